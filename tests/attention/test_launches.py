"""A packed layer starts as many operations as its kernel says, however many samples share the sequence."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swift_vlpack.attention import attention
from swift_vlpack.attention.attention import NAME
from swift_vlpack.attention.choose_kernel import layer_kinds, results
from swift_vlpack.attention.kernels import grouped, segments, varlen
from swift_vlpack.attention.linear_attention import restart_at_boundaries
from swift_vlpack.plan.boundaries import ROOT, Boundaries
from tests.attention.one_by_one import built, packed, run, samples_of
from tests.attention.test_choose_kernel import calls_of
from tests.attention.test_honours import gemma2, gpt_oss, llama4, mistral
from tests.attention.test_linear_attention import lfm2
from tests.attention.test_rehearsal import LAYOUTS, sequence_of
from tests.fake_cuda import rehearsal

SIXTY = (48,) * 20 + (36,) * 20 + (24,) * 20
THIRTY = (48,) * 10 + (36,) * 10 + (24,) * 10
"""Three groups as well. All are longer than windows and chunks, so that they have masks of one kind."""


class Operations(TorchDispatchMode):
    """Operations that compute something: on a GPU, each launches a kernel or a few."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and function.namespace != "prim":
            self.found[str(function)] += 1
        return function(*args, **(kwargs or {}))

    @property
    def count(self):
        return self.found.total()


def of_layer(kind, kernel, lengths):
    """Forward and backward of one layer, the second time: layers share what is known of a sequence."""
    sequence = kind.random(lengths, 1024)
    results(sequence, kernel)
    with Operations() as operations:
        results(sequence, kernel)
    return operations.count


def plain(sequence):
    """The whole sequence by one call of sdpa, as an un-packed row."""
    whole = torch.nn.functional.scaled_dot_product_attention(
        sequence.query, sequence.key, sequence.value, is_causal=True, enable_gqa=True
    )
    return whole.transpose(1, 2).contiguous()


@pytest.mark.parametrize("config", [mistral, gemma2, gpt_oss])
def test_operations_of_grouped_are_a_function_of_its_groups(config):
    """ATTN-12: with windows, soft cap and sinks, too; 30 a group and 30 for all of them, gradients included."""
    for kind in layer_kinds(calls_of(built(config()))):
        of_sixty, of_thirty = (of_layer(kind, grouped, lengths) for lengths in (SIXTY, THIRTY))
        assert of_sixty == of_thirty
        of_groups = [of_layer(kind, grouped, SIXTY[20 * n :]) for n in (2, 1, 0)]
        assert of_groups[1] - of_groups[0] == of_groups[2] - of_groups[1] < 40


def test_operations_beside_those_of_a_plain_row():
    """ATTN-12: of one layer with 60 samples, by kernel."""
    (kind, *_) = layer_kinds(calls_of(built(mistral())))
    counted = {kernel.__name__: of_layer(kind, kernel, SIXTY) for kernel in (plain, grouped, segments)}
    assert counted["grouped"] < counted["plain"] + 30 + 3 * 15
    assert counted["segments"] > counted["plain"] + 60 * 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operations_of_varlen_do_not_depend_on_samples(layout):
    """ATTN-12: counted on fake CUDA tensors, so of the forward."""
    counts = []
    for num in (30, 60):
        boundaries = Boundaries((40, *(10,) * num), (ROOT, *(0,) * num) if layout == "forest" else ())
        with rehearsal():
            sequence = sequence_of(boundaries)
            varlen(sequence)
            with Operations() as operations:
                varlen(sequence)
        counts.append(operations.count)
    assert counts == ([4, 4] if layout == "flat" else [6, 6]), "three states in order, the keys of rows, one kernel"


@pytest.mark.parametrize("config", [mistral, gemma2, llama4, lfm2])
def test_operations_of_a_packed_model_do_not_depend_on_samples(config):
    """ATTN-12: masks, positions, temperatures and states, forward and backward, the first time."""
    model = built(config())
    model.set_attn_implementation(NAME)
    attention.use_kernel(model, grouped)
    if config is lfm2:
        restart_at_boundaries(model)
    counts = []
    for lengths in (SIXTY, THIRTY):
        row = packed(samples_of(lengths))
        with Operations() as operations:
            run(model, row, lambda name: "token_type" not in name).sum().backward()
        model.zero_grad()
        counts.append(operations.found)
    assert counts[0] == counts[1], counts[0] - counts[1] or counts[1] - counts[0]
