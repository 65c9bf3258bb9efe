"""A sample's part of the row's mask is the mask that transformers makes for the sample alone."""

from itertools import pairwise

import pytest
import torch
from transformers import masking_utils as of

from swift_vlpack.attention.masks import EVERYTHING, PAST, SequenceMask, sequence_mask
from swift_vlpack.errors import AttentionError

ENDS = (0, 7, 8, 21, 30)
BLOCKS = torch.tensor([[-1, -1, 0, 0, 0, 1, 1, 1, 1, -1, 2, 2, 2, -1, -1, -1, 3, 3, -1, -1, -1, *[-1] * 9]])
NO_PADDING = torch.zeros(1, dtype=torch.int64)
WINDOW = of.sliding_window_causal_mask_function(4)
CHUNKS = of.chunked_causal_mask_function(5, NO_PADDING)
IMAGES = of.or_masks(of.causal_mask_function, of.blockwise_overlay(BLOCKS))
SAMPLE = torch.bucketize(torch.arange(30), torch.tensor(ENDS[1:]), right=True)[None]


def of_row(function, **options):
    return sequence_mask(1, 30, 30, mask_function=function, allow_is_causal_skip=True, use_vmap=False, **options)


def in_row(function):
    """The oracle: the whole matrix, made by transformers."""
    return of.sdpa_mask(1, 30, 30, mask_function=function, allow_is_causal_skip=False)


def alone(function, length):
    return of.sdpa_mask(1, length, length, mask_function=function, allow_is_causal_skip=False)


@pytest.mark.parametrize(
    "function",
    [
        WINDOW,
        CHUNKS,
        of.or_masks(WINDOW, CHUNKS),
        of.sliding_window_bidirectional_mask_function(3),
        of.and_masks(of.causal_mask_function, lambda b, h, q, kv: (q - kv) % 2 == 0),
    ],
)
@pytest.mark.parametrize("knows_samples", [False, True])
def test_part_of_a_sample_is_its_mask_alone(function, knows_samples):
    """ATTN-2 ATTN-3: also of chunks, which count from the start of the sample, and of a function of another's."""
    samples = of.packed_sequence_mask_function(SAMPLE)  # which transformers adds where it sees that positions restart
    row = of_row(of.and_masks(function, samples) if knows_samples else function)
    for start, end in pairwise(ENDS):
        made = row.of_sample(start, end)
        assert torch.equal(matrix_of(made, end - start), alone(function, end - start)[0, 0]), (start, end)


def matrix_of(mask, length):
    if mask.matrix is not None:
        return mask.matrix[0, 0]
    everything = torch.ones(length, length, dtype=torch.bool)
    return everything.tril() if mask.is_causal else everything


@pytest.mark.parametrize("function", [IMAGES, of.and_masks(IMAGES, of.sliding_window_overlay(3))])
def test_image_blocks_are_looked_up_in_the_row(function):
    """ATTN-2 ATTN-3"""
    row = of_row(function)
    for start, end in pairwise(ENDS):
        made = matrix_of(row.of_sample(start, end), end - start)
        assert torch.equal(made, in_row(function)[0, 0, start:end, start:end])
    assert row.of_sample(21, 30).is_of_positions
    assert not row.of_sample(8, 21).is_of_positions


def test_padding_is_looked_up_in_the_row():
    """ATTN-2"""
    padding = torch.ones(1, 30, dtype=torch.bool)
    assert of_row(of.causal_mask_function, attention_mask=padding).of_sample(8, 21) is PAST
    padding[0, 20] = False
    made = of_row(of.causal_mask_function, attention_mask=padding).of_sample(8, 21)
    assert not made.matrix[0, 0, :, -1].any()
    assert torch.equal(made.matrix[0, 0, :, :-1], torch.ones(13, 12, dtype=torch.bool).tril())


def test_no_matrix_is_made_where_the_past_is_all():
    """ATTN-6"""
    samples = of.and_masks(of.causal_mask_function, of.packed_sequence_mask_function(SAMPLE))
    for function in (WINDOW, CHUNKS, IMAGES, samples):
        assert of_row(function).of_sample(26, 30) is PAST
    assert of_row(of.bidirectional_mask_function).of_sample(0, 7) == EVERYTHING
    million = sequence_mask(1, 1_000_000, 1_000_000, mask_function=WINDOW)
    assert (million.shape, million.ndim) == ((1, 1, 1_000_000, 1_000_000), 4)
    assert million.of_sample(999_000, 999_010).matrix.shape == (1, 1, 10, 10)


def test_matrix_is_made_once_for_all_layers_and_samples_of_a_length():
    """ATTN-6"""
    row = of_row(WINDOW)
    assert row.of_sample(0, 7).matrix is row.of_sample(0, 7).matrix is row.of_sample(8, 15).matrix
    blocks = of_row(IMAGES)
    assert blocks.of_sample(0, 7).matrix is not blocks.of_sample(8, 15).matrix


def test_window_is_known_to_kernels_that_have_one():
    """ATTN-2"""
    row = of_row(of.and_masks(WINDOW, of.packed_sequence_mask_function(SAMPLE)))
    assert row.of_sample(8, 21).window == of_row(WINDOW).of_sample(8, 21).window == 4
    assert of_row(CHUNKS).of_sample(8, 21).window is None


def test_function_that_depends_on_the_place_in_the_row_is_refused():
    """ATTN-4"""

    def from_the_tenth_token_on(batch_idx, head_idx, q_idx, kv_idx):
        return (q_idx >= 10) & (kv_idx <= q_idx)

    row = of_row(of.and_masks(of.causal_mask_function, from_the_tenth_token_on))
    with pytest.raises(AttentionError, match=r"from_the_tenth_token_on .*tokens 8 to 21.* without packing"):
        row.of_sample(8, 21)


def test_model_that_reads_its_mask_is_refused():
    """ATTN-4"""
    row = of_row(WINDOW)
    with pytest.raises(AttentionError, match=r"reads 'dtype' of its attention mask.* without packing"):
        row.dtype.is_floating_point  # noqa: B018
    with pytest.raises(AttentionError, match="cuts a part out of its attention mask"):
        row[:, :, 3:]
    assert not hasattr(row, "to")


def test_whole_mask_is_the_one_of_sdpa():
    """ATTN-5"""
    assert torch.equal(of_row(WINDOW, local_size=4).whole(), in_row(WINDOW))
    assert of_row(of.causal_mask_function).whole() is None
    assert of_row(of.causal_mask_function, attention_mask=torch.ones(1, 30, dtype=torch.bool)).whole() is None
    batch = sequence_mask(2, 30, 30, mask_function=WINDOW, local_size=4)
    assert torch.equal(batch, in_row(WINDOW).expand(2, -1, -1, -1))
    step = sequence_mask(1, 1, 30, 29, mask_function=WINDOW, local_size=4)
    assert torch.equal(step[0, 0], in_row(WINDOW)[0, 0, -1:])


def test_mask_of_the_outer_model_is_the_inner_ones():
    """ATTN-5"""
    outer = of_row(WINDOW)
    assert isinstance(outer, SequenceMask)
    assert sequence_mask(1, 30, 30, mask_function=of.causal_mask_function, attention_mask=outer) is outer
