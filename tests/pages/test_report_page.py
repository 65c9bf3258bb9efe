"""The report as a page, and what it takes to make one."""

import json
import math
import subprocess
import sys

import pytest

from swift_vlpack import json_lines
from swift_vlpack.cli import main
from swift_vlpack.pages.report import print_report
from swift_vlpack.pages.report_page import report_page
from swift_vlpack.runlog.events import EventLog, read_events
from tests.pages.test_page import Elements
from tests.runlog.test_counts import steps_event
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
    assert not [attrs for _, attrs in elements.found if {"src", "action"} & set(attrs)]
    links = {attrs["href"] for _, attrs in elements.found if "href" in attrs}
    assert [link for link in links if not link.startswith("#")] == [], "but to a part of a plot in the page itself"


def tables(made):
    """Of a page: the attributes of each element that scrolls, and of every heading of a table."""
    elements = Elements(made).found
    return [attrs for _, attrs in elements if attrs.get("class") == "scroll"], [
        of for tag, of in elements if tag == "th"
    ]


def test_page_names_model_and_data_and_no_folder_above_the_run(tmp_path):
    """REPORT-12: what is shared says what was trained, and not on whose account or disk."""
    first, second = tmp_path / "home" / "mix", tmp_path / "home" / "again"
    train(first, range(1, 6), 1, checkpoints=(3,))
    train(second, range(4, 7), 1, resume=first / "checkpoint-3", ends=True)
    row = {"id": "a:1", "reason": "file_missing", "epoch": 0, "error": "no such file"}
    (second / "vlpack" / "left_out.jsonl").write_text(json.dumps(row) + "\n")
    (second / "args.json").write_text(json.dumps({"model": "/home/jane/models/tiny"}))
    made = report_page(report(second))
    assert "<title>Report: tiny on a (again)</title>" in made
    assert "<h1>Report: tiny on a (again)</h1>" in made
    assert str(tmp_path) not in made
    assert "jane" not in made
    for said in ("~/models/tiny", "again/vlpack/left_out.jsonl", "resumes from mix/checkpoint-3"):
        assert said in made, said
    assert report(second)["folder"] == str(second), "which JSON and the terminal keep"


def test_tables_are_reached_by_keyboard_and_say_what_they_are(tmp_path):
    """REPORT-10: a table that is wider than a phone scrolls by itself."""
    train(tmp_path, range(1, 4), 1, ends=True)
    scrolls, headings = tables(report_page(report(tmp_path)))
    assert {attrs["aria-label"] for attrs in scrolls} == {"Sources", "Epochs", "Timeline"}
    assert all((attrs["tabindex"], attrs["role"]) == ("0", "region") for attrs in scrolls)
    assert len(headings) > 8
    assert {attrs["scope"] for attrs in headings} == {"col"}


def test_nothing_is_saved_against_batches_of_one(tmp_path, capsys):
    """REPORT-3: whatever the samples of a pack would be as one batch."""
    log = EventLog(tmp_path)
    log.append("start", 0, **facts(1, unpacked_batch_size=1))
    for step in (1, 2):
        log.append("steps", step, epoch=0, **steps_event([("a", 60), ("a", 40)]))
    made = report(tmp_path)
    assert (made["unpacked"]["batch_size"], made["unpacked"]["num_tokens"]) == (1, 200)
    assert made["unpacked"]["num_padding_saved"] == made["unpacked"]["seconds_saved_estimated"] == 0
    assert [point["padding_saved"] for point in made["series"]] == [0, 0]
    print_report(made, sys.stdout)
    flat = " ".join(capsys.readouterr().out.split())
    assert "none are saved: 200 un-packed, and packs have as many" in flat
    assert "as one batch" not in flat
    assert "Vision tokens, shares of tokens" in report_page(made), "and no line of zeros"


def test_long_run_makes_a_page_of_moderate_size_and_a_timeline_to_look_at(tmp_path, capsys):
    """REPORT-6 REPORT-10: 3,000 notes and 600 checkpoints."""
    log = EventLog(tmp_path)
    train(tmp_path, range(1, 2), 1)
    (note,) = [event for event in read_events(log.path) if event["event"] == "steps"]
    more = [{**note, "step": step} for step in range(2, 3001)]
    checkpoints = [
        {"event": "checkpoint", "checkpoint": f"checkpoint-{n}", "when": note["when"], "step": n}
        for n in range(5, 3001, 5)
    ]
    json_lines.append(log.path, sorted([*more, *checkpoints], key=lambda event: event["step"]))
    made = report(tmp_path)
    assert made["trained"]["num_steps"] == len(made["series"]) == 3000
    assert len(made["timeline"]) == 1 + 600 + 1
    assert len(report_page(made)) < 500_000, "characters"
    print_report(made, sys.stdout)
    text = capsys.readouterr().out
    assert "542 more, which --json has" in text
    assert len(text.splitlines()) < 130
    assert "checkpoint-5," in text
    assert "checkpoint-3000," in text


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
    assert ">no number</text>" in report_page(made)
    print_report(made, sys.stdout)
    assert said in " ".join(capsys.readouterr().out.split())
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["notes"] == made["notes"]
