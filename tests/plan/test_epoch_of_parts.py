"""Epochs of rows that are longer than a pack: once for each of their parts, and the account of both."""

import numpy as np
import pytest

from swift_vlpack import PackingConfig
from swift_vlpack.plan.epoch import LENGTH, Recipe, pack_epoch, plan_epoch
from swift_vlpack.plan.mix import Mix, Source
from swift_vlpack.plan.parts import CutRows, Part, Span
from swift_vlpack.reasons import Reason

SIZES = np.array([[5, 22, 0, 7, 30], [1, 2, 0, 0, 1], [4, 8, 0, 0, 9], [3, 9, 0, 2, 9]])
CUT = CutRows.of(
    {
        1: [Part(0, 0, 10, 0, 1, 4, None, 5), Part(1, 10, 20, 0, 1, 4, None, 3), Part(2, 20, 22, supervised=1)],
        4: [Part(0, 12, 20, 2, supervised=4), Part(1, 0, 12, 0, 1, 9, Reason.IMAGE_OVER_LENGTH, 2)],
    }
)


def recipe(**options):
    config = PackingConfig(
        **{"packing_length": 10, "packing_overflow": "split", "packing_strategy": "exact", "packing_drop_last": False}
        | options
    )
    mix = Mix(sources=(Source("a", 5, options.pop("ratio", 1.0)),), rows=(None,), shuffle=False)
    return Recipe(sizes=(SIZES,), cut=(CUT,), mix=mix, config=config)


def test_a_row_is_there_once_for_each_of_its_parts():
    """CUT-11: in their order, with their sizes; what cutting left out has none, as a row that cannot be encoded."""
    epoch = pack_epoch(recipe(), 0)
    assert epoch.samples(range(len(epoch.schedule))) == [
        (0, 0),
        *((0, 1, Span(*span)) for span in ((0, 0, 10), (1, 10, 20), (2, 20, 22))),
        (0, 2),
        (0, 3),
        *((0, 4, Span(*span)) for span in ((0, 12, 20, 2), (1, 0, 12))),
    ]
    assert epoch.sizes.T.tolist() == [
        [5, 1, 4, 3], [10, 1, 4, 5], [10, 1, 4, 3], [2, 0, 0, 1], [0, 0, 0, 0], [7, 0, 0, 2], [8, 0, 0, 4], [0, 0, 0, 0]
    ]  # fmt: skip
    assert epoch.is_further_part.tolist() == [False, False, True, True, False, False, False, True]
    assert epoch.unreadable.tolist() == [4, 7]
    assert sorted(epoch.packs.members.tolist()) == [0, 1, 2, 3, 5, 6]


def test_a_part_that_fills_a_pack_is_no_single_long():
    """CUT-11: also where long samples are skipped, and under every way of planning."""
    for strategy in ("exact", "greedy", "binpack", "best_fit"):
        epoch = pack_epoch(recipe(packing_strategy=strategy, packing_allow_single_long=False), 0)
        assert sorted(epoch.packs.members.tolist()) == [0, 1, 2, 3, 5, 6], strategy
        assert epoch.packs.num_dropped == {}
        assert not epoch.packs.is_single_long.any()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_epochs_are_shared_and_resumed_between_the_parts_of_a_row(num_ranks):
    """CUT-11 PLAN-6: every sample once, whichever ranks consumed how many packs before."""
    whole = plan_epoch(recipe(), 0)
    for consumed in range(0, len(whole), 1):
        first = whole.cuts[0]._replace(num_consumed=consumed)
        made = recipe()
        rest = plan_epoch(Recipe(**{**vars(made), "num_ranks": num_ranks}), 0, [first])
        behind = [item for number in range(consumed) for item in whole.packs[number]]
        ahead = [item for rank in range(num_ranks) for number in rest.numbers_left(rank) for item in rest.packs[number]]
        assert sorted([*behind, *ahead]) == [0, 1, 2, 3, 5, 6]


def test_rows_of_which_nothing_is_left_are_drawn_as_those_that_cannot_be_encoded():
    """CUT-11: a ratio is one of rows, of which some part can be packed."""
    nothing = CutRows.of({1: [Part(0, 0, 22, 0, 2, 8, Reason.OVERFLOW, 9)]})
    made = recipe()
    epoch = pack_epoch(Recipe(**{**vars(made), "cut": (nothing,)}), 0)
    assert epoch.lengths[1] == 0
    assert SIZES[LENGTH, 1] == 22, "of the row it is what it was"
