"""What the evidence says, in a sentence. Whole models that are wrong in these ways: `test_sabotage.py`."""

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swift_vlpack.errors import IsolationError
from swift_vlpack.proof import explain
from swift_vlpack.proof.explain import (
    INPUT,
    Evidence,
    Origin,
    Tokens,
    cause_of,
    evidence_of,
    samples_to_change,
    where,
)
from swift_vlpack.proof.prove import run_proof
from swift_vlpack.proof.verdict import Limits
from tests.host.proof import sabotage as s
from tests.host.proof.runners import text_samples

LIMITS = Limits(1e-4, 1e-3)
ALL, NORM = Tokens(0, 29), Origin("layers.0.norm", "RMSNorm")
ATTENTION = Origin("layers.0.self_attn.o_proj", "Linear", is_attention=True)
LATER = {(0, 1): ALL, (0, 2): ALL, (1, 2): ALL}


def seen(**facts):
    facts = {"differs": {0: ALL}, **facts}
    return Evidence(**{"attention": "vlpack", "num_samples": 3, "changed": (0, 1, 2), "origin": ATTENTION, **facts})


CAUSES = {
    "sdpa": (seen(attention="sdpa"), "attention sdpa knows no boundaries; leave attn_impl unset"),
    "all later ones": (seen(moved=LATER), "causal and has no boundaries"),
    "earlier ones": (seen(moved={(1, 0): ALL}), "not causal over the sequence"),
    "one boundary": (seen(moved={(0, 1): ALL}), "boundary before sample 2 of the sequence is lost"),
    "a layer with a state": (seen(moved=LATER, origin=ATTENTION._replace(is_stateful=True)), "linear attention"),
    "outside of attention": (
        seen(moved=LATER, origin=NORM),
        r"of attention, first in layers\.0\.norm \(RMSNorm",
    ),
    "branches": (seen(moved={(0, 1): ALL}, units=[[0, 1]]), "branches of one prefix see each other"),
    "media": (seen(moved={(2, 0): ALL}, origin=Origin(INPUT)), f"one sample reach another, first {INPUT}"),
    "embedded": (seen(differs={0: ALL}, origin=Origin(INPUT)), f"samples differ, first {INPUT}"),
    "a module": (seen(differs={0: ALL}, origin=NORM), "something else in the sequence than alone, first in layers"),
    "the first token": (seen(differs={0: ALL}), r"from token 0 on \(sinks"),
    "the second token": (seen(differs={0: Tokens(1, 29)}), r"from token 1 on \(scaling, a soft cap"),
    "rope": (seen(origin=Origin("model.rotary_emb")), "rotary embeddings turn samples by other angles"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_cause_follows_the_evidence(name):
    """ISO-15"""
    evidence, cause = CAUSES[name]
    assert re.search(cause, cause_of(evidence))


def test_evidence_names_sample_tokens_and_module_and_leaves_the_model_as_it_was():
    """ISO-6 ISO-15: of a boundary that is lost in the second layer only."""
    right = s.llama(attention_dropout=0.5)
    second = right.model.model.layers[1].self_attn

    def attend(module, *args, **options):
        return (s.ignoring_boundaries if module is second else s.segmented_attention)(module, *args, **options)

    samples = text_samples(24, 9, 31)
    right.model.train()
    with s.attending(right, attend):
        evidence = evidence_of(right, samples, LIMITS)
    assert set(evidence.moved) == {(0, 1), (0, 2), (1, 2)}
    assert set(evidence.differs) == {1, 2}
    assert where(samples, evidence).startswith(
        "text:1, number 2 of 3 in its sequence, differs from token 0 to 8 of 9, first in model.layers.1.self_attn"
    )
    assert right.model.training
    assert second.attention_dropout == 0.5
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in right.model.modules())
    assert torch.is_grad_enabled()


class Largest(TorchDispatchMode):
    """Remembers the most bytes that a tensor of a sequence held, and of what was kept of modules' outputs."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        of_one = [one.untyped_storage().nbytes() for one in tree_leaves(made) if isinstance(one, torch.Tensor)]
        self.num_bytes = max(self.num_bytes, *of_one, 0)
        return made


def test_explanation_takes_some_columns_of_a_large_vocabulary_and_never_all(monkeypatch):
    """ISO-15: of a long sequence, in which boundaries are lost; every module's output is kept as a few columns."""
    num_words, long = 60_000, text_samples(*[30] * 40)

    @s.if_packed
    def losing_the_tenth(right, args, ends, options):
        return s.segmented_attention(*args, cu_seq_lens_q=ends[torch.arange(len(ends)) != 10], **options)

    kept, parts = [], explain.parts_of
    monkeypatch.setattr(explain, "parts_of", lambda *args, **to: kept.append(parts(*args, **to)) or kept[-1])
    with (
        s.attending(s.llama(vocab_size=num_words), losing_the_tenth) as broken,
        Largest() as largest,
        pytest.raises(IsolationError, match=r"boundary before sample 11 .*layers\.0\.self_attn"),
    ):
        run_proof(broken, text_samples(24, 9, 31, 14, 20), [long])
    assert largest.num_bytes < 1200 * num_words * 4 / 10
    assert max(part.made.untyped_storage().nbytes() for part in kept[0].values()) <= 1200 * 16 * 4


def test_of_a_long_row_the_samples_around_the_wrong_one_are_changed():
    """ISO-15"""
    assert samples_to_change(9, 4) == tuple(range(9))
    assert samples_to_change(60, 30) == (0, 1, 28, 29, 30, 31, 32, 58, 59)


def test_leak_inside_the_forward_of_a_layer_is_told_as_the_layer(monkeypatch):
    """ISO-15: the input of its norm differs already, so the norm is not to blame."""
    right = s.llama()
    layer = right.model.model.layers[1]
    forward = layer.forward
    monkeypatch.setattr(
        layer, "forward", lambda hidden, *args, **to: forward(hidden + 0.1 * hidden.mean(1, keepdim=True), *args, **to)
    )
    with pytest.raises(IsolationError, match=r"outside of attention, first in model\.layers\.1 \(LlamaDecoderLayer\)"):
        run_proof(right, text_samples(24, 9, 31, 14, 20))


def test_rope_that_is_stretched_by_the_row_is_told_as_rope(monkeypatch):
    """ISO-15: positions are right, and attention is not to blame."""
    right = s.llama()
    rotary = right.model.model.rotary_emb
    forward = rotary.forward
    monkeypatch.setattr(
        rotary, "forward", lambda x, position_ids: forward(x, position_ids * (1 if x.shape[1] < 50 else 0.9))
    )
    with pytest.raises(IsolationError, match="rotary embeddings turn samples by other angles"):
        run_proof(right, text_samples(24, 9, 31, 14, 20))
