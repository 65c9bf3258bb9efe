"""What a length pass leaves behind meets the truth when packs are loaded."""

import logging
import random

import numpy as np
import pytest
import torch

from swift_vlpack.config import PackingConfig
from swift_vlpack.feed import reader
from swift_vlpack.feed.dataset import PackingDataset
from swift_vlpack.lengths.cache import LengthCache
from swift_vlpack.lengths.measure import measure
from swift_vlpack.lengths.rows_work import Encoders
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.samples import SampleId
from swift_vlpack.rows.source import RowSource
from tests.data_rows import image_row, mixed_rows
from tests.images import noise, photo
from tests.plain_template import PlainTemplate


@pytest.fixture
def template():
    return PlainTemplate()


def sized(rows, template, path):
    """The source after a pass of its own, as a start of a run makes it."""
    cache = LengthCache(path, "context")
    source = RowSource(name="data", rows=rows)
    encoder = RowEncoder(template)
    sizes = measure(source, cache, Encoders(by_header=encoder, in_full=encoder))
    return RowSource(name="data", rows=rows, sizes=sizes)


def packs_of(source, template, **options):
    options = {"packing_length": 400, "packing_strategy": "greedy", "packing_drop_last": False, **options}
    return PackingDataset(FusionCaptionDataset([source], template, shuffle=False), template, PackingConfig(**options))


def test_row_that_grew_is_set_aside_and_planned_rightly_at_the_next_start(template, tmp_path, caplog):
    """LEN-13: another image under the same name."""
    paths = [photo(tmp_path, str(n), 140, 140) for n in range(9)]
    rows = [image_row([path]) for path in paths]
    packs = packs_of(sized(rows, template, tmp_path / "lengths"), template)
    before = [packs[n] for n in range(len(packs))]
    assert len(before[0].record.sample_ids) > 2
    noise(420, 420).save(paths[1])
    with caplog.at_level(logging.WARNING):
        after = [packs[n] for n in range(len(packs))]
    grown = SampleId("data", 1)
    assert len(after) == len(before)
    for one, other in zip(before, after, strict=True):
        kept = tuple(sample_id for sample_id in one.record.sample_ids if sample_id != grown)
        assert other.record.sample_ids == kept, "a sample that did not grow had to go"
        assert sum(other.record.lengths) <= 400
    assert [left[:2] for pack in after for left in pack.record.left_out] == [(grown, "longer_than_planned")]
    true = template.encode(rows[1], return_length=True)["length"]
    assert f"data:1: {true} tokens, but {before[0].record.lengths[1]} were planned" in caplog.text
    assert f"data:1: left out: {true} tokens do not fit into its pack with " in caplog.text
    again = sized(rows, template, tmp_path / "lengths")
    assert again.sizes.lengths[1] == true
    packs = packs_of(again, template)
    loaded = [packs[n] for n in range(len(packs))]
    assert sum(len(pack.record.sample_ids) for pack in loaded) == 9
    assert not any(pack.record.left_out for pack in loaded)


@pytest.mark.parametrize("is_allowed", [True, False])
def test_row_that_outgrew_a_pack_of_its_own(is_allowed, template, tmp_path):
    """LEN-13: as `packing_allow_single_long` says."""
    path = photo(tmp_path, "a", 140, 140)
    source = sized([image_row([path])], template, tmp_path / "lengths")
    packs = packs_of(source, template, packing_allow_single_long=is_allowed)
    noise(700, 700).save(path)
    pack = packs[0]
    assert len(pack) == is_allowed
    assert pack.record.single_long == is_allowed
    assert [left.reason for left in pack.record.left_out] == ([] if is_allowed else ["longer_than_planned"])


def is_same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other


def test_pack_encoded_in_threads_equals_one_encoded_one_by_one(template, tmp_path, monkeypatch):
    """LEN-15: many packs at random, some rows of them bad."""
    rows = mixed_rows(tmp_path / "rows", 60, largest=200)
    rows += [image_row([str(tmp_path / f"gone{n}.jpg")]) for n in range(6)]
    random.Random(0).shuffle(rows)
    sizes = sized(rows, template, tmp_path / "lengths").sizes
    columns = np.where(sizes.columns[0] == 0, [[50], [1], [4], [9]], sizes.columns)  # planned, and gone afterwards
    source = RowSource(name="data", rows=rows, sizes=type(sizes)(columns, {}))
    packs = packs_of(source, template, packing_length=1500, packing_strategy="best_fit")
    assert max(len(packs.address(n).samples) for n in range(len(packs))) > 8
    monkeypatch.setattr(reader, "threads_per_worker", lambda: 1)
    right = [packs[n] for n in range(len(packs))]
    assert sum(len(pack.record.left_out) for pack in right) == 6
    for num_threads in (2, 8):
        monkeypatch.setattr(reader, "threads_per_worker", lambda num_threads=num_threads: num_threads)
        for _ in range(3):
            for number, pack in enumerate(right):
                other = packs[number]
                assert other.record == pack.record
                for one, two in zip(pack, other, strict=True):
                    assert set(one) == set(two)
                    assert all(is_same(one[name], two[name]) for name in one)
