"""Classes as projects write them around ms-swift: they mix, shuffle and encode by its template. Ten scenarios."""

import logging
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from swift_vlpack import Collator, Packer, PackingConfig, PackingDataset, prove
from swift_vlpack.errors import ConfigError
from tests.data_rows import mixed_rows, text_row, write_jsonl
from tests.doc_blocks import blocks
from tests.own_run import FusionCaptionDataset
from tests.test_architecture import functions_of_tests

FAMILY = "qwen2_5_vl"
ROOT = Path(__file__).parents[2]
RATIOS = {"target": 0.3, "source": 1.7}
FORMS = pytest.mark.parametrize("form", ["plan", "buffer"])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two files of rows, with and without images, and the ratio of each."""
    folder = tmp_path_factory.mktemp("own")
    rows = {name: mixed_rows(folder / name, 20, seed=len(name), largest=120) for name in RATIOS}
    return {write_jsonl(folder / f"{name}.jsonl", rows[name]): ratio for name, ratio in RATIOS.items()}


@pytest.fixture
def data(files, template):
    """A class of one's own around them, in the template's training mode."""
    template.set_mode("train")
    return FusionCaptionDataset(files, template, 5)


@pytest.fixture
def door(tiny):
    """The tiny model, prepared, with its template."""
    made = tiny(FAMILY)
    made.template.set_mode("train")
    return made.model, made.template


def config(**options):
    return PackingConfig(**{"packing_length": 300, "packing_drop_last": False, **options})


def packs_of(packs):
    return [packs[number] for number in range(len(packs))] if hasattr(packs, "plan") else list(packs)


def expected(data, epoch):
    data.set_epoch(epoch)
    return sorted(f"{name}-{row}" for name, row in data.schedule)


def assert_equal(one, other):
    """Two batches have the same fields."""
    assert set(one) == set(other)
    for name in one:
        assert torch.equal(one[name], other[name]) if isinstance(one[name], torch.Tensor) else one[name] == other[name]


# -- the ten scenarios ------------------------------------------------------------------------------------------------


class Ordered(list):
    """Rows that come in their order."""

    def set_epoch(self, epoch):
        """Change nothing."""


@FORMS
def test_scenario_1(data, template, form):
    """OWN-15 OWN-8: packing is enabled; an item is a list of samples within the capacity; a batch is one pack."""
    packs = PackingDataset(data, template, config(packing_mode=form))
    made = packs_of(packs)
    assert (template.packing, template.padding_free) == (True, True)
    for pack in made:
        assert isinstance(pack, list)
        assert sum(sample["length"] for sample in pack) <= 300
        assert {"input_ids", "labels", "length", "sample_id"} <= set(pack[0])
    with pytest.raises(ConfigError, match="one sequence is one pack, so set the batch size to 1"):
        Collator(template)(made[:2])


@pytest.mark.parametrize("drop_last", [True, False])
def test_scenario_2(template, drop_last):
    """OWN-15: by ms-swift's grouping; the one underfilled group at the end is emitted or dropped."""
    lengths = [*[60] * 8, *[40] * 8, *[99] * 60, 30]
    rows = [{"input_ids": [8] * num, "labels": [8] * num} for num in lengths]
    options = {"packing_length": 100, "packing_buffer": 16, "packing_mode": "buffer", "packing_drop_last": drop_last}
    made = packs_of(PackingDataset(Ordered(rows), template, PackingConfig(**options)))
    fills = Counter(sum(pack.record.lengths) for pack in made if pack)
    assert fills == {100: 8, 99: 60} | ({} if drop_last else {30: 1})
    reasons = [one.reason for pack in made for one in pack.record.left_out]
    assert reasons == (["underfilled"] if drop_last else [])


@FORMS
def test_scenario_3(template, form, caplog):
    """OWN-15: a sample as long as a pack, or longer, is whole and alone, and is logged."""
    rows = [{"input_ids": [8] * num, "labels": [-100, *[8] * (num - 1)]} for num in (300, 90, 450, 80)]
    with caplog.at_level(logging.INFO):
        made = packs_of(PackingDataset(rows, template, config(packing_mode=form)))
    assert [pack.record.lengths for pack in made if pack.record.single_long] == [(450,)]
    assert sorted(tuple(sorted(pack.record.lengths)) for pack in made) == [(80, 90), (300,), (450,)]
    assert "450 tokens" in caplog.text


@FORMS
def test_scenario_4(template, form, caplog):
    """OWN-15: or it is skipped, if that is asked for, and is logged."""
    rows = [{"input_ids": [8] * num, "labels": [8] * num} for num in (300, 90, 450, 80)]
    made = packs_of(PackingDataset(rows, template, config(packing_mode=form, packing_allow_single_long=False)))
    assert sorted(length for pack in made for length in pack.record.lengths) == [80, 90]
    assert "450 tokens" in caplog.text


def test_scenario_5(data, door, files):
    """OWN-15 OWN-8: the batches are those of the same rows, encoded by the packs; and the model proves them."""
    model, template = door
    own, collate, num_images = PackingDataset(data, template, config()), Collator(template), 0
    for pack in packs_of(own):
        names = [sample["sample_id"].partition("-") for sample in pack]
        encoded = [template.encode(data.pools[name][int(row)], return_length=True) for name, _, row in names]
        for sample, alone in zip(pack, encoded, strict=True):
            assert_equal({name: sample[name] for name in alone}, alone)
        assert_equal(collate([pack]), collate([encoded]))
        num_images += pack.record.num_images
    assert num_images > 5
    batch = collate([own[0]])
    assert batch["position_ids"].shape[-1] == sum(own[0].record.lengths) == batch["input_ids"].shape[-1]
    assert tuple(batch["cu_seq_lens_q"].tolist()) == own[0].record.boundaries.cu_seqlens
    assert prove(model, template, own).startswith("isolation verified: max difference 0.0")


@FORMS
def test_scenario_6(data, files, template, form):
    """OWN-15 OWN-9: ratios .3 and 1.7 over four epochs."""
    packs = PackingDataset(data, template, config(packing_mode=form))
    schedules = FusionCaptionDataset(files, None, 5)
    orders = set()
    for epoch in range(4):
        packs.set_epoch(epoch)
        found = sorted(sample["sample_id"] for pack in packs_of(packs) for sample in pack)
        assert found == expected(schedules, epoch)
        assert Counter(name.partition("-")[0] for name in found) == {"target": 6, "source": 34}
        orders.add(tuple(found))
    assert len(orders) == 4


def test_scenario_7(template):
    """OWN-15: of the plan, and in the record of every batch."""
    rows = [{"input_ids": [8] * num, "labels": [8] * num} for num in (400, 160, 140, 290)]
    packs = PackingDataset(rows, template, config(packing_strategy="exact"))
    assert 0.6 < packs.plan.mean_fill < 1
    loader = DataLoader(packs, batch_size=1, collate_fn=Collator(template, for_model=False))
    assert sorted((batch.record.single_long, batch.record.num_tokens) for batch in loader) == [
        (False, 290), (False, 300), (True, 400),
    ]  # fmt: skip


def test_scenario_8(template, data):
    """OWN-15: nothing but the length has to be given, which is the template's."""
    packs = PackingDataset(data, template, PackingConfig(packing_length=template.max_length))
    assert (packs.config.packing_drop_last, packs.config.packing_allow_single_long) == (True, True)
    assert packs.config.packing_min_fill_ratio >= 0.6
    assert not packs.config.eval_packing


def test_scenario_9(data, template):
    """OWN-15: the same collator pads a list of samples, before and after packs."""
    collate = Collator(template)
    samples = [data[index] for index in range(3)]
    before = collate(samples)
    packs = PackingDataset(data, template, config())
    collate([packs[0]])
    padded = collate(samples)
    assert_equal(padded, before)
    assert padded["input_ids"].shape[0] == 3
    assert padded["attention_mask"].sum(1).tolist() == [sample["length"] for sample in samples]


def test_scenario_10():
    """OWN-15: the page of own trainers names every option of `PackingDataset`, and what packing needs."""
    page = (ROOT / "docs" / "own_trainer.md").read_text()
    for said in ("batch_size=1", "set_epoch", "num_epochs", "max_steps", "lengths=", "num_ranks", "template=None"):
        assert said in page


def test_every_scenario_names_tests_that_exist():
    """OWN-15"""
    table = (ROOT / "specs" / "OWN.md").read_text().partition("## The ten scenarios")[2]
    lines = [line.split("|") for line in table.splitlines() if re.match(r"\| \d+ \|", line)]
    tests = {function.name for function in functions_of_tests()}
    assert [int(line[1]) for line in lines] == list(range(1, 11))
    for line in lines:
        own, swift = (re.findall(r"`(test_\w+)`", cell) for cell in line[3:5])
        assert own == [f"test_scenario_{int(line[1])}"]
        assert swift
        assert {*own, *swift} <= tests


# -- collators of one's own, and fresh samples ------------------------------------------------------------------------


def of_page(mark):
    """A block of the page, ready to run."""
    (block,) = [block for block in blocks(ROOT / "docs" / "own_trainer.md", "python") if block.mark == mark]
    return block.text


def test_columns_of_ones_own_reach_the_collator(data, template):
    """OWN-14: as the page shows it, through workers; the names are those of the class."""
    known = {"Collator": Collator, "torch": torch}
    exec(of_page("columns"), known)
    data.__class__ = type("Weighted", (FusionCaptionDataset,), {
        "__getitem__": lambda self, index: with_weights(FusionCaptionDataset.__getitem__(self, index))
    })  # fmt: skip
    packs = PackingDataset(data, template, config())
    loader = DataLoader(packs, batch_size=1, collate_fn=known["WithWeights"](template, for_model=False), num_workers=2)
    batches = list(loader)
    assert sorted(one for batch in batches for one in batch["ids"]) == expected(data, 0)
    for batch in batches:
        assert torch.equal(batch["weights"], batch["input_ids"] % 7)
        assert len(batch.record.sample_ids) == len(batch["ids"])


def with_weights(sample):
    return {**sample, "weights": [token % 7 for token in sample["input_ids"]]}


def test_columns_of_rows_that_the_template_encodes_reach_the_collator(template, monkeypatch):
    """OWN-14: with `remove_unused_columns=False`, as ms-swift names it."""
    monkeypatch.setattr(template, "remove_unused_columns", False)
    template.set_mode("train")
    packs = PackingDataset([{**text_row(), "weight": 0.5}], template, config())
    assert packs[0][0]["_extra_kwargs"]["weight"] == 0.5


def test_packs_of_fresh_samples(door, data):
    """OWN-14: three lines of the page; every field, boundaries of all samples, and the loss of the samples alone."""
    model, template = door
    fresh = [data[index] for index in range(12)]
    samples = [{name: value for name, value in sample.items() if name != "length"} for sample in fresh]
    known = {"Packer": Packer, "PackingConfig": PackingConfig, "samples": samples, "collate": Collator(template)}
    exec(of_page("fresh").replace("4096", "400"), known)
    batches = known["batches"]
    assert 1 < len(batches) < len(samples)
    tokens = Counter(tuple(sample["input_ids"]) for sample in samples)
    found = Counter()
    for batch in batches:
        found.update(split(batch))
        assert (batch["labels"][0, batch["cu_seq_lens_q"][:-1].long()] == -100).all(), "no target across a boundary"
    assert found == tokens
    pixels = [sample["pixel_values"] for sample in samples if "pixel_values" in sample]
    packed = [batch["pixel_values"] for batch in batches if "pixel_values" in batch]
    assert sum(map(len, packed)) == sum(map(len, pixels)) > 0
    with torch.no_grad():
        ones = [known["collate"]([[sample]]) for sample in samples]
        alone = {split(one)[0]: model(**one).logits[0] for one in ones}
        logits = model(**batches[0]).logits[0]
    assert torch.allclose(logits, torch.cat([alone[ids] for ids in split(batches[0])]), atol=1e-5)


def split(batch):
    ids, ends = batch["input_ids"][0].tolist(), batch["cu_seq_lens_q"].tolist()
    return [tuple(ids[start:stop]) for start, stop in pairwise(ends)]
