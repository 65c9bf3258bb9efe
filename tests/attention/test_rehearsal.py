"""Kernels and decoders on CUDA tensors that are fake (`tests/fake_cuda.py`): devices, types, strides, and no wait."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers as T
from torch.nn.attention import varlen as of_torch
from transformers import masking_utils as of

from swift_vlpack.attention import attention, kernels
from swift_vlpack.attention.choose_kernel import LENGTHS, WITH_BRANCHES
from swift_vlpack.attention.kernels import KERNELS, CannotDo, by_lengths
from swift_vlpack.attention.masks import SequenceMask
from swift_vlpack.attention.packed_sequence import AttentionArgs, PackedSequence, boundaries_of, known_bounds, tensor_of
from swift_vlpack.plan.boundaries import Boundaries
from tests.attention.one_by_one import packed, samples_of, text
from tests.attention.test_attention import Layer
from tests.attention.test_honours import gemma2, llama4, mistral
from tests.fake_cuda import on_cuda, rehearsal, use_watched
from tests.marks import telling

LAYOUTS = {"flat": Boundaries(LENGTHS), "forest": WITH_BRANCHES}
ASKED = {
    "plain": {}, "window": {"window": 16}, "window of a mask": {"mask": 16}, "sinks": {"sinks": True},
    "soft cap": {"softcap": 30.0}, "dropout": {"dropout": 0.1}, "float32": {"dtype": torch.float32},
    "bias": {"bias": True},
}  # fmt: skip
FLAT = [("plain", "flat"), ("window", "flat"), ("bias", "flat")]  # the bias of a branch is looked at on the device
CANNOT = {
    "varlen": {"sinks", "soft cap", "dropout", "float32", "bias"},
    "grouped": {"bias"},
    "by_lengths": {"bias"},
    "flex": {"dropout", "bias"},
}


@pytest.fixture
def cuda():
    with rehearsal() as waited_for:
        yield waited_for
        assert not waited_for


def sequence_of(boundaries, *, window=None, mask=None, sinks=False, bias=False, dtype=torch.bfloat16, **asked):
    """A call of attention with four heads on two, on a GPU."""
    num = boundaries.num_tokens
    options = {"device": torch.device("cuda"), "allow_is_causal_skip": True, "use_vmap": False}
    return PackedSequence(
        Layer().train(),
        *(torch.empty(1, num_heads, num, 16, device="cuda", dtype=dtype) for num_heads in (4, 2, 2)),
        mask and SequenceMask(of.sliding_window_causal_mask_function(mask), num, options),
        window,
        AttentionArgs(
            scaling=0.25,
            sinks=torch.empty(4, device="cuda", dtype=dtype) if sinks else None,
            position_bias=torch.empty(1, 4, num, num, device="cuda", dtype=dtype) if bias else None,
            **asked,
        ),
        boundaries.cu_seqlens,
        boundaries.parents,
    )


def assert_attended(made, sequence):
    num_tokens, num_heads = sequence.query.shape[2], sequence.query.shape[1]
    assert made.device.type == "cuda"
    assert made.dtype == sequence.query.dtype
    assert made.shape == (1, num_tokens, num_heads, 16)
    assert made.is_contiguous()


@pytest.mark.parametrize(("asked", "layout"), [(one, "forest") for one in ASKED if one != "bias"] + FLAT)
@pytest.mark.parametrize("name", ["segments", "grouped", "varlen", "by_lengths"])
def test_kernel_computes_on_the_device_or_says_why_not(cuda, name, asked, layout):
    """ATTN-11"""
    sequence = sequence_of(LAYOUTS[layout], **ASKED[asked])
    kernel = {**KERNELS, "by_lengths": by_lengths}[name]
    if asked in CANNOT.get(name, ()):
        with pytest.raises(CannotDo):
            kernel(sequence)
    else:
        assert_attended(kernel(sequence), sequence)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("window", "expected"), [(None, (-1, 0)), (16, (15, 0))])
def test_what_varlen_is_called_with(cuda, monkeypatch, layout, window, expected):
    """ATTN-11: boundaries of 32 bits on the device, tokens before heads, the longest as numbers."""
    calls, call = [], of_torch.varlen_attn

    def varlen_attn(*args, **kwargs):
        calls.append((args, kwargs))
        return call(*args, **kwargs)

    monkeypatch.setattr(of_torch, "varlen_attn", varlen_attn)
    boundaries = LAYOUTS[layout]
    kernels.varlen(sequence_of(boundaries, window=window))
    (((query, key, value, ends, ends_of_keys, *longest), options),) = calls
    num_keys = sum(one.num_keys for one in sequence_of(boundaries).segments)
    assert (query.shape, key.shape) == ((boundaries.num_tokens, 4, 16), (num_keys, 2, 16))
    assert all(one.is_contiguous() and one.dtype == torch.bfloat16 for one in (query, key, value))
    for one in (ends, ends_of_keys):
        assert (one.dtype, one.device.type, one.shape) == (torch.int32, "cuda", (len(boundaries.lengths) + 1,))
    assert [type(one) for one in longest] == [int, int]
    assert options == {"scale": 0.25, "window_size": expected, "enable_gqa": True}


@pytest.mark.parametrize(
    ("asked", "layout"), [("sinks", "flat"), ("soft cap", "forest"), ("dropout", "flat"), telling("window", "forest")]
)
def test_compiled_flex_takes_its_mask(monkeypatch, asked, layout):
    """ATTN-11: captured and traced as for CUDA; only the last step, which makes code for the driver, is left out."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    with rehearsal(compiles=True):
        sequence = sequence_of(LAYOUTS[layout], **ASKED[asked])
        if asked in CANNOT["flex"]:
            with pytest.raises(CannotDo):
                kernels.flex(sequence)
        else:
            assert_attended(kernels.flex(sequence), sequence)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 16])
def test_mask_of_flex_is_made_on_the_device(cuda, window, layout):
    """ATTN-11"""
    bounds = sequence_of(LAYOUTS[layout]).bounds
    made = kernels.block_mask(bounds, window, torch.device("cuda"))
    num_tokens = bounds.ends[-1]
    assert made.kv_indices.device.type == "cuda"
    assert made.shape == (1, 1, num_tokens, num_tokens)


def test_device_is_not_asked_which_samples_have_images(cuda):
    """ATTN-11: every sample of a model with image blocks gets a matrix there."""
    num = LAYOUTS["flat"].num_tokens
    blocks, padding = torch.zeros(1, num, dtype=torch.int64, device="cuda"), torch.ones(1, num, device="cuda").bool()
    function = of.or_masks(of.causal_mask_function, of.blockwise_overlay(blocks))
    options = {"device": torch.device("cuda"), "allow_is_causal_skip": True, "use_vmap": True}
    for changed in ({}, {"attention_mask": padding}):
        sequence = replace(sequence_of(LAYOUTS["flat"]), mask=SequenceMask(function, num, {**options, **changed}))
        assert all(sequence.mask_of(segment).matrix is not None for segment in sequence.segments)
        assert_attended(kernels.segments(sequence), sequence)
        for kernel in (kernels.grouped, kernels.varlen):
            with pytest.raises(CannotDo):
                kernel(sequence)


def test_waits_show():
    """ATTN-11: what the rehearsal cannot overlook."""
    with rehearsal() as waited_for:
        numbers = torch.tensor([1, 2], device="cuda")
        assert waited_for == ["(2,) from cpu to cuda"]
        for ask in (bool, int, torch.Tensor.item):
            with pytest.raises(RuntimeError, match="_local_scalar_dense"):
                ask(numbers[0])
        for ask in (torch.nonzero, boundaries_of, lambda one: one[one > 0], lambda one: one.repeat_interleave(one)):
            with pytest.raises(RuntimeError, match=r"aten.nonzero|tolist|_local_scalar_dense|aten.repeat_interleave"):
                ask(numbers)
        numbers.cpu()
        assert len(waited_for) == 2


# -- decoders ---------------------------------------------------------------------------------------------------------


def qwen2():
    return T.Qwen2Config(**text(head_dim=None))


def inputs_of(boundaries):
    """A packed sequence as it is after its batch was moved."""
    moved = {name: value.to("cuda") for name, value in packed(samples_of(boundaries.lengths)).items()}
    moved["cu_seq_lens_q"] = tensor_of(boundaries).to("cuda")
    known_bounds[moved["cu_seq_lens_q"]] = attention.Bounds(boundaries.cu_seqlens, boundaries.parents)
    return moved


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("config", "kernel"),
    [(qwen2, "varlen"), (qwen2, "segments"), (mistral, "varlen"), (gemma2, "grouped"), (llama4, "grouped")],
)
def test_text_decoder_runs_on_the_device(config, kernel, layout):
    """ATTN-11: masks of transformers, windows, chunks, temperatures."""
    with rehearsal() as waited_for:
        model = on_cuda(T.AutoModelForCausalLM, config())
        computed = use_watched(model, KERNELS[kernel])
        inputs = inputs_of(LAYOUTS[layout])
        waited_for.clear()
        made = model(**inputs, use_cache=False).logits
        assert (made.device.type, made.dtype, made.shape[1]) == ("cuda", torch.bfloat16, LAYOUTS[layout].num_tokens)
        assert len(computed) == 2
        assert not waited_for
