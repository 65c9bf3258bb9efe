"""Plots as SVG."""

import re
from xml.etree import ElementTree

from swift_vlpack.pages.charts import Line, bar_chart, histogram, legs_chart, line_chart
from swift_vlpack.pages.report_text import sparkline


def drawn(figure):
    """The SVG of a figure as elements; a figure that is no well-formed XML fails here."""
    (chart,) = [svg for svg in ElementTree.fromstring(figure).iter("svg") if svg.get("role")]
    return chart


def test_line_goes_through_its_points():
    """REPORT-10: by hand: steps 0 to 10, values 0 to 1; a gap is not bridged."""
    chart = drawn(line_chart("t", [Line("fill", [(0, 0.0), (4, 1.0), (6, None), (8, 0.5), (10, 1.0)])], is_share=True))
    dots = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in chart.iter("circle")]
    left, right, bottom, top = 52, 408, 170, 14
    assert dots == [(left, bottom), (194.4, top), (336.8, (bottom + top) / 2), (right, top)]
    (path,) = [path.get("d") for path in chart.iter("path") if path.get("stroke-width") == "1.8"]
    assert re.findall(r"[ML]", path) == ["M", "L", "M", "L"]
    assert [dot.find("title").text for dot in chart.iter("circle")][2] == "fill, step 8: 50%"


def test_chart_of_nothing_and_of_one_point_can_be_made():
    """REPORT-10: a run that was just begun has none."""
    assert line_chart("t", [Line("loss", [])]) == ""
    assert line_chart("t", [Line("loss", [(3, None)])]) == ""
    assert bar_chart("t", [], {}) == histogram("t", {}) == legs_chart("t", [], 3) == ""
    assert len(list(drawn(line_chart("t", [Line("loss", [(3, 0.0)])])).iter("circle"))) == 1


def test_bars_are_as_long_as_their_shares():
    """REPORT-10"""
    chart = drawn(bar_chart("t", ["a", "<b>"], {"asked": [0.25, None], "trained": [0.5, 0.5]}))
    wide = [float(bar.get("width")) for bar in chart.iter("rect")]
    assert len(wide) == 3
    assert wide[1] == wide[2] == 2 * wide[0]
    assert "<b>" in [text.text for text in chart.iter("text")], "escaped, and read back"


def test_histogram_and_legs_have_all_their_parts():
    """REPORT-10: packs by fill; a leg with lost steps has a hollow bar behind, and a tick for each checkpoint."""
    assert len(list(drawn(histogram("t", {36: 2, 100: 16})).iter("rect"))) == 2
    legs = [
        {"name": "starts", "first": 0, "kept": 4, "last": 6, "checkpoints": [2, 4]},
        {"name": "goes on", "first": 4, "kept": 10, "last": 10, "checkpoints": []},
    ]
    chart = drawn(legs_chart("t", legs, 10))
    bars = [(float(bar.get("x")), float(bar.get("width")), bar.get("fill")) for bar in chart.iter("rect")]
    assert [fill for *_, fill in bars] == ["var(--c1)", "none", "var(--c1)"]
    assert bars[0][0] + bars[0][1] == bars[1][0] == bars[2][0]
    assert len([path for path in chart.iter("path") if path.find("title") is not None]) == 2


def test_sparkline_of_many_values_is_their_means():
    """REPORT-6"""
    assert sparkline([0.0, 0.0, 7.0, 7.0], most=2) == "▁█"
    assert len(sparkline(list(range(1000)))) == 60
