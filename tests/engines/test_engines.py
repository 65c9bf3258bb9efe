"""DeepSpeed ZeRO-2 and ZeRO-3 and FSDP2 on two ranks, beside DDP. What every test compares is of an engine in force."""

import pytest

from tests.e2e.ranks import trained
from tests.engines.launcher import ENGINES, assert_in_force, assert_same_steps
from tests.engines.runs_of_engines import AT_STEP, NUM_STEPS
from tests.host.runs import log_lines

pytestmark = pytest.mark.engines
TRAININGS = ("full", "frozen", "lora", "lora_with_tower", "qwen3_vl")
"""Full and LoRA, the vision tower frozen and not, one pack a step and two; and a family whose tower ms-swift enters
without an image under DeepSpeed only."""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("training", TRAININGS)
def test_loss_and_gradient_norm_of_ten_steps_are_those_of_ddp(engine, training, runs):
    """RANKS-17"""
    expected, found = (runs(name).first[training].steps for name in ("ddp", engine))
    assert len(expected) == NUM_STEPS
    pairs = [(*one, *other) for one, other in zip(found, expected, strict=True)]
    losses, norms = zip(
        *((abs(loss - right), abs(norm / wanted - 1)) for loss, norm, right, wanted in pairs), strict=True
    )
    print(f"{engine}, {training}: up to {max(losses):.1e} in the loss, {max(norms):.1e} of the gradient norm")
    assert_same_steps(found, expected)


@pytest.mark.parametrize("engine", ["ddp", *ENGINES])
@pytest.mark.parametrize("training", TRAININGS)
def test_pack_without_an_image_trains_beside_a_pack_with_one(engine, training, runs):
    """RANKS-4 RANKS-17: where parameters are sharded, every rank enters the tower in every pack."""
    outcome = runs(engine).first[training]
    have_images = [images_of_rank(outcome.output, rank) for rank in (0, 1)]
    assert have_images[0] != have_images[1], "no pack without an image beside one with"
    num_packs = [[len(packs) for packs in of_rank] for of_rank in have_images]
    if engine in ("zero3", "fsdp2"):
        assert [note["towers"] for note in outcome.notes] == num_packs


def images_of_rank(output, rank):
    """For each step, whether each pack of a rank has an image."""
    steps = [[] for _ in range(NUM_STEPS)]
    for pack in trained(output):
        if pack["rank"] == f"packs_rank{rank}":
            steps[pack["step"] - 1].append(any(int(name.split(":")[1]) % 2 for name in pack["ids"]))
    return steps


@pytest.mark.parametrize("engine", ENGINES)
def test_step_without_any_image_moves_the_tower_by_momentum_under_deepspeed_alone(engine, runs):
    """RANKS-17: where ms-swift does not enter it, DDP gives its parameters no gradient, and DeepSpeed gives zeros."""
    ddp, other = (runs(name).first["qwen3_vl_with_texts"] for name in ("ddp", engine))
    entered = [sum(of_ranks) for of_ranks in zip(*(note["towers"] for note in ddp.notes), strict=True)]
    assert entered.index(0) == 3
    assert_same_steps(other.steps[:4], ddp.steps[:4])
    if engine == "fsdp2":
        assert_same_steps(other.steps, ddp.steps)
    else:
        assert abs(other.steps[4][0] - ddp.steps[4][0]) > 1e-4


@pytest.mark.parametrize("engine", ENGINES)
def test_step_without_any_image_is_that_of_plain_ms_swift(engine, runs):
    """RANKS-17 SAME-3: DeepSpeed's losses part from DDP's in plain ms-swift, and packing changes none of them."""
    ddp, of_engine = (runs(name).with_a_step_of_texts for name in ("ddp", engine))
    assert "did not receive gradient" in ddp["plain"].error, "plain ms-swift ends under DDP, packing does not"
    assert_same_steps(of_engine["packed"].steps, of_engine["plain"].steps)
    after = abs(of_engine["plain"].steps[3][0] - ddp["packed"].steps[3][0])
    print(f"{engine}: {after:.1e} from DDP in the loss after a step without an image")
    assert after < 1e-5 if engine == "fsdp2" else 1e-2 < after < 1e-1


@pytest.mark.parametrize("engine", ENGINES)
def test_steps_that_keep_their_samples_are_those_of_ddp(engine, runs):
    """SAME-3 RANKS-17: how many sequences a rank accumulates differs from step to step."""
    ddp, other = (runs(name).first["same_steps"] for name in ("ddp", engine))
    assert_same_steps(other.steps, ddp.steps)
    num_sequences = [sum(pack["step"] == step for pack in trained(other.output)) for step in range(1, NUM_STEPS + 1)]
    assert len(set(num_sequences)) > 1, "every step took as many sequences"
    assert [sum(len(pack["ids"]) for pack in trained(other.output) if pack["step"] == 1)] == [8]


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


def test_fsdp2_that_accelerate_turns_into_ddp_is_noticed(runs):
    """RANKS-17: by the look at every run of this folder, and by a warning of the run."""
    outcome = runs("ddp").first["not_fsdp2"]
    (note, _) = outcome.notes
    with pytest.raises(AssertionError, match="this is not FSDP2"):
        assert_in_force("fsdp2", {**note, "engine": "fsdp2"}, 2)
    log = (outcome.output.parent / "full_and_more.txt").read_text()
    assert log.count("--fsdp has no effect: accelerate shards on devices") == 1


def test_ranks_that_would_wait_for_each_other_are_stopped_with_one_line(runs):
    """RANKS-17: Qwen3-VL under FSDP2, where nobody tells ms-swift to show its tower an empty image."""
    outcome = runs("fsdp2").first["tower_forgotten"]
    for rank in (0, 1):
        *_, last = (outcome.output / f"error_rank{rank}.txt").read_text().splitlines()
        assert "ranks 0 and 1 train batches of other media at the same time" in last
        assert "enters model.visual of this family for media alone" in last
    assert len(trained(outcome.output)) < 2 * NUM_STEPS


@pytest.mark.parametrize("packing", ["false", "true"], ids=["rows", "packs"])
def test_evaluation_that_would_let_ranks_wait_is_stopped_with_one_line(packing, runs):
    """RANKS-17: all rows to train have images, and of those to evaluate every other one."""
    outcome = runs("fsdp2").evaluated_forgotten[f"eval_packing_{packing}"]
    for rank in (0, 1):
        *_, last = (outcome.output / f"error_rank{rank}.txt").read_text().splitlines()
        assert "ranks 0 and 1 evaluate batches of other media at the same time" in last
        assert "give every validation row an image" in last
    assert len(trained(outcome.output)) == 2 * 2, "two steps before the evaluation"


def test_bfloat16_trains_and_is_proved_under_fsdp2(runs):
    """RANKS-17: with losses as far from those of float32 as bfloat16 rounds."""
    losses = {name: [loss for loss, _ in run.steps] for name, run in runs("fsdp2").half_precision.items()}
    assert len(losses["bfloat16"]) == 4
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)
    log = (runs("fsdp2").half_precision["float32"].output.parent / "float32_and_more.txt").read_text()
    assert log.count("isolation verified in training: the first batch ") == 2
    assert log.count("isolation verified in training: a batch of step 4 ") == 2
    assert log.count("; in bfloat16 1 sample in it equals ") == 2
    assert log.count("not compared: float32 (parameters are sharded)") == 1
