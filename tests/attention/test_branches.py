"""Rows that share a prefix: every row is what it is alone, in kernels and in tiny real models of transformers."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
import transformers as T
from torch.nn.attention.flex_attention import flex_attention
from transformers import masking_utils as of

from swift_vlpack.attention import attention, kernels, masks, packed_sequence
from swift_vlpack.attention.attention import NAME, recorded_calls, segmented_attention
from swift_vlpack.attention.choose_kernel import WITH_BRANCHES, choose, layer_kinds, reference, results
from swift_vlpack.attention.kernels import by_flex, by_lengths, grouped, saves_calls, segments
from swift_vlpack.attention.linear_attention import restart_at_boundaries
from swift_vlpack.attention.masks import Segment, SequenceMask, sequence_mask
from swift_vlpack.attention.packed_sequence import boundaries_of, tensor_of
from swift_vlpack.errors import AttentionError, BoundaryError
from swift_vlpack.plan.boundaries import ROOT, Boundaries
from tests.attention.one_by_one import IMAGE, VOCABULARY, built, gap, gradients, run, samples_of, text
from tests.attention.test_attention import Layer, states
from tests.attention.test_choose_kernel import Written, calls_of, forward_of
from tests.attention.test_honours import deepseek, gemma2, gemma3_vision, gpt_oss, llama4, mistral, paligemma
from tests.attention.test_linear_attention import lfm2, qwen3_next


@dataclass(frozen=True)
class Rows:
    """Units and flat samples of a sequence, (tokens of the prefix, tokens of each branch); a flat one has no prefix."""

    units: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def boundaries(self):
        lengths, parents = [], []
        for prefix, branches in self.units:
            parents += [ROOT, *[len(lengths)] * len(branches)] if prefix else [ROOT] * len(branches)
            lengths += [prefix, *branches] if prefix else branches
        return Boundaries(tuple(lengths), tuple(parents))

    @property
    def alone(self):
        """Places in the sequence of the tokens of each row alone, and the tokens of its prefix."""
        rows, start = [], 0
        for prefix, branches in self.units:
            shared, start = list(range(start, start + prefix)), start + prefix
            for branch in branches:
                rows.append((torch.tensor([*shared, *range(start, start + branch)]), prefix))
                start += branch
        return rows

    @property
    def first_of_units(self):
        """Whether a row is the first of its prefix: in it the prefix is scored."""
        return [number == 0 for _, branches in self.units for number in range(len(branches))]


MIXED = Rows(((6, (4, 1, 9)), (0, (5,)), (1, (3, 3)), (12, (2,)), (0, (7, 4))))
MANY = Rows(((11, tuple(1 + number % 5 for number in range(20))),))
LONG = Rows(((30, (12, 14, 13)), (0, (40,)), (30, (13, 1))))
ALL = (MIXED, MANY, LONG)


def attended(qkv, rows, layer=None, mask=None, **asked):
    return segmented_attention(layer or Layer(), *qkv, mask, cu_seq_lens_q=tensor_of(rows.boundaries), **asked)[0]


def oracle(qkv, rows, sees, *, softcap=None, s_aux=None, bias=None):
    """Every row alone, in plain double precision; `sees` makes the matrix of a row. Shares no code with the package."""
    query, key, value = (x.double() for x in qkv)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    made = [None] * query.shape[2]
    for tokens, _ in rows.alone:
        one, other, third = (x[:, :, tokens] for x in (query, key, value))
        scores = one @ other.transpose(-1, -2) * query.shape[-1] ** -0.5
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        scores = scores if bias is None else scores + bias(len(tokens))
        weights = scores.masked_fill(~sees(tokens), -torch.inf).exp()
        total = weights.sum(-1, keepdim=True)
        total = total if s_aux is None else total + s_aux.double().exp()[:, None, None]
        outputs = (weights / total @ third).transpose(1, 2)
        for number, token in enumerate(tokens.tolist()):
            if made[token] is None:
                made[token] = outputs[:, number]
            assert torch.allclose(made[token], outputs[:, number], atol=1e-9), "the prefix is the same in all rows"
    return torch.stack(made, dim=1)


def causal(tokens, window=None, chunk=None):
    place = torch.arange(len(tokens))
    seen = place[:, None] >= place
    seen = seen if window is None else seen & (place[:, None] - place < window)
    return seen if chunk is None else seen & (place[:, None] // chunk == place // chunk)


def in_sequence(function, num_tokens, **options):
    options = {"allow_is_causal_skip": True, "use_vmap": False, **options}
    return sequence_mask(1, num_tokens, num_tokens, mask_function=function, **options)


def gap_of(qkv, rows, sees, *, mask=None, layer=None, asked=None, **of_oracle):
    """The largest difference of outputs and of gradients from those of the rows alone."""
    weight = states(qkv[0].shape[2], seed=9)[0].transpose(1, 2)
    results = []
    for compute in (
        lambda inputs: oracle(inputs, rows, sees, **of_oracle),
        lambda inputs: attended(inputs, rows, layer, mask, **(asked or {})),
    ):
        inputs = [x.detach().clone().requires_grad_() for x in qkv]
        made = compute(inputs)
        (made * weight).sum().backward()
        results.append([made, *[x.grad for x in inputs]])
    return max(gap([one.double()], [other.double()]) for one, other in zip(*results, strict=True))


def num_tokens(rows):
    return rows.boundaries.num_tokens


# -- boundaries -------------------------------------------------------------------------------------------------------


def test_tensor_says_where_prefixes_are_and_is_read_once():
    """SHARE-20"""
    assert tensor_of(Boundaries((3, 2))).tolist() == [0, 3, 5]
    made = tensor_of(Boundaries((3, 2, 1, 4), (ROOT, 0, 0, ROOT)))
    assert made.tolist() == [[0, 3, 5, 6, 10], [-1, -1, 0, 0, -1]]
    assert made.dtype == torch.int32
    read = boundaries_of(made)
    assert read == ((0, 3, 5, 6, 10), (ROOT, 0, 0, ROOT))
    assert boundaries_of(made) is read
    assert packed_sequence.segments_of(read)[1:] == (Segment(3, 5, 0, 3), Segment(5, 6, 0, 3), Segment(6, 10))


def test_forest_of_another_shape_is_refused():
    """SHARE-20"""
    with pytest.raises(BoundaryError, match="the prefix of segment 2, segment 1, is itself a branch"):
        boundaries_of(torch.tensor([[0, 3, 5, 6], [-1, -1, 0, 1]]))


# -- kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ALL)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 4e-2)]
)
@pytest.mark.parametrize("kernel", [segments, grouped])
def test_rows_equal_themselves_alone(rows, dtype, tolerance, kernel):
    """SHARE-20: outputs, and gradients, which of a prefix are the sum over its branches."""
    layer = Layer()
    attention.use_kernel(layer, kernel, kernel)
    assert gap_of(states(num_tokens(rows), dtype=dtype), rows, causal, layer=layer) < tolerance


@pytest.mark.parametrize(("num_kv_heads", "groups"), [(1, 4), (2, 2), (4, 1)])
@pytest.mark.parametrize("window", [1, 3, 8, 20, 100])
def test_windows_count_in_the_row_alone(window, num_kv_heads, groups):
    """SHARE-21: as the layer's own window, and as transformers' mask; shorter and longer than the prefix."""
    for rows in ALL:
        qkv = states(num_tokens(rows), num_kv_heads=num_kv_heads)
        mask = in_sequence(of.sliding_window_causal_mask_function(window), num_tokens(rows))

        def sees(tokens):
            return causal(tokens, window)

        for kernel in (segments, grouped):
            layer = Layer(groups)
            attention.use_kernel(layer, kernel, kernel)
            assert gap_of(qkv, rows, sees, layer=layer, asked={"sliding_window": window}) < 1e-12
            assert gap_of(qkv, rows, sees, layer=layer, mask=mask) < 1e-12


@pytest.mark.parametrize("chunk", [2, 5, 8, 100])
def test_chunks_count_from_the_start_of_the_row(chunk):
    """SHARE-21"""
    function = of.chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64))
    for rows in ALL:
        mask, qkv = in_sequence(function, num_tokens(rows)), states(num_tokens(rows))
        for kernel in (segments, grouped):
            layer = Layer()
            attention.use_kernel(layer, kernel, kernel)
            assert gap_of(qkv, rows, lambda tokens: causal(tokens, chunk=chunk), layer=layer, mask=mask) < 1e-12


@pytest.mark.parametrize("use_vmap", [False, True])
def test_image_blocks_and_padding_are_looked_up_in_the_row(use_vmap):
    """SHARE-21: an image in the prefix, and one in a branch, with a window."""
    rows = Rows(((12, (8, 8, 4)), (0, (10,))))
    blocks = torch.full((1, 42), -1)
    blocks[0, 2:7], blocks[0, 13:17], blocks[0, 22:25], blocks[0, 33:36] = 0, 1, 2, 3
    padding = torch.ones(1, 42, dtype=torch.bool)
    padding[0, [9, 19]] = False  # in the prefix, and in a branch
    for window in (None, 4, 15):
        text = of.causal_mask_function if window is None else of.sliding_window_causal_mask_function(window)
        function = of.or_masks(text, of.blockwise_overlay(blocks))

        def sees(tokens, window=window):
            own = blocks[0, tokens]
            image = (own[:, None] == own) & (own >= 0)
            return (causal(tokens, window) | image) & padding[0, tokens]

        mask = in_sequence(function, 42, attention_mask=padding, use_vmap=use_vmap)
        assert gap_of(states(42), rows, sees, mask=mask) < 1e-12


def test_soft_cap_sinks_and_bias_are_those_of_the_row():
    """SHARE-21: a bias by distance; the model made it for the sequence, in which branches are farther away."""
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]).double()

    def bias(length):
        place = torch.arange(length)
        return torch.sin((place[:, None] - place) * torch.arange(1, 5).double()[:, None, None])[None]

    for rows in ALL:
        qkv = states(num_tokens(rows))
        for asked in ({"s_aux": sinks}, {"softcap": 0.3}, {"s_aux": sinks, "softcap": 0.3}):
            for kernel in (segments, grouped):
                layer = Layer()
                attention.use_kernel(layer, kernel, kernel)
                assert gap_of(qkv, rows, causal, layer=layer, asked=asked, **asked) < 1e-12
        whole = {"position_bias": bias(num_tokens(rows))}
        assert gap_of(qkv, rows, causal, asked=whole, bias=bias) < 1e-12


@pytest.mark.parametrize("is_added", [False, True])
def test_matrix_of_the_whole_sequence_is_read_as_if_the_branch_came_first(is_added):
    """SHARE-21"""
    for rows in ALL:
        place = torch.arange(num_tokens(rows))
        mask = causal(place, window=5)[None, None]
        if is_added:
            mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
        assert gap_of(states(num_tokens(rows)), rows, lambda tokens: causal(tokens, 5), mask=mask) < 1e-12


def test_matrix_that_knows_tokens_is_refused():
    """SHARE-22: a bias or a mask by place, and a mask by which the prefix sees its branches."""
    rows, qkv = Rows(((6, (4, 4)),)), states(14)
    bias = torch.arange(14.0).double().expand(1, 4, 14, 14)
    with pytest.raises(
        AttentionError, match=r"a bias \(1, 4, 14, 14\) .*a branch lies \(tokens 10 to 14\).*share=none"
    ):
        attended(qkv, rows, position_bias=bias)
    with pytest.raises(AttentionError, match=r"lets tokens 0 to 6, which rows share, see .* \(tokens 6 to 10\).*=none"):
        attended(qkv, rows, mask=torch.ones(1, 1, 14, 14, dtype=torch.bool))
    with pytest.raises(AttentionError, match="lets tokens 0 to 6, which rows share, see"):
        attended(qkv, rows, mask=torch.zeros(1, 1, 14, 14, dtype=torch.float64))


def test_prefix_that_sees_its_branches_is_refused():
    """SHARE-22: as in prefix language models, and of an image that goes on in a branch."""
    rows, qkv = Rows(((6, (4, 4)),)), states(14)
    blocks = torch.full((1, 14), -1)
    blocks[0, 4:8] = 0
    for function in (
        of.bidirectional_mask_function,
        of.or_masks(of.causal_mask_function, of.sliding_window_bidirectional_mask_function(4)),
        of.or_masks(of.causal_mask_function, of.blockwise_overlay(blocks)),
    ):
        with pytest.raises(AttentionError, match=r"lets tokens 0 to 6, which rows share, see what follows them"):
            attended(qkv, rows, mask=in_sequence(function, 14))


def test_function_of_another_is_taken_if_only_distances_count():
    """SHARE-21 SHARE-22"""
    rows = Rows(((6, (4, 4)), (0, (5,))))

    def every_second(batch_idx, head_idx, q_idx, kv_idx):
        return (q_idx - kv_idx) % 2 == 0

    def from_the_tenth_token_on(batch_idx, head_idx, q_idx, kv_idx):
        return (q_idx >= 10) | (kv_idx <= q_idx)

    def sees(tokens):
        place = torch.arange(len(tokens))
        return causal(tokens) & ((place[:, None] - place) % 2 == 0)

    mask = in_sequence(of.and_masks(of.causal_mask_function, every_second), 19)
    assert gap_of(states(19), rows, sees, mask=mask) < 1e-12
    mask = in_sequence(of.and_masks(from_the_tenth_token_on, of.causal_mask_function), 19)
    with pytest.raises(AttentionError, match=r"from_the_tenth_token_on .*tokens 10 to 14"):
        attended(states(19), rows, mask=mask)


def test_branches_of_a_size_share_a_mask_no_larger_than_branch_by_row():
    """SHARE-21"""
    blocks = torch.full((1, 500), -1)
    blocks[0, 3:90] = 0
    images = of.or_masks(of.causal_mask_function, of.blockwise_overlay(blocks))
    for function in (of.causal_mask_function, of.sliding_window_causal_mask_function(50), images):
        mask = in_sequence(function, 500)
        one, other = mask.of_sample(100, 140, 0, 100), mask.of_sample(300, 340, 150, 250)
        assert one.matrix is other.matrix
        assert one.matrix.shape == (1, 1, 40, 140)
        assert one.is_of_positions


@pytest.mark.parametrize("kernel", [segments, grouped])
def test_what_is_copied_is_the_prefix_for_each_branch(kernel):
    """SHARE-23: keys and values of it; nothing as long as the sequence is made for every branch."""
    (kind, *_) = layer_kinds(calls_of(built(mistral())))
    written = []
    for rows in (Rows(((0, (512 + 40,) * 20),)), Rows(((512, (40,) * 20),))):
        sequence = kind.random(rows.boundaries, 2048)
        with Written() as writes:
            results(sequence, kernel)
        written.append(writes.count)
    assert written[1] < 0.7 * written[0]


# -- kernels against each other ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [gpt_oss, gemma2, mistral, llama4, deepseek])
@pytest.mark.parametrize("boundaries", [WITH_BRANCHES, MANY.boundaries, LONG.boundaries])
def test_every_kernel_that_runs_here_gives_what_the_reference_gives(config, boundaries):
    """SHARE-23"""
    for kind in layer_kinds(calls_of(built(config()))):
        sequence = kind.random(boundaries, 16)
        expected = results(sequence, reference)
        for kernel in (segments, grouped):
            for made, right in zip(results(sequence, kernel), expected, strict=True):
                torch.testing.assert_close(made.double(), right.double(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("config", [gpt_oss, gemma2, mistral])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_result_of_flex_is_that_of_the_reference(config):
    """SHARE-23"""
    for kind in layer_kinds(calls_of(built(config()))):
        for boundaries in (WITH_BRANCHES, LONG.boundaries):
            sequence = kind.random(boundaries, 16)
            with torch.no_grad():
                made = by_flex(replace_states(sequence), flex_attention)
                torch.testing.assert_close(made.double(), reference(sequence), atol=2e-5, rtol=2e-5)


def replace_states(sequence):
    return replace(sequence, **{name: getattr(sequence, name).detach() for name in ("query", "key", "value")})


def test_keys_of_varlen_are_those_of_the_rows():
    """SHARE-23: it runs on CUDA only; queries are the last of their keys there."""
    bounds = packed_sequence.Bounds(MIXED.boundaries.cu_seqlens, MIXED.boundaries.parents)
    _, ends, tokens = kernels._ends_and_keys(bounds, torch.device("cpu"))
    rows = [tokens[start:end].tolist() for start, end in pairwise(ends.tolist())]
    assert [row for row in rows if row[0] != row[-1] + 1 - len(row)] == [
        [*range(6), 10],
        [*range(6), *range(11, 20)],
        [25, *range(29, 32)],
    ]
    assert [len(row) for row in rows] == [6, 10, 7, 15, 5, 1, 4, 4, 12, 14, 7, 4]


def test_lengths_tell_whether_branches_are_grouped():
    """SHARE-23"""
    (kind, *_) = layer_kinds(calls_of(built(mistral())))
    assert saves_calls(kind.random(Boundaries((20, *[8] * 40), (ROOT, *[0] * 40)), 16))
    assert not saves_calls(kind.random(Boundaries((20, 8), (ROOT, 0)), 16))
    assert not saves_calls(kind.random(Boundaries((3000, *[200] * 10), (ROOT, *[0] * 10)), 16))


# -- the choice -------------------------------------------------------------------------------------------------------


def ignores_branches(sequence):
    return segments(replace(sequence, parents=()))


def test_kernel_that_is_wrong_with_branches_is_not_used_for_them():
    """SHARE-23: in a run without them it is tried on flat sequences only, and used for these only."""
    model = built(mistral())
    kernels = {"segments": segments, "varlen": ignores_branches}
    line = choose(model, forward_of(model), kernels=kernels)
    assert line == "attention vlpack: varlen, equal to the reference"
    assert {*attention._kernels.values()} >= {ignores_branches}
    assert {attention._kernels_of_branches[module] for module in model.modules()} == {segments}
    assert max(compared(model, MIXED)) < 1e-5
    line = choose(model, forward_of(model), shares_prefixes=True, kernels=kernels)
    assert line.startswith("attention vlpack: segments, equal to the reference (varlen differs from the reference by")
    assert "where rows share a prefix" in line
    assert attention._kernels[model] is attention._kernels_of_branches[model] is segments


def test_lengths_choose_the_kernel_of_branches_too():
    """SHARE-23"""
    model = built(gpt_oss())
    line = choose(model, forward_of(model), shares_prefixes=True)
    assert line.startswith("attention vlpack: segments or grouped, by the lengths of each sequence")
    assert {attention._kernels_of_branches[module] for module in model.modules()} == {by_lengths}


def test_images_are_tried_with_branches():
    """SHARE-23: blocks of the sequence that is tried end where segments end."""
    (kind, *_) = layer_kinds(calls_of(built(gemma3_text())))
    layout = Boundaries((33, 20, 9), (ROOT, 0, 0))
    mask = of.or_masks(of.causal_mask_function, of.blockwise_overlay(torch.zeros(1, 4, dtype=torch.int64)))
    kind = replace(kind, call=replace(kind.call, mask=SequenceMask(mask, 4, {})))
    sequence = kind.random(layout, 16)
    for made, right in zip(results(sequence, segments), results(sequence, reference), strict=True):
        torch.testing.assert_close(made.double(), right.double(), atol=2e-5, rtol=2e-5)


def gemma3_text():
    return T.Gemma3TextConfig(**text(sliding_window=6, query_pre_attn_scalar=16))


# -- models -----------------------------------------------------------------------------------------------------------


def qwen3():
    return T.Qwen3Config(**text())


def qwen2_5_vl():
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 64}
    language = text(rope_parameters=rope, model_type="qwen2_5_vl_text")
    return T.Qwen2_5_VLConfig(text_config=language, vision_config=vision)


def compared(model, rows, samples=None, taken=lambda name: "token_type" not in name):
    """The largest differences of logits and gradients: a sequence with branches from each row alone under `eager`.

    `samples` has the rows alone; the tokens of a prefix are read from its first row.
    """
    samples = samples or rows_alone(rows)
    weights = [torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3)) for _ in samples]

    def score(logits, weight):
        return (logits.log_softmax(-1) * weight.to(logits)).sum(-1).sum() / 10

    model.set_attn_implementation("eager")
    model.zero_grad()
    alone = []
    for sample, weight, (_, prefix), is_first in zip(samples, weights, rows.alone, rows.first_of_units, strict=True):
        logits = run(model, {**sample, "attention_mask": torch.ones_like(sample["input_ids"])}, taken)
        alone.append(logits)
        score(logits if is_first else logits[prefix:], weight).backward()
    expected = gradients(model)
    model.set_attn_implementation(NAME)
    model.zero_grad()
    made = run(model, in_one_sequence(rows, samples), taken)
    found = [made[tokens] for tokens, _ in rows.alone]
    parts = zip(found, weights, rows.alone, rows.first_of_units, strict=True)
    sum(score(one if is_first else one[prefix:], weight) for one, weight, (_, prefix), is_first in parts).backward()
    of_ours = gradients(model)
    assert of_ours.keys() == expected.keys()
    return gap(alone, found), gap(list(expected.values()), [of_ours[name] for name in expected])


def rows_alone(rows):
    """Random tokens; the rows of a unit begin with the same."""
    samples, first = samples_of(tuple(len(tokens) for tokens, _ in rows.alone)), None
    for sample, (_, prefix), is_first in zip(samples, rows.alone, rows.first_of_units, strict=True):
        first = sample["input_ids"] if is_first else first
        sample["input_ids"][:, :prefix] = first[:, :prefix]
    return samples


def in_one_sequence(rows, samples):
    """Values by token from the rows alone, their positions too; pixels once a unit."""
    total = num_tokens(rows)
    sequence = {name: torch.zeros(1, total, dtype=torch.long) for name in samples[0] if name != "pixel_values"}
    sequence["position_ids"] = torch.zeros(1, total, dtype=torch.long)
    pixels = []
    for sample, (tokens, _), is_first in zip(samples, rows.alone, rows.first_of_units, strict=True):
        for name, value in sample.items():
            if name == "pixel_values":
                pixels += [value] if is_first else []
            else:
                sequence[name][:, tokens] = value
        sequence["position_ids"][:, tokens] = torch.arange(len(tokens))
    longest = torch.tensor(max(len(tokens) for tokens, _ in rows.alone))
    ends = tensor_of(rows.boundaries)
    if pixels:
        sequence["pixel_values"] = torch.cat(pixels)
    return sequence | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


TEXT_MODELS = (qwen3, qwen2_5_vl, gpt_oss, gemma2, mistral, llama4, deepseek, gemma3_text)


@pytest.mark.parametrize("config", TEXT_MODELS)
@pytest.mark.parametrize("rows", [MIXED, LONG])
def test_model_gives_every_row_what_it_gives_it_alone(config, rows):
    """SHARE-20 SHARE-21: logits and gradients of all weights; windows, chunks, sinks, soft cap, temperature."""
    for kernel in (segments, grouped):
        model = built(config())
        attention.use_kernel(model, kernel, kernel)
        assert max(compared(model, rows)) < 1e-5


def test_twenty_branches_in_double_precision():
    """SHARE-20: norms compute in single precision, and round the gradients of the branches before they are added."""
    of_logits, of_gradients = compared(built(gpt_oss(), dtype=torch.float64), MANY)
    assert of_logits < 1e-13
    assert of_gradients < 1e-6


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_keeps_the_branches(reentrant):
    """SHARE-20"""
    model = built(gemma2()).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert max(compared(model, MIXED)) < 1e-5


def with_image(rows, starts, size):
    """Rows alone, with images of `size` tokens from these places of each row."""
    samples = rows_alone(rows)
    generator = torch.Generator().manual_seed(2)
    pixels = None
    for sample, starts_of_row, is_first in zip(samples, starts, rows.first_of_units, strict=True):
        kinds = torch.zeros_like(sample["input_ids"])
        for start in starts_of_row:
            sample["input_ids"][:, start : start + size] = IMAGE
            kinds[:, start : start + size] = 1
        pixels = torch.randn(len(starts_of_row), 3, 28, 28, generator=generator) if is_first else pixels
        sample["token_type_ids"] = sample["mm_token_type_ids"] = kinds
        sample["pixel_values"] = pixels
    return samples


def test_images_of_a_model_that_sees_them_both_ways():
    """SHARE-21: in the prefix, encoded once, and in a flat sample."""
    rows = Rows(((15, (9, 12, 20)), (0, (25,)), (10, (4, 4))))
    samples = with_image(rows, ((3, 9), (3, 9), (3, 9), (0, 20), (5,), (5,)), 4)
    assert max(compared(built(gemma3_vision()), rows, samples, lambda name: True)) < 1e-5


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "leave", "name"),
    [(lfm2, (), "Lfm2DecoderLayer"), (qwen3_next, ("Qwen3NextGatedDeltaNet",), "Qwen3NextDecoderLayer")],
)
def test_layers_with_a_state_are_refused(config, leave, name):
    """SHARE-22: also those whose kernels are given the boundaries."""
    model = built(config())
    model.set_attn_implementation(NAME)
    restart_at_boundaries(model, leave)
    with pytest.raises(AttentionError, match=rf"{name} keeps a state along the sequence, .* packing_share=none"):
        run(model, in_one_sequence(MIXED, rows_alone(MIXED)), lambda name: True)


def test_boundaries_with_branches_of_another_sequence_are_refused():
    """SHARE-22"""
    with pytest.raises(AttentionError, match="from 0 to 57, but the batch is 1 sequence"):
        attended(states(56), MIXED)


def test_vision_tower_ignores_the_branches_of_the_text():
    """SHARE-20"""
    qkv = states(num_tokens(MIXED))
    everything = segmented_attention(Layer(is_causal=False), *qkv, None)[0]
    assert torch.equal(attended(qkv, MIXED, Layer(is_causal=False)), everything)
    assert torch.equal(attended(qkv, MIXED, is_causal=False), everything)
    assert not torch.equal(attended(qkv, MIXED), everything)


# -- sabotage ---------------------------------------------------------------------------------------------------------


def sees_sibling(sequence):
    """Every branch has the last token of its sibling among its keys."""
    return segments(replace(sequence, ends=shifted_fork(sequence.ends, sequence.parents)))


def shifted_fork(ends, parents):
    fork = next(number for number, parent in enumerate(parents) if parent != ROOT and parents[number - 1] == parent)
    return tuple(end - (number == fork) for number, end in enumerate(ends))


def top_left(monkeypatch):
    monkeypatch.setattr(masks, "past", lambda segment, window, device: masks.PAST)
    monkeypatch.setattr(packed_sequence, "past", lambda segment, window, device: masks.PAST)


def window_over_siblings(monkeypatch):
    monkeypatch.setattr(masks._FunctionOfSample, "matrix", masks_in_sequence)


def masks_in_sequence(self, function):
    place = self.segment.in_sequence(torch.arange(self.segment.num_keys))
    queries = place[self.segment.num_prefix :]
    return function(None, None, queries[:, None], place[None])[None, None]


def off_by_one(monkeypatch):
    made = masks.past

    def late(segment, window, device):
        mask = made(segment, window, device)
        return replace(mask, make=lambda: mask.matrix.roll(-1, dims=-2)) if segment.num_prefix else mask

    monkeypatch.setattr(masks, "past", late)
    monkeypatch.setattr(packed_sequence, "past", late)


@pytest.mark.parametrize("sabotage", [top_left, off_by_one])
def test_causal_from_another_corner_is_seen(sabotage, monkeypatch):
    """SHARE-20: so the tests above can fail."""
    sabotage(monkeypatch)
    assert gap_of(states(num_tokens(LONG)), LONG, causal) > 1e-2
    assert min(compared(built(qwen3()), LONG)) > 1e-3


def test_sibling_that_is_seen_is_seen():
    """SHARE-20"""
    model = built(qwen3())
    attention.use_kernel(model, segments, sees_sibling)
    assert min(compared(model, LONG)) > 1e-3


def test_window_over_siblings_is_seen(monkeypatch):
    """SHARE-21"""
    window_over_siblings(monkeypatch)
    model = built(gemma2())
    assert min(compared(model, Rows(((10, (20, 8, 8)),)))) > 1e-3


def test_positions_over_siblings_are_seen(monkeypatch):
    """SHARE-20"""
    rows = Rows(((10, (9, 8, 8)),))
    made = in_one_sequence
    for shift in (0, 1):
        positions = torch.arange(num_tokens(rows))[None] if not shift else None

        def wrong(rows, samples, positions=positions):
            sequence = made(rows, samples)
            moved = sequence["position_ids"] + (torch.arange(num_tokens(rows)) >= 10)
            return sequence | {"position_ids": moved if positions is None else positions}

        monkeypatch.setattr(f"{__name__}.in_one_sequence", wrong)
        assert min(compared(built(qwen3()), rows)) > 1e-3


def test_temperature_by_the_place_in_the_sequence_is_seen(monkeypatch):
    """SHARE-21"""
    monkeypatch.setattr(attention, "rescaled_by_sample", lambda module, query, bounds: query)
    assert min(compared(built(llama4()), LONG)) > 1e-3


def test_recorded_call_has_the_branches():
    """SHARE-20"""
    with recorded_calls() as calls:
        attended(states(num_tokens(MIXED)), MIXED)
    assert calls[0].parents == MIXED.boundaries.parents


def test_prefix_language_model_is_refused():
    """SHARE-22: the prefix sees the question there."""
    model = built(paligemma())
    rows = Rows(((20, (9, 9)),))
    samples = with_image(rows, ((2,), (2,)), 16)
    for sample in samples:
        sample["token_type_ids"] = torch.zeros_like(sample["input_ids"])
        sample["token_type_ids"][:, 25:] = 1
    with pytest.raises(AttentionError, match="which rows share, see what follows them"):
        compared(model, rows, samples, lambda name: True)
