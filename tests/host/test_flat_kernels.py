"""Readers of boundaries that know flat ones only: what they make of a sequence in which rows share a prefix.

flash-attn needs CUDA to be built, so none of its kernels runs here. Its sources were read: version 2 takes
`cu_seqlens_q.numel() - 1` samples, versions 3 and 4 one less than its first dimension, and all of them then ask for the
shape `(samples + 1,)`, in front of the kernel. What runs here is everything before that: transformers' own path to the
kernel, which hands the tensor on as it is; and ms-swift's own readers.
"""

from types import SimpleNamespace

import pytest
import torch
from swift.utils.transformers_utils import get_packed_seq_params, get_position_ids_from_cu_seqlens
from transformers import modeling_flash_attention_utils as flash
from transformers.integrations.flash_attention import flash_attention_forward

from swift_vlpack.attention.packed_sequence import tensor_of
from swift_vlpack.feed.sequence import boundary_tensors
from swift_vlpack.plan.boundaries import Boundaries

FLAT = Boundaries((4, 3, 5))
UNIT = Boundaries((4, 3, 5), parents=(-1, 0, 0))
CHECKS = {
    "flash_attn 2": lambda ends: ends.numel() - 1,
    "flash_attn 3 and 4": lambda ends: ends.shape[0] - 1,
}
"""How the versions count samples, before they ask for the shape (samples + 1,)."""


class Layer(torch.nn.Module):
    """What transformers asks of a layer on the way to a kernel of flash-attn."""

    is_causal, layer_idx, config = True, 0, SimpleNamespace(_attn_implementation="stand_in")


@pytest.fixture
def handed(monkeypatch):
    """The boundaries that transformers hands to a kernel; the kernel stands in for flash-attn and computes nothing."""
    found = []

    def kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, **options):
        found.append((cu_seqlens_q, cu_seqlens_k))
        return torch.zeros_like(q)

    for name, value in (
        ("_loaded_implementation", "stand_in"),
        ("_flash_fn", None),
        ("_flash_varlen_fn", kernel),
        ("_flash_with_kvcache_fn", None),
        ("_pad_fn", None),
        ("_unpad_fn", None),
        ("_process_flash_kwargs_fn", flash._lazy_define_process_function(kernel)),
        ("_process_with_kvcache_kwargs_fn", dict),
    ):
        monkeypatch.setattr(flash, name, value)
    return found


def attended(boundaries, **asked):
    query = torch.randn(1, 2, boundaries.num_tokens, 8, dtype=torch.bfloat16)
    return flash_attention_forward(Layer(), query, query, query, None, **asked)


@pytest.mark.parametrize("boundaries", [FLAT, UNIT], ids=["flat", "unit"])
def test_transformers_hands_boundaries_to_the_kernel_as_they_are(boundaries, handed):
    """SHARE-20: flash-attn is given two lines for a unit, and refuses them by its check of the shape."""
    attended(boundaries, **boundary_tensors(boundaries))
    for ends in handed[0]:
        assert torch.equal(ends, tensor_of(boundaries))
        for num_samples in CHECKS.values():
            assert (ends.shape == (num_samples(ends) + 1,)) == (boundaries is FLAT)


def test_positions_alone_do_not_tell_a_unit_from_a_sample(handed):
    """SHARE-49: this is why flash-attn is refused by name: without boundaries transformers reads the positions."""
    attended(UNIT, position_ids=torch.tensor([UNIT.position_ids]))
    ((ends, _),) = handed
    assert ends.tolist() == [0, UNIT.num_tokens], "one sample: branches see each other, and nothing fails"


def test_readers_of_swift_fail_on_two_lines_and_take_positions_for_one_sample():
    """SHARE-20 SHARE-49"""
    assert get_position_ids_from_cu_seqlens(tensor_of(FLAT)).tolist() == [list(FLAT.position_ids)]
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        get_position_ids_from_cu_seqlens(tensor_of(UNIT))
    found = get_packed_seq_params(torch.tensor([UNIT.position_ids]))["cu_seq_lens_q"]
    assert found.tolist() == [0, UNIT.num_tokens]
