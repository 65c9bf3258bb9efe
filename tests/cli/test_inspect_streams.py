"""`vlpack inspect` of streams, in process: the first packs before a run, what was trained by its record after it."""

import json
import shutil

import pytest

from swift_vlpack.cli.trained_steps import TrainedSteps, place_of
from swift_vlpack.errors import ConfigError
from swift_vlpack.host.trainer import PackingTrainer
from swift_vlpack.runlog.events import EventLog
from swift_vlpack.runlog.pack_log import PackLog, older_half, pack_file, read_packs
from tests.cli.test_inspect import looking, recorded_by_hand
from tests.data_rows import mixed_rows, write_jsonl
from tests.environment import packing_variables, restored_environment
from tests.host.runs import log_lines, packed_argv, train

FAMILY = "qwen2_5_vl"
OPTIONS = {"VLPACK_PACKING_BUFFER": "4", "VLPACK_PACKING_STRATEGY": "best_fit", "VLPACK_PACKING_VERIFY": "false"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return write_jsonl(folder / "train.jsonl", mixed_rows(folder / "images", 20, largest=100))


def flags(small_folder, output, data):
    return packed_argv(
        small_folder(FAMILY), FAMILY, output, dataset=data, streaming="true", max_steps=3, gradient_accumulation_steps=2
    )


@pytest.fixture(scope="module")
def run(small_folder, data, tmp_path_factory):
    """Three steps of a stream, of which nobody asked for a record; and the packs as they were trained."""
    output = tmp_path_factory.mktemp("run")
    with restored_environment(), pytest.MonkeyPatch.context() as patch:
        packing_variables(OPTIONS)
        trained = recorded_by_hand(patch, PackingTrainer)
        train(flags(small_folder, output, data))
    return output, trained


def test_first_packs_of_a_stream_are_those_that_are_trained(small_folder, run, data, tmp_path):
    """SEE-1: and what would need a plan says what works."""
    batches = [row for record, row in run[1] if record.sample_ids]
    with looking(flags(small_folder, tmp_path, data), environ=OPTIONS) as seen:
        packs = [seen(pack=number)["packs"][0] for number in (0, 3)] + seen(step=2)["packs"]
        assert [pack["row"] for pack in packs] == [batches[0], batches[3], batches[2], batches[3]]
        assert [pack["step"] for pack in packs] == [1, 2, 2, 2]
        assert len(seen(examples=3)["examples"]) == 3
        for wish in ({"longest": True}, {"sample": "stream:0"}, {"epoch": 1}):
            with pytest.raises(ConfigError, match="--pack N and --step N read the first packs of rank 0"):
                seen(**wish)
        with pytest.raises(ConfigError, match="the rows of rank 0 make fewer than 100 packs"):
            seen(pack=99)


def test_steps_of_a_stream_lead_to_the_packs_on_record(run, tmp_path):
    """SEE-5 SEE-3: which it keeps by itself; a run without one says what to set."""
    output, trained = run
    losses = [line["loss"] for line in log_lines(output) if "loss" in line]
    for step in (1, 2, 3):
        found = TrainedSteps(output).step(step)
        ids = [list(map(str, record.sample_ids)) for record, _ in trained[2 * step - 2 : 2 * step]]
        assert [pack.ids for pack in found.packs] == ids, "a pack that completes an epoch has none"
        assert found.packs[0].where[0] == f"row {int(ids[0][0].partition(':')[2]) + 1} of the stream"
        assert (found.loss, found.known_from) == (losses[step - 1], "packs as recorded")
    with pytest.raises(ConfigError, match="step 4 is not on record, which has steps 1 to 3"):
        TrainedSteps(output).step(4)
    without = tmp_path / "without"
    shutil.copytree(output, without, ignore=shutil.ignore_patterns("packs_*"))
    with pytest.raises(ConfigError, match="it was started with VLPACK_RECORD_PACKS=false"):
        TrainedSteps(without).step(1)


def test_record_that_nobody_asked_for_is_bounded_and_never_ends_a_run(tmp_path):
    """SEE-5"""
    path = tmp_path / "vlpack" / "packs_rank0.jsonl"
    lines = [{"step": step, "epoch": 0, "pack": step, "ids": [f"stream:{step}"]} for step in range(100)]
    log = PackLog(path, most_bytes=500)
    for line in lines:
        log.append([line])
    assert path.stat().st_size < 600
    assert older_half(path).stat().st_size < 600
    kept = list(read_packs(path))
    assert kept == lines[-len(kept) :]
    assert len(kept) > 8
    path.write_text(path.read_text() + '{"step": 1')  # killed in the middle of a line
    assert list(read_packs(path)) == kept
    path.unlink()
    path.mkdir()
    log.append(lines)
    with pytest.raises(OSError, match="directory"):
        PackLog(path).append(lines)


@pytest.mark.parametrize(
    ("said", "is_kept", "is_bounded"), [(None, True, True), ("true", True, False), ("false", False, None)]
)
def test_packs_are_recorded_unless_that_is_switched_off(said, is_kept, is_bounded, tmp_path):
    """SEE-5"""
    log = PackLog.wanted(tmp_path / "packs_rank0.jsonl", {} if said is None else {"VLPACK_RECORD_PACKS": said})
    assert (log is not None) == is_kept
    assert log is None or (log.most_bytes is not None) == is_bounded


def test_step_that_was_trained_twice_is_the_later_one(run, tmp_path):
    """SEE-5"""
    output, _ = run
    again = tmp_path / "again"
    shutil.copytree(output, again)
    path = again / "vlpack" / "packs_rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    later = [{**line, "ids": ["stream:999"]} for line in lines if line["step"] > 1]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *later]))
    assert [pack.ids for pack in TrainedSteps(again).step(2).packs] == [["stream:999"]] * 2


def test_packs_are_read_from_the_folder_that_trained_the_step(tmp_path):
    """SEE-5 SEE-3: a run that was resumed into another folder, after a step that both folders have."""
    first, second = tmp_path / "v0-a", tmp_path / "v1-b"
    for folder, steps in ((first, (1, 2, 3)), (second, (3, 4))):
        PackLog(pack_file(folder, 0)).append(
            [{"step": step, "epoch": 0, "pack": step, "ids": [f"{folder.name}:{step}"]} for step in steps]
        )
    facts = {"mode": "buffer", "num_ranks": 1, "num_workers": 0, "origins": {}}
    EventLog(first).append("start", 0, **facts)
    (first / "checkpoint-2").mkdir()
    EventLog(second).append("resume", 2, checkpoint=str(first / "checkpoint-2"), **facts)
    run = TrainedSteps(second)
    assert [run.step(step).packs[0].ids for step in (1, 2, 3, 4)] == [["v0-a:1"], ["v0-a:2"], ["v1-b:3"], ["v1-b:4"]]
    with pytest.raises(ConfigError, match="which has steps 1 to 4"):
        run.step(5)


def test_part_of_a_row_stands_where_its_row_does():
    """SEE-5"""
    places = [place_of(name, {"a": "/data/a.txt"}) for name in ("a:3", "a:3/1", "a:loaded-3/1", "stream:3/1")]
    assert places == ["/data/a.txt row 4", "/data/a.txt row 4", "/data/a.txt loaded row 4", "row 4 of the stream"]
