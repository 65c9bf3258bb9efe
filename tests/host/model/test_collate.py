import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from swift.model import get_processor
from swift.template import get_template
from swift.utils import get_packed_seq_params

from swift_vlpack.errors import BoundaryError, ConfigError
from swift_vlpack.feed.collate import Collator
from swift_vlpack.feed.sequence import boundary_tensors, completed, layout
from swift_vlpack.plan.boundaries import Boundaries
from swift_vlpack.rows.contents import size_of
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.samples import PackedSamples, PackRecord, SampleId
from tests.data_rows import image_row, text_row
from tests.images import photo

FAMILY = "qwen2_5_vl"
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    one, two = photo(folder, "wide", 160, 60, seed=1), photo(folder, "tall", 60, 120, seed=2)
    return [
        {**image_row([one], "what is it?", "noise"), "channel": "web"},
        text_row("hello", "good day to you"),
        {**image_row([two, one], "compare them", "one is wide"), "channel": "ocr"},
    ]


def encoded(template, rows):
    return [RowEncoder(template).sample(row, SampleId("data", 10 + number)) for number, row in enumerate(rows)]


def pack_of(samples):
    sample_ids = tuple(sample["sample_id"] for sample in samples)
    lengths = tuple(sample["length"] for sample in samples)
    return PackedSamples(samples, PackRecord(3, 7, sample_ids, lengths, sum(size_of(s).images for s in samples)))


def ends_of(samples):
    return torch.tensor([0, *(sample["length"] for sample in samples)]).cumsum(0).tolist()


def assert_equal(one, other):
    """Two collated batches, or two samples, are the same in every field."""
    assert set(one) == set(other)
    for name in one:
        if isinstance(one[name], torch.Tensor):
            assert torch.equal(one[name], other[name]), name
        else:
            assert one[name] == other[name], name


# -- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_pack_becomes_one_row_of_its_samples_in_order(tiny, rows, family):
    """DATA-11"""
    template = tiny(family).template
    pack = pack_of(encoded(template, rows))
    row = Collator(template)([pack])
    for name in ("input_ids", "labels"):
        assert row[name].tolist() == [[token for sample in pack for token in sample[name]]]
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(row[name], torch.cat([sample[name] for sample in pack if name in sample]))
    assert row.beside["channel"] == ["web", None, "ocr"]
    assert row["cu_seq_lens_q"].tolist() == row["cu_seq_lens_k"].tolist() == ends_of(pack)
    assert "attention_mask" not in row
    num_vision_tokens = int((row["input_ids"] == template.config.image_token_id).sum())
    assert row.record == replace(pack.record, num_vision_tokens=num_vision_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_sample_has_the_positions_it_has_alone(tiny, rows, family):
    """DATA-11 ISO-2"""
    template = tiny(family).template
    samples = encoded(template, rows)
    collator = Collator(template)
    row = collator([samples])
    assert row["position_ids"].shape == (3, 1, sum(sample["length"] for sample in samples))
    assert not torch.equal(row["position_ids"][0], row["position_ids"][1]), "images have more than one dimension"
    for sample, (start, end) in zip(samples, pairwise(ends_of(samples)), strict=True):
        alone = collator([[sample]])
        assert torch.equal(row["position_ids"][..., start:end], alone["position_ids"])
        assert row.beside["text_position_ids"][0, start:end].tolist() == list(range(sample["length"]))


def test_padded_batches_come_from_the_same_template_between_packs(template, rows):
    """DATA-11"""
    samples = encoded(template, rows)
    expected = template.data_collator([dict(sample) for sample in samples])
    collator = Collator(template, for_model=False)
    template.packing = template.padding_free = True  # as PackingDataset leaves it
    packed = collator([samples])
    padded = collator(samples)
    assert_equal(padded, expected)
    assert padded["input_ids"].shape == (3, max(sample["length"] for sample in samples))
    assert padded["attention_mask"].sum(1).tolist() == [sample["length"] for sample in samples]
    assert_equal(collator([samples]), packed)
    assert (template.packing, template.padding_free) == (True, True)


@pytest.mark.parametrize("before", [(False, False), (True, True), (True, False)])
def test_layout_is_given_back_after_an_error(template, rows, before):
    """DATA-11"""
    template.packing, template.padding_free = before
    (sample,) = encoded(template, rows[:1])
    del sample["image_grid_thw"]
    for batch in ([[sample]], [sample]):
        with pytest.raises(TypeError):  # the template misses the grid
            Collator(template)(batch)
        assert (template.packing, template.padding_free) == before


def test_samples_are_not_changed_and_can_be_collated_again(template, rows):
    """DATA-1 DATA-11: ms-swift's template takes grids out of the samples and puts positions in."""
    samples = encoded(template, rows)
    before = copy.deepcopy(samples)
    collator = Collator(template)
    packed, again = collator([samples]), collator([samples])
    padded, once_more = collator(samples), collator(samples)
    assert_equal(packed, again)
    assert_equal(padded, once_more)
    for sample, was in zip(samples, before, strict=True):
        assert_equal(sample, was)


def test_two_packs_in_a_batch_are_refused(template, rows):
    """DATA-11"""
    samples = encoded(template, rows[1:2])
    with pytest.raises(ConfigError, match=r"2 packs in a batch.*batch size to 1"):
        Collator(template)([samples, samples])


# -- wrong rows -------------------------------------------------------------------------------------------------------


def continued(positions, ends):
    """No restart: one long text."""
    return torch.arange(ends[-1]).expand_as(positions).clone()


def restarted_early(positions, ends):
    """A restart one token before a boundary."""
    wrong = positions.clone()
    wrong[..., ends[1] - 1] = 0
    return wrong


def jumping(positions, ends):
    """A sample that starts right and then skips a position."""
    wrong = positions.clone()
    wrong[..., ends[1] + 2 : ends[2]] += 1
    return wrong


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (continued, "token {0} has position .*; in its sample alone it has 0"),
        (restarted_early, "token {1} has position 0; in its sample alone it has "),
        (jumping, "has position 3; in its sample alone it has 2"),
    ],
)
def test_wrong_positions_stop_the_run_and_name_the_samples(template, rows, monkeypatch, spoil, what):
    """DATA-11"""
    samples = encoded(template, rows)
    ends, packing_row = ends_of(samples), template.packing_row

    def wrong_row(row):
        made = packing_row(row)
        made["position_ids"] = spoil(made["position_ids"], ends)
        return made

    monkeypatch.setattr(template, "packing_row", wrong_row)
    with pytest.raises(BoundaryError, match=what.format(ends[1], ends[1] - 1)) as caught:
        Collator(template)([pack_of(samples)])
    assert "pack 7 of epoch 3 [data:10, data:11, data:12]" in str(caught.value)


def test_lost_sample_stops_the_run(template, rows, monkeypatch):
    """DATA-11"""
    samples = encoded(template, rows)
    packing_row = template.packing_row
    monkeypatch.setattr(template, "packing_row", lambda row: packing_row(row[:-1]))
    num_tokens = ends_of(samples)
    with pytest.raises(
        BoundaryError, match=rf"data:12\]: .*1 sequences of {num_tokens[2]} tokens, not one of {num_tokens[3]}"
    ):
        Collator(template)([pack_of(samples)])


def test_boundaries_that_are_not_the_packs_stop_the_run(template, rows, monkeypatch):
    """DATA-11"""
    samples = encoded(template, rows)
    collate = template._data_collator

    def shifted(*args, **kwargs):
        row = collate(*args, **kwargs)
        row["cu_seq_lens_q"] = row["cu_seq_lens_q"] + torch.tensor([0, 1, 0, 0], dtype=torch.int32)
        return row

    monkeypatch.setattr(template, "_data_collator", shifted)
    with pytest.raises(BoundaryError, match=r"data:12\]: cu_seq_lens_q is \[0, "):
        Collator(template)([pack_of(samples)])


# -- rows without a loss, and loss scales -----------------------------------------------------------------------------


def test_pack_without_a_sample_becomes_a_row_without_a_label(template):
    """DATA-10"""
    empty = pack_of([])
    row = Collator(template)([empty])
    assert row["input_ids"].shape[0] == 1
    assert set(row["labels"].flatten().tolist()) == {-100}
    assert row["cu_seq_lens_q"].tolist() == [0, row["input_ids"].shape[1]]
    assert row.record == empty.record


def test_row_without_a_label_gives_no_gradient(tiny):
    """DATA-10"""
    made = tiny(FAMILY)
    row = Collator(made.template)([pack_of([])])
    logits = made.model(**{name: row[name] for name in ("input_ids", "position_ids", "cu_seq_lens_q")}).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], row["labels"][0, 1:], reduction="sum")
    loss.backward()
    assert loss.item() == 0
    assert all(not p.grad.any() for p in made.model.parameters() if p.grad is not None)


def test_samples_without_a_loss_scale_get_one_beside_those_that_have_it(template, rows, caplog):
    """DATA-11 ISO-3 OWN-1: the template joins the scales end to end, so a missing one would move the others."""
    scaling = copy.copy(template)
    scaling._loss_scale = "react"
    row = text_row("what next?", "Thought: look\nAction: open\nAction Input: door")
    samples = [*encoded(template, rows[:2]), RowEncoder(scaling).sample(row, SampleId("data", 12))]
    assert ["loss_scale" in sample for sample in samples] == [False, False, True]
    collator = Collator(template)
    scales = [collator([samples]).beside["loss_scale"][0].tolist() for _ in range(2)][-1]
    assert caplog.text.count("weigh it with batch.beside['loss_scale']") == 1
    start = ends_of(samples)[2]
    assert scales[:start] == [1.0] * start
    assert scales[start:] == samples[2]["loss_scale"]
    assert set(scales[start:]) == {0.0, 1.0, 2.0}
    assert ["loss_scale" in sample for sample in samples] == [False, False, True], "the samples stay as they were"


def test_no_sample_gets_a_loss_scale_where_none_has_one(template, rows):
    """DATA-11"""
    samples = encoded(template, rows[:2])
    assert not any("loss_scale" in sample for sample in completed(samples))
    assert "loss_scale" not in Collator(template)([samples]).beside


# -- templates of text ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text_template(small_folder):
    processor = get_processor(str(small_folder(FAMILY)), model_type="qwen2", use_hf=True)
    made = get_template(processor.tokenizer, template_type="qwen2_5", max_length=512)
    made.set_mode("train")
    return made


def test_text_template_gets_the_boundaries_it_does_not_make_itself(text_template):
    """DATA-11"""
    samples = encoded(text_template, [text_row("one", "word " * n) for n in (3, 9, 5)])
    with layout(text_template, packed=True):
        assert "cu_seq_lens_q" not in text_template.data_collator([[dict(sample) for sample in samples]])
    row = Collator(text_template, for_model=False)([pack_of(samples)])
    assert row["position_ids"].tolist() == [[n for sample in samples for n in range(sample["length"])]]
    assert row["cu_seq_lens_q"].tolist() == row["cu_seq_lens_k"].tolist() == ends_of(samples)
    assert int(row["max_length_q"]) == int(row["max_length_k"]) == samples[1]["length"]


@pytest.mark.parametrize("lengths", [(4,), (1, 1), (3, 7, 2)])
def test_boundary_tensors_are_those_that_the_host_makes_of_positions(lengths):
    """DATA-11"""
    positions = torch.tensor([[n for length in lengths for n in range(length)]])
    ours, theirs = boundary_tensors(Boundaries(lengths)), get_packed_seq_params(positions)
    assert_equal(ours, theirs)
    assert {name: tensor.dim() for name, tensor in ours.items()} == {name: t.dim() for name, t in theirs.items()}
    assert ours["cu_seq_lens_q"].dtype == theirs["cu_seq_lens_q"].dtype
