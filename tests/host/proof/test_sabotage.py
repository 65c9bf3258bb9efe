"""Every sabotage is stopped, and the module, the tokens or the field where it is are named.

Wording is tested where the words are made, in `test_explain.py`.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import transformers as T

from swift_vlpack.errors import IsolationError
from swift_vlpack.proof.prove import run_proof
from tests.attention.one_by_one import text
from tests.host.proof import sabotage as s
from tests.host.proof.runners import text_model, text_samples

QWEN, QWEN3 = "qwen2_5_vl", "qwen3_vl"
MIXED = ("image", "text", "images", "words")
LENGTHS = (24, 9, 31, 14, 20)


def shifted(by):
    return lambda ends: [*ends[:2], ends[2] + by, *ends[3:]]


def without_the_third(ends):
    return [*ends[:3], *ends[4:]] if len(ends) > 4 else ends


LINEAR = r"state .*layers\.\d\.(conv|linear_attn)"

OF_ROWS = {
    "boundaries missing": (s.no_boundaries, MIXED, r"layers\.0\.self_attn"),
    "boundary one late": (s.boundaries_at(shifted(1)), MIXED, "sample 3 "),
    "boundary one early": (s.boundaries_at(shifted(-1)), MIXED, "sample 3 "),
    "one boundary lost": (
        s.boundaries_at(without_the_third), MIXED, r"boundary before sample 4 ",
    ),
    "positions of the whole row": (
        s.positions_of_the_sequence, ("image", "text"), r"positions of image:0 .* are not .*\(time\)",
    ),
    "grids exchanged": (
        s.grids_exchanged, ("wide", "text", "tall"), "image_grid_thw",
    ),
    "images in the wrong order": (
        s.images_reversed, MIXED, r"pixel_values\b",
    ),
    "images of one size exchanged": (
        s.media_exchanged, ("image", "text", "like"), r"pixel_values\b",
    ),
    "videos exchanged": (
        partial(s.media_exchanged, name="pixel_values_videos"), ("video", "text", "film"),
        "pixel_values_videos",
    ),
    "labels shifted": (s.labels_shifted, MIXED, r"labels of image:0"),
    "loss weights shifted": (s.weights_shifted, MIXED, r"loss weights of image:0"),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ROWS)
def test_rows_made_wrongly_are_stopped(name, proof_model, encoded):
    """ISO-5 ISO-9"""
    change, kinds, named = OF_ROWS[name]
    right = proof_model(QWEN)
    samples = encoded(right.batches.template, kinds)
    check(nullcontext(s.batches_changed(right, change)), samples, named)


FIRST = r"first in model\.layers\.0\.self_attn"

OF_ATTENTION = {
    "boundaries ignored": (s.ignoring_boundaries, FIRST),
    "a mask over all": (s.looking_everywhere, f"not causal.*{FIRST}"),
    "only in training": (s.leaking_in_training, FIRST),
    "boundaries behind the third": (s.losing_the_fourth, r"boundary before sample 5 "),
    "backward": (s.with_a_wrong_backward, r"backward.*gradients? "),
    "wrong scaling": (s.badly_scaled, f"from token 1 to .*{FIRST}"),
}


@pytest.mark.parametrize("name", OF_ATTENTION)
def test_attention_that_is_wrong_is_stopped(name):
    """ISO-5 ISO-9"""
    attend, cause = OF_ATTENTION[name]
    check(s.attending(s.llama(), attend), text_samples(*LENGTHS), cause)


DROPPED = {
    "sinks": (s.gpt_oss, partial(s.dropping, "s_aux"), f"from token 0 to .*{FIRST}"),
    "soft cap": (s.gemma2, partial(s.dropping, "softcap"), f"from token 1 to .*{FIRST}"),
    "window": (s.gemma2, s.without_window, f"from token 16 to .*{FIRST}"),
}


@pytest.mark.parametrize("name", DROPPED)
def test_attention_that_drops_what_the_model_asks_for_is_stopped(name):
    """ISO-5 ISO-9"""
    make, attend, cause = DROPPED[name]
    check(s.attending(make(), attend), text_samples(*LENGTHS), cause)


def test_experts_with_a_capacity_are_stopped():
    """ISO-5 ISO-9 ISO-15: tokens early in the row take the room of later ones, and attention is right."""
    cause = r"first in model\.layers\.\d\.mlp \(LlamaMLP\)"
    check(s.experts_with_a_capacity(s.llama(), 30), text_samples(*LENGTHS), cause)


def test_norms_over_the_row_are_stopped():
    """ISO-5 ISO-9 ISO-15: a padded batch does not mix its samples by them, so it is not said to."""
    broken = s.norm_over_the_sequence(s.llama())
    cause = r"first in model\.layers\.\d\.input_layernorm"
    check(broken, text_samples(*LENGTHS), cause)


def test_cache_that_lives_on_is_stopped():
    """ISO-5 ISO-9"""
    attending = s.attending(s.llama(), s.keeping_a_cache())
    check(attending, text_samples(*LENGTHS), "when it was run again")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_of_the_longest_sample_are_stopped(kind):
    """ISO-5 ISO-9: short samples are right beside each other, and wrong beside a long one of the plan."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    factors = {"short_factor": [1.0] * 8, "long_factor": [float(n + 1) for n in range(8)]}
    limit = 32 if kind == "dynamic" else 2048
    config = text(max_position_embeddings=limit, rope_parameters=rope | (factors if kind == "longrope" else {}))
    *samples, long = text_samples(*LENGTHS, 90)
    cause = "rotary embeddings turn samples by other angles"
    check(nullcontext(text_model(T.LlamaConfig(**config))), samples, cause, rows=[[samples[0], long]])


def fits_eight(ends):
    return [*ends[:9], ends[-1]] if len(ends) > 9 else ends


def test_boundaries_that_are_lost_in_full_rows_only_are_stopped():
    """ISO-5 ISO-9 ISO-12: the few samples of the pack are right, a row of the plan is not."""
    lost = s.batches_changed(s.llama(), s.boundaries_at(fits_eight))
    cause = r"boundary before sample 10, 11 .*cu_seq_lens_q"
    check(nullcontext(lost), text_samples(*LENGTHS), cause, rows=[text_samples(*[9] * 11)])


def test_labels_that_are_wrong_in_full_rows_only_are_stopped():
    """ISO-5 ISO-9 ISO-12"""

    def shifted_if_long(row, samples):
        return s.labels_shifted(row, samples) if len(samples) > 8 else row

    wrong = s.batches_changed(s.llama(), shifted_if_long)
    cause = r"labels of text:0 "
    check(nullcontext(wrong), text_samples(*LENGTHS), cause, rows=[text_samples(*[9] * 11)])


def test_convolution_without_boundaries_is_stopped():
    """ISO-5 ISO-7 ISO-9: transformers' own LFM2, as it is."""
    check(nullcontext(s.lfm2()), text_samples(*LENGTHS), LINEAR)


def test_linear_attention_without_boundaries_is_stopped(proof_model, encoded, monkeypatch):
    """ISO-5 ISO-7 ISO-9: the full attention has its boundaries, the linear one does not get them."""
    right = proof_model("qwen3_5")
    for layer in right.model.model.language_model.layers:
        if hasattr(layer, "linear_attn"):
            monkeypatch.setattr(layer.linear_attn, "forward", without_boundaries(layer.linear_attn.forward))
    check(nullcontext(right), encoded(right.batches.template, MIXED), LINEAR)


def without_boundaries(forward):
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    return lambda *args, **kwargs: forward(*args, **{k: v for k, v in kwargs.items() if k not in names})


def test_images_that_see_each_other_are_stopped(proof_model, encoded):
    """ISO-5 ISO-9"""
    right = proof_model(QWEN)
    samples = encoded(right.batches.template, MIXED)
    check(s.images_see_each_other(right), samples, "before the first layer")


def test_deepstack_at_the_wrong_tokens_is_stopped(proof_model, encoded):
    """ISO-5 ISO-9"""
    right = proof_model(QWEN3)
    samples = encoded(right.batches.template, MIXED)
    check(s.deepstack_misaligned(right), samples, r"first in model\.language_model\.layers\.1\.input_layernorm")


def test_positions_that_do_not_restart_are_stopped(proof_model, encoded, monkeypatch):
    """ISO-5 ISO-9 DATA-11: the collator sees it before the model does."""
    right = proof_model(QWEN)
    packing_row = right.batches.template.packing_row

    def continued(row):
        made = packing_row(row)
        made["position_ids"] = torch.arange(len(made["input_ids"])).expand_as(made["position_ids"]).clone()
        return made

    monkeypatch.setattr(right.batches.template, "packing_row", continued)
    cause = "positions"
    check(nullcontext(right), encoded(right.batches.template, MIXED), cause)


def check(broken, samples, named, rows=()):
    """The run stops, and its message names these."""
    with broken as proof_model, pytest.raises(IsolationError, match=named) as caught:
        run_proof(proof_model, samples, rows)
    assert caught.value.cause
    assert "attention vlpack" in str(caught.value)
