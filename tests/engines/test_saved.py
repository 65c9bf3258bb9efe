"""What an engine saves: resumed by as many ranks and by fewer, and loaded by plain transformers."""

import shutil

import pytest
import torch

from tests.engines.launcher import ENGINES, assert_same_steps
from tests.engines.runs_of_engines import AT_STEP, FAMILY, NUM_STEPS

pytestmark = pytest.mark.engines
NO_ASSIGN = "SwiftModel.load_state_dict() got an unexpected keyword argument 'assign'"


@pytest.mark.parametrize("engine", ENGINES)
def test_resumed_run_goes_on_as_if_it_had_not_stopped(engine, runs):
    """RESUME-3 RANKS-17"""
    assert_goes_on(runs(engine), "full")


@pytest.mark.parametrize(
    "engine",
    [
        "zero2",
        "zero3",
        # A resumed adapter is a `SwiftModel`, whose load_state_dict has no `assign`, by which accelerate 1.15 hands
        # out the weights of rank 0. A run from the beginning has a model of peft, which passes everything on.
        pytest.param("fsdp2", marks=pytest.mark.xfail(strict=True, raises=AssertionError, reason=NO_ASSIGN)),
    ],
)
def test_resumed_adapter_goes_on_as_if_it_had_not_stopped(engine, runs):
    """RESUME-3 RANKS-17"""
    error = runs(engine).resumed["lora_resumed"].error
    assert error is None or NO_ASSIGN in error, pytest.fail(f"another error than the one that is known: {error}")
    assert_goes_on(runs(engine), "lora")


def assert_goes_on(runs, training):
    whole, resumed = runs.first[training], runs.resumed[f"{training}_resumed"]
    assert_same_steps(resumed.steps, whole.steps[AT_STEP:])


def test_fsdp2_is_resumed_on_another_number_of_ranks(runs):
    """RESUME-4 RANKS-17: the packs that two ranks would have trained in a step are those of one rank, two a step."""
    whole, alone = runs("fsdp2").first["full"], runs("fsdp2").alone["full_alone"]
    assert_same_steps(alone.steps, whole.steps[AT_STEP:])


@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_deepspeed_on_another_number_of_ranks_is_one_line_before_the_model_is_loaded(engine, runs):
    """RANKS-18"""
    error = runs(engine).alone["full_alone"].error or ""
    *_, last = error.splitlines()
    said = "has DeepSpeed's optimizer in 2 parts, which it loads on 2 ranks only, and this run has 1 rank; start it on"
    assert last.startswith("swift_vlpack.errors.ConfigError: ")
    assert said in last
    assert "_prepare_model_tokenizer" in error


@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_deepspeed_goes_on_with_another_number_of_ranks_without_its_optimizer(engine, runs):
    """RANKS-18: the way out that the line names, which trains the rest of the same packs from the saved weights."""
    whole, alone = runs(engine).first["full"], runs(engine).alone["only_model"]
    assert len(alone.steps) == NUM_STEPS - AT_STEP
    assert alone.steps[0][0] == pytest.approx(whole.steps[AT_STEP][0], abs=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_saved_model_is_loaded_by_transformers_and_is_that_of_ddp(engine, runs, tmp_path):
    """RANKS-17"""
    from transformers import Qwen2_5_VLForConditionalGeneration as Model

    assert runs(engine).first["full"].notes
    expected = Model.from_pretrained(runs("ddp").checkpoint("full", NUM_STEPS)).state_dict()
    checkpoint = runs(engine).checkpoint("full", NUM_STEPS)
    if engine == "fsdp2":
        checkpoint = merged(checkpoint, runs(engine).model_of(FAMILY), tmp_path / "merged")
    loaded = Model.from_pretrained(checkpoint, torch_dtype=torch.float32)
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    untrained = Model.from_pretrained(runs(engine).model_of(FAMILY)).state_dict()
    moved = max(float((expected[name] - untrained[name]).abs().max()) for name in expected)
    apart = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    print(f"{engine}: weights moved by up to {moved:.1e}, and are {apart:.1e} apart from those of DDP")
    assert moved > 1e-3
    # Adam divides by the size of a gradient, so where gradients are rounding alone, the moves are too.
    assert apart < moved / 100


def merged(checkpoint, model, folder):
    """The model of FSDP2's shards, as docs/doors.md says."""
    from accelerate.utils import merge_fsdp_weights

    shutil.copytree(model, folder)
    (folder / "model.safetensors").unlink()
    merge_fsdp_weights(str(checkpoint / "pytorch_model_fsdp_0"), str(folder))
    return folder


@pytest.mark.parametrize(
    ("engine", "saved_by"), [("ddp", "zero3"), ("ddp", "fsdp2"), ("zero3", "ddp"), ("fsdp2", "ddp")]
)
def test_a_checkpoint_of_another_engine_is_refused_with_both_named(engine, saved_by, runs):
    """RESUME-21: where its weights are whole files, `--resume_only_model true` goes on with these, as it says."""
    names = {"ddp": "DDP", "zero3": "DeepSpeed", "fsdp2": "FSDP"}
    found = runs(engine).from_another(saved_by, runs(saved_by).checkpoint("full"))
    *_, last = found[f"from_{saved_by}"].error.splitlines()
    assert f"has the optimizer of {names[saved_by]}, which {names[engine]} cannot load" in last
    model = found[f"model_from_{saved_by}"]
    if saved_by == "fsdp2":
        assert model.error is not None
    else:
        assert len(model.steps) == NUM_STEPS - AT_STEP
        assert model.steps[0][0] == pytest.approx(runs(saved_by).first["full"].steps[AT_STEP][0], abs=1e-5)
