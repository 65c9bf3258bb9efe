"""The notes of a run."""

import json

from swift_vlpack.runlog.run_log import RunLog, events


def test_notes_are_lines_that_a_kill_leaves_readable(tmp_path):
    """REPORT-1: half a line is passed over, also by the run that goes on behind it."""
    log = RunLog(tmp_path)
    log.note("start", 0, num_ranks=2)
    log.note("steps", 5, num_tokens=10)
    with log.path.open("a") as file:
        file.write('{"event": "steps", "when": "2026-')
    assert [line["event"] for line in events(log.path)] == ["start", "steps"]
    RunLog(tmp_path).note("resume", 5)
    assert [(line["event"], line["step"]) for line in events(log.path)] == [("start", 0), ("steps", 5), ("resume", 5)]
    assert json.loads(log.path.read_text().splitlines()[0])["num_ranks"] == 2


def test_notes_that_cannot_be_written_warn_once(tmp_path, caplog):
    """REPORT-1"""
    (tmp_path / "vlpack").write_text("a file where the folder would be")
    log = RunLog(tmp_path)
    log.note("start", 0)
    log.note("steps", 5)
    assert caplog.text.count("`vlpack report` will know less of this run") == 1
    assert list(events(log.path)) == []
