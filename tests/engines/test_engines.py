"""DeepSpeed ZeRO-2 and ZeRO-3 and FSDP2 on two ranks, beside DDP. What every test compares is of an engine in force."""

import pytest

from tests.e2e.ranks import trained
from tests.engines.launcher import ENGINES
from tests.engines.runs_of_engines import AT_STEP, NUM_STEPS
from tests.host.runs import log_lines

pytestmark = pytest.mark.engines
TRAININGS = ("full", "frozen", "lora", "lora_with_tower", "qwen3_vl")
"""Full and LoRA, the vision tower frozen and not, one pack a step and two; and a family whose tower ms-swift enters
without an image under DeepSpeed only."""
NUM_PACKS = {"frozen": 2, "lora_with_tower": 2}
"""Packs of a rank in a step, where it is not one."""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("training", TRAININGS)
def test_loss_and_gradient_norm_of_ten_steps_are_those_of_ddp(engine, training, runs):
    """RANKS-17"""
    expected = runs("ddp").first[training].steps
    assert len(expected) == NUM_STEPS
    for (loss, norm), (loss_of_ddp, norm_of_ddp) in zip(runs(engine).first[training].steps, expected, strict=True):
        assert loss == pytest.approx(loss_of_ddp, abs=1e-5)
        assert norm == pytest.approx(norm_of_ddp, abs=1e-5)


@pytest.mark.parametrize("engine", ["ddp", *ENGINES])
@pytest.mark.parametrize("training", TRAININGS)
def test_pack_without_an_image_trains_beside_a_pack_with_one(engine, training, runs):
    """RANKS-4 RANKS-17: in several steps; and where parameters are sharded, all ranks enter the tower equally often."""
    outcome = runs(engine).first[training]
    assert num_mixed_steps(outcome.output) >= 2
    entered = [note["towers"] for note in outcome.notes]
    if engine in ("zero3", "fsdp2"):
        assert entered == [[NUM_PACKS.get(training, 1)] * NUM_STEPS] * 2


def num_mixed_steps(output):
    """Steps in which one rank had an image, and the other had none, in the same pack of the step."""
    packs = {}
    for pack in trained(output):
        has_image = any(int(name.split(":")[1]) % 2 for name in pack["ids"])
        packs.setdefault(pack["step"], {}).setdefault(pack["rank"], []).append(has_image)
    pairs = [zip(*by_rank.values(), strict=True) for by_rank in packs.values()]
    return sum(any(one != other for one, other in of_step) for of_step in pairs)


@pytest.mark.parametrize("engine", ENGINES)
def test_step_without_any_image_moves_the_tower_by_momentum_but_not_under_ddp(engine, runs):
    """RANKS-17: where ms-swift does not enter it, DDP gives its parameters no gradient, and engines give them zeros."""
    ddp, other = (runs(name).first["qwen3_vl_with_texts"] for name in ("ddp", engine))
    entered = [sum(of_ranks) for of_ranks in zip(*(note["towers"] for note in ddp.notes), strict=True)]
    assert entered.index(0) == 3
    assert other.steps[:4] == [pytest.approx(step, abs=1e-5) for step in ddp.steps[:4]]
    assert abs(other.steps[4][0] - ddp.steps[4][0]) > 1e-4
    assert other.steps == [pytest.approx(step, abs=1e-5) for step in runs("zero3").first["qwen3_vl_with_texts"].steps]


@pytest.mark.parametrize("engine", ENGINES)
def test_evaluation_is_that_of_ddp(engine, runs):
    """TRAIN-6 RANKS-17"""
    losses = {}
    for name in ("ddp", engine):
        outcome = runs(name).first["full"]
        assert outcome.notes
        losses[name] = [line["eval_loss"] for line in log_lines(outcome.output) if "eval_loss" in line]
    assert len(losses[engine]) == NUM_STEPS // AT_STEP
    assert losses[engine] == pytest.approx(losses["ddp"], abs=1e-5)
