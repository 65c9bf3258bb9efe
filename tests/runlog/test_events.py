"""The events of a run: written, and read back."""

import json

from swift_vlpack.runlog.events import EventLog, read_events


def test_events_are_lines_that_a_kill_leaves_readable(tmp_path):
    """REPORT-1: half a line is passed over, also by the run that goes on behind it."""
    log = EventLog(tmp_path)
    log.append("start", 0, num_ranks=2)
    log.append("steps", 5, num_tokens=10)
    with log.path.open("a") as file:
        file.write('{"event": "steps", "when": "2026-')
    assert [line["event"] for line in read_events(log.path)] == ["start", "steps"]
    EventLog(tmp_path).append("resume", 5)
    found = [(line["event"], line["step"]) for line in read_events(log.path)]
    assert found == [("start", 0), ("steps", 5), ("resume", 5)]
    assert json.loads(log.path.read_text().splitlines()[0])["num_ranks"] == 2


def test_events_that_cannot_be_written_warn_once(tmp_path, caplog):
    """REPORT-1"""
    (tmp_path / "vlpack").write_text("a file where the folder would be")
    log = EventLog(tmp_path)
    log.append("start", 0)
    log.append("steps", 5)
    assert caplog.text.count("will know less of this run") == 1
    assert list(read_events(log.path)) == []
