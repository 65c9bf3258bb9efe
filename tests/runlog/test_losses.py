"""The losses of a log, and the steps they are means of."""

import json

from swift_vlpack.runlog.events import EventLog
from swift_vlpack.runlog.losses import Loss, loss_at, losses_of
from swift_vlpack.runlog.segments import segments_of


def log(*both):
    return [{"loss": loss, "global_step/max_steps": f"{step}/99"} for step, loss in both]


def write(path, lines):
    with path.open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    return path.stat().st_size


def test_a_loss_is_the_mean_since_the_line_before_or_the_resume(tmp_path):
    """SEE-3 SEE-14: and lines of an earlier run, and of steps that were lost, are no part of it."""
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
    (tmp_path / "logging.jsonl").unlink()
    assert losses_of(tmp_path, segments_of(tmp_path)) == []
