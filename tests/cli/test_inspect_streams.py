"""`vlpack inspect` of streams, in process: the first packs before a run, what was trained by its record after it."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from swift_vlpack.errors import ConfigError
from swift_vlpack.host.trainer import PackingTrainer
from swift_vlpack.runlog.pack_log import PackLog, older_half, read_packs
from tests.cli.test_inspect import looking, looking_back, recorded_by_hand
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


def check_lines(places, data, labels, tokenizer):
    """That the answers of these lines are those that were trained, in the same order."""
    lines = data_lines(data)
    answers = [lines[int(place.removeprefix(f"{data}:")) - 1]["messages"][-1]["content"] for place in places]
    trained = tokenizer.decode([label for label in labels if label != -100])
    assert trained == "".join(f"{answer}<|im_end|>\n" for answer in answers)


def data_lines(data):
    return [json.loads(line) for line in Path(data).read_text().splitlines()]


def test_steps_of_a_stream_lead_to_the_packs_on_record(run, data, small_folder, tmp_path):
    """SEE-5 SEE-3: with the lines of the file; which it keeps by itself; a run without one says what to set."""
    output, trained = run
    tokenizer = AutoTokenizer.from_pretrained(small_folder(FAMILY))
    losses = [line["loss"] for line in log_lines(output) if "loss" in line]
    with looking_back(output) as seen:
        for step in (1, 2, 3):
            (found,) = seen(step=step)["steps"]
            ids = [list(map(str, record.sample_ids)) for record, _ in trained[2 * step - 2 : 2 * step]]
            assert [list(pack["ids"]) for pack in found["packs"]] == ids, "a pack that completes an epoch has none"
            for pack, (_, row) in zip(found["packs"], trained[2 * step - 2 : 2 * step], strict=True):
                check_lines(pack["where"], data, row["labels"], tokenizer)
            assert (found["loss"], found["known_from"]) == (losses[step - 1], "packs as recorded")
        with pytest.raises(ConfigError, match="step 4 is not on record, which has steps 1 to 3"):
            seen(step=4)
    without = tmp_path / "without"
    shutil.copytree(output, without, ignore=shutil.ignore_patterns("packs_*"))
    with looking_back(without) as seen, pytest.raises(ConfigError, match="Leave VLPACK_RECORD_PACKS out, or set it"):
        seen(step=1)


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
    ("said", "can_plan_again", "is_kept", "is_bounded"),
    [(None, True, False, None), (None, False, True, True), ("true", True, True, False), ("true", False, True, False),
     ("false", False, False, None), (" ", False, True, True)],
)  # fmt: skip
def test_what_cannot_be_computed_again_is_recorded(said, can_plan_again, is_kept, is_bounded, tmp_path):
    """SEE-5"""
    environ = {} if said is None else {"VLPACK_RECORD_PACKS": said}
    log = PackLog.wanted(tmp_path / "packs_rank0.jsonl", environ, can_plan_again)
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
    with looking_back(again) as seen:
        (found,) = seen(step=2)["steps"]
    assert [list(pack["ids"]) for pack in found["packs"]] == [["stream:999"]] * 2
