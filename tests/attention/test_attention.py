import doctest
import random
from itertools import pairwise

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from swift_vlpack.attention import attention, packed_sequence
from swift_vlpack.attention.attention import NAME, segmented_attention
from swift_vlpack.attention.masks import sequence_mask
from swift_vlpack.attention.packed_sequence import boundaries_of, to_device
from swift_vlpack.attention.prepare import have_targets
from swift_vlpack.errors import AttentionError
from swift_vlpack.feed.collate import batch_of

LENGTHS = (5, 1, 9, 3)


class Layer(torch.nn.Module):
    """What an attention layer of transformers tells of itself."""

    def __init__(self, num_groups=2, is_causal=True):
        super().__init__()
        self.num_key_value_groups = num_groups
        self.is_causal = is_causal


def states(num_tokens, *, seed=0, dtype=torch.float64, batch=1, num_heads=4, num_kv_heads=2):
    """Query, key and value of a sequence."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, num_tokens, 8) for heads in (num_heads, num_kv_heads, num_kv_heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def ends_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def dense(query, key, value, lengths, *, scaling=None, window=None, **more):
    """The oracle: one matrix of all against all, masked to the same sample, the past and the window."""
    query, key, value = (x.double() for x in (query, key, value))
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(len(sample))
    distance = position[:, None] - position[None, :]
    allowed = (sample[:, None] == sample[None, :]) & (distance >= 0)
    if window is not None:
        allowed &= distance < window
    softcap, s_aux, mask = (more.get(name) for name in ("softcap", "s_aux", "mask"))
    if mask is not None:
        allowed = (sample[:, None] == sample[None, :]) & mask
    scores = query @ key.transpose(-1, -2) * (scaling or query.shape[-1] ** -0.5)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    weights = (scores + more.get("position_bias", 0)).masked_fill(~allowed, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    total = total if s_aux is None else total + s_aux.double().exp()[:, None, None]
    return (weights / total @ value).transpose(1, 2)


def attend(qkv, lengths, layer=None, mask=None, **kwargs):
    return segmented_attention(layer or Layer(), *qkv, mask, cu_seq_lens_q=ends_of(lengths), **kwargs)[0]


def plain(qkv, layer=None, mask=None, **kwargs):
    return sdpa_attention_forward(layer or Layer(), *qkv, mask, **kwargs)[0]


@pytest.mark.parametrize("module", [attention, packed_sequence])
def test_examples_in_docstrings_run(module):
    """DOC-1"""
    assert doctest.testmod(module).failed == 0


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


@pytest.mark.parametrize("num_masks", [1, 4])
@pytest.mark.parametrize("is_added", [False, True])
def test_every_sample_gets_its_part_of_a_mask(num_masks, is_added):
    """ATTN-2: of all heads or of each, of booleans or added to the scores."""
    qkv = states(sum(LENGTHS))
    causal = torch.ones(sum(LENGTHS), sum(LENGTHS), dtype=torch.bool).tril()[None, None]
    seen = torch.rand(1, num_masks, *causal.shape[2:], generator=torch.Generator().manual_seed(0)) < 0.5
    seen = seen & causal | torch.eye(sum(LENGTHS), dtype=torch.bool)
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf) if is_added else seen
    made = attend(qkv, LENGTHS, mask=mask)
    assert torch.allclose(made, dense(*qkv, LENGTHS, mask=seen), atol=1e-12)
    assert not torch.allclose(made, attend(qkv, LENGTHS), atol=1e-2)
    assert torch.allclose(attend(qkv, LENGTHS, mask=causal), attend(qkv, LENGTHS), atol=1e-12)


@pytest.mark.parametrize("mask", [torch.ones(1, 18), torch.ones(1, 1, 18, 20), {"full_attention": None}])
def test_a_mask_that_cannot_be_cut_is_refused(mask):
    """ATTN-2"""
    layer = Layer()
    layer.layer_idx = 3
    with pytest.raises(AttentionError, match=r"Layer of layer 3 .* mask .* \((Tensor \(1|dict)"):
        attend(states(18), LENGTHS, layer, mask=mask)


def test_block_mask_of_flex_attention_is_cut():
    """ATTN-2"""
    qkv = states(sum(LENGTHS))
    seen = create_block_mask(lambda b, h, q, kv: (kv <= q) & (q - kv < 3), 1, None, 18, 18, device="cpu")
    assert torch.allclose(attend(qkv, LENGTHS, mask=seen), dense(*qkv, LENGTHS, window=3), atol=1e-12)


def test_sinks_soft_cap_and_bias_are_given_to_every_sample():
    """ATTN-1"""
    qkv = states(sum(LENGTHS))
    sinks, bias = torch.tensor([0.5, -1.0, 2.0, 0.0]).double(), states(18, num_heads=18)[0][:, :, :, :1]
    bias = (bias @ bias.transpose(-1, -2))[:, :4].contiguous()
    for asked in ({"s_aux": sinks}, {"softcap": 0.3}, {"position_bias": bias}, {"s_aux": sinks, "softcap": 0.3}):
        made = attend(qkv, LENGTHS, **asked)
        assert torch.allclose(made, dense(*qkv, LENGTHS, **asked), atol=1e-12), asked
        assert not torch.allclose(made, attend(qkv, LENGTHS), atol=1e-3), asked


# -- what is not known ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.zeros(1, 18, 4), 0.5, "all", True])
def test_unknown_keyword_is_refused_by_name(value):
    """ATTN-4"""
    layer = Layer()
    layer.layer_idx = 1
    with pytest.raises(AttentionError, match=f"Layer of layer 1 .*'indices' \\({type(value).__name__}.*without pack"):
        attend(states(18), LENGTHS, layer, indices=value)
    with pytest.raises(AttentionError, match="'indices'"):
        segmented_attention(layer, *states(18), None, indices=value)
    assert segmented_attention(Layer(is_causal=False), *states(18), None, indices=value)[0] is not None


@pytest.mark.parametrize("value", [None, False])
def test_unknown_keyword_that_asks_for_nothing_is_not_refused(value):
    """ATTN-4"""
    qkv = states(18)
    assert torch.equal(attend(qkv, LENGTHS, indices=value), attend(qkv, LENGTHS))


def test_weights_cannot_be_had():
    """ATTN-4"""
    with pytest.raises(AttentionError, match="leave output_attentions unset"):
        attend(states(18), LENGTHS, output_attentions=True)


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


def test_sinks_and_soft_cap_are_kept_where_there_are_no_boundaries():
    """ATTN-5: padded evaluation, and a step of generation with its cache."""
    query, key, value = states(18)
    asked = {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0]).double(), "softcap": 0.3}
    made = segmented_attention(Layer(), query, key, value, None, **asked)[0]
    assert torch.allclose(made, dense(query, key, value, [18], **asked), atol=1e-12)
    step = segmented_attention(Layer(), query[:, :, -1:], key, value, None, **asked)[0]
    assert torch.allclose(step, made[:, -1:], atol=1e-12)


def test_boundaries_of_a_batch_are_refused():
    """ATTN-5"""
    with pytest.raises(AttentionError, match=r"from 0 to 18, but the batch is 2 sequence\(s\) of 18 tokens"):
        attend(states(sum(LENGTHS), batch=2), LENGTHS)


@pytest.mark.parametrize("lengths", [LENGTHS, (1,)])
def test_boundaries_with_the_keys_of_a_cache_are_refused(lengths):
    """ATTN-5"""
    query, key, value = states(sum(LENGTHS))
    with pytest.raises(AttentionError, match=r"1 sequence\(s\) of 1 tokens with 18 keys"):
        attend((query[:, :, -1:], key, value), lengths)


@pytest.mark.parametrize("lengths", [(5, 1, 9), (5, 1, 9, 4)])
def test_boundaries_of_another_sequence_are_refused(lengths):
    """ATTN-5"""
    qkv = states(sum(LENGTHS))
    with pytest.raises(AttentionError, match=f"from 0 to {sum(lengths)}, but the batch is 1 sequence"):
        attend(qkv, lengths)
    late = torch.tensor([1, sum(LENGTHS)], dtype=torch.int32)
    with pytest.raises(AttentionError, match="from 1 to 18"):
        segmented_attention(Layer(), *qkv, None, cu_seq_lens_q=late)


def test_vision_tower_is_not_causal_and_ignores_the_boundaries_of_the_text():
    """ISO-1"""
    qkv = states(sum(LENGTHS))
    everything = plain(qkv, Layer(is_causal=False))
    assert torch.equal(attend(qkv, LENGTHS, Layer(is_causal=False)), everything)
    assert torch.equal(attend(qkv, LENGTHS, is_causal=False), everything)
    assert not torch.equal(attend(qkv, LENGTHS), everything)


def test_one_sample_is_an_ordinary_causal_sequence():
    """ISO-1 ISO-2"""
    qkv = states(18)
    assert torch.equal(attend(qkv, [18]), plain(qkv))


# -- registration -----------------------------------------------------------------------------------------------------


def test_registering_again_changes_nothing():
    """ISO-1"""
    for _ in range(2):
        attention.register()
        assert AttentionInterface()[NAME] is segmented_attention
        assert AttentionMaskInterface()[NAME] is sequence_mask


# -- what is known of tensors without reading them ---------------------------------------------------------------------


def test_facts_of_a_tensor_that_is_changed_in_place_are_forgotten():
    """TRAIN-31: boundaries, and whether there is a target."""
    batch = batch_of({"cu_seq_lens_q": torch.tensor([0, 3, 6]), "labels": torch.full((1, 6), -100)}, None, {})
    assert boundaries_of(batch["cu_seq_lens_q"]).ends == (0, 3, 6)
    assert not have_targets(batch["labels"])
    batch["cu_seq_lens_q"][1] = 2
    batch["labels"][0, 3:] = 7
    assert boundaries_of(batch["cu_seq_lens_q"]).ends == (0, 2, 6)
    assert have_targets(batch["labels"])
    other = type(batch)({**batch, "labels": torch.full((1, 6), -100)})
    assert not have_targets(other["labels"])
    assert type(batch)({"labels": None}) == {"labels": None}


def test_no_numbers_are_still_whole_numbers_on_a_device():
    """TRAIN-31: a pack of which no row could be read has no sample to mask."""
    assert to_device((), torch.device("cpu")).dtype == torch.int64


def test_what_an_evaluation_computed_for_a_sequence_serves_training():
    """TRAIN-31"""
    bounds = packed_sequence.Bounds((0, 7, 12))
    with torch.inference_mode():
        groups = packed_sequence.groups_of(bounds, torch.device("cpu"))
    assert not groups.tokens.is_inference()
