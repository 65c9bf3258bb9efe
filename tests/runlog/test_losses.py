"""The losses of a log, the steps they are means of, and their jumps."""

import json
import math

from swift_vlpack.runlog.events import EventLog
from swift_vlpack.runlog.losses import Loss, loss_at, losses_in, losses_of, spikes
from swift_vlpack.runlog.segments import segments_of


def log(*both):
    return [{"loss": loss, "global_step/max_steps": f"{step}/99"} for step, loss in both]


def write(path, lines):
    with path.open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    return path.stat().st_size


def test_a_loss_is_the_mean_since_the_line_before_or_the_resume(tmp_path):
    """SEE-9 SEE-14: and lines of an earlier run, and of steps that were lost, are no part of it."""
    path, events = tmp_path / "logging.jsonl", EventLog(tmp_path)
    end = write(path, log((1, 9.0), (50, 9.0)))  # of an earlier run in the same folder
    events.append("start", 0, log_bytes=end)
    end = write(path, [*log((1, 3.0), (5, 2.0)), {"eval_loss": 9.0, "global_step/max_steps": "10/99"}, {"loss": "x"}])
    end = write(path, log((8, 2.5), (10, 1.0)))
    events.append("checkpoint", 8, checkpoint="checkpoint-8")
    events.append("resume", 8, checkpoint=str(tmp_path / "checkpoint-8"), log_bytes=end)
    end = write(path, log((11, 1.5)))
    events.append("checkpoint", 12, checkpoint="checkpoint-12")
    events.append("resume", 12, checkpoint=str(tmp_path / "checkpoint-12"), log_bytes=end)
    write(path, log((15, 1.2)))
    found = losses_of(tmp_path, segments_of(tmp_path))
    assert found == [Loss(1, 1, 3.0), Loss(2, 5, 2.0), Loss(6, 8, 2.5), Loss(9, 11, 1.5), Loss(13, 15, 1.2)]
    assert loss_at(found, 4) == Loss(2, 5, 2.0)
    assert loss_at(found, 12) is None, "it was not logged before the resume"


def test_without_a_run_log_the_later_line_of_a_step_counts(tmp_path):
    """SEE-9 REPORT-6"""
    write(tmp_path / "logging.jsonl", log((1, 3.0), (5, 2.0), (10, 1.0), (5, 2.5), (8, 1.5)))
    found = losses_of(tmp_path, [])
    assert found == [Loss(1, 1, 3.0), Loss(2, 5, 2.5), Loss(6, 8, 1.5)]
    assert losses_of(tmp_path / "nothing", []) == []


def test_spikes_are_the_largest_jumps_upwards_and_no_number_is_the_largest():
    """SEE-9"""
    found = list(losses_in(log((1, 2.0), (2, 2.5), (3, 2.4), (4, 7.0), (5, math.nan), (6, 1.0), (7, 1.1))))
    assert [(one.loss.last, round(one.before.value, 1)) for one in spikes(found, 3)] == [(5, 7.0), (4, 2.4), (2, 2.0)]
    assert spikes(list(losses_in(log((1, 2.0), (2, 1.0)))), 3) == []
