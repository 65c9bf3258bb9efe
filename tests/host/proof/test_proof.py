"""The proof on models that train packs rightly: what it says, what it measures, what it leaves behind."""

import random
import time

import numpy as np
import pytest
import torch
import transformers as T
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel

from swift_vlpack.attention.attention import NAME
from swift_vlpack.errors import IsolationError
from swift_vlpack.proof import measure, reference
from swift_vlpack.proof.limits import FLOORS, Limits, Noise
from swift_vlpack.proof.measure import measure_pack
from swift_vlpack.proof.perturb import media_of, replaced, with_other_media, with_twins
from swift_vlpack.proof.proof_model import ProofModel, some_columns
from swift_vlpack.proof.prove import run_proof
from swift_vlpack.proof.reference import configs_of, own_attention, repeatable_training
from swift_vlpack.proof.verdict import finding_in
from tests.attention.one_by_one import text
from tests.host.proof import sabotage as s
from tests.host.proof.proof_models import TextBatches, text_samples

QWEN = "qwen2_5_vl"
MIXED = ("image", "text", "images", "video")
LENGTHS = (24, 9, 31, 14, 20)


# -- it holds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_vl", QWEN, "qwen3_vl"])
def test_proof_holds_and_says_what_it_measured(proof_model, encoded, family):
    """ISO-5 ISO-9 ISO-10: text, an image, several, a video, and twins of the image and of the video."""
    right = proof_model(family)
    samples = encoded(right.batches.template, MIXED)
    proof = run_proof(right, samples, [samples[::-1]])
    assert (proof.num_samples, proof.num_more, proof.num_sequences_left_out) == (6, 4, 0)
    assert proof.moved == 0
    assert 0 < proof.alone < 1e-4, "another attention, so not the same to the last bit"
    assert 0 < proof.gradient < 1e-4
    assert proof.largest_logit > 1
    line = proof.line(NAME)
    assert line.startswith("isolation verified: max difference 0.0 over 6 samples, attention vlpack (packed ")
    assert "so do 4 samples in sequences of the plan" in line


@pytest.mark.parametrize("make", [s.llama, s.gemma2, s.gpt_oss])
def test_proof_of_a_text_model_needs_no_template(make):
    """ISO-9: soft caps, windows and sinks as the model has them."""
    proof = run_proof(make(), text_samples(*LENGTHS))
    assert proof.moved == 0
    assert proof.alone < 1e-4


def test_reference_is_the_attention_that_defines_the_model():
    """ISO-9: what sdpa would drop is there, on the very model, and it is given back."""
    right = s.gemma2()
    (sample,) = text_samples(24)
    with torch.no_grad():
        ours = right.run([sample], packed=False).logits[0]
        with own_attention(right.model, "sdpa"):
            dropped = right.run([sample], packed=False).logits[0]
        with own_attention(right.model):
            names = {config._attn_implementation for config in configs_of(right.model)}
            own = right.run([sample], packed=False).logits[0]
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
    samples = with_twins(encoded(right.batches.template, MIXED))
    counts = []
    for change in (lambda row, samples: row, s.no_boundaries):
        runs = []
        rows = s.batches_changed(right, change).batches
        handle = right.model.register_forward_hook(lambda *args, runs=runs: runs.append(1))
        found = finding_in(measure_pack(ProofModel(right.model, rows, right.is_ordinary), samples, [samples[:2]]))
        handle.remove()
        counts.append((len(runs), found is None))
    # The head, alone, noise of a sample of each kind, the pack, a row of two.
    num_runs = 2 + len(samples) + 3 + 6 + 3
    assert counts == [(num_runs, True), (num_runs, False)]


# -- it can fail ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 2])
def test_not_a_number_is_not_a_pass(number):
    """ISO-13: in whichever sample it is, packed or alone."""
    right, samples = s.llama(), text_samples(*LENGTHS)
    is_hit = torch.zeros(512)
    is_hit[samples[number]["input_ids"][-1]] = torch.nan
    embed = right.model.get_input_embeddings()
    handle = embed.register_forward_hook(lambda module, args, made: made + is_hit[args[0]][..., None])
    with pytest.raises(IsolationError, match=r"the model itself gives them, without packing, too.*nan"):
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
    with pytest.raises(IsolationError, match=r"the model does not look at its tokens.*text:0 did not move its own"):
        run_proof(right, text_samples(*LENGTHS))
    handle.remove()


def test_media_that_do_not_reach_the_model_are_noticed(proof_model, encoded):
    """ISO-10: in a pack as little as alone."""
    right = proof_model(QWEN)
    handle = right.model.model.visual.merger.register_forward_hook(lambda module, args, made: made * 0)
    try:
        with pytest.raises(IsolationError, match=r"media do not reach the model.*the media of image:0 did not move"):
            run_proof(right, encoded(right.batches.template, ("image", "text")))
    finally:
        handle.remove()


def test_twin_has_the_same_tokens_and_other_media(proof_model, encoded):
    """ISO-10"""
    samples = encoded(proof_model(QWEN).batches.template, MIXED)
    image, text_only, _, video, *twins = with_twins(samples)
    assert len(twins) == 2
    for sample, twin in ((image, twins[0]), (video, twins[1])):
        assert twin["input_ids"] == sample["input_ids"]
        (name,) = media_of(sample)
        assert not torch.equal(twin[name], sample[name])
        assert not torch.equal(with_other_media(sample, 2)[name], twin[name])
        others = {key for key in sample if key not in ("pixel_values", "pixel_values_videos")}
        assert all(twin[key] is sample[key] for key in others)
    assert with_twins([text_only]) == [text_only]


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


# -- tolerances -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOORS)
def test_tolerance_follows_the_noise_that_was_measured_within_bounds(dtype):
    """ISO-13"""
    floor = FLOORS[dtype]
    quiet, usual, wild = (Limits.of(dtype, 4.0, Noise(size, size), 0.0) for size in (0.0, 0.16, 72.0))
    assert quiet[:3] == pytest.approx((4 * floor.moved, 4 * floor.logits, floor.gradient))
    assert usual[1:3] == pytest.approx((0.16, 0.16))
    assert wild[1:3] == pytest.approx((2.0, 0.5))
    assert Limits.of(dtype, 0.1, Noise(0.0, 0.0), 0.0).alone == floor.logits
    assert Limits.of(dtype, 4.0, Noise(0.0, 0.0), 0.3).moved == pytest.approx(1.2), "kernels that add in any order"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_model_that_is_sure_of_all_it_says_is_verified(dtype):
    """ISO-11 ISO-13: its loss has a gradient of nothing but rounding, as of a run that is resumed in a bad state."""
    right = s.llama()
    with torch.no_grad():
        right.model.lm_head.weight.mul_(2000)
    right.model.to(dtype)
    samples = [{**one, "labels": certain(right, one)} for one in text_samples(*LENGTHS)]
    assert run_proof(right, samples).gradient < (0.1 if dtype == torch.bfloat16 else 1e-4)


def certain(proof_model, sample):
    """What the model itself expects, as labels."""
    with torch.no_grad():
        expected = proof_model.run([sample], packed=False).logits[0].argmax(-1).tolist()
    return [-100, *expected[:-1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("make", [s.llama, s.gpt_oss])
def test_noise_is_what_another_attention_makes(make, dtype):
    """ISO-13: eager against segments; within a few times, on a dense model and where experts are chosen."""
    right = make()
    right.model.to(dtype)
    of = measure_pack(right, text_samples(*LENGTHS))
    assert finding_in(of) is None
    largest = max(gap.over_tokens for gap in of.compared[0].gaps)
    assert 0.1 * largest < of.noise.logits < 10 * largest
    assert 0.1 * max(of.gradient.values()) < of.noise.gradient < 10 * max(of.gradient.values())


def test_logits_of_a_large_vocabulary_are_compared_in_part():
    """ISO-14: of all over it."""
    logits = torch.arange(151_936.0).expand(2, 3, -1)
    some = some_columns(logits)
    assert some.shape == (2, 3, 1020)
    assert float(some.min()) == 0
    assert float(some.max()) > 151_800
    assert some_columns(logits[..., :512]).shape[-1] == 512


def test_model_that_cannot_be_run_on_a_few_words_computes_all_logits():
    """ISO-14: as one that needs an image; it is proved all the same."""
    right = s.llama(vocab_size=5000)

    def refuse(module, args, options):
        if options["input_ids"].shape[1] == 16:
            raise KeyError("pixel_values")

    handle = right.model.register_forward_pre_hook(refuse, with_kwargs=True)
    proof = run_proof(right, text_samples(*LENGTHS), [text_samples(*LENGTHS)])
    handle.remove()
    assert (proof.num_samples, proof.num_more) == (len(LENGTHS), len(LENGTHS))


def test_head_computes_all_logits_of_a_few_words_only():
    """ISO-14: to compare it with the part of it that it computes otherwise."""
    right = s.llama(vocab_size=5000)
    made = []
    right.model.lm_head.register_forward_hook(lambda module, args, logits: made.append(logits.shape))
    run_proof(right, text_samples(*LENGTHS), [text_samples(*LENGTHS)])
    assert [shape[1] for shape in made if shape[-1] == 5000] == [16]
    assert {shape[-1] for shape in made} == {5000, 1000}


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


@pytest.mark.parametrize("change", [with_lora, checkpointed(True), checkpointed(False), frozen, noisy])
def test_proof_holds_on_a_model_as_it_trains(change):
    """ISO-11: with dropout 0.5 everywhere, and with everything as it was afterwards."""
    right = s.llama(attention_dropout=0.5)
    model = change(right.model).train()
    before = state_of(model)
    proof = run_proof(ProofModel(model, TextBatches(), right.is_ordinary), text_samples(*LENGTHS))
    assert proof.alone < 1e-4
    assert proof.gradient is not None
    assert proof.gradient < 1e-4
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
        one, two = (right.run([sample], packed=False).logits[0] for _ in range(2))
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
    cast = ProofModel(right.model, right.batches, right.is_ordinary, lambda: torch.autocast("cpu", torch.bfloat16))
    of = measure_pack(cast, text_samples(*LENGTHS))
    assert of.dtype == torch.bfloat16
    assert finding_in(of) is None
    assert max(gap.most for gap in of.compared[0].gaps) > 1e-3


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
        run_proof(ProofModel(unwrapped(model), right.batches, right.is_ordinary), samples)
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
    """ISO-14: but for the first, and the line says so; in a long epoch they are not."""
    right, samples = s.llama(), text_samples(*LENGTHS)
    monkeypatch.setattr(measure, "TOKENS_ALLOWED", 0)
    proof = run_proof(right, samples, [samples] * 3)
    assert (proof.num_more, proof.num_sequences_left_out) == (5, 2)
    assert "2 long sequences of the plan left out, 196 tokens" in proof.line(NAME)
    assert run_proof(right, samples, [samples] * 3, tokens_of_epoch=10**6).num_more == 15


def test_one_full_row_of_the_plan_is_looked_at_on_a_slow_machine(monkeypatch):
    """ISO-14: how much is looked at does not depend on how busy the machine is."""
    right, samples = s.llama(), text_samples(*LENGTHS)
    clock = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    assert run_proof(right, samples, [text_samples(*[60] * 8), samples]).num_more == 13


@pytest.mark.parametrize(("make", "num_more"), [(s.llama, 5), (s.gemma2, 4)])
def test_long_samples_are_compared_with_sdpa_where_that_is_the_same(make, num_more, monkeypatch):
    """ISO-9 ISO-14: the model's own attention keeps matrices of L x L; sdpa, where it drops nothing, does not."""
    monkeypatch.setattr(reference, "_BYTES_OF_FORWARD", 10 * 4 * 25**2)
    monkeypatch.setattr(reference, "_BYTES_OF_BACKWARD", 10 * 4 * 2 * 15**2)
    right = make()
    assert reference.longest_for_own(right.model) == 25
    assert reference.longest_for_own(right.model, is_trained=True) == 15
    proof = run_proof(right, text_samples(24, 9, 31), [text_samples(*LENGTHS)])
    assert proof.num_samples == (3 if num_more == 5 else 2)
    assert (proof.num_more, proof.num_sequences_left_out) == (num_more, 0)
    is_said = "1 sample too long for the model's own attention left out" in proof.line(NAME)
    assert is_said == (num_more == 4), "the others of its row are compared"
    assert proof.gradient < 1e-4
