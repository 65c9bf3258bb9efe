"""Sabotages that hide: in full rows, in 16 bits, in the backward, in what is kept from row to row."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

from swift_vlpack.attention.linear_attention import restart_at_boundaries
from swift_vlpack.errors import IsolationError
from swift_vlpack.proof import prove
from swift_vlpack.proof.prove import run_proof
from tests.host.proof import sabotage as s
from tests.host.proof.runners import text_samples
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


def if_long(wrong):
    """Only in rows of more than 430 tokens."""

    def attend(*args, cu_seq_lens_q=None, **options):
        is_long = cu_seq_lens_q is not None and cu_seq_lens_q[-1] > 430
        use = wrong if is_long else s.segmented_attention
        return use(*args, cu_seq_lens_q=cu_seq_lens_q, **options)

    return attend


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
        cause = r"token (\d+) to \1 of"
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
    assert proof.off(in_float32=True) < 1e-4
    assert proof.gradient(in_float32=True) < 5e-4
    assert proof.off(in_float32=False) < proof.limits.states / 2, "far from a refusal"
    assert proof.gradient(in_float32=False) < proof.limits.gradient / 2
    assert proof.limits.states < 1, "and a mistake would be refused"
    assert proof.line("vlpack").startswith("isolation verified: ")
    assert "in bfloat16, as it trains, " in proof.line("vlpack")


@if_long
def scaled_in_long_rows(*args, **options):
    """By 1.3, where the row is longer than the short samples of a proof."""
    return s.segmented_attention(*args, **{**options, "scaling": options["scaling"] * 1.3})


@if_long
def scaled_in_long_rows_of_16_bits(*args, **options):
    """As a kernel that float32 does not take."""
    factor = 1.3 if args[1].dtype == HALF else 1.0
    return s.segmented_attention(*args, **{**options, "scaling": options["scaling"] * factor})


@pytest.mark.parametrize(
    ("make", "wrong"),
    [(s.llama, scaled_in_long_rows), (s.llama, scaled_in_long_rows_of_16_bits), (s.gpt_oss, scaled_in_long_rows)],
)
def test_attention_that_is_wrong_in_full_rows_is_stopped_in_16_bits(make, wrong):
    """ISO-13 ISO-16: every row that trains is long; in its own type alone, too."""
    samples, row = text_samples(*LENGTHS), text_samples(*[60] * 8)
    with in_16_bits(make()) as right:
        proof = run_proof(right, samples, [row])
        assert proof.off(in_float32=False) < proof.limits.states / 2
        check(s.attending(right, wrong), samples, "not the model's own", rows=[row])


@pytest.mark.parametrize("reentrant", [False, True])
def test_experts_whose_layers_are_run_again_are_verified(reentrant):
    """ISO-11 ISO-13: a router that runs a second time in the backward does not choose twice."""
    with in_16_bits(checkpointed(s.gpt_oss(), use_reentrant=reentrant)) as right:
        right.model.train()
        proof = run_proof(right, text_samples(*LENGTHS), [text_samples(*[60] * 8)])
    assert proof.off(in_float32=True) < 1e-4


def test_kernel_that_refuses_float32_is_compared_in_its_own_type():
    """ISO-16: the line says what was not compared; what rounding does is measured on the model's own attention."""

    def of_16_bits(module, query, *args, **options):
        if query.dtype == torch.float32:
            raise RuntimeError("this kernel computes in 16 bits")
        return s.segmented_attention(module, query, *args, **options)

    def wrong(*args, **options):
        return of_16_bits(*args, **{**options, "scaling": options["scaling"] * 1.3})

    samples = text_samples(*LENGTHS)
    with in_16_bits(s.llama()) as right:
        with s.attending(right, of_16_bits):
            line = run_proof(right, samples).line("vlpack")
        assert "not compared: float32 (RuntimeError: this kernel computes in 16 bits)" in line
        assert "in bfloat16, as it trains, packed equals" in line
        check(s.attending(right, wrong), samples, "not the model's own")


def test_float32_that_would_take_long_or_has_no_memory_is_left_out_and_said(monkeypatch):
    """ISO-16: on all ranks together."""
    samples = text_samples(*LENGTHS)
    with in_16_bits(s.llama()) as right:
        assert "not compared" not in run_proof(right, samples, [samples]).line("vlpack")
        monkeypatch.setattr(prove, "SECONDS_IN_FLOAT32", -1)
        line = run_proof(right, samples, [samples]).line("vlpack")
        assert "not compared: sequences of the plan in float32 (it would take" in line
        assert "in float32 packed equals the model's own attention" in line
        monkeypatch.setattr(prove, "why_not_in_float32", lambda model: "")
        line = run_proof(right, samples, results_of_all=lambda work: [work(), work() or "no memory"]).line("vlpack")
        assert "not compared: float32 (no memory)" in line


def restarted(proof_model):
    """With what a run puts on layers of linear attention."""
    restart_at_boundaries(proof_model.model)
    return proof_model
