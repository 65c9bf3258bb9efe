"""The record of packs, and the steps that it shows, without a run."""

import time

import pytest

from swift_vlpack.cli.trained_steps import place_of, trained_step
from swift_vlpack.errors import ConfigError
from swift_vlpack.runlog.events import EventLog
from swift_vlpack.runlog.pack_log import MOST_BYTES, PackLog, older_half, pack_file, read_packs


def test_record_that_nobody_asked_for_is_bounded_and_never_ends_a_run(tmp_path):
    """SEE-5: each half says by itself of which segment its packs are."""
    path = tmp_path / "vlpack" / "packs_rank0.jsonl"
    lines = [pack(step, f"stream:{step}") for step in range(100)]
    log = PackLog(path, most_bytes=800)
    log.begin("now")
    for line in lines:
        log.append([line])
    assert path.stat().st_size < 950
    assert older_half(path).stat().st_size < 950
    kept = [{**line, "begin": None} for line in read_packs(path, "now")]
    assert kept == [{**line, "begin": None} for line in lines[-len(kept) :]]
    assert len(kept) > 8
    path.write_text(path.read_text() + '{"step": 1')  # killed in the middle of a line
    assert len(list(read_packs(path, "now"))) == len(kept)
    path.unlink()
    path.mkdir()
    log.append(lines)
    with pytest.raises(OSError, match="directory"):
        PackLog(path).append(lines)
    assert 2 * MOST_BYTES == 16 * 1024**2, "of a rank, as docs/resume.md says"


@pytest.mark.parametrize(
    ("said", "is_kept", "is_bounded"), [(None, True, True), ("true", True, False), ("false", False, None)]
)
def test_packs_are_recorded_unless_that_is_switched_off(said, is_kept, is_bounded, tmp_path):
    """SEE-5"""
    log = PackLog.wanted(tmp_path / "packs_rank0.jsonl", {} if said is None else {"VLPACK_RECORD_PACKS": said})
    assert (log is not None) == is_kept
    assert log is None or (log.most_bytes is not None) == is_bounded


def pack(step, *ids):
    return {"step": step, "epoch": 0, "pack": step, "ids": list(ids), "lengths": [1] * len(ids)}


def train_segment(folder, steps, num_ranks, name, *, resume=None, records=True):
    """The log and the records of a segment that takes these steps, whose samples have its name."""
    facts = {"num_ranks": num_ranks, "origins": {}}
    if resume is None:
        when = EventLog(folder).append("start", 0, **facts)
    else:
        when = EventLog(folder).append("resume", resume, checkpoint=str(folder / f"checkpoint-{resume}"), **facts)
    for rank in range(num_ranks if records else 0):
        log = PackLog(pack_file(folder, rank))
        log.begin(when)
        for step in steps:
            log.append([pack(step, f"{name}{rank}:{step}")])
    for step in steps:
        EventLog(folder).append("checkpoint", step, checkpoint=f"checkpoint-{step}")
    time.sleep(0.002)  # a segment is known by the millisecond of its start


def found(folder, step):
    return [one.ids[0].partition(":")[0] for one in trained_step(folder, step).packs]


def test_step_is_shown_with_the_packs_of_the_segment_that_trained_it(tmp_path):
    """SEE-3: trained twice, the second time counts; ranks of a segment that was lost are not shown."""
    train_segment(tmp_path, (1, 2, 3), 3, "first")
    train_segment(tmp_path, (3,), 2, "second", resume=2)
    assert [found(tmp_path, step) for step in (2, 3)] == [["first0", "first1", "first2"], ["second0", "second1"]]
    with pytest.raises(ConfigError, match="step 4 is not on record, which has steps 1 to 3"):
        trained_step(tmp_path, 4)


def test_step_that_a_second_run_has_not_reached_is_not_that_of_the_first(tmp_path):
    """SEE-14: in the same folder; also where a third goes on from a checkpoint of the first."""
    train_segment(tmp_path, (1, 2, 3), 2, "first")
    train_segment(tmp_path, (1,), 2, "second")
    assert found(tmp_path, 1) == ["second0", "second1"]
    with pytest.raises(ConfigError, match="step 2 is not on record, which has steps 1 to 1"):
        trained_step(tmp_path, 2)
    train_segment(tmp_path, (4,), 1, "third", resume=3)
    assert [found(tmp_path, step)[0] for step in (1, 3, 4)] == ["first0", "first0", "third0"]


def test_step_that_was_lost_and_not_trained_again_is_not_on_record(tmp_path):
    """SEE-3: the model does not have it; and a segment without a record does not show another's packs."""
    train_segment(tmp_path, (1, 2, 3, 4), 1, "first")
    train_segment(tmp_path, (3,), 1, "second", resume=2)
    with pytest.raises(ConfigError, match="step 4 is not on record, which has steps 1 to 3"):
        trained_step(tmp_path, 4)
    train_segment(tmp_path, (3, 4), 1, "third", resume=2, records=False)
    with pytest.raises(ConfigError, match="step 3 is not on record, which has steps 1 to 2"):
        trained_step(tmp_path, 3)


def test_rank_without_a_record_of_the_step_is_named(tmp_path):
    """SEE-3: a machine may write to a disk of its own."""
    train_segment(tmp_path, (1,), 3, "run")
    pack_file(tmp_path, 1).unlink()
    shown = trained_step(tmp_path, 1)
    assert [one.rank for one in shown.packs] == [0, 2]
    assert shown.notes[0] == f"rank 1 has not recorded this step in {pack_file(tmp_path, 1)}"
    assert shown.notes[1] == "ms-swift has not logged a loss of this step"


def test_step_before_a_resume_from_another_folder_is_said_to_be_there(tmp_path):
    """SEE-3"""
    (tmp_path / "v0").mkdir()
    EventLog(tmp_path / "v1").append(
        "resume", 2, checkpoint=str(tmp_path / "v0" / "checkpoint-2"), num_ranks=1, origins={}
    )
    with pytest.raises(ConfigError, match=r"begins after step 2, where the run was resumed from .*v0/checkpoint-2"):
        trained_step(tmp_path / "v1", 2)


def test_part_of_a_row_stands_where_its_row_does():
    """SEE-5"""
    places = [place_of(name, {"a": "/data/a.txt"}) for name in ("a:3", "a:3/1", "a:loaded-3/1", "stream:3/1")]
    assert places == ["/data/a.txt row 4", "/data/a.txt row 4", "/data/a.txt loaded row 4", "row 4 of the stream"]
