"""The segments of a run, from events that the real writer wrote."""

import json
from pathlib import Path

import pytest

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
        "sources": {"a": {"rows": 40, "ratio": 1, "asked_share": 1.0}},
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


def test_segments_on_other_ranks_and_in_other_folders_are_one_run(tmp_path):
    """REPORT-7: two ranks are killed, three go on in another folder, one ends it there."""
    first, second = tmp_path / "v0-a", tmp_path / "v1-b"
    train(first, range(1, 6), 2, checkpoints=(3,))
    train(second, range(4, 7), 3, resume=first / "checkpoint-3", checkpoints=(5,))
    train(second, range(6, 9), 1, resume=second / "checkpoint-5", ends=True)
    assert [(one.start["num_ranks"], one.stops_at) for one in segments_of(second)] == [(2, 3), (3, 5), (1, None)]
    made = report(second)
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
    assert [point["leg"] for point in made["series"]] == [0, 0, 0, 1, 1, 2, 2, 2]


def test_run_that_was_started_anew_in_its_folder_is_the_new_one(tmp_path):
    """REPORT-7: what trained there before is another run."""
    train(tmp_path, range(1, 9), 2, checkpoints=(4,))
    train(tmp_path, range(1, 3), 1)
    made = report(tmp_path)
    assert (made["run"]["num_ranks"], made["trained"]["num_steps"], made["run"]["step"]) == ([1], 2, 2)


def test_folders_that_were_moved_together_are_found(tmp_path):
    """REPORT-7: paths in events are those of the time of writing."""
    then = tmp_path / "then"
    train(then / "v0-a", range(1, 4), 1, checkpoints=(3,))
    train(then / "v1-b", range(4, 6), 1, resume=then / "v0-a" / "checkpoint-3")
    then.rename(tmp_path / "now")
    assert report(tmp_path / "now" / "v1-b")["trained"]["num_steps"] == 5


def test_checkpoint_that_is_gone_is_said(tmp_path):
    """REPORT-7"""
    train(tmp_path / "out", range(4, 6), 1, resume="/gone/run/checkpoint-3")
    made = report(tmp_path / "out")
    assert made["trained"]["num_steps"] == 2
    assert "/gone/run/checkpoint-3, whose run is gone: the numbers begin after step 3" in made["notes"][0]


def test_logs_that_lead_in_a_circle_end(tmp_path):
    """REPORT-7: a copied folder may name itself."""
    train(tmp_path / "a", range(4, 6), 1, resume=tmp_path / "b" / "checkpoint-3")
    train(tmp_path / "b", range(4, 6), 1, resume=tmp_path / "a" / "checkpoint-3")
    assert len(segments_of(tmp_path / "b")) == 2
    assert len(segments_of(tmp_path / "a")) <= 2


def test_lists_of_several_folders_become_one(tmp_path):
    """REPORT-11: each row of an epoch once."""
    first, second = tmp_path / "a", tmp_path / "b"
    train(first, range(1, 4), 1, checkpoints=(3,))
    train(second, range(4, 6), 1, resume=first / "checkpoint-3")
    row = {"id": "a:1", "reason": "file_missing", "epoch": 0, "error": "no such file"}
    other = {**row, "id": "a:2", "reason": "oversize"}
    (first / "vlpack" / "left_out.jsonl").write_text(json.dumps(row) + "\n")
    (second / "vlpack" / "left_out.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (row, other)))
    (second / "vlpack" / "epoch_0.json").write_text(
        json.dumps({**EPOCH, "num_dropped": {"file_missing": 2, "oversize": 1, "underfilled": 3}})
    )
    made = report(second)["left_out"]
    assert {reason: about["num_rows"] for reason, about in made["reasons"].items()} == {
        "file_missing": 1,
        "oversize": 1,
    }
    assert [json.loads(line) for line in Path(made["file"]).read_text().splitlines()] == [row, other]
    assert made["not_listed"] == {"underfilled": 3}, "of a row that an epoch has twice there is one line"


EPOCH = {
    "epoch": 0, "global_step": 4, "num_packs": 1, "num_samples": 1, "num_tokens": 60, "fill_mean": 0.6, "fill_p5": 60,
    "fill_p50": 60, "fill_p95": 60, "fill_histogram": {"60": 1}, "num_single_long": 0, "account": "counts add up",
}  # fmt: skip
