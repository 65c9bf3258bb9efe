import copy
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from swift.trainers.utils import per_token_loss_func

from swift_vlpack.errors import IsolationError
from swift_vlpack.feed.collate import NOT_FOR_THE_MODEL, Collator
from swift_vlpack.feed.sequence import packed_sequence
from swift_vlpack.proof.perturb import replaced
from swift_vlpack.proof.prove import is_ordinary_token, run_proof
from swift_vlpack.proof.reference import untouched
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.samples import SampleId
from tests.data_rows import text_row
from tests.host.proof.runners import template_model

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
FAMILY = "qwen2_5_vl"
KINDS = ("image", "images", "text", "video")
SHORT = ("image", "text", "images")


def row_of(loaded, samples):
    """Without a collator, which refuses an attention that knows no boundaries."""
    return packed_sequence(loaded.template, [dict(sample) for sample in samples])


def inputs_of(loaded, samples, **changes):
    """What the model gets of a pack; `changes` replace inputs, None takes one away."""
    row = row_of(loaded, samples)
    inputs = {name: value for name, value in row.items() if name not in ("labels", *NOT_FOR_THE_MODEL)} | changes
    return {name: value for name, value in inputs.items() if value is not None}


def forward_of(loaded, **changes):
    """The forward that the proof runs."""

    def forward(samples):
        with torch.no_grad():
            return loaded.model(**inputs_of(loaded, samples, **changes)).logits[0].float()

    return forward


def gap(one, other):
    return float((one - other).abs().max())


def lengths_of(samples):
    return [sample["length"] for sample in samples]


# -- logits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_equal_those_of_every_sample_alone(training, encoded, family):
    """ISO-2 ISO-8: text, an image, several images and a video in one pack; the control attention tells them apart."""
    loaded = training(family)
    samples = encoded(loaded.template, KINDS)
    forward = forward_of(loaded)
    alone = [forward([sample]) for sample in samples]
    packed = forward(samples).split(lengths_of(samples))
    assert max(map(gap, packed, alone)) < 1e-5
    loaded.model.set_attn_implementation("sdpa")
    assert gap(forward(samples[:1]), alone[0]) < 1e-5
    leaked = forward(samples).split(lengths_of(samples))
    assert gap(leaked[0], alone[0]) < 1e-5, "the first has nobody before it"
    assert min(map(gap, leaked[1:], alone[1:])) > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_neighbours_do_not_move_when_a_sample_changes(training, encoded, family):
    """ISO-2"""
    loaded = training(family)
    samples = encoded(loaded.template, SHORT)
    is_ordinary, forward = is_ordinary_token(loaded.template.tokenizer), forward_of(loaded)
    others = [replaced(samples[0], is_ordinary), *samples[1:]]

    def moved():
        before, after = (forward(pack).split(lengths_of(samples)) for pack in (samples, others))
        return list(map(gap, before, after))

    assert moved()[0] > 0.1
    assert max(moved()[1:]) < 1e-6
    loaded.model.set_attn_implementation("sdpa")
    assert min(moved()) > 0.1, "without boundaries they do"


def test_order_of_the_samples_does_not_matter(training, encoded):
    """ISO-2"""
    loaded = training(FAMILY)
    samples = encoded(loaded.template, SHORT)
    forward = forward_of(loaded)
    there = forward(samples).split(lengths_of(samples))
    back = forward(samples[::-1]).split(lengths_of(samples[::-1]))
    assert max(map(gap, there, back[::-1])) < 1e-5


# -- loss and gradients -----------------------------------------------------------------------------------------------


def loss_of(loaded, samples, num_targets):
    """The loss as ms-swift's trainer computes it: the sum over the sequence's targets, over those of the whole step."""
    row = row_of(loaded, samples)
    inputs = inputs_of(loaded, samples)
    if "loss_scale" not in row:
        inputs["labels"] = row["labels"]
        return loaded.template.compute_sft_loss(loaded.model, inputs, num_items_in_batch=num_targets).loss
    loss = per_token_loss_func(loaded.model(**inputs), row["labels"])
    return (loss * row["loss_scale"].roll(-1, dims=-1).view(-1)).sum() / num_targets


def step_of(loaded, packs):
    """Loss and gradients of one optimizer step over these packs."""
    loaded.model.zero_grad()
    num_targets = sum(label != -100 for pack in packs for sample in pack for label in sample["labels"][1:])
    total = 0.0
    for pack in packs:
        loss = loss_of(loaded, pack, num_targets)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in loaded.model.named_parameters() if p.grad is not None}


def assert_same_step(loaded, samples):
    loss, grads = step_of(loaded, [samples])
    expected_loss, expected = step_of(loaded, [[sample] for sample in samples])
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    assert set(grads) == set(expected)
    for name, grad in grads.items():
        assert gap(grad, expected[name]) < 1e-5, name
    return grads


@pytest.mark.parametrize("family", FAMILIES)
def test_step_on_a_mixed_pack_equals_the_samples_one_by_one(training, encoded, family):
    """ISO-3 ISO-8"""
    loaded = training(family)
    grads = assert_same_step(loaded, encoded(loaded.template, KINDS))
    assert len(grads) == len(list(loaded.model.parameters()))
    largest = {part: max(float(g.abs().max()) for n, g in grads.items() if part in n) for part in ("visual", "layers")}
    assert min(largest.values()) > 1e-2, "there is something to compare"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kinds", [("text", "action", "text"), ("images", "image", "images")])
def test_step_on_a_pack_of_one_kind_equals_the_samples_one_by_one(training, encoded, family, kinds):
    """ISO-3 ISO-8"""
    loaded = training(family)
    assert_same_step(loaded, encoded(loaded.template, kinds))


@pytest.mark.parametrize("family", FAMILIES)
def test_step_with_loss_scale_equals_the_samples_one_by_one(training, encoded, family):
    """ISO-3: one sample is scaled by ms-swift, its neighbours are not."""
    loaded = training(family)
    scaling = copy.copy(loaded.template)
    scaling._loss_scale = "react"
    samples = encoded(loaded.template, ("text", "image"))
    samples[1:1] = encoded(scaling, ("action",))
    assert 2.0 in samples[1]["loss_scale"]
    grads = assert_same_step(loaded, samples)
    del samples[1]["loss_scale"]
    _, unscaled = step_of(loaded, [samples])
    assert max(gap(grads[name], unscaled[name]) for name in grads) > 1e-3, "the scale counts"


def test_step_with_an_attention_that_knows_no_boundaries_is_another_one(training, encoded):
    """ISO-3: what the comparison above would say if samples saw each other."""
    loaded = training(FAMILY)
    loaded.model.set_attn_implementation("sdpa")
    samples = encoded(loaded.template, SHORT)
    (_, leaked), (_, expected) = step_of(loaded, [samples]), step_of(loaded, [[sample] for sample in samples])
    assert max(gap(leaked[name], expected[name]) for name in leaked) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_first_token_is_never_the_target_of_the_sample_before(training, encoded, family):
    """ISO-4"""
    loaded = training(family)
    samples = encoded(loaded.template, ("text", "image", "action"))
    labels = Collator(loaded.template).sequence(samples)["labels"]
    outputs = loaded.model(**inputs_of(loaded, samples, labels=labels))
    outputs.logits.retain_grad()
    outputs.loss.backward()
    is_trained = outputs.logits.grad[0].abs().sum(-1) > 0
    ends = [0, *torch.tensor(lengths_of(samples)).cumsum(0).tolist()]
    for (start, end), sample in zip(pairwise(ends), samples, strict=True):
        assert not is_trained[end - 1], "the last token of a sample predicts nothing"
        targets = [label != -100 for label in sample["labels"][1:]]
        assert is_trained[start : end - 1].tolist() == targets
        assert any(targets)


def test_first_label_is_masked_where_the_template_cut_the_sample(training):
    """ISO-4 DATA-8"""
    template = copy.copy(training(FAMILY).template)
    template.max_length, template.truncation_strategy = 25, "left"
    sample = RowEncoder(template).sample(text_row(answer="word " * 100), SampleId("text", 0))
    assert sample["length"] == 25
    assert sample["labels"][0] == -100
    assert -100 not in sample["labels"][1:], "the cut went through the answer"


@pytest.mark.parametrize("family", FAMILIES)
def test_pack_without_an_image_trains_after_one_with_images(training, encoded, family):
    """ISO-8"""
    loaded = training(family)
    pictures, words = (
        encoded(loaded.template, ("image", "images")),
        encoded(loaded.template, ("text", "text")),
    )
    _, of_pictures = step_of(loaded, [pictures])
    loss, of_words = step_of(loaded, [words])
    assert np.isfinite(loss)
    assert loss > 0
    assert all(torch.isfinite(grad).all() for grad in of_words.values())
    assert max(float(grad.abs().max()) for name, grad in of_words.items() if "visual" not in name) > 1e-2
    assert all(not grad.any() for name, grad in of_words.items() if "visual" in name)
    assert any(grad.any() for name, grad in of_pictures.items() if "visual" in name)


# -- the model afterwards ---------------------------------------------------------------------------------------------


def test_proof_leaves_the_model_as_it_was(training, encoded):
    """ISO-6"""
    loaded = training(FAMILY)
    model = loaded.model
    samples = encoded(loaded.template, ("text", "image"))
    model.train()
    model.model.visual.eval()  # a frozen tower
    parameters = list(model.parameters())
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 0.5) if number % 2 else None
    modes = [module.training for module in model.modules()]
    grads = [parameter.grad for parameter in parameters]
    values = [parameter.detach().clone() for parameter in parameters]
    buffers = [buffer.clone() for buffer in model.buffers()]
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    try:
        with untouched(model):
            assert not any(module.training for module in model.modules())
            assert not forward_of(loaded)(samples).requires_grad
            run_proof(template_model(loaded), samples)
            random.random(), np.random.rand(), torch.rand(1)
            for buffer in model.buffers():
                buffer += 1
        assert len({*modes}) == 2
        assert [module.training for module in model.modules()] == modes
        assert all(parameter.grad is grad for parameter, grad in zip(parameters, grads, strict=True))
        assert all(grad is None or (grad == 0.5).all() for grad in grads)
        assert all(map(torch.equal, parameters, values))
        assert len(buffers) > 0
        assert all(map(torch.equal, model.buffers(), buffers))
        assert random.getstate() == states[0]
        assert np.random.get_state()[1].tolist() == states[1]
        assert torch.equal(torch.get_rng_state(), states[2])
        assert torch.is_grad_enabled()
        assert all(parameter.requires_grad for parameter in parameters)
    finally:
        model.eval()


def test_failed_proof_leaves_the_model_as_it_was_too():
    """ISO-6"""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.5))
    model[1].eval()
    state = torch.get_rng_state()
    with pytest.raises(IsolationError, match="leak"), untouched(model):
        fail_after_running(model)
    assert [module.training for module in model] == [True, False]
    assert model[0].running_mean.tolist() == [0, 0]
    assert model[0].num_batches_tracked == 0
    assert torch.equal(torch.get_rng_state(), state)


def fail_after_running(model):
    model.train()
    model(torch.rand(4, 2))
    raise IsolationError("leak")
