"""Plots as SVG."""

import math
import re
import sys
from xml.etree import ElementTree

import matplotlib as mpl
import pytest

from swift_vlpack.pages.charts import HEIGHT, Line, bar_chart, histogram, line_chart, segments_chart
from swift_vlpack.pages.report import sparkline
from swift_vlpack.pages.report_page import report_page
from swift_vlpack.runlog.folder import RunFolder
from swift_vlpack.runlog.report import run_report
from tests.runlog.test_segments import train


def drawn(figure):
    """The SVG of a figure as elements; a figure that is no well-formed XML fails here."""
    (chart,) = [svg for svg in ElementTree.fromstring(figure).iter("svg") if svg.get("role")]
    return chart


def curve(chart, colour="c1"):
    """The line of a series as its moves: M where it begins anew, L where it goes on."""
    paths = [path for path in chart.iter("path") if f"stroke: var(--{colour})" in path.get("style", "")]
    path = next(path.get("d") for path in paths if "stroke-width: 1.8" in path.get("style"))
    return [(move, float(x), float(y)) for move, x, y in re.findall(r"([ML]) ([\d.]+) ([\d.]+)", path)]


def ticks(chart, anchor):
    """What the labels of an axis say, and where they stand: `end` is the one on the left, `middle` the lower one."""
    texts = [text for text in chart.iter("text") if f"text-anchor: {anchor}" in text.get("style")]
    at = "y" if anchor == "end" else "x"
    found = [(text.text, float(text.get(at))) for text in texts if re.match(r"-?[\d.]", text.text)]
    return [(float(said.replace(",", "").rstrip("%")), place) for said, place in found]


def scale_of(points, value=lambda said: said):
    """The places that values have by the first and the last tick of an axis."""
    (low, start), (high, end) = [(value(said), place) for said, place in (points[0], points[-1])]
    return lambda said: start + (value(said) - low) / (high - low) * (end - start)


TEXT_BELOW = 4.6
"""The baseline of a label is that far below its gridline."""
LOSSES = {
    "falling": [2.4 * math.exp(-at / 12) + 0.3 for at in range(40)],
    "flat": [2.3 + 0.002 * math.sin(at) for at in range(40)],
    "equal": [2.0] * 12,
    "tiny": [1e-5 * (1 + at % 3) for at in range(20)],
    "negative": [-math.log(1 + at) for at in range(30)],
    "zero": [max(0.0, 1 - at / 20) for at in range(40)],
    "huge": [3e6 + at for at in range(20)],
}
FAR_APART = {
    "spike": [2.0 - at / 50 + 900 * (at == 20) for at in range(40)],
    "falling far": [2.4 * math.exp(-at / 8) + 0.001 for at in range(60)],
}


@pytest.mark.parametrize("values", [*LOSSES.values(), *FAR_APART.values()], ids=[*LOSSES, *FAR_APART])
def test_loss_fills_its_axis_and_every_tick_is_where_it_says(values):
    """REPORT-13: whatever the loss is like; no two ticks say the same."""
    chart = drawn(line_chart("Loss", [Line("loss", list(enumerate(values)))], "loss"))
    is_log = "logarithmic" in [text.text for text in chart.iter("text")]
    assert is_log == (values in FAR_APART.values())
    left, below = ticks(chart, "end"), ticks(chart, "middle")
    for axis in (left, below):
        assert len({said for said, _ in axis}) == len(axis) > 1
    y, x = scale_of(left, math.log if is_log else float), scale_of(below)
    assert [place for _, place in left] == pytest.approx([y(said) for said, _ in left], abs=0.2)
    wanted = {(round(x(step)), round(y(value) - TEXT_BELOW)) for step, value in enumerate(values)}
    for _, at, high in curve(chart):
        assert any(abs(at - step) <= 2 and abs(high - place) <= 2 for step, place in wanted), (at, high)
    places = [place for *_, place in curve(chart)]
    assert max(places) - min(places) > 0.6 * HEIGHT or len(set(values)) == 1


def test_share_and_rate_begin_at_zero():
    """REPORT-13: half of the speed is half as high."""
    share = drawn(line_chart("t", [Line("fill", [(1, 0.8), (2, 0.9)])], "share"))
    assert [said for said, _ in ticks(share, "end")] == [0, 20, 40, 60, 80, 100]
    rate = drawn(line_chart("t", [Line("speed", [(1, 41_000.0), (2, 39_500.0)])], "rate"))
    assert [said for said, _ in ticks(rate, "end")] == [0, 10_000, 20_000, 30_000, 40_000]
    assert "10,000" in [text.text for text in rate.iter("text")]


def test_all_plots_of_a_run_have_the_same_steps():
    """REPORT-13: the loss may be logged more rarely than the rest."""
    rest = drawn(line_chart("t", [Line("fill", [(1, 0.5), (14, 0.5), (28, 0.5)])], "share", span=(1, 28)))
    loss = drawn(line_chart("t", [Line("loss", [(10, 3.0), (20, 2.0)])], "loss", span=(1, 28)))
    assert [said for said, _ in ticks(loss, "middle")] == [said for said, _ in ticks(rest, "middle")]
    assert [move for move, *_ in curve(loss)] == ["M", "L"]


def test_gap_is_not_bridged_and_a_loss_that_is_no_number_has_a_cross():
    """REPORT-10 REPORT-13"""
    points = [(1, 2.0), (2, 1.9), (3, None), (4, None), (5, 1.6), (6, 1.5)]
    chart = drawn(line_chart("t", [Line("loss", points)], "loss"))
    assert [move for move, *_ in curve(chart)] == ["M", "L", "M", "L"]
    crosses = [use for use in chart.iter("use") if "var(--bad)" in use.get("style", "")]
    assert len(crosses) == 2 + 1, "and the one of the legend"
    assert "no number" in [text.text for text in chart.iter("text")]
    fill = drawn(line_chart("t", [Line("fill", [(1, 0.5), (2, None), (3, 1.0)])], "share"))
    assert not [use for use in fill.iter("use") if "var(--bad)" in use.get("style", "")], "a step of single-long packs"


def test_point_between_two_gaps_is_seen_in_a_long_line():
    """REPORT-13"""
    points = [(step, 1.0 if step < 40 or step == 60 else None) for step in range(100)]
    chart = drawn(line_chart("t", [Line("loss", points)], "loss"))
    assert len([use for use in chart.iter("use") if "var(--c1)" in use.get("style", "")]) == 1


def test_single_spike_of_a_long_run_is_seen():
    """REPORT-13: means of neighbours alone would hide it."""
    values = [1.0 + 0.1 * (step % 7) for step in range(3000)]
    values[1800] = 9.0
    chart = drawn(line_chart("t", [Line("loss", list(enumerate(values)))], "loss"))
    (pale,) = [path for path in chart.iter("path") if "stroke-opacity" in path.get("style", "")]
    left = ticks(chart, "end")
    highest = min(float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", pale.get("d")))
    assert highest == pytest.approx(scale_of(left)(9.0) - TEXT_BELOW, abs=1)
    assert min(place for *_, place in curve(chart)) > highest + 50
    assert "step (pale: all 3,000; line: means of about 30)" in [text.text for text in chart.iter("text")]


def test_chart_of_nothing_and_of_one_point_can_be_made():
    """REPORT-10: a run that was just begun has none."""
    assert line_chart("t", [Line("loss", [])], "loss") == ""
    assert line_chart("t", [Line("loss", [(3, None)])], "loss") == ""
    assert bar_chart("t", [], {}) == histogram("t", {}) == segments_chart("t", [], 3) == ""
    chart = drawn(line_chart("t", [Line("loss", [(3, 0.0)])], "loss"))
    assert len([use for use in chart.iter("use") if "var(--c1)" in use.get("style", "")]) == 1
    assert [said for said, _ in ticks(chart, "middle")] == [3]


def test_who_cannot_see_a_plot_is_told_what_it_shows():
    """REPORT-10"""
    chart = drawn(line_chart("Loss", [Line("loss", [(1, 2.5), (2, 3.0), (3, 1.25)])], "loss"))
    assert chart.get("aria-label") == "Loss: loss 2.5 at step 1 and 1.25 at step 3, between 1.25 and 3"
    assert drawn(histogram("Fill", {36: 2, 100: 16})).get("aria-label") == "Fill: most often 100%, 16 of 18 packs"


def boxes(chart, colour):
    """Left and right end of every filled box of a colour."""
    found = [path.get("d") for path in chart.iter("path") if f"fill: var(--{colour})" in path.get("style", "")]
    corners = [[float(x) for x in re.findall(r"[ML] ([\d.]+) ", path)] for path in found]
    return [(min(xs), max(xs)) for xs in corners]


def test_bars_are_as_long_as_their_shares():
    """REPORT-10: and names of others are texts, whatever they are."""
    names = ["<b>", "$x_1$", "\0\udc80\uffff", "图文对"]
    chart = drawn(bar_chart("t", names, {"asked": [0.25, None, 0.1, 0.1], "trained": [0.5, 0.5, 0.1, 0.1]}))
    asked, trained = (boxes(chart, colour) for colour in ("c1", "c2"))
    wide = {round(end - start, 1) for start, end in trained}
    ((start, end),) = [box for box in asked if box[1] - box[0] == max(right - left for left, right in asked)]
    assert max(wide) == pytest.approx(2 * (end - start), abs=0.3)
    texts = [text.text for text in chart.iter("text")]
    assert {"<b>", "$x_1$", "␀\\udc80<U+FFFF>", "图文对", "asked", "25.0%", "50.0%"} <= set(texts)


def test_histogram_and_segments_have_all_their_parts():
    """REPORT-10: packs by fill; a segment with lost steps has a hollow bar behind, and a tick for each checkpoint."""
    chart = drawn(histogram("t", {36: 2, 100: 16}))
    assert len(boxes(chart, "c1")) == 2
    assert [said for said, _ in ticks(chart, "middle")] == [0, 25, 50, 75, 100]
    assert all(said == int(said) for said, _ in ticks(chart, "end")), "there are no half packs"
    segments = [
        {"name": "starts", "first": 0, "kept": 4, "last": 6, "checkpoints": [2, 4]},
        {"name": "goes on", "first": 4, "kept": 10, "last": 10, "checkpoints": []},
    ]
    chart = drawn(segments_chart("t", segments, 10))
    (start, end), (again, last) = boxes(chart, "c1")
    x = scale_of(ticks(chart, "middle"))
    assert [start, end, again, last] == pytest.approx([x(0), x(4), x(4), x(10)], abs=0.2)
    hollow = [path for path in chart.iter("path") if "stroke: var(--c2)" in path.get("style", "")]
    assert len(hollow) == 1
    assert "fill: none" in hollow[0].get("style")
    checkpoints = [path for path in chart.iter("path") if "stroke: var(--fg)" in path.get("style", "")]
    assert len(checkpoints) == 2


def test_equal_reports_are_equal_drawings_in_colours_and_font_of_the_page(monkeypatch):
    """REPORT-10: no colour of its own, which would be wrong in light or in dark; whatever a matplotlibrc has."""

    def plots():
        lines = [Line("a", [(1, 0.5), (2, 0.75)]), Line("b", [(1, 0.25), (2, None)])]
        return line_chart("Shares", lines, "share", resumes=[2]) + line_chart("Loss", lines, "loss")

    made = plots()
    for name, value in (("font.size", 30), ("text.usetex", True), ("axes.titlecolor", "red"), ("lines.marker", "v")):
        monkeypatch.setitem(mpl.rcParams, name, value)
    assert made == plots()
    assert mpl.rcParams["font.size"] == 30
    assert re.findall(r"(?:fill|stroke): (?!none|var)[^;\"]*", made) == []
    assert "font-family" not in made
    names = re.findall(r' id="(.*?)"', made)
    assert len(names) == len(set(names)) > 0
    assert {f"#{name}" for name in names} >= set(re.findall(r'href="(.*?)"', made)) | set(
        re.findall(r"url\((.*?)\)", made)
    )


def test_page_without_matplotlib_says_so(monkeypatch, tmp_path):
    """REPORT-10"""
    train(tmp_path, range(1, 4), 1)
    monkeypatch.delitem(sys.modules, "swift_vlpack.pages.charts")
    monkeypatch.delattr("swift_vlpack.pages.charts")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    made = report_page(run_report(RunFolder(tmp_path)))
    assert "No plots: matplotlib is not installed; `pip install .` in a checkout" in made
    assert "<figure" not in made
    assert "<table" in made


def test_sparkline_of_many_values_is_their_means():
    """REPORT-6"""
    assert sparkline([0.0, 0.0, 7.0, 7.0], most=2) == "▁█"
    assert len(sparkline(list(range(1000)))) == 60
