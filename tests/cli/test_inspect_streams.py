"""`vlpack inspect` of streams, in process: the first packs before a run, what was trained by its record after it."""

import shutil

import pytest

from swift_vlpack.cli.trained_steps import trained_step
from swift_vlpack.errors import ConfigError
from swift_vlpack.host.trainer import PackingTrainer
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
        for wish in ({"sample": "stream:0"}, {"epoch": 1}):
            with pytest.raises(ConfigError, match="--pack N and --step N read the first packs of rank 0"):
                seen(**wish)
        with pytest.raises(ConfigError, match="the rows of rank 0 make fewer than 100 packs"):
            seen(pack=99)


def test_steps_of_a_stream_lead_to_the_packs_on_record(run, tmp_path):
    """SEE-5 SEE-3: which it keeps by itself; a run without one says what to set."""
    output, trained = run
    losses = [line["loss"] for line in log_lines(output) if "loss" in line]
    for step in (1, 2, 3):
        found = trained_step(output, step)
        ids = [list(map(str, record.sample_ids)) for record, _ in trained[2 * step - 2 : 2 * step]]
        assert [pack.ids for pack in found.packs] == ids, "a pack that completes an epoch has none"
        assert found.packs[0].where[0] == f"row {int(ids[0][0].partition(':')[2]) + 1} of the stream"
        assert found.loss == losses[step - 1]
    with pytest.raises(ConfigError, match="step 4 is not on record, which has steps 1 to 3"):
        trained_step(output, 4)
    without = tmp_path / "without"
    shutil.copytree(output, without, ignore=shutil.ignore_patterns("packs_*"))
    with pytest.raises(ConfigError, match="has no pack of this run, which was trained with VLPACK_RECORD_PACKS=false"):
        trained_step(without, 1)
