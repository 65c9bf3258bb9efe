"""The report as a page, and what it takes to make one."""

import json
import math
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from swift_vlpack import json_lines
from swift_vlpack.cli import main
from swift_vlpack.cli.report import report_text
from swift_vlpack.pages.report_page import BOTTOM, LEFT, TOP, WIDTH, line, report_page
from swift_vlpack.runlog.events import EventLog
from tests.pages.test_page import Elements
from tests.runlog.test_segments import facts, report, train

NAME = "<script>alert(1)</script>"


def test_texts_of_a_run_cannot_become_markup(tmp_path):
    """REPORT-10: names of sources and folders are others' words."""
    folder = tmp_path / "<img src=x>"
    EventLog(folder).append("start", 0, **facts(1, sources={NAME: {"rows": 1, "ratio": 1, "asked_share": 1.0}}))
    made = report_page(report(folder))
    assert "<script>alert" not in made
    assert "<img" not in made
    assert [tag for tag, _ in Elements(made).found].count("script") == 1, "the page's own"


def test_page_asks_no_network_for_anything(tmp_path):
    """REPORT-10"""
    train(tmp_path, range(1, 4), 2, checkpoints=(2,), ends=True)
    elements = Elements(report_page(report(tmp_path)))
    assert not [attrs for _, attrs in elements.found if {"src", "action", "href"} & set(attrs)]


def test_page_names_model_and_data_and_no_folder_above_the_run(tmp_path):
    """REPORT-12: what is shared says what was trained, and not on whose account or disk."""
    folder = tmp_path / "home" / "mix"
    train(folder, range(4, 7), 1, resume=tmp_path / "home" / "first" / "checkpoint-3", ends=True)
    row = {"id": "a:1", "reason": "file_missing", "epoch": 0, "error": "no such file"}
    (folder / "vlpack" / "left_out.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "args.json").write_text(json.dumps({"model": "/home/jane/models/tiny"}))
    made = report_page(report(folder))
    assert "<title>Report: tiny on a (mix)</title>" in made
    assert "<h1>Report: tiny on a (mix)</h1>" in made
    assert str(tmp_path) not in made
    assert "jane" not in made
    for said in ("~/models/tiny", "mix/vlpack/left_out.jsonl", "resumed from first/checkpoint-3"):
        assert said in made, said
    assert report(folder)["folder"] == str(folder), "which JSON and the terminal keep"


def drawn(points, **options):
    """The drawing of a loss as elements; one that is no well-formed XML fails here."""
    figure = ElementTree.fromstring(line("Loss", points, (points[0][0], points[-1][0]), "{:,.4g}".format, **options))
    return {path.get("class"): path.get("d") for path in figure.iter("path")}, list(figure.iter("text")), figure


def places(path):
    return [(move, float(x), float(y)) for move, x, y in re.findall(r"([ML])([\d.]+) ([\d.]+)", path)]


def test_line_goes_from_step_to_step_between_its_lowest_and_highest_value():
    """REPORT-13: a flat loss fills its drawing, and a share begins at zero; labels say the limits."""
    points = [(1, 2.5), (2, 3.0), (5, 1.0)]
    paths, texts, figure = drawn(points)
    middle = LEFT + (WIDTH - 8 - LEFT) / 4
    assert places(paths["values"]) == [
        ("M", LEFT, pytest.approx(BOTTOM - 0.75 * (BOTTOM - TOP), abs=0.1)),
        ("L", pytest.approx(middle, abs=0.1), TOP),
        ("L", WIDTH - 8, BOTTOM),
    ]
    assert [text.text for text in texts] == ["3", "1", "step 1", "5"]
    assert figure.find("svg").get("aria-label") == "Loss: 2.5, at last 1, from 1 to 3"
    paths, texts, _ = drawn(points, within=(0.0, 4.0))
    assert [y for *_, y in places(paths["values"])] == pytest.approx([57, 42, 102], abs=0.1)
    assert [text.text for text in texts][:2] == ["4", "0"]


def test_gap_is_not_bridged_and_a_loss_that_is_no_number_has_a_cross():
    """REPORT-10 REPORT-13: and a point between two gaps is a dot."""
    paths, _, figure = drawn([(1, 2.0), (2, 1.9), (3, None), (4, 1.6), (5, None), (6, 1.5), (7, 1.5)])
    assert [move for move, *_ in places(paths["values"])] == ["M", "L", "M", "M", "L"]
    assert paths["values"].count("h0") == 3
    inside = WIDTH - 8 - LEFT
    assert [x for _, x, _ in places(paths["cross"])] == pytest.approx(
        [LEFT + inside / 3, LEFT + inside * 2 / 3], abs=0.1
    )
    assert figure.find("figcaption").text == "Loss (x: no number)"
    assert line("Loss", [(1, None)], (1, 1), str) == ""
    assert places(drawn([(3, 0.5)])[0]["values"]) == [("M", LEFT, BOTTOM)], "one step has no range"


def test_report_loads_neither_torch_nor_ms_swift(tmp_path):
    """REPORT-9"""
    train(tmp_path, range(1, 4), 1)
    code = (
        "import sys; from swift_vlpack.cli import main; "
        f"main(['report', {str(tmp_path)!r}, '--html', {str(tmp_path / 'page.html')!r}]); "
        f"main(['report', {str(tmp_path)!r}]); "
        "print([name for name in ('torch', 'swift', 'transformers', 'datasets', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "3 packs, 6 samples, 300 tokens" in done.stdout


def test_losses_that_are_no_numbers_are_named_and_marked(tmp_path, capsys):
    """REPORT-6 REPORT-9 REPORT-13: of a run that went wrong, in every form."""
    train(tmp_path, range(1, 6), 1)
    losses = [2.0, math.nan, math.inf, 3.0, 2.5]
    lines = [{"loss": loss, "global_step/max_steps": f"{step}/5"} for step, loss in enumerate(losses, 1)]
    json_lines.append(tmp_path / "logging.jsonl", lines)
    made = report(tmp_path)
    assert [point["loss"] for point in made["series"]] == [2.0, None, None, 3.0, 2.5]
    assert made["steps_without_loss"] == [2, 3]
    said = "the logged loss is infinite or no number at 2 steps: 2, 3 ("
    assert any(said in note for note in made["notes"])
    assert said in report_page(made)
    assert "Loss (x: no number)" in report_page(made)
    assert said in " ".join(report_text(made, 120).split())
    assert "2 at step 1, 2.5 at step 5" in report_text(made, 120)
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["notes"] == made["notes"]


def test_text_fits_the_terminal_and_no_number_is_broken(tmp_path):
    """REPORT-6"""
    train(tmp_path, range(1, 201), 2)
    text = report_text(report(tmp_path), 60)
    sentences, tables = text.partition("\nTrained")[2].split("\nSources")
    assert max(map(len, sentences.splitlines())) <= 60
    assert max(map(len, tables.splitlines())) <= 80
    assert any("38,000" in line and "95.0%" in line for line in tables.splitlines()), (
        "the tokens and the fill of the epoch"
    )
