"""Sabotages that hide: in full rows, in 16 bits, in the backward, in what is kept from row to row."""

import re
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

from swift_vlpack.attention.linear_attention import restart_at_boundaries
from swift_vlpack.errors import IsolationError
from swift_vlpack.proof.limits import Noise
from swift_vlpack.proof.measure import measure_pack
from swift_vlpack.proof.prove import run_proof
from swift_vlpack.proof.verdict import finding_in
from tests.host.proof import sabotage as s
from tests.host.proof.proof_models import text_samples
from tests.host.proof.test_sabotage import LENGTHS, QWEN, QWEN3, check, shifted

HALF = torch.bfloat16


@contextmanager
def in_16_bits(proof_model):
    """Model and pixels, as ms-swift trains unless it is told otherwise."""
    proof_model.model.to(HALF)
    try:
        yield replace(proof_model, batches=HalfBatches(proof_model.batches))
    finally:
        proof_model.model.to(torch.float32)


class HalfBatches:
    def __init__(self, batches):
        self.batches = batches

    @contextmanager
    def batch(self, samples, *, packed):
        with self.batches.batch(samples, packed=packed) as row:
            floats = {
                name: one.to(HALF) for name, one in row.inputs.items() if getattr(one, "is_floating_point", bool)()
            }
            yield replace(row, inputs={**row.inputs, **floats})


def checkpointed(proof_model, **options):
    proof_model.model.gradient_checkpointing_enable(options or None)
    return proof_model


def test_boundaries_that_are_remembered_by_the_length_of_a_row_are_stopped():
    """ISO-5 ISO-9: as of a mask in a cache; the first row is right, the next of as many tokens has its boundaries."""
    remembering = s.attending(s.llama(), s.remembering_boundaries())
    cause = r"layers\.0\.self_attn"
    check(remembering, text_samples(*LENGTHS), cause)


AGAIN = {
    "without boundaries": (
        s.forgetting_in_the_backward,
        "gradient checkpointing",
    ),
    "scaled": (s.scaled_otherwise_in_the_backward, r"backward.*gradients? "),
}


@pytest.mark.parametrize("name", AGAIN)
def test_layers_that_are_run_again_otherwise_are_stopped(name):
    """ISO-5 ISO-9 ISO-11: forwards are right, and so is every gradient without checkpointing."""
    broken, cause = AGAIN[name]
    for options in ({}, {"use_reentrant": True}):
        check(s.attending(checkpointed(s.llama(), **options), broken), text_samples(*LENGTHS), cause)
    with s.attending(s.llama(), broken) as proof_model:
        run_proof(proof_model, text_samples(*LENGTHS))


def test_attention_that_leaks_only_with_gradients_is_stopped():
    """ISO-5 ISO-9"""
    leaking = s.attending(s.llama(), s.leaking_where_gradients_are_asked_for)
    check(leaking, text_samples(*LENGTHS), "where gradients are asked for")


def test_layers_without_room_for_a_full_row_are_stopped():
    """ISO-5 ISO-9 ISO-12"""
    samples, row = text_samples(*LENGTHS), text_samples(*[12] * 20)
    cause = r"first in .*layers\.0\.mlp \(LlamaMLP\).*text:12, number 13 of 20 "
    check(s.no_room_behind(s.llama(), 150), samples, cause, rows=[row])


def test_images_that_see_each_other_in_full_rows_only_are_stopped(proof_model, encoded):
    """ISO-5 ISO-9 ISO-12: a tower with room for so many patches."""
    right = proof_model(QWEN)
    samples = encoded(right.batches.template, ("image", "text", "images"))
    row = encoded(right.batches.template, ("image", "images", "image", "images", "image"))
    mixing = partial(s.images_see_each_other, num_patches=70)
    check(mixing(right), samples, "before the first layer", rows=[row])


def test_one_head_that_leaks_is_stopped_in_16_bits():
    """ISO-5 ISO-9 ISO-13"""
    with in_16_bits(s.llama()) as right:
        check(s.attending(right, s.leaking_in_one_head), text_samples(*LENGTHS), r"layers\.0\.self_attn")


def test_boundary_of_long_samples_that_is_one_token_off_is_stopped_in_16_bits():
    """ISO-5 ISO-9 ISO-13: one token of 300 is wrong, which is little in the mean."""
    with in_16_bits(s.llama()) as right:
        moved = s.batches_changed(right, s.boundaries_at(shifted(-1)))
        check(nullcontext(moved), text_samples(300, 280, 320, 310), "sample 3 ")


def test_last_tokens_that_see_nobody_are_stopped_in_16_bits():
    """ISO-5 ISO-9 ISO-13: nobody moves, and one token of 300 is wrong."""
    with in_16_bits(s.llama()) as right:
        cause = "token 279 to 279 of 280"
        check(s.attending(right, s.losing_last_tokens), text_samples(300, 280, 320, 310), cause)


def test_grids_that_are_exchanged_are_stopped_in_16_bits(proof_model, encoded):
    """ISO-5 ISO-9 ISO-13: this model hardly minds them."""
    with in_16_bits(proof_model(QWEN)) as right:
        samples = encoded(right.batches.batches.template, ("wide", "text", "tall"))
        cause = "image_grid_thw"
        check(nullcontext(s.batches_changed(right, s.grids_exchanged)), samples, cause)


AXES = {"height and width exchanged": (0, 2, 1), "height and width lost": (0, 0, 0)}


@pytest.mark.parametrize("name", AXES)
@pytest.mark.parametrize("family", ["qwen2_vl", QWEN, "qwen3_vl", "qwen3_5"])
def test_positions_of_images_that_are_wrong_are_stopped_in_16_bits(proof_model, encoded, family, name):
    """ISO-9 ISO-13: whole numbers, which no rounding moves; gradients are off by 3 to 5 %."""
    with in_16_bits(restarted(proof_model(family))) as right:
        samples = encoded(right.batches.batches.template, ("wide", "text", "tall"))
        wrong = s.batches_changed(right, partial(s.axes_of_positions, order=AXES[name]))
        with pytest.raises(IsolationError, match=r"positions of wide:0 in the sequence are not .*\((height|width)\)"):
            run_proof(wrong, samples)


def test_kinds_of_tokens_that_are_wrong_are_stopped_in_16_bits(proof_model, encoded):
    """ISO-9 ISO-13"""
    with in_16_bits(proof_model(QWEN3)) as right:
        samples = encoded(right.batches.batches.template, ("wide", "text"))
        wrong = s.batches_changed(right, partial(s.token_types_of_text, name="mm_token_type_ids"))
        with pytest.raises(
            IsolationError, match="mm_token_type_ids of wide:0 in the sequence are not those that it has"
        ):
            run_proof(wrong, samples)


def test_attention_that_is_scaled_a_little_is_stopped_in_16_bits():
    """ISO-9 ISO-13: by a tenth, which rounding hides in 16 bits and not in float32."""
    with in_16_bits(s.llama()) as right:
        cause = r"float32.*token 1 to "
        check(s.attending(right, s.scaled_a_little), text_samples(*LENGTHS), cause)


@pytest.mark.parametrize("family", ["qwen2_vl", QWEN, "qwen3_vl", "qwen3_5"])
def test_right_packs_are_verified_in_16_bits(proof_model, encoded, family):
    """ISO-13 ISO-16: sharply, in float32."""
    with in_16_bits(restarted(proof_model(family))) as right:
        samples = encoded(right.batches.batches.template, ("wide", "text", "tall", "images", "video"))
        proof = run_proof(right, samples, [samples[::-1]])
    assert proof.moved == 0
    assert proof.in_float32.alone < 1e-4
    assert proof.in_float32.gradient < 1e-3
    assert proof.line("vlpack").startswith("isolation verified: ")
    assert "in bfloat16, as it trains, within" in proof.line("vlpack")


def test_gradients_that_rounding_moves_by_eight_times_the_noise_are_not_refused():
    """ISO-13 ISO-16: as of a Qwen2-VL whose visual norms were off by .201, where .199 was allowed."""
    with in_16_bits(s.llama()) as right:
        of = measure_pack(right, text_samples(*LENGTHS))
    of = replace(of, gradient={"visual": 0.201}, noise=Noise(of.noise.logits, 0.0249))
    assert finding_in(of) is None, "it is right in float32"
    of = replace(of, in_float32=None, padded=Noise(0.0, 0.086))
    assert finding_in(of) is None, "a padded batch is off by .086, too"
    of = replace(of, gradient={"visual": 0.4})
    assert re.search(r"so it may be rounding: .*`vlpack verify` takes --torch_dtype float32", finding_in(of).said)


def test_what_rests_on_rounding_is_not_called_verified(monkeypatch):
    """ISO-16: where float32 cannot be asked, as of a kernel that knows 16 bits only."""

    def of_16_bits(module, query, *args, **options):
        if query.dtype == torch.float32:
            raise RuntimeError("this kernel computes in 16 bits")
        return s.segmented_attention(module, query, *args, **options)

    with in_16_bits(s.llama()) as right, s.attending(right, of_16_bits):
        proof = run_proof(right, text_samples(*LENGTHS))
    assert proof.in_float32 is None
    line = proof.line("vlpack")
    assert "verified" not in line
    assert line.startswith(
        "isolation: no sample sees another, max difference 0.0 over 5 samples, attention vlpack; the"
    )
    for said in (
        "only up to the rounding of bfloat16",
        "would pass",
        "not compared in float32: RuntimeError: this ker",
    ):
        assert said in line


def restarted(proof_model):
    """With what a run puts on layers of linear attention."""
    restart_at_boundaries(proof_model.model)
    return proof_model
