"""The proof on models that train packs rightly: what it says, what it measures, what it leaves behind."""

import random

import numpy as np
import pytest
import torch
import transformers as T
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel

from swift_vlpack.attention.attention import NAME
from swift_vlpack.comm import ALONE
from swift_vlpack.errors import IsolationError
from swift_vlpack.proof import prove, reference
from swift_vlpack.proof.perturb import media_of, replaced, with_other_media
from swift_vlpack.proof.prove import run_proof
from swift_vlpack.proof.reference import configs_of, own_attention, repeatable_training
from swift_vlpack.proof.runner import Runner
from tests.attention.one_by_one import text
from tests.host.proof import sabotage as s
from tests.host.proof.runners import TextBatches, text_samples

QWEN = "qwen2_5_vl"
MIXED = ("image", "text", "images", "video")
LENGTHS = (24, 9, 31, 14, 20)


# -- it holds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_vl", QWEN, "qwen3_vl"])
def test_proof_holds_and_says_what_it_measured(proof_model, encoded, family):
    """ISO-5 ISO-9 ISO-10: text, an image, several, a video."""
    right = proof_model(family)
    samples = encoded(right.batches.template, MIXED)
    proof = run_proof(right, samples, [samples[::-1]])
    assert (proof.num_samples, proof.moved, proof.left_out) == (4, 0, [])
    assert 0 < proof.off(in_float32=True) < 1e-5, "another attention, so not the same to the last bit"
    assert 0 < proof.gradient(in_float32=True) < 1e-5
    line = proof.line(NAME)
    assert line.startswith("isolation verified: max difference 0.0 over 4 samples, attention vlpack (packed ")
    assert "so do 4 samples in sequences of the plan" in line


@pytest.mark.parametrize("make", [s.llama, s.gemma2, s.gpt_oss])
def test_proof_of_a_text_model_needs_no_template(make):
    """ISO-9: soft caps, windows and sinks as the model has them."""
    proof = run_proof(make(), text_samples(*LENGTHS))
    assert proof.moved == 0
    assert proof.off(in_float32=True) < 1e-4


def test_reference_is_the_attention_that_defines_the_model():
    """ISO-9: what sdpa would drop is there, on the very model, and it is given back."""
    right = s.gemma2()
    (sample,) = text_samples(24)
    with torch.no_grad():
        ours = right.run([sample], packed=False).of(0)
        with own_attention(right.model, "sdpa"):
            dropped = right.run([sample], packed=False).of(0)
        with own_attention(right.model):
            names = {config._attn_implementation for config in configs_of(right.model)}
            own = right.run([sample], packed=False).of(0)
    assert names == {"eager"}
    assert float((own - dropped).abs().max()) > 0.1
    assert float((own - ours).abs().max()) < 1e-4
    assert right.model.config._attn_implementation == NAME


def test_vision_tower_has_its_own_attention_in_the_reference(proof_model):
    """ISO-9"""
    model = proof_model(QWEN).model
    with own_attention(model):
        assert {config._attn_implementation for config in configs_of(model)} == {"eager"}
    assert model.config.vision_config._attn_implementation == NAME
    assert model.config.text_config._attn_implementation == NAME


def test_proof_runs_the_same_forwards_whatever_it_finds(proof_model, encoded):
    """ISO-5: ranks that wait for each other in a forward must do equally many."""
    right = proof_model(QWEN)
    samples = encoded(right.batches.template, MIXED)
    counts = []
    for change in (lambda row, samples: row, s.no_boundaries):
        runs = []
        rows = s.batches_changed(right, change).batches
        handle = right.model.register_forward_hook(lambda *args, runs=runs: runs.append(1))
        finding = measured(Runner(right.model, rows, right.is_ordinary), samples, [samples[:2]]).finding()
        handle.remove()
        counts.append((len(runs), finding is None))
    # Alone, the pack turned round with a backward, the pack, two of it with others replaced, a row of two. Where
    # something moved, the pack is run once more; where ranks wait for each other it always is.
    num_runs = len(samples) + 1 + 3 + 3
    assert counts == [(num_runs, True), (num_runs + 1, False)]


def measured(runner, samples, sequences=()):
    with reference.untouched(runner.model), repeatable_training(runner.model):
        return prove._measured(runner, samples, sequences, "sequences", ALONE.results_of_all)


# -- it can fail ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 2])
def test_not_a_number_is_not_a_pass(number):
    """ISO-13: in whichever sample it is, packed or alone."""
    right, samples = s.llama(), text_samples(*LENGTHS)
    is_hit = torch.zeros(512)
    is_hit[samples[number]["input_ids"][-1]] = torch.nan
    embed = right.model.get_input_embeddings()
    handle = embed.register_forward_hook(lambda module, args, made: made + is_hit[args[0]][..., None])
    with pytest.raises(IsolationError, match=r"the model itself gives them.*nan"):
        run_proof(right, samples)
    handle.remove()
    handle = embed.register_forward_hook(
        lambda module, args, made: made + (is_hit[args[0]][..., None] if args[0].shape[1] > 40 else 0)
    )
    with pytest.raises(IsolationError, match="nan"):
        run_proof(right, samples)
    handle.remove()


def test_model_that_does_not_look_at_its_tokens_is_stopped():
    """ISO-10: nothing moves, packed equals alone, and nothing is proved."""
    right = s.llama()
    handle = right.model.get_input_embeddings().register_forward_hook(lambda module, args, made: made * 0 + 1)
    with pytest.raises(IsolationError, match="the model does not look at its tokens"):
        run_proof(right, text_samples(*LENGTHS))
    handle.remove()


def test_other_media_are_other_pixels_of_the_same_shape(proof_model, encoded):
    """ISO-10"""
    for sample in encoded(proof_model(QWEN).batches.template, MIXED):
        other = with_other_media(sample)
        for name, value in media_of(sample).items():
            assert other[name].shape == value.shape
            assert not torch.equal(other[name], value)
        assert all(other[key] is sample[key] for key in sample if key not in media_of(sample))


def test_replaced_sample_keeps_its_media_tokens_and_changes_every_other(proof_model, encoded):
    """ISO-10"""
    right = proof_model(QWEN)
    for sample in encoded(right.batches.template, MIXED):
        before = list(sample["input_ids"])
        other = replaced(sample, right.is_ordinary)
        for token, new in zip(before, other["input_ids"], strict=True):
            assert right.is_ordinary(token) == right.is_ordinary(new) == (token != new)
        assert sample["input_ids"] == before
    media = right.batches.template.tokenizer.convert_tokens_to_ids(
        ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>"]
    )
    assert not any(map(right.is_ordinary, media))


# -- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_model_that_is_sure_of_all_it_says_is_verified(dtype):
    """ISO-11 ISO-13: its loss has a gradient of nothing but rounding, as of a run that is resumed in a bad state."""
    right = s.llama()
    with torch.no_grad():
        right.model.lm_head.weight.mul_(2000)
    right.model.to(dtype)
    samples = [{**one, "labels": certain(right, one)} for one in text_samples(*LENGTHS)]
    assert run_proof(right, samples).gradient(in_float32=True) < 1e-4


def certain(proof_model, sample):
    """What the model itself expects, as labels."""
    with torch.no_grad():
        expected = proof_model.model(input_ids=torch.tensor([sample["input_ids"]])).logits[0].argmax(-1).tolist()
    return [-100, *expected[:-1]]


def test_logits_of_the_vocabulary_are_never_computed():
    """ISO-14: hidden states are compared, not what the head makes of them."""
    right = s.llama(vocab_size=5000)
    made = []
    right.model.register_forward_hook(lambda module, args, outputs: made.append(outputs.logits.shape[-1]))
    run_proof(right, text_samples(*LENGTHS), [text_samples(*LENGTHS)])
    assert set(made) == {1}


# -- as models train --------------------------------------------------------------------------------------------------


def with_lora(model):
    return get_peft_model(model, LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj", "v_proj"]))


def checkpointed(reentrant):
    def change(model):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    return change


def frozen(model):
    return model.requires_grad_(False)


def noisy(model):
    """NEFTune, as a trainer's hook adds it."""
    embed = model.get_input_embeddings()
    embed.neftune_noise_alpha = 5.0

    def add(module, args, made):
        return made + torch.rand_like(made) * module.neftune_noise_alpha if module.training else made

    embed.register_forward_hook(add)
    return model


def gaussian(model):
    """Noise without a largest value, off where rates are."""
    rate = torch.nn.Dropout(0.1)
    model.add_module("rate", rate)

    def add(module, args, made):
        return made + 0.01 * torch.randn_like(made) if rate.training and rate.p else made

    model.get_input_embeddings().register_forward_hook(add)
    return model


@pytest.mark.parametrize("change", [with_lora, checkpointed(True), checkpointed(False), frozen, noisy, gaussian])
def test_proof_holds_on_a_model_as_it_trains(change):
    """ISO-11: with dropout 0.5 everywhere, and with everything as it was afterwards."""
    right = s.llama(attention_dropout=0.5)
    model = change(right.model).train()
    before = state_of(model)
    proof = run_proof(Runner(model, TextBatches(), right.is_ordinary), text_samples(*LENGTHS))
    assert proof.off(in_float32=True) < 1e-4
    assert proof.gradient(in_float32=True) < 1e-4
    assert state_of(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())


def state_of(model):
    """Modes, rates, settings and what is trained."""
    plain = (bool, int, float, str, type(None))
    settings = [
        {name: value for name, value in vars(owner).items() if isinstance(value, plain)}
        for owner in [*model.modules(), *configs_of(model)]
    ]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    return settings, hooks, [parameter.requires_grad for parameter in model.parameters()]


def test_training_can_be_repeated_with_all_rates_at_nothing():
    """ISO-11"""
    right = s.llama(attention_dropout=0.5)
    (sample,) = text_samples(24)

    def differs():
        one, two = (right.run([sample], packed=False, seed=seed).of(0) for seed in range(2))
        return not torch.equal(one, two)

    with torch.no_grad(), own_attention(right.model):
        right.model.train()
        assert differs()
        with repeatable_training(right.model):
            assert right.model.training
            assert not differs()
        assert differs()


def test_autocast_decides_the_precision():
    """ISO-13: weights of 32 bits, computed in 16."""
    right = s.llama()
    cast = Runner(right.model, right.batches, right.is_ordinary, lambda: torch.autocast("cpu", torch.bfloat16))
    proof = run_proof(cast, text_samples(*LENGTHS))
    assert 1e-3 < proof.off(in_float32=False) < proof.limits.states / 2
    assert proof.off(in_float32=True) < 1e-5


def test_wrapped_model_is_left_to_its_reducer(tmp_path):
    """ISO-11: DDP's bookkeeping sees nothing of the proof, and the next step is as without it."""
    from swift_vlpack.attention.prepare import unwrapped

    right, samples = s.llama(), text_samples(*LENGTHS)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(right.model.train())

        def step():
            model.zero_grad()
            with right.batches.batch(samples, packed=True) as row:
                model(**row.inputs, labels=row.labels).loss.backward()
            return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

        expected = step()
        model.zero_grad()
        run_proof(Runner(unwrapped(model), right.batches, right.is_ordinary), samples)
        assert all(parameter.grad is None for parameter in model.parameters())
        after = step()
    finally:
        torch.distributed.destroy_process_group()
    assert all(torch.equal(after[name], grad) for name, grad in expected.items())


def test_proof_leaves_states_and_buffers_as_they_were():
    """ISO-6: also a buffer that RoPE puts another in the place of."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    config = T.LlamaConfig(**text(max_position_embeddings=32, rope_parameters=rope))
    right = s.text_model(config)
    rotary = right.model.model.rotary_emb
    buffer, values = rotary.inv_freq, rotary.inv_freq.clone()
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    with pytest.raises(IsolationError):
        run_proof(right, text_samples(9, 60))
    assert rotary.inv_freq is buffer
    assert torch.equal(buffer, values)
    assert rotary.max_seq_len_cached == 32
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


# -- cost -------------------------------------------------------------------------------------------------------------


def test_rows_of_the_plan_that_would_take_too_much_are_left_out(monkeypatch):
    """ISO-14: but for the first, and the line says so."""
    right, samples = s.llama(), text_samples(*LENGTHS)
    monkeypatch.setattr(prove, "TOKENS_ALLOWED", 0)
    line = run_proof(right, samples, [samples] * 3).line(NAME)
    assert "so do 5 samples in sequences of the plan" in line
    assert "not compared: 2 long sequences of the plan" in line


@pytest.mark.parametrize(("make", "num_more"), [(s.llama, 5), (s.gemma2, 4)])
def test_long_samples_are_compared_with_sdpa_where_that_is_the_same(make, num_more, monkeypatch):
    """ISO-9 ISO-14: the model's own attention keeps matrices of L x L; sdpa, where it drops nothing, does not."""
    monkeypatch.setattr(reference, "_BYTES_OF_FORWARD", 10 * 4 * 25**2)
    monkeypatch.setattr(reference, "_BYTES_OF_BACKWARD", 10 * 4 * 2 * 15**2)
    right = make()
    assert reference.longest_for_own(right.model) == 25
    assert reference.longest_for_own(right.model, is_trained=True) == 15
    line = run_proof(right, text_samples(24, 9, 31), [text_samples(*LENGTHS)]).line(NAME)
    assert f"over {3 if num_more == 5 else 2} samples" in line
    assert f"so do {num_more} samples in sequences of the plan" in line, "the others of its row are compared"
    assert ("not compared: 1 sample too long for the model's own attention" in line) == (num_more == 4)
