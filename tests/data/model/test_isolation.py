import copy
import random
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from swift.trainers.utils import per_token_loss_func

from swift_vlpack.core.errors import BoundaryError
from swift_vlpack.data.model.attention import NAME
from swift_vlpack.data.model.collate import NOT_FOR_THE_MODEL, Collator, packed_row
from swift_vlpack.data.model.isolation import IsolationError, diagnosis, proof_of, replaced, untouched
from swift_vlpack.data.model.proof import is_ordinary_token
from swift_vlpack.data.rows.fusion import encode_row
from swift_vlpack.data.rows.samples import SampleId
from tests.images import photo
from tests.rows import image_row, text_row

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
FAMILY = "qwen2_5_vl"
KINDS = ("image", "images", "text", "video")
SHORT = ("image", "text", "images")


def row_of(loaded, samples):
    """Without a collator, which refuses an attention that knows no boundaries."""
    return packed_row(loaded.template, [dict(sample) for sample in samples])


@pytest.fixture
def training(tiny):
    """A family as it trains: with ms-swift's hook on the model, which puts images into the embeddings."""
    made = []

    def load(family):
        loaded = tiny(family)
        loaded.template.register_post_encode_hook([loaded.model])
        made.append(loaded)
        return loaded

    yield load
    for loaded in made:
        loaded.template.remove_post_encode_hook()
        loaded.model.set_attn_implementation(NAME)
        loaded.model.zero_grad()


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    sizes = [(160, 90), (70, 140), (64, 64)]
    one, two, three = (photo(folder, str(n), *size, seed=n) for n, size in enumerate(sizes))
    frames = [photo(folder, f"frame{n}", 96, 64, seed=10 + n) for n in range(2)]
    return {
        "image": image_row([one], "what is it", "a noisy picture of many colours"),
        "images": image_row([two, three], "compare them", "the first is larger"),
        "text": text_row("how are you today?", "fine, thanks a lot"),
        "video": {**text_row("<video>what happens", "nothing much"), "videos": [frames]},
        "action": text_row("what next?", "Thought: look\nAction: open\nAction Input: door"),
    }


def encoded(template, rows, kinds):
    return [encode_row(template, rows[kind], SampleId(kind, 0), strict=True) for kind in kinds]


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


def proved(loaded, samples, forward=None):
    return proof_of(forward or forward_of(loaded), samples, is_ordinary_token(loaded.template.tokenizer), torch.float32)


# -- logits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_equal_those_of_every_sample_alone(training, rows, family):
    """ISO-2 ISO-8: text, an image, several images and a video in one pack; the control attention tells them apart."""
    loaded = training(family)
    samples = encoded(loaded.template, rows, KINDS)
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
def test_neighbours_do_not_move_when_a_sample_changes(training, rows, family):
    """ISO-2"""
    loaded = training(family)
    samples = encoded(loaded.template, rows, SHORT)
    is_ordinary, forward = is_ordinary_token(loaded.template.tokenizer), forward_of(loaded)
    others = [replaced(samples[0], is_ordinary), *samples[1:]]

    def moved():
        before, after = (forward(pack).split(lengths_of(samples)) for pack in (samples, others))
        return list(map(gap, before, after))

    assert moved()[0] > 0.1
    assert max(moved()[1:]) < 1e-6
    loaded.model.set_attn_implementation("sdpa")
    assert min(moved()) > 0.1, "without boundaries they do"


def test_order_of_the_samples_does_not_matter(training, rows):
    """ISO-2"""
    loaded = training(FAMILY)
    samples = encoded(loaded.template, rows, SHORT)
    forward = forward_of(loaded)
    there = forward(samples).split(lengths_of(samples))
    back = forward(samples[::-1]).split(lengths_of(samples[::-1]))
    assert max(map(gap, there, back[::-1])) < 1e-5


# -- loss and gradients -----------------------------------------------------------------------------------------------


def loss_of(loaded, samples, num_targets):
    """The loss as ms-swift's trainer computes it: the sum over the row's targets, over those of the whole step."""
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
def test_step_on_a_mixed_pack_equals_the_samples_one_by_one(training, rows, family):
    """ISO-3 ISO-8"""
    loaded = training(family)
    grads = assert_same_step(loaded, encoded(loaded.template, rows, KINDS))
    assert len(grads) == len(list(loaded.model.parameters()))
    largest = {part: max(float(g.abs().max()) for n, g in grads.items() if part in n) for part in ("visual", "layers")}
    assert min(largest.values()) > 1e-2, "there is something to compare"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kinds", [("text", "action", "text"), ("images", "image", "images")])
def test_step_on_a_pack_of_one_kind_equals_the_samples_one_by_one(training, rows, family, kinds):
    """ISO-3 ISO-8"""
    loaded = training(family)
    assert_same_step(loaded, encoded(loaded.template, rows, kinds))


@pytest.mark.parametrize("family", FAMILIES)
def test_step_with_loss_scale_equals_the_samples_one_by_one(training, rows, family):
    """ISO-3: one sample is scaled by ms-swift, its neighbours are not."""
    loaded = training(family)
    scaling = copy.copy(loaded.template)
    scaling._loss_scale = "react"
    samples = encoded(loaded.template, rows, ("text", "image"))
    samples[1:1] = encoded(scaling, rows, ("action",))
    assert 2.0 in samples[1]["loss_scale"]
    grads = assert_same_step(loaded, samples)
    del samples[1]["loss_scale"]
    _, unscaled = step_of(loaded, [samples])
    assert max(gap(grads[name], unscaled[name]) for name in grads) > 1e-3, "the scale counts"


def test_step_with_an_attention_that_knows_no_boundaries_is_another_one(training, rows):
    """ISO-3: what the comparison above would say if samples saw each other."""
    loaded = training(FAMILY)
    loaded.model.set_attn_implementation("sdpa")
    samples = encoded(loaded.template, rows, SHORT)
    (_, leaked), (_, expected) = step_of(loaded, [samples]), step_of(loaded, [[sample] for sample in samples])
    assert max(gap(leaked[name], expected[name]) for name in leaked) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_first_token_is_never_the_target_of_the_sample_before(training, rows, family):
    """ISO-4"""
    loaded = training(family)
    samples = encoded(loaded.template, rows, ("text", "image", "action"))
    labels = Collator(loaded.template).row(samples)["labels"]
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


def test_first_label_is_masked_where_the_template_cut_the_sample(tiny):
    """ISO-4 DATA-8"""
    template = copy.copy(tiny(FAMILY).template)
    template.max_length, template.truncation_strategy = 25, "left"
    sample = encode_row(template, text_row(answer="word " * 100), SampleId("text", 0))
    assert sample["length"] == 25
    assert sample["labels"][0] == -100
    assert -100 not in sample["labels"][1:], "the cut went through the answer"


@pytest.mark.parametrize("family", FAMILIES)
def test_pack_without_an_image_trains_after_one_with_images(training, rows, family):
    """ISO-8"""
    loaded = training(family)
    pictures, words = (
        encoded(loaded.template, rows, ("image", "images")),
        encoded(loaded.template, rows, ("text", "text")),
    )
    _, of_pictures = step_of(loaded, [pictures])
    loss, of_words = step_of(loaded, [words])
    assert np.isfinite(loss)
    assert loss > 0
    assert all(torch.isfinite(grad).all() for grad in of_words.values())
    assert max(float(grad.abs().max()) for name, grad in of_words.items() if "visual" not in name) > 1e-2
    assert all(not grad.any() for name, grad in of_words.items() if "visual" in name)
    assert any(grad.any() for name, grad in of_pictures.items() if "visual" in name)


# -- the proof --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_proof_passes_and_says_what_it_measured(training, rows, family):
    """ISO-5 ISO-2"""
    loaded = training(family)
    proof = proved(loaded, encoded(loaded.template, rows, SHORT))
    assert proof.num_samples == 3
    assert proof.moved < 1e-6
    assert proof.alone < 1e-5
    assert proof.largest_logit > 1
    assert proof.line(NAME).startswith(
        f"isolation verified: max difference {proof.moved} over 3 samples, attention vlpack"
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_proof_stops_an_attention_without_boundaries(training, rows, family, name):
    """ISO-5"""
    loaded = training(family)
    loaded.model.set_attn_implementation(name)
    with pytest.raises(IsolationError, match="see each other: replacing the tokens of one moved") as caught:
        proved(loaded, encoded(loaded.template, rows, ("image", "text")))
    assert f"attention {name} knows no boundaries" in diagnosis(caught.value, loaded.model.config, name)


@pytest.mark.parametrize("family", FAMILIES)
def test_proof_stops_a_model_that_does_not_get_the_boundaries(training, rows, family):
    """ISO-5"""
    loaded = training(family)
    with pytest.raises(IsolationError, match="see each other") as caught:
        proved(loaded, encoded(loaded.template, rows, ("image", "text")), forward_of(loaded, cu_seq_lens_q=None))
    assert "a mask or a cache hides the boundaries" in diagnosis(caught.value, loaded.model.config, NAME)


@pytest.mark.parametrize("shift", [-1, 1])
def test_proof_stops_boundaries_that_are_one_token_off(training, rows, shift):
    """ISO-5"""
    loaded = training(FAMILY)
    samples = encoded(loaded.template, rows, ("text", "image", "action"))
    wrong = torch.tensor([0, *lengths_of(samples)], dtype=torch.int32).cumsum(0)
    wrong[2] += shift

    def forward(pack):
        changes = {"cu_seq_lens_q": wrong} if len(pack) > 1 else {}
        return forward_of(loaded, **changes)(pack)

    with pytest.raises(IsolationError):
        proved(loaded, samples, forward)


def test_proof_stops_positions_that_are_made_of_the_whole_row(training, rows):
    """ISO-5 ISO-2: nobody sees another, but an image in a pack has other positions than alone."""
    loaded = training(FAMILY)
    samples = encoded(loaded.template, rows, ("text", "image"))

    def forward(pack):
        changes = {}
        if len(pack) > 1:
            changes["position_ids"] = torch.arange(sum(lengths_of(pack))).expand(3, 1, -1)
        return forward_of(loaded, **changes)(pack)

    with pytest.raises(IsolationError, match="does not give what it gives alone: logits differ by"):
        proved(loaded, samples, forward)


def test_proof_stops_at_positions_that_do_not_restart(training, rows, monkeypatch):
    """ISO-5 DATA-11: the collator sees it before the model does."""
    loaded = training(FAMILY)
    packing_row = loaded.template.packing_row

    def continued(row):
        made = packing_row(row)
        made["position_ids"] = torch.arange(len(made["input_ids"])).expand_as(made["position_ids"]).clone()
        return made

    monkeypatch.setattr(loaded.template, "packing_row", continued)
    with pytest.raises(BoundaryError) as caught:
        proved(loaded, encoded(loaded.template, rows, ("text", "image")))
    assert diagnosis(caught.value, loaded.model.config, NAME) == "positions are not restarted at the boundaries"


@pytest.mark.parametrize("number", [0, 1, 2])
def test_proof_does_not_take_nan_for_a_pass(rows, tiny, number):
    """ISO-5: not a number is not a small number, in whichever sample it is."""
    loaded = tiny(FAMILY)
    samples = encoded(loaded.template, rows, SHORT)

    def forward(pack):
        logits = {sample["sample_id"]: torch.zeros(sample["length"], 4) for sample in pack}
        if samples[number]["sample_id"] in logits:
            logits[samples[number]["sample_id"]][-1] = torch.nan
        return torch.cat(list(logits.values()))

    with pytest.raises(IsolationError, match="nan"):
        proved(loaded, samples, forward)


def test_proof_runs_the_same_forwards_whatever_it_finds(rows, tiny):
    """ISO-5: ranks that wait for each other in a forward must do equally many."""
    loaded = tiny(FAMILY)
    samples = encoded(loaded.template, rows, SHORT)
    for leak in (0.0, 1.0):
        packs = []

        def forward(pack, leak=leak, packs=packs):
            packs.append(len(pack))
            tokens = torch.tensor([token for sample in pack for token in sample["input_ids"]], dtype=torch.float32)
            return (tokens / 1e5 + leak * tokens.mean())[:, None]

        try:
            proof = proved(loaded, samples, forward)
        except IsolationError:
            proof = None
        assert (proof is None) == (leak > 0)
        assert packs == [3] * 4 + [1] * 3


def test_replaced_sample_keeps_its_media_tokens_and_changes_every_other(rows, tiny):
    """ISO-5"""
    loaded = tiny(FAMILY)
    is_ordinary = is_ordinary_token(loaded.template.tokenizer)
    for sample in encoded(loaded.template, rows, KINDS):
        before = copy.deepcopy(sample["input_ids"])
        other = replaced(sample, is_ordinary)
        for token, new in zip(before, other["input_ids"], strict=True):
            assert is_ordinary(token) == is_ordinary(new) == (token != new)
        assert sample["input_ids"] == before
        one, two = (Collator(loaded.template).row([s]) for s in (sample, other))
        assert torch.equal(one["position_ids"], two["position_ids"])
    media = loaded.template.tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>", "<|vision_start|>"])
    assert not any(map(is_ordinary, media))


def test_sample_without_two_ordinary_tokens_cannot_be_used():
    """ISO-5"""
    with pytest.raises(IsolationError, match="no two different ordinary tokens"):
        replaced({"input_ids": [5, 5, 99]}, lambda token: token < 50)


@pytest.mark.parametrize(
    ("error", "layers", "attention", "cause"),
    [
        (BoundaryError("x"), ["full_attention"], NAME, "positions are not restarted"),
        (BoundaryError("x"), ["linear_attention"], "sdpa", "positions are not restarted"),
        (IsolationError("x"), ["full_attention", "linear_attention"], NAME, "linear attention"),
        (IsolationError("x"), ["mamba"], NAME, "linear attention"),
        (ImportError("fla"), None, NAME, "linear attention"),
        (IsolationError("x"), ["full_attention"], "eager", "attention eager knows no boundaries"),
        (IsolationError("x"), None, NAME, "a mask or a cache hides"),
        (IsolationError("x"), None, "flash_attention_2", "a mask or a cache hides"),
    ],
)
def test_diagnosis_names_the_likeliest_cause(error, layers, attention, cause):
    """ISO-5 ISO-7"""
    text = SimpleNamespace(layer_types=layers)
    for config in (text, SimpleNamespace(text_config=text)):
        assert cause in diagnosis(error, config, attention)


# -- the model afterwards ---------------------------------------------------------------------------------------------


def test_proof_leaves_the_model_as_it_was(training, rows):
    """ISO-6"""
    loaded = training(FAMILY)
    model = loaded.model
    samples = encoded(loaded.template, rows, ("text", "image"))
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
            proved(loaded, samples)
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


# -- linear attention -------------------------------------------------------------------------------------------------


def test_linear_attention_passes_the_proof_or_is_stopped_with_its_cause(training, rows):
    """ISO-7"""
    loaded = training("qwen3_5")
    samples = encoded(loaded.template, rows, ("text", "image"))
    cause = cause_of_failure(loaded, samples)
    assert cause is None or "linear attention, whose state must restart" in cause


def cause_of_failure(loaded, samples):
    try:
        proved(loaded, samples)
    except (IsolationError, ImportError) as error:
        return diagnosis(error, loaded.model.config, NAME)
    return None


def test_linear_attention_that_carries_its_state_over_is_seen(training, rows, monkeypatch):
    """ISO-7: the full attention has its boundaries, the linear one does not get them."""
    loaded = training("qwen3_5")
    for layer in loaded.model.model.language_model.layers:
        if hasattr(layer, "linear_attn"):
            forward = layer.linear_attn.forward
            monkeypatch.setattr(layer.linear_attn, "forward", without_boundaries(forward))
    with pytest.raises(IsolationError, match="see each other") as caught:
        proved(loaded, encoded(loaded.template, rows, ("image", "text")))
    assert "linear attention" in diagnosis(caught.value, loaded.model.config, NAME)


def without_boundaries(forward):
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    return lambda *args, **kwargs: forward(*args, **{k: v for k, v in kwargs.items() if k not in names})
