import random
from itertools import pairwise

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from swift_vlpack.data.model import attention
from swift_vlpack.data.model.attention import NAME, segmented_attention

LENGTHS = (5, 1, 9, 3)


class Layer(torch.nn.Module):
    """What an attention layer of transformers tells of itself."""

    def __init__(self, num_groups=2, is_causal=True):
        super().__init__()
        self.num_key_value_groups = num_groups
        self.is_causal = is_causal


def states(num_tokens, *, seed=0, dtype=torch.float64, batch=1, num_heads=4, num_kv_heads=2):
    """Query, key and value of a row."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, num_tokens, 8) for heads in (num_heads, num_kv_heads, num_kv_heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def ends_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def dense(query, key, value, lengths, *, scaling=None, window=None):
    """The oracle: one matrix of all against all, masked to the same sample, the past and the window."""
    query, key, value = (x.double() for x in (query, key, value))
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(len(sample))
    distance = position[:, None] - position[None, :]
    allowed = (sample[:, None] == sample[None, :]) & (distance >= 0)
    if window is not None:
        allowed &= distance < window
    scores = query @ key.transpose(-1, -2) * (scaling or query.shape[-1] ** -0.5)
    return (scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value).transpose(1, 2)


def attend(qkv, lengths, layer=None, mask=None, **kwargs):
    return segmented_attention(layer or Layer(), *qkv, mask, cu_seq_lens_q=ends_of(lengths), **kwargs)[0]


def plain(qkv, layer=None, mask=None, **kwargs):
    return sdpa_attention_forward(layer or Layer(), *qkv, mask, **kwargs)[0]


# -- the walk ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 3e-2)],
)
def test_segments_equal_a_dense_block_mask(dtype, tolerance):
    """ISO-1 ISO-2"""
    qkv = states(sum(LENGTHS), dtype=dtype)
    made = attend(qkv, LENGTHS)
    assert (made.shape, made.dtype) == ((1, sum(LENGTHS), 4, 8), dtype)
    torch.testing.assert_close(made.double(), dense(*qkv, LENGTHS), atol=tolerance, rtol=tolerance)
    leaked = (plain(qkv).double() - dense(*qkv, LENGTHS)).abs().max()
    assert leaked > 20 * tolerance, "without boundaries the samples see each other"


def test_segments_equal_a_dense_block_mask_for_any_lengths_heads_and_window():
    """ISO-1 ISO-2"""
    rng = random.Random(0)
    for seed in range(60):
        lengths = [rng.randint(1, 12) for _ in range(rng.randint(1, 6))]
        num_kv_heads, groups = rng.choice([(1, 4), (2, 2), (4, 1)])
        window, scaling = rng.choice([None, 1, 3, 8, 40]), rng.choice([None, 0.3])
        qkv = states(sum(lengths), seed=seed, num_kv_heads=num_kv_heads)
        made = attend(qkv, lengths, Layer(groups), sliding_window=window, scaling=scaling)
        expected = dense(*qkv, lengths, scaling=scaling, window=window)
        torch.testing.assert_close(made, expected, atol=1e-12, rtol=1e-12, msg=f"seed {seed}")


def test_packed_equals_alone_to_the_last_bit():
    """ISO-2"""
    qkv = states(sum(LENGTHS), dtype=torch.float32)
    packed = attend(qkv, LENGTHS)
    for start, end in pairwise(ends_of(LENGTHS).tolist()):
        alone = attend([x[:, :, start:end] for x in qkv], [end - start])
        assert torch.equal(packed[:, start:end], alone)


def test_neighbours_neither_move_nor_get_gradient():
    """ISO-2"""
    qkv = [x.requires_grad_() for x in states(sum(LENGTHS))]
    third = slice(6, 15)
    attend(qkv, LENGTHS)[:, third].square().sum().backward()
    for x in qkv:
        assert x.grad[:, :, third].abs().sum() > 0
        assert x.grad[:, :, :6].abs().sum() == x.grad[:, :, 15:].abs().sum() == 0
    changed = [x.detach().clone() for x in qkv]
    for x in changed:
        x[:, :, third] += 1
    before, after = attend(qkv, LENGTHS), attend(changed, LENGTHS)
    others = [*range(6), *range(15, 18)]
    assert torch.equal(before[:, others], after[:, others])
    assert not torch.equal(before[:, third], after[:, third])


@pytest.mark.parametrize("window", [None, 2])
def test_gradients_equal_those_of_the_dense_mask(window):
    """ISO-3"""
    weight = states(sum(LENGTHS), seed=9)[0].transpose(1, 2)
    grads = []
    for attention_of in (attend, lambda qkv, lengths, sliding_window: dense(*qkv, lengths, window=sliding_window)):
        qkv = [x.requires_grad_() for x in states(sum(LENGTHS))]
        (attention_of(qkv, LENGTHS, sliding_window=window) * weight).sum().backward()
        grads.append([x.grad for x in qkv])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


def test_the_mask_of_the_whole_row_is_ignored_where_there_are_boundaries():
    """ISO-1: transformers makes a causal mask of the row, which knows no samples."""
    qkv = states(sum(LENGTHS))
    causal = torch.ones(sum(LENGTHS), sum(LENGTHS), dtype=torch.bool).tril()[None, None]
    assert torch.equal(attend(qkv, LENGTHS, mask=causal), attend(qkv, LENGTHS))


def test_dropout_reaches_every_segment():
    """ISO-1"""
    qkv = states(sum(LENGTHS))
    assert attend(qkv, LENGTHS, dropout=0.999999).abs().sum() < attend(qkv, LENGTHS).abs().sum() / 100


# -- elsewhere --------------------------------------------------------------------------------------------------------


def test_without_boundaries_it_is_sdpa_with_its_mask():
    """ISO-1"""
    qkv = states(18, batch=2)
    padded = torch.ones(18, 18, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    padded[1, :, 1:, 0] = False
    made = segmented_attention(Layer(), *qkv, padded)[0]
    assert torch.equal(made, plain(qkv, mask=padded))
    assert not torch.equal(made, plain(qkv))
    assert torch.equal(segmented_attention(Layer(), *qkv, None)[0], plain(qkv))


def test_batch_of_rows_is_plain_sdpa():
    """ISO-1"""
    qkv = states(sum(LENGTHS), batch=2)
    assert torch.equal(attend(qkv, LENGTHS), plain(qkv))


def test_keys_of_a_cache_make_it_plain_sdpa():
    """ISO-1: the boundaries do not cover a row whose keys come from elsewhere too."""
    query, key, value = states(sum(LENGTHS))
    qkv = query[:, :, -1:], key, value
    assert torch.equal(attend(qkv, LENGTHS), plain(qkv))
    assert torch.equal(attend(qkv, [1]), plain(qkv))


@pytest.mark.parametrize("lengths", [(5, 1, 9), (5, 1, 9, 4)])
def test_boundaries_of_another_row_are_not_used(lengths):
    """ISO-1"""
    qkv = states(sum(LENGTHS))
    assert torch.equal(attend(qkv, lengths), plain(qkv))
    late = torch.tensor([1, sum(LENGTHS)], dtype=torch.int32)
    assert torch.equal(segmented_attention(Layer(), *qkv, None, cu_seq_lens_q=late)[0], plain(qkv))


def test_vision_tower_is_not_causal_and_ignores_the_boundaries_of_the_text():
    """ISO-1"""
    qkv = states(sum(LENGTHS))
    everything = plain(qkv, Layer(is_causal=False))
    assert torch.equal(attend(qkv, LENGTHS, Layer(is_causal=False)), everything)
    assert torch.equal(attend(qkv, LENGTHS, is_causal=False), everything)
    assert not torch.equal(attend(qkv, LENGTHS), everything)


def test_one_sample_is_an_ordinary_causal_row():
    """ISO-1 ISO-2"""
    qkv = states(18)
    assert torch.equal(attend(qkv, [18]), plain(qkv))


# -- registration -----------------------------------------------------------------------------------------------------


def test_registering_again_changes_nothing():
    """ISO-1"""
    for _ in range(2):
        attention.register()
        assert AttentionInterface()[NAME] is segmented_attention
        assert AttentionMaskInterface()[NAME] is sdpa_mask


def test_model_is_built_with_it_and_can_be_switched(tiny):
    """ISO-1"""
    model = tiny("qwen2_5_vl").model
    assert model.config.text_config._attn_implementation == NAME
    try:
        model.set_attn_implementation("sdpa")
        assert model.config.text_config._attn_implementation == "sdpa"
    finally:
        model.set_attn_implementation(NAME)
    assert model.config.text_config._attn_implementation == NAME
