"""The epochs of a run: what is kept of an epoch gives the epoch that was planned."""

import numpy as np
import pytest

from swift_vlpack import PackingConfig
from swift_vlpack.feed import epochs
from swift_vlpack.feed.epochs import Epochs, Extent
from swift_vlpack.plan.epoch import Recipe, pack_epoch
from swift_vlpack.plan.mix import Mix, Source
from swift_vlpack.plan.parts import CutRows, Cutting, Run, parts_of


def recipe(num_rows=300, ratio=0.7, **options):
    config = PackingConfig(packing_length=100, **options)
    rng = np.random.default_rng(1)
    lengths = np.where(rng.random(num_rows) < 0.05, 0, rng.integers(3, 250, num_rows))
    cutting, rows = Cutting.of(config), {}
    if config.packing_overflow == "split":
        rows = {at: parts_of([Run(int(length), 0, 0)], cutting) for at, length in enumerate(lengths) if length}
    return Recipe(
        sizes=(np.array([lengths, 0 * lengths, 0 * lengths, lengths], dtype=np.int32),),
        cut=(CutRows.of({at: parts for at, parts in rows.items() if parts}),) if rows else (),
        mix=Mix(sources=(Source("data", num_rows, ratio),), rows=(None,)),
        config=config,
        seed=5,
        num_ranks=2,
    )


def facts_of(packed):
    spans = None if packed.spans is None else packed.spans.tolist()
    packs = packed.packs
    dropped = {reason: items.tolist() for reason, items in packs.dropped.items()}
    columns = [column.tolist() for column in (packs.lengths, packs.images, packs.patches)]
    return [
        list(packed.schedule),
        packed.sizes.tolist(),
        spans,
        list(packs),
        dropped,
        packs.seed,
        packs.method,
        columns,
    ]


@pytest.mark.parametrize("extent", [Extent(3), Extent(num_packs=900)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packing_strategy": "exact", "packing_allow_single_long": False},
        {"packing_overflow": "split", "packing_strategy": "exact"},
    ],
    ids=["default", "left out", "split"],
)
def test_epoch_that_was_kept_is_the_one_that_was_planned(monkeypatch, options, extent):
    """PLAN-15"""
    made = Epochs(recipe(**options), extent)
    expected = [facts_of(pack_epoch(made.recipe, epoch)) for epoch in range(3)]
    monkeypatch.setattr(epochs, "pack_epoch", None)
    assert [facts_of(made.packed(epoch)) for epoch in range(3)] == expected
    assert facts_of(made.packed(0)) == expected[0], "an earlier epoch, as a resume asks for"


def test_packs_are_kept_up_to_a_limit_and_without_their_rows(monkeypatch):
    """PLAN-15"""
    packs = pack_epoch(recipe(), 1).packs
    monkeypatch.setattr(epochs, "MOST_BYTES_KEPT", 4 * (packs.members.nbytes + packs.offsets.nbytes))
    made = Epochs(recipe(), Extent(20))
    kept = made._kept._kept
    assert 2 <= len(kept) <= 4
    assert not {"lengths", "images", "patches"} & {name for packs in kept.values() for name in packs}
    planned = []
    monkeypatch.setattr(epochs, "pack_epoch", lambda of_run, epoch, name_of: planned.append(epoch))
    made.packed(10)
    assert planned == [10]
