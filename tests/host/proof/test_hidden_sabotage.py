"""Sabotages that hide: in full rows, in 16 bits, in the backward, in what is kept from row to row."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

from swift_vlpack.data.proof.isolation import proved
from tests.host.proof import sabotage as s
from tests.host.proof.subjects import text_samples
from tests.host.proof.test_sabotage import LENGTHS, MISNAMED, MISSED, QWEN, check, shifted

HALF = torch.bfloat16


@contextmanager
def in_16_bits(subject):
    """Model and pixels, as ms-swift trains unless it is told otherwise."""
    subject.model.to(HALF)
    try:
        yield replace(subject, rows=HalfRows(subject.rows))
    finally:
        subject.model.to(torch.float32)


class HalfRows:
    def __init__(self, rows):
        self.rows = rows

    @contextmanager
    def row(self, samples, *, packed):
        with self.rows.row(samples, packed=packed) as row:
            floats = {
                name: one.to(HALF) for name, one in row.inputs.items() if getattr(one, "is_floating_point", bool)()
            }
            yield replace(row, inputs={**row.inputs, **floats})


def checkpointed(subject, **options):
    subject.model.gradient_checkpointing_enable(options or None)
    return subject


def test_boundaries_that_are_remembered_by_the_length_of_a_row_are_stopped():
    """ISO-5 ISO-9: as of a mask in a cache; the first row is right, the next of as many tokens has its boundaries."""
    remembering = s.attending(s.llama(), s.remembering_boundaries())
    cause = r"a mask or a cache hides the boundaries.*while a row before it, of the same samples in another order, is r"
    check(remembering, text_samples(*LENGTHS), cause, MISSED)


AGAIN = {
    "without boundaries": (
        s.forgetting_in_the_backward,
        r"\(gradient checkpointing\) does something else than in the f",
    ),
    "scaled": (s.scaled_otherwise_in_the_backward, "the backward of a pack is not that of its samples one by one"),
}


@pytest.mark.parametrize("name", AGAIN)
def test_layers_that_are_run_again_otherwise_are_stopped(name):
    """ISO-5 ISO-9 ISO-11: forwards are right, and so is every gradient without checkpointing."""
    broken, cause = AGAIN[name]
    for options in ({}, {"use_reentrant": True}):
        check(s.attending(checkpointed(s.llama(), **options), broken), text_samples(*LENGTHS), cause, MISSED)
    with s.attending(s.llama(), broken) as subject:
        proved(subject, text_samples(*LENGTHS))


def test_attention_that_leaks_only_with_gradients_is_stopped():
    """ISO-5 ISO-9"""
    leaking = s.attending(s.llama(), s.leaking_where_gradients_are_asked_for)
    check(leaking, text_samples(*LENGTHS), "where gradients are asked for", MISSED)


def test_layers_without_room_for_a_full_row_are_stopped():
    """ISO-5 ISO-9 ISO-12"""
    samples, row = text_samples(*LENGTHS), text_samples(*[12] * 20)
    cause = r"text:12, number 13 of 20 in its row"
    check(s.no_room_behind(s.llama(), 150), samples, cause, MISSED, rows=[row])


def test_images_that_see_each_other_in_full_rows_only_are_stopped(subject, encoded):
    """ISO-5 ISO-9 ISO-12: a tower with room for so many patches."""
    right = subject(QWEN)
    samples = encoded(right.rows.template, ("image", "text", "images"))
    row = encoded(right.rows.template, ("image", "images", "image", "images", "image"))
    mixing = partial(s.images_see_each_other, num_patches=70)
    check(mixing(right), samples, r"images, videos or sounds of one sample reach another", MISSED, rows=[row])


def test_one_head_that_leaks_is_stopped_in_16_bits():
    """ISO-5 ISO-9 ISO-13"""
    with in_16_bits(s.llama()) as right:
        check(s.attending(right, s.leaking_in_one_head), text_samples(*LENGTHS), "has no boundaries", MISNAMED)


def test_boundary_of_long_samples_that_is_one_token_off_is_stopped_in_16_bits():
    """ISO-5 ISO-9 ISO-13: one token of 300 is wrong, which is little in the mean."""
    with in_16_bits(s.llama()) as right:
        moved = s.rows_changed(right, s.boundaries_at(shifted(-1)))
        check(nullcontext(moved), text_samples(300, 280, 320, 310), r"a boundary is shifted", MISNAMED)


def test_last_tokens_that_see_nobody_are_stopped_in_16_bits():
    """ISO-5 ISO-9 ISO-13: nobody moves, and one token of 300 is wrong."""
    with in_16_bits(s.llama()) as right:
        cause = r"a boundary is shifted: only a few tokens where samples meet differ.*from token 299 to 299 of 300"
        check(s.attending(right, s.losing_last_tokens), text_samples(300, 280, 320, 310), cause, MISNAMED)


def test_grids_that_are_exchanged_are_stopped_in_16_bits(subject, encoded):
    """ISO-5 ISO-9 ISO-13: this model hardly minds them."""
    with in_16_bits(subject(QWEN)) as right:
        samples = encoded(right.rows.rows.template, ("wide", "text", "tall"))
        cause = r"wrong order: .*grids, exchanged.*image_grid_thw of a row is not that of its samples"
        check(nullcontext(s.rows_changed(right, s.grids_exchanged)), samples, cause, MISNAMED)


def test_right_packs_are_verified_in_16_bits(subject, encoded):
    """ISO-13"""
    with in_16_bits(subject(QWEN)) as right:
        samples = encoded(right.rows.rows.template, ("wide", "text", "tall", "images", "video"))
        assert proved(right, samples, [samples[::-1]]).moved == 0
