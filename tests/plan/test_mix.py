from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from swift_vlpack import schedule
from swift_vlpack.errors import DataError
from swift_vlpack.plan.mix import Source

MIX = [Source("captions", 100, 0.5), Source("ocr", 40, 1.0), Source("chat", 30, 2.5)]


def rows_of(order, name):
    number = order.names.index(name)
    return [row for source, row in order if source == number]


def test_every_source_delivers_its_share():
    """MIX-1"""
    order = schedule(MIX, seed=0, epoch=0)
    assert order.num_rows_per_source == (50, 40, 75)
    assert len(order) == 165
    assert order[0] == next(iter(order))
    assert schedule([("a", 3, 0.5)], seed=0, epoch=0).num_rows_per_source == (round(1.5),)


def test_draws_are_without_replacement_and_whole_times_beyond_one():
    """MIX-2"""
    order = schedule(MIX, seed=3, epoch=1)
    assert max(Counter(rows_of(order, "captions")).values()) == 1
    assert sorted(rows_of(order, "ocr")) == list(range(40))
    chat = Counter(rows_of(order, "chat"))
    assert sorted(Counter(chat.values()).items()) == [(2, 15), (3, 15)]


def test_order_is_a_pure_function_and_every_epoch_another():
    """MIX-3"""
    again = [list(schedule(MIX, seed=1, epoch=4)) for _ in range(2)]
    assert again[0] == again[1]
    other_epoch, other_seed = list(schedule(MIX, seed=1, epoch=5)), list(schedule(MIX, seed=2, epoch=4))
    assert again[0] != other_epoch
    assert again[0] != other_seed
    drawn = {epoch: sorted(rows_of(schedule(MIX, seed=1, epoch=epoch), "captions")) for epoch in (0, 1)}
    assert drawn[0] != drawn[1]


def test_schedule_does_not_change_with_the_numpy_version():
    """MIX-3: a literal, so that a change of the stream is seen."""
    order = schedule([("a", 4, 1.0), ("b", 2, 1.5)], seed=0, epoch=0)
    assert list(order) == [(0, 3), (0, 1), (1, 1), (1, 0), (0, 2), (0, 0), (1, 0)]


def test_sources_are_mixed():
    """MIX-3"""
    sources = [source for source, _ in schedule([("a", 500, 1.0), ("b", 500, 1.0)], seed=0, epoch=0)]
    assert 400 < sum(before != after for before, after in pairwise(sources)) < 600


def test_adding_a_source_leaves_the_others_alone():
    """MIX-4"""
    before = schedule(MIX[:2], seed=0, epoch=0)
    after = schedule([MIX[2], *MIX[:2]], seed=0, epoch=0)
    for name in ("captions", "ocr"):
        assert rows_of(before, name) == rows_of(after, name)
    kept = [(after.names[s], r) for s, r in after if after.names[s] != "chat"]
    assert kept == [(before.names[s], r) for s, r in before]


def test_ratio_zero_leaves_a_source_out():
    """MIX-5"""
    assert schedule([("a", 5, 0), ("empty", 0, 0), ("b", 3)], seed=0, epoch=0).num_rows_per_source == (0, 0, 3)
    assert len(schedule([], seed=0, epoch=0)) == 0


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([("a", 5, -1)], "'a': ratio must be 0 or more, got -1"),
        ([("a", 5, float("nan"))], "'a': ratio must be 0 or more, got nan"),
        ([("a", 0, 1.0)], "'a' has no rows"),
        ([("a", 5), ("a", 6)], "two sources are named 'a'"),
    ],
)
def test_impossible_sources_are_refused(sources, message):
    """MIX-5"""
    with pytest.raises(DataError, match=message):
        schedule(sources, seed=0, epoch=0)


def test_known_unusable_rows_leave_every_epoch_equally_many_usable_ones():
    """MIX-6 MIX-1"""
    usable = np.arange(101) % 3 > 0
    for ratio in (0.3, 0.5, 1.0, 1.7, 2.0):
        for shuffle in (True, False):
            for epoch in range(20):
                made = schedule(
                    [("a", 101, ratio), ("b", 10, 1.0)], seed=3, epoch=epoch, shuffle=shuffle, usable={"a": usable}
                )
                rows = made.row[made.source == 0]
                assert usable[rows].sum() == round(usable.sum() * ratio)
                assert np.bincount(rows).max() <= -(-ratio // 1)
    whole = [schedule([("a", 50, 0.4)], seed=3, epoch=1, usable=known) for known in (None, {"a": np.ones(50, bool)})]
    assert whole[0].row.tolist() == whole[1].row.tolist()
    nothing = schedule([("a", 50, 0.4)], seed=3, epoch=1, usable={"a": np.zeros(50, bool)})
    assert len(nothing) == 20, "to be counted"
