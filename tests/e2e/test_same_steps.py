"""`packing_batch=samples` on two real ranks, beside plain `swift sft` on as many, and resumed on others."""

import json
import os
import subprocess
import sys

import pytest

from tests.e2e.ranks import ROOT, Run, free_port, last_complete, step_of, trained
from tests.host.runs import SMALL_VOCABULARY, argv, log_lines
from tests.host.same_steps import (
    OPTIONS,
    RECORDER,
    curve,
    largest_differences,
    largest_gap,
    numbered_rows,
    packed_steps,
    recipe,
    unpacked_steps,
    weights,
)

FAMILY = "qwen2_5_vl"
NUM_ROWS = 27  # two ranks take 26 of them
ENVIRONMENT = {"packing_verify": "true", **OPTIONS}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return numbered_rows(tmp_path_factory.mktemp("data"), NUM_ROWS)


def flags(small_folder, output, dataset, *plugins, **options):
    """Two epochs with an incomplete last step, warmup and cosine, clipping and weight decay."""
    given = {"dataset": dataset, "external_plugins": [SMALL_VOCABULARY, *plugins], **recipe(2, 3), **options}
    return argv(small_folder(FAMILY), FAMILY, output, **given)


@pytest.fixture(scope="module")
def plain(small_folder, dataset, tmp_path_factory):
    """Plain `swift sft` on two ranks, with what its collators saw."""
    output = tmp_path_factory.mktemp("plain")
    environ = {key: value for key, value in os.environ.items() if not key.startswith("VLPACK_")}
    environ |= {"RECORD_FOLDER": str(output), "NPROC_PER_NODE": "2", "MASTER_PORT": str(free_port())}
    given = [*flags(small_folder, output, dataset, RECORDER), "--ddp_backend", "gloo", "--use_cpu", "true"]
    command = [sys.executable, "-m", "swift.cli.main", "sft", *given]
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return output


@pytest.mark.slow
@pytest.mark.telling
def test_two_ranks_train_the_steps_of_two_plain_ranks(plain, small_folder, dataset, tmp_path):
    """SAME-1 SAME-2 SAME-3: ids, loss, gradient norm, rate and weights; a row that plain leaves out is named."""
    run = Run(flags(small_folder, tmp_path, dataset, packing="true"), tmp_path / "log.txt", **ENVIRONMENT)
    assert run.wait() == 0, run.output[-3000:]
    expected = unpacked_steps(plain, accumulation=3, num_epochs=2)
    assert [len(step) for step in expected] == [12, 12, 2, 12, 12, 2]
    assert packed_steps(tmp_path) == expected
    loss, grad_norm, rate = largest_differences(curve(log_lines(plain)), curve(log_lines(tmp_path)))
    assert loss < 1e-5
    assert grad_norm < 1e-5
    assert rate == 0
    (one,), (other,) = plain.glob("checkpoint-*"), tmp_path.glob("checkpoint-*")
    assert largest_gap(weights(one), weights(other)) < 3e-6
    left_out = [json.loads(line) for line in (tmp_path / "vlpack" / "left_out.jsonl").read_text().splitlines()]
    missing = [set(range(NUM_ROWS)) - {row for step in expected[first : first + 3] for row in step} for first in (0, 3)]
    said = [{int(line["id"].rpartition(":")[2]) for line in left_out if line["epoch"] == epoch} for epoch in (0, 1)]
    assert said == missing
    assert {line["reason"] for line in left_out} == {"unpacked_leaves_out"}


@pytest.mark.slow
def test_killed_and_resumed_on_other_ranks_the_steps_stay(plain, small_folder, dataset, tmp_path):
    """SAME-4: two ranks, killed; one rank, killed; two ranks, to the end. The order is that of two ranks throughout."""
    constant = {"lr_scheduler_type": "constant", "warmup_ratio": 0, "tuner_type": "lora", "lora_dropout": 0}
    constant |= {"save_steps": 1, "packing": "true"}
    whole = Run(flags(small_folder, tmp_path / "whole", dataset, **constant), tmp_path / "whole.txt", **ENVIRONMENT)
    assert whole.wait() == 0, whole.output[-3000:]
    outputs, more = [], {}
    for number, (num_ranks, accumulation, after) in enumerate(((2, 3, 2), (1, 6, 4), (2, 3, None))):
        output = tmp_path / str(number)
        outputs.append(output)
        given = flags(
            small_folder, output, dataset, **{**constant, **more, "gradient_accumulation_steps": accumulation}
        )
        run = Run(given, tmp_path / f"{number}.txt", num_ranks=num_ranks, **ENVIRONMENT)
        if after is None:
            assert run.wait() == 0, run.output[-3000:]
            break
        run.until(lambda output=output, after=after: bool(done := trained(output)) and done[-1]["step"] >= after)
        run.end()
        run.wait()
        more = {"resume_from_checkpoint": last_complete(output)}
        kept = step_of(last_complete(output))
        for path in (output / "vlpack").glob("packs_rank*.jsonl"):  # what was trained after the checkpoint is lost
            lines = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= kept]
            path.write_text("".join(f"{line}\n" for line in lines))
    assert (
        packed_steps(*outputs)
        == packed_steps(tmp_path / "whole")
        == unpacked_steps(plain, accumulation=3, num_epochs=2)
    )
    gaps = largest_differences(curve(log_lines(tmp_path / "whole"))[-2:], curve(log_lines(outputs[-1]))[-2:])
    assert max(gaps) < 2e-6
