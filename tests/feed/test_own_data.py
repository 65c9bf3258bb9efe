"""Data sets of one's own, of samples that are encoded already, and of rows that change from epoch to epoch."""

import pytest

from swift_vlpack import PackingConfig, PackingDataset
from tests.own_data import Mixed, encoded

RATIOS = {"target": 0.3, "source": 1.7}


def config(**options):
    return PackingConfig(
        **{"packing_length": 100, "packing_strategy": "best_fit", "packing_drop_last": False, **options}
    )


def packs_of(packs):
    return [packs[number] for number in range(len(packs))] if hasattr(packs, "plan") else list(packs)


def names(packs):
    return sorted(sample["name"] for pack in packs_of(packs) for sample in pack)


@pytest.mark.parametrize("form", ["plan", "buffer"])
def test_encoded_samples_are_packed_with_every_field(form):
    """OWN-8"""
    rows = [encoded(num_tokens, f"row {num_tokens}", length=num_tokens) for num_tokens in range(20, 60)]
    packs = packs_of(PackingDataset(rows, None, config(packing_mode=form)))
    assert sorted(sample["name"] for pack in packs for sample in pack) == [row["name"] for row in rows]
    assert all(sum(len(sample["input_ids"]) for sample in pack) <= 100 for pack in packs)


@pytest.mark.parametrize("form", ["plan", "buffer"])
def test_every_epoch_has_the_rows_that_the_data_set_draws_for_it(form):
    """OWN-9"""
    data = Mixed(RATIOS)
    packs = PackingDataset(data, None, config(packing_mode=form))
    for epoch in range(4):
        packs.set_epoch(epoch)
        assert names(packs) == data.names(epoch)
