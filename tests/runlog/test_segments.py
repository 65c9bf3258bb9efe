"""The segments of a run, from events that the real writer wrote."""

import json
import shutil

import pytest

from swift_vlpack.errors import ConfigError
from swift_vlpack.runlog.events import EventLog
from swift_vlpack.runlog.folder import RunFolder
from swift_vlpack.runlog.report import run_report
from swift_vlpack.runlog.segments import segments_of
from tests.runlog.test_counts import steps_event

LENGTH = 100


def facts(num_ranks, accumulation=1, **others):
    return {
        "num_ranks": num_ranks,
        "gradient_accumulation_steps": accumulation,
        "packing_length": LENGTH,
        "unpacked_batch_size": 1,
        "num_steps": 10,
        "mode": "plan",
        "packing_strategy": "exact",
        "sources": {"a": {"rows": 40, "ratio": 1, "asked_share": 1.0}},
        "origins": {"a": "/data/a.jsonl"},
        **others,
    }


def train(folder, steps, num_ranks, *, resume=None, ends=False, checkpoints=()):
    """Events of steps in which each rank has a pack of 60 and 30 tokens, but rank 0, which has 60 and 40."""
    log = EventLog(folder)
    if resume is None:
        log.append("start", 0, **facts(num_ranks))
    else:
        log.append("resume", steps[0] - 1, checkpoint=str(resume), **facts(num_ranks))
    for step in steps:
        packs = [[("a", 60), ("a", 30 if rank else 40)] for rank in range(num_ranks)]
        log.append("steps", step, epoch=0, **steps_event(*packs))
        if step in checkpoints:
            (folder / f"checkpoint-{step}").mkdir()
            log.append("checkpoint", step, checkpoint=f"checkpoint-{step}")
    if ends:
        log.append("end", steps[-1])


def report(folder):
    return run_report(RunFolder(folder))


def test_segments_on_other_ranks_are_one_run(tmp_path):
    """REPORT-7: two ranks are killed, three go on and are killed, one ends it; all in the same folder."""
    train(tmp_path, range(1, 6), 2, checkpoints=(3,))
    train(tmp_path, range(4, 7), 3, resume=tmp_path / "checkpoint-3", checkpoints=(5,))
    train(tmp_path, range(6, 9), 1, resume=tmp_path / "checkpoint-5", ends=True)
    assert [(one.start["num_ranks"], one.stops_at) for one in segments_of(tmp_path)] == [(2, 3), (3, 5), (1, None)]
    made = report(tmp_path)
    assert made["run"]["num_ranks"] == [2, 3, 1]
    assert made["trained"]["num_steps"] == 3 + 2 + 3
    assert made["trained"]["num_tokens"] == 3 * (100 + 90) + 2 * (100 + 90 + 90) + 3 * 100
    assert made["trained"]["seconds"] == 16.0
    assert made["balance"]["trained"] == pytest.approx(
        (3 * 200 + 2 * 300 + 3 * 100) / made["trained"]["num_tokens"], abs=1e-4
    )
    assert [note.split(" were lost")[0].split(", ")[1] for note in made["notes"]] == [
        "and its steps up to 5",
        "and its steps up to 6",
    ]
    assert "380 tokens" in made["notes"][0]
    assert [point["step"] for point in made["series"]] == list(range(1, 9))


def test_run_that_was_started_anew_in_its_folder_is_the_new_one(tmp_path):
    """REPORT-7: what trained there before is another run."""
    train(tmp_path, range(1, 9), 2, checkpoints=(4,))
    train(tmp_path, range(1, 3), 1)
    made = report(tmp_path)
    assert (made["run"]["num_ranks"], made["trained"]["num_steps"], made["run"]["step"]) == ([1], 2, 2)


def test_run_of_a_checkpoint_goes_on_past_another_run_in_the_folder(tmp_path):
    """REPORT-7: the segment that wrote the checkpoint is the one before, and not the latest."""
    train(tmp_path, range(1, 6), 2, checkpoints=(4,))
    train(tmp_path, range(1, 4), 1)
    train(tmp_path, range(5, 7), 3, resume=tmp_path / "checkpoint-4")
    assert report(tmp_path)["run"]["num_ranks"] == [2, 3]


def test_folder_that_was_moved_is_one_run_still(tmp_path):
    """REPORT-7: paths in events are those of the time of writing."""
    then = tmp_path / "then"
    train(then, range(1, 4), 1, checkpoints=(3,))
    train(then, range(4, 6), 1, resume=then / "checkpoint-3")
    then.rename(tmp_path / "now")
    assert report(tmp_path / "now")["trained"]["num_steps"] == 5
    shutil.rmtree(tmp_path / "now" / "checkpoint-3")
    assert report(tmp_path / "now")["trained"]["num_steps"] == 5


@pytest.mark.parametrize("is_there", [True, False])
def test_run_that_another_folder_began_is_reported_from_its_resume(is_there, tmp_path):
    """REPORT-7: the report says from where it went on; a run of its own in this folder is no part of it."""
    other = tmp_path / "v0"
    if is_there:
        train(other, range(1, 4), 1, checkpoints=(3,))
    train(tmp_path / "v1", range(1, 3), 2)
    train(tmp_path / "v1", range(4, 6), 1, resume=other / "checkpoint-3")
    made = report(tmp_path / "v1")
    assert (made["run"]["num_ranks"], made["trained"]["num_steps"]) == ([1], 2)
    assert (
        f"{other}/checkpoint-3, and the log of what it trained before is not here: the numbers begin after step 3"
        in (made["notes"][0])
    )


def test_run_without_its_log_is_refused_and_the_error_says_why(tmp_path):
    """CLI-36: other files know neither time nor padding."""
    (tmp_path / "logging.jsonl").write_text('{"loss": 1.0, "global_step/max_steps": "1/2"}\n')
    with pytest.raises(ConfigError, match=r"run.jsonl\) is missing"):
        report(tmp_path)
    EventLog(tmp_path).append("steps", 1)
    with pytest.raises(ConfigError, match=r"run.jsonl, 1 line\) is damaged: it has no start of a run"):
        report(tmp_path)
    (tmp_path / "vlpack" / "run.jsonl").unlink()
    (tmp_path / "vlpack" / "run.jsonl").mkdir()
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        report(tmp_path)


def test_rows_are_counted_once_over_epochs_and_ranks(tmp_path):
    """REPORT-11: and a reason that an epoch counts and no row has is said."""
    train(tmp_path, range(1, 6), 1)
    row = {"id": "a:1", "reason": "file_missing", "epoch": 0, "error": "no such file"}
    lines = [row, row, {**row, "epoch": 1}, {**row, "id": "a:2", "reason": "oversize"}]
    (tmp_path / "vlpack" / "left_out.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines) + '{"id": ')
    dropped = {"file_missing": 2, "oversize": 1, "underfilled": 3}
    (tmp_path / "vlpack" / "epoch_0.json").write_text(json.dumps({**EPOCH, "num_dropped": dropped}))
    made = report(tmp_path)["left_out"]
    assert {reason: about["num_rows"] for reason, about in made["reasons"].items()} == {
        "file_missing": 1,
        "oversize": 1,
    }
    assert (made["num_rows"], made["num_lines"], made["sources"]) == (2, 3, {"a": 2})
    assert made["file"] == str(tmp_path / "vlpack" / "left_out.jsonl")
    assert made["not_listed"] == {"underfilled": 3}, "of a row that an epoch has twice there is one line"


EPOCH = {
    "epoch": 0, "global_step": 4, "num_packs": 1, "num_samples": 1, "num_tokens": 60, "fill_mean": 0.6, "fill_p5": 60,
    "fill_p50": 60, "fill_p95": 60, "fill_histogram": {"60": 1}, "num_single_long": 0, "account": "counts add up",
}  # fmt: skip
