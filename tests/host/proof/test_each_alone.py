"""Samples of a sequence alone: short texts share un-packed batches, if that gives them the same."""

import random

import pytest
import torch

from swift_vlpack.proof import each_alone as module
from swift_vlpack.proof.each_alone import _groups, each_alone
from swift_vlpack.proof.proof_model import ProofModel
from swift_vlpack.proof.prove import run_proof
from swift_vlpack.proof.reference import Reference, own_attention, run_alone
from tests.host.proof import sabotage as s
from tests.host.proof.proof_models import template_model, text_samples
from tests.host.proof.test_proof import QWEN

TEXTS = text_samples(*[5 + 7 * n % 40 for n in range(30)])


@pytest.fixture
def sizes(monkeypatch):
    """How many samples each forward has."""
    seen, right = [], ProofModel.run

    def run(self, samples, **options):
        seen.append(len(samples))
        return right(self, samples, **options)

    monkeypatch.setattr(ProofModel, "run", run)
    return seen


@pytest.mark.parametrize("make", [s.llama, s.gemma2])
def test_texts_that_share_a_batch_give_what_they_give_alone(make, sizes):
    """ISO-9: logits, labels, positions and inputs, in the order of the sequence."""
    right = make()
    with torch.no_grad(), own_attention(right.model):
        expected = [run_alone(right, sample) for sample in TEXTS]
        sizes.clear()
        found = list(each_alone(right, Reference(right, TEXTS), TEXTS))
    assert sizes == [1, 1, 2, 30]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.logits[0], other.logits[0], rtol=1e-4, atol=1e-5)
        assert torch.equal(one.labels[0], other.labels[0])
        assert torch.equal(one.positions[0], other.positions[0])
        assert torch.equal(one.inputs["input_ids"], other.inputs["input_ids"])


@pytest.mark.parametrize("seed", range(20))
def test_batches_hold_all_texts_once_and_few_tokens(seed):
    """ISO-9: padding included; none has a larger matrix of attention than one sample may have."""
    rng = random.Random(seed)
    for _ in range(10):
        lengths = sorted(rng.randint(1, 900) for _ in range(rng.randint(1, 60)))
        limit = rng.choice((900, 1000, 3000))
        groups = list(_groups(lengths, limit))
        assert [at for group in groups for at in range(len(lengths))[group]] == list(range(len(lengths)))
        for group in groups:
            of_group = lengths[group]
            if len(of_group) > 1:
                assert len(of_group) * max(of_group) <= module.TOKENS_TOGETHER
                assert len(of_group) * max(of_group) ** 2 <= limit**2


@pytest.mark.parametrize("kind", ["other in a batch", "no batches", "experts"])
def test_texts_run_alone_where_a_batch_gives_them_something_else(kind, sizes):
    """ISO-9"""
    right = s.gpt_oss() if kind == "experts" else s.llama()

    def change(module, args, made):
        if len(made) > 1 and kind == "no batches":
            raise RuntimeError("sizes of tensors must match")
        return made * 1.01 if len(made) > 1 else made

    if kind != "experts":
        right.model.model.layers[0].register_forward_hook(lambda *args: change(*args))
    assert run_proof(right, TEXTS[:4], [TEXTS]).num_more == 30
    assert sizes.count(1) >= 30
    assert max(size for size in sizes if size not in (4, 30)) <= 2
    assert sizes.count(30) == 1


def test_samples_with_media_run_alone(training, rows, sizes):
    """ISO-9: in one batch a tower that mixes images would mix them as in the sequence."""
    loaded = training(QWEN)
    right = template_model(loaded)
    encoded = [loaded.template.encode(row, return_length=True) for row in [rows["image"]] + [rows["text"]] * 9]
    with torch.no_grad(), own_attention(right.model):
        found = list(each_alone(right, Reference(right, encoded), encoded))
    assert sizes == [1, 1, 2, 9, 1]
    assert "pixel_values" in found[0].inputs
    assert not any("pixel_values" in one.inputs for one in found[1:])
