"""Two ranks that read a stream, in subprocesses as the command line starts them."""

import json
import os
import subprocess
import sys

import pytest

from tests.data_rows import mixed_rows, write_jsonl
from tests.e2e.ranks import ROOT, free_port
from tests.host.runs import SMALL_VOCABULARY, argv, epoch_report, log_lines, packed_argv, train

FAMILY = "qwen2_5_vl"
SIZES = (19, 5)
OPTIONS = {
    "VLPACK_PACKING_BUFFER": "4",
    "VLPACK_PACKING_STRATEGY": "best_fit",
    "VLPACK_PACKING_VERIFY": "false",
    "VLPACK_PACKING_DROP_LAST": "false",
    "VLPACK_RECORD_PACKS": "true",
}
FLAGS = {
    "streaming": "true", "dataset_shuffle": "false", "max_steps": 5, "gradient_accumulation_steps": 2,
    "max_length": 256, "learning_rate": 0, "save_strategy": "steps", "save_steps": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return [
        write_jsonl(folder / f"{n}.jsonl", mixed_rows(folder / str(n), size, seed=n, largest=100))
        for n, size in enumerate(SIZES)
    ]


@pytest.fixture(scope="module")
def two_ranks(small_folder, files, tmp_path_factory):
    output = tmp_path_factory.mktemp("two")
    run_two_ranks(argv(small_folder(FAMILY), FAMILY, output, dataset=files, external_plugins=SMALL_VOCABULARY, **FLAGS))
    return output


def run_two_ranks(flags, **environ):
    clean = {key: value for key, value in os.environ.items() if not key.startswith("VLPACK_")}
    clean |= {"NPROC_PER_NODE": "2", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "swift_vlpack", "sft", *flags, "--ddp_backend", "gloo", "--use_cpu", "true"],
        capture_output=True, text=True, timeout=600, check=False,
        env={**clean, **OPTIONS, **environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def packs(output, rank):
    """What a rank trained: (step, epoch, ids)."""
    lines = (output / "vlpack" / f"packs_rank{rank}.jsonl").read_text().splitlines()
    return [(line["step"], line["epoch"], line["ids"]) for line in map(json.loads, lines)]


@pytest.mark.slow
@pytest.mark.telling
def test_ranks_with_unequal_shards_take_equal_steps_and_train_every_row_once(two_ranks):
    """STREAM-1 STREAM-3 STREAM-4"""
    both = [packs(two_ranks, rank) for rank in range(2)]
    assert [pack[:2] for pack in both[0]] == [pack[:2] for pack in both[1]], "equal steps and epochs"
    ids = [i for rank in both for _, epoch, inside in rank if epoch == 0 for i in inside]
    assert sorted(ids) == sorted([f"stream:{2 * n}" for n in range(19)] + [f"stream:{2 * n + 1}" for n in range(5)])
    report = epoch_report(two_ranks)
    assert (report["num_read"], report["num_samples"], report["is_closed"]) == (24, 24, True)
    assert report["num_packs"] == sum(bool(inside) for rank in both for _, epoch, inside in rank if epoch == 0)
    num_packs = [sum(bool(inside) for _, epoch, inside in rank if epoch == 0) for rank in both]
    assert num_packs[0] > num_packs[1] + 1, "rank 1 runs dry"
    num_steps = len({step for step, epoch, _ in both[0] if epoch == 0})
    assert num_steps == -(-num_packs[0] // 2)
    assert {step for rank in both for step, _, inside in rank if inside} == {1, 2, 3, 4, 5}, "all are dry in a step"


@pytest.mark.slow
@pytest.mark.telling
def test_step_of_a_dry_rank_has_loss_and_gradient_of_the_other(two_ranks, small_folder, files, tmp_path, monkeypatch):
    """STREAM-4: rank 0 alone, on its shard, gives the same steps where rank 1 is dry."""
    for key, value in OPTIONS.items():
        monkeypatch.setenv(key, value)
    train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path, dataset=files[0], **FLAGS))
    alone, both = ([line for line in log_lines(output) if "loss" in line] for output in (tmp_path, two_ranks))
    busy = {step for step, epoch, inside in packs(two_ranks, 1) if inside or epoch > 0}
    dry = {step for step, epoch, _ in packs(two_ranks, 1) if epoch == 0} - busy
    assert dry
    for step in dry:
        assert both[step - 1]["loss"] == pytest.approx(alone[step - 1]["loss"], abs=1e-5)
        assert both[step - 1]["grad_norm"] == pytest.approx(alone[step - 1]["grad_norm"], rel=1e-4)
    assert both[0]["loss"] != pytest.approx(alone[0]["loss"], abs=1e-5), "rank 1 takes part in the first step"


@pytest.mark.slow
@pytest.mark.telling
def test_two_ranks_resume_with_the_next_packs(two_ranks, small_folder, files, tmp_path):
    """STREAM-8 STREAM-9: from where rank 1 has run dry and rank 0 has not."""
    whole = [packs(two_ranks, rank) for rank in range(2)]
    step = max(step for step, epoch, inside in whole[1] if inside and epoch == 0)
    checkpoint = two_ranks / f"checkpoint-{step}"
    assert {path.name for path in checkpoint.glob("vlpack_*")} == {
        "vlpack_rows.npz", "vlpack_state.json", "vlpack_state_rank0.json", "vlpack_state_rank1.json",
    }  # fmt: skip
    flags = {**FLAGS, "resume_from_checkpoint": checkpoint}
    run_two_ranks(
        argv(small_folder(FAMILY), FAMILY, tmp_path, dataset=files, external_plugins=SMALL_VOCABULARY, **flags)
    )
    for rank in range(2):
        assert packs(tmp_path, rank) == [pack for pack in whole[rank] if pack[0] > step]
    assert epoch_report(tmp_path) == epoch_report(two_ranks)
