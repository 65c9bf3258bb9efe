"""`packing_pad_to`: rows of a fixed shape. What is behind the samples sees nobody, is seen by nobody, has no loss."""

from types import MappingProxyType

import pytest
import torch

from swift_vlpack import PackingConfig, PackingDataset, prove
from swift_vlpack.attention import attention
from swift_vlpack.attention.sequence_effects import check_rope
from swift_vlpack.errors import ConfigError, IsolationError
from swift_vlpack.feed import sequence
from swift_vlpack.feed.collate import Collator
from swift_vlpack.feed.packs import packed_samples
from swift_vlpack.feed.sequence_loss import weigh_samples
from swift_vlpack.proof.gradients import Parameters
from swift_vlpack.rows.contents import NO_LABEL
from tests.data_rows import text_row
from tests.host.proof.runners import template_model

QWEN = "qwen2_5_vl"
MIXED = ("image", "text", "images", "video")
MULTIPLE = 64


def config(**options):
    return PackingConfig(**{"packing_length": 640, "packing_pad_to": MULTIPLE, **options})


def row_of(template, samples, **options):
    return Collator(template)([packed_samples(samples, 0, 0, config(**options), ())])


@pytest.mark.parametrize("family", ["qwen2_vl", QWEN, "qwen3_vl", "qwen3_5"])
def test_padding_is_a_segment_of_its_own(training, encoded, family):
    """PAD-2 PAD-5: tokens, labels, boundaries, and positions in their four rows."""
    template = training(family).template
    samples = encoded(template, MIXED)
    samples[0]["channel"] = "web"
    bare, row = row_of(template, samples, packing_pad_to=None), row_of(template, samples)
    num_tokens = sum(sample["length"] for sample in samples)
    missing = -num_tokens % MULTIPLE
    assert missing > 0
    assert row["input_ids"].shape == row["labels"].shape == (1, num_tokens + missing)
    assert row["input_ids"][0, num_tokens:].unique().tolist() == [template.tokenizer.pad_token_id]
    assert row["labels"][0, num_tokens:].unique().tolist() == [NO_LABEL]
    assert row["cu_seq_lens_q"].tolist() == [*bare["cu_seq_lens_q"].tolist(), num_tokens + missing]
    assert int(row["max_length_q"]) == max(missing, *(sample["length"] for sample in samples))
    assert row.beside["channel"] == [*bare.beside["channel"], "web"], "one that has a metric; nothing is added to it"
    positions = [row.beside["text_position_ids"], *row["position_ids"]]
    assert len(positions) == 4
    for of_axis in positions:
        assert of_axis[0, num_tokens:].tolist() == list(range(missing))
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(row[name][..., :num_tokens], bare[name]), "samples are where they were"
    assert (row.record.num_padding, row.record.lengths_in_sequence[-1]) == (missing, missing)
    assert (bare.record.num_padding, bare.record.lengths_in_sequence) == (0, bare.record.lengths)


def test_rows_of_a_family_without_own_positions_are_padded_too(training, encoded):
    """PAD-1: by one token, none, and a row of which no sample could be read."""
    template = training(QWEN).template
    (sample,) = encoded(template, ["text"])
    for missing in (0, 1, 30):
        row = row_of(template, [sample], packing_length=sample["length"] + missing, packing_pad_to="length")
        assert row["input_ids"].shape[1] == sample["length"] + missing
        assert row.record.num_padding == missing
    empty = row_of(template, [], packing_pad_to="length")
    assert empty["input_ids"].shape == (1, 640)
    assert empty["labels"].unique().tolist() == [NO_LABEL]
    assert empty.record.lengths_in_sequence == (640,)
    alone = row_of(template, [sample], packing_length=sample["length"] - 1, packing_pad_to="length")
    assert alone["input_ids"].shape[1] == 2 * (sample["length"] - 1), "longer than a pack: the next multiple"


def ran(proof_model, samples, multiple):
    proof_model.batches.multiple = multiple
    parameters = Parameters(proof_model.model, all_trained=True)
    return proof_model.run(samples, packed=True, parameters=parameters)


@pytest.mark.parametrize(
    ("family", "kernel"), [(QWEN, "segments"), (QWEN, "grouped"), ("qwen3_vl", "segments"), ("qwen3_5", "segments")]
)
def test_loss_and_gradients_are_those_without_padding(training, encoded, family, kernel, monkeypatch):
    """PAD-2 ISO-3: within 1e-5, with linear attention too; and other padding moves no sample at all."""
    from swift_vlpack.attention.kernels import KERNELS
    from swift_vlpack.attention.linear_attention import restart_at_boundaries

    loaded = training(family)
    restart_at_boundaries(loaded.model)
    attention.use_kernel(loaded.model, KERNELS[kernel])
    proof_model, samples = template_model(loaded), encoded(loaded.template, MIXED)
    bare, padded = ran(proof_model, samples, 1), ran(proof_model, samples, MULTIPLE)
    for at in range(len(samples)):
        assert torch.allclose(bare.of(at), padded.of(at), rtol=1e-5, atol=1e-5)
    assert bare.gradient.keys() == padded.gradient.keys()
    for name, gradient in bare.gradient.items():
        assert torch.allclose(gradient, padded.gradient[name], rtol=1e-5, atol=1e-5 * float(gradient.abs().max())), name
    right = sequence.padding
    monkeypatch.setattr(sequence, "padding", lambda *of: {**right(*of), "input_ids": list(range(300, 300 + of[1]))})
    other_padding = ran(proof_model, samples, MULTIPLE)
    for at in range(len(samples)):
        assert torch.equal(padded.of(at), other_padding.of(at))
    attention.use_kernel(loaded.model, KERNELS["segments"])


@pytest.fixture
def packs(training):
    loaded = training(QWEN)
    rows = [text_row(f"question {n}", "word " * (3 + 7 * n)) for n in range(6)]
    made = PackingDataset(rows, loaded.template, config(packing_strategy="best_fit", packing_pad_to="length"))
    return loaded, made


def test_proof_is_of_padded_rows(packs, monkeypatch):
    """PAD-3 ISO-5: it holds, and padding that is trained stops it."""
    loaded, made = packs
    with attention.recorded_calls() as rows:
        assert prove(loaded.model, loaded.template, made).startswith("isolation verified: max difference 0.0")
    assert {row.ends[-1] for row in rows} == {640}
    right = sequence.padding

    def trained(template, num_tokens):
        made = right(template, num_tokens)
        return {**made, "labels": [NO_LABEL] + [5] * (num_tokens - 1)}

    monkeypatch.setattr(sequence, "padding", trained)
    with pytest.raises(IsolationError, match="gradient"):
        prove(loaded.model, loaded.template, made)


def test_every_pack_of_an_epoch_has_the_one_shape(packs):
    """PAD-1 PAD-4: planned padding is what collated rows have."""
    loaded, made = packs
    rows = [Collator(loaded.template)([made[n]]) for n in range(len(made))]
    assert {row["input_ids"].shape for row in rows} == {(1, 640)}
    assert sum(row.record.num_padding for row in rows) == made.plan.num_padding > 0


def test_weights_of_samples_are_given_past_the_padding(training, encoded):
    """PAD-5 LOSS-9: padding is no sample of the step."""
    template = training(QWEN).template
    samples = encoded(template, ["text", "image"])
    bare, row = row_of(template, samples, packing_pad_to=None), row_of(template, samples)
    for batch in (bare, row):
        weigh_samples([batch], "sample", lambda numbers: numbers)
    num_tokens = bare["input_ids"].shape[1]
    assert torch.equal(row["loss_scale"][:, :num_tokens], bare["loss_scale"])
    assert row["loss_scale"].shape == row["labels"].shape
    assert not row["loss_scale"][:, num_tokens:].any()


def test_padding_that_would_choose_the_frequencies_is_refused():
    """PAD-5 LOSS-5: samples are short, and what fills the row is not."""

    class Dynamic:
        max_position_embeddings = 128
        rope_parameters = MappingProxyType({"rope_type": "dynamic", "factor": 2.0})

    check_rope(Dynamic(), (), 100, config(packing_pad_to=128))
    with pytest.raises(ConfigError, match=r"padding can have 639. Set packing_pad_to to 128 or less"):
        check_rope(Dynamic(), (), 100, config(packing_pad_to="length"))
