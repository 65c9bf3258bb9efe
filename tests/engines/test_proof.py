"""Both proofs under the engines: what was compared, and a leak that only the gradients of parameters show."""

import os
import re
from functools import partial

import pytest
import torch

from tests.e2e.ranks import ROOT
from tests.engines.launcher import ENGINES, Training, train_all
from tests.engines.runs_of_engines import FAMILY, FULL, TWICE
from tests.host.proof import sabotage as s
from tests.host.proof import test_ranks as on_ranks
from tests.host.proof.runners import text_samples

pytestmark = pytest.mark.engines
NAMES = {"zero3": "ZeRO-3", "fsdp2": "FSDP2"}
OFF = "IsolationError: isolation could not be verified.*the gradient of parameters of the language part is off by 0."


# -- by ms-swift -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["ddp", *ENGINES])
def test_gradients_are_compared_before_training_and_on_the_first_batch(engine, runs):
    """ISO-24"""
    number = sum(outcome.error is None for outcome in runs(engine).first.values())
    assert number >= 5
    said = (runs(engine).folder / engine / "full_and_more.txt").read_text()
    of_parts = rf"of \d+ whole parameters that {NAMES[engine]} shards" if engine in NAMES else ""
    before = r"isolation verified: .*gradients within \d\.\de-0[67]" + (rf" \({of_parts}\)" if of_parts else ";")
    assert len(re.findall(before, said)) >= number
    lines = re.findall(r"isolation verified in training: the first batch .*", said)
    assert len(lines) == number
    for line in lines:
        assert "gradients of parameters (" not in line
        assert re.search(rf"gradients within \d\.\de-0[67] \({of_parts}\)", line) if of_parts else "shards" not in line


@pytest.mark.parametrize("engine", ENGINES)
def test_leak_that_only_gradients_of_parameters_show_stops_training_on_both_ranks(engine, runs, tmp_path):
    """ISO-24 ISO-5: all else is right: logits, hidden states and the gradients of tokens."""
    plugin = {"custom_register_path": ROOT / "tests" / "plugins" / "leaking_gradient.py"}
    training = runs(engine).training("leaking", FULL, TWICE, plugin, max_steps=1)
    assert isinstance(training, Training)
    assert training.family == FAMILY
    output = train_all(engine, [training], tmp_path)["leaking"].output
    for rank in (0, 1):
        assert re.search(OFF, (output / f"error_rank{rank}.txt").read_text())
    assert not list(output.glob("checkpoint-*"))


# -- by DeepSpeed itself, with a rank that has no data left ------------------------------------------------------------


def in_zero(model, stage):
    """A model that DeepSpeed trains; under ZeRO-3 each rank has a part of every parameter."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    trained = [one for one in model.parameters() if one.requires_grad]
    settings = {"stage": stage, "stage3_param_persistence_threshold": 0, "overlap_comm": False}
    config = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 2, "zero_optimization": settings}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=trained, optimizer=torch.optim.AdamW(trained), config=config
    )
    if stage == 3:
        assert all(hasattr(one, "ds_id") and not one.numel() for one in model.parameters()), "this is not ZeRO-3"
    return engine


def as_launched(rank):
    """Set what DeepSpeed reads of a launcher, and let the proof know of an engine, as the trainer does."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}
    on_ranks.HAS_ENGINE = True


def prove_and_train(rank):
    """Of both stages, all trained and not: the lines, and the gradients of the step after them."""
    as_launched(rank)
    return "\n".join(line for stage in (2, 3) for is_frozen in (False, True) for line in prove(rank, stage, is_frozen))


def prove(rank, stage, is_frozen):
    from deepspeed.utils import safe_get_full_grad

    right = s.llama(attention_dropout=0.3)
    for name, parameter in right.model.named_parameters():
        parameter.requires_grad_(not is_frozen or "mlp" in name)
    engine = in_zero(right.model.train(), stage)
    samples = text_samples(*on_ranks.LENGTHS)
    lines = [on_ranks.proved(engine, right), on_ranks.proved_in_training(engine, right, [] if rank else samples)]
    torch.manual_seed(0)
    with right.batches.batch(samples, packed=True) as row:
        engine.backward(engine(**row.inputs, labels=row.labels).loss)
    grads = [safe_get_full_grad(one) for one in right.model.parameters() if one.requires_grad]
    return [*lines, f"{len(grads)} {sum(float(one.abs().sum()) for one in grads)}"]


def test_rank_without_data_takes_part_and_the_step_after_it_is_as_without(tmp_path):
    """ISO-23 ISO-24: ZeRO-2 and ZeRO-3, whose own hooks get no gradient of a proof, and get all of training."""
    (first, other) = (said.split("\n") for said in on_ranks.on_two_ranks(prove_and_train, tmp_path))
    assert len(first) == len(other) == 12, first
    for at, shards in enumerate(("", "", "ZeRO-3", "ZeRO-3")):
        line, in_training, step = first[3 * at : 3 * at + 3]
        _, without_data, other_step = other[3 * at : 3 * at + 3]
        of_parts = rf" \(of 5 whole parameters that {shards} shards\)" if shards else ""
        assert re.match(rf"isolation verified: .*gradients within \d\.\de-0[67]{of_parts};", line), line
        number, size = (6, 310.256) if at % 2 else (19, 904.846)
        assert "gradients by 0.0e+00; 2 samples in it equal" in in_training
        assert "(0 samples of 9 tokens, " in without_data
        assert (f"(of {number} whole parameters that ZeRO-3 shards)" in in_training) == bool(shards)
        for said in (in_training, without_data):
            assert "gradients of parameters (" not in said
        assert step == other_step
        # As large as under DDP, tests/host/proof/test_ranks.py.
        assert float(step.split()[1]) == pytest.approx(size, abs=1e-3)


def sabotaged(rank):
    """What both proofs say of models that are wrong, under ZeRO-3."""
    as_launched(rank)
    on_ranks.SABOTAGES = {
        name: ("zero3", *rest) for name, (kind, *rest) in on_ranks.SABOTAGES.items() if kind == "fsdp"
    }
    on_ranks.WRAPPERS["zero3"] = partial(in_zero, stage=3)
    return on_ranks.sabotaged(rank)


def test_leak_is_refused_on_both_ranks_by_both_proofs(tmp_path):
    """ISO-24 ISO-15 ISO-23"""
    on_ranks.assert_refused(on_ranks.on_two_ranks(sabotaged, tmp_path), "fsdp")
