from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from swift_vlpack import PackingConfig, schedule
from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.plan.epoch import Recipe, pack_epoch
from swift_vlpack.plan.mix import Mix, Source

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


# -- by tokens -------------------------------------------------------------------------------------------------------


def mix_of(ratios, lengths, rows=None, **options):
    rows = rows or [None] * len(ratios)
    sizes = [len(own) if some is None else len(some) for own, some in zip(lengths, rows, strict=True)]
    sources = tuple(Source(f"s{n}", size, ratio) for n, (size, ratio) in enumerate(zip(sizes, ratios, strict=True)))
    return Mix(sources=sources, rows=tuple(rows), ratio_by="tokens", **options)


def tokens_of(order, lengths):
    rows = [order.row[order.source == number] for number in range(len(lengths))]
    return [int(own[drawn].sum()) for own, drawn in zip(lengths, rows, strict=True)]


def test_sources_of_unlike_rows_get_equal_tokens():
    """MIX-7: by hand. 4 rows of 10 and 3 of 40 are 160 tokens; half of them is each of the short rows twice, and two
    of the long ones."""
    lengths = [np.full(4, 10), np.full(3, 40)]
    order = mix_of([1, 1], lengths).schedule(0, lengths=lengths)
    assert tokens_of(order, lengths) == [80, 80]
    assert Counter(order.row[order.source == 0].tolist()) == {0: 2, 1: 2, 2: 2, 3: 2}
    assert len(set(order.row[order.source == 1].tolist())) == 2


def test_ratios_that_are_the_sources_own_shares_draw_every_row_once():
    """MIX-7"""
    lengths = [np.array([5, 7, 8]), np.array([30, 50])]
    order = mix_of([20, 80], lengths).schedule(3, lengths=lengths)
    assert sorted(order) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_shares_are_as_exact_as_lengths_allow():
    """MIX-7 MIX-2 MIX-3: over seeded sources, limits and rows that cannot be trained."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        lengths = [rng.integers(1, 400, rng.integers(3, 80)) for _ in range(rng.integers(1, 5))]
        ratios = rng.choice([0.2, 0.5, 1, 3, 7], len(lengths)).tolist()
        usable = [rng.random(len(own)) < 0.8 for own in lengths]
        limited = [np.arange(0, len(own), 2) if rng.random() < 0.3 else None for own in lengths]
        mix = mix_of(ratios, lengths, limited, seed=seed)
        part = [own * can for own, can in zip(lengths, usable, strict=True)]
        taking = [own if some is None else own[some] for own, some in zip(part, limited, strict=True)]
        if not all(own.any() for own in taking):
            continue
        total = sum(int(own.sum()) for own in taking)
        for epoch in range(2):
            order = mix.schedule(epoch, usable, lengths)
            got = tokens_of(order, part)
            for number, (own, ratio) in enumerate(zip(taking, ratios, strict=True)):
                assert abs(got[number] - total * ratio / sum(ratios)) <= own.max() / 2 + 1
                times = Counter(order.row[order.source == number].tolist())
                trained = [times[row] for row in range(len(lengths[number])) if part[number][row]]
                trained = trained if limited[number] is None else [times[r] for r in limited[number] if part[number][r]]
                assert max(trained) - min(trained) <= 1
        again = mix.schedule(1, usable, lengths)
        assert (again.row.tolist(), again.source.tolist()) == (order.row.tolist(), order.source.tolist())


def test_another_epoch_draws_other_rows_and_order_is_kept_without_shuffle():
    """MIX-7 MIX-3"""
    lengths = [np.arange(1, 101), np.full(10, 1000)]
    mix = mix_of([1, 99], lengths)
    drawn = [set(mix.schedule(epoch, lengths=lengths).row.tolist()) for epoch in (0, 1)]
    assert drawn[0] != drawn[1]
    kept = mix_of([1, 1], lengths, shuffle=False).schedule(0, lengths=lengths)
    assert kept.source.tolist() == sorted(kept.source.tolist())
    rows = kept.row[kept.source == 1]
    assert rows.tolist() == sorted(rows.tolist())


def test_ratio_zero_and_sources_without_a_token():
    """MIX-7 MIX-5: the one is left out, of the other every row is drawn to be counted, and neither has a share."""
    lengths = [np.full(5, 10), np.full(5, 10), np.full(3, 10)]
    usable = [np.ones(5, bool), np.ones(5, bool), np.zeros(3, bool)]
    order = mix_of([1, 0, 5], lengths).schedule(0, usable, lengths)
    assert order.num_rows_per_source == (5, 0, 3)
    nothing = mix_of([1], [np.full(3, 10)]).schedule(0, [np.zeros(3, bool)], [np.full(3, 10)])
    assert nothing.num_rows_per_source == (3,)


def test_planned_epochs_take_shares_of_what_can_be_packed():
    """MIX-7: rows too long for a pack are no tokens of the mix where they are skipped."""
    sizes = tuple(np.zeros((4, 40), dtype=np.int64) for _ in range(2))
    sizes[0][0], sizes[1][0] = 20, 50
    sizes[1][0, :20] = 500
    config = PackingConfig(packing_length=100, packing_allow_single_long=False, packing_drop_last=False)
    mix = mix_of([1, 1], [own[0] for own in sizes])
    packed = pack_epoch(Recipe(sizes=sizes, mix=mix, config=config), 0)
    members = packed.packs.members
    tokens = np.bincount(packed.schedule.source[members], weights=packed.lengths[members])
    assert tokens.tolist() == [900, 900]


def test_buffer_mode_and_unknown_counts_are_refused():
    """MIX-8"""
    lengths = [np.full(4, 10)]
    with pytest.raises(ConfigError, match=r"ratio_by: tokens needs the length of every row.*packing_mode=plan"):
        mix_of([1], lengths).schedule(0)
    with pytest.raises(ConfigError, match=r"ratio_by must be one of rows, tokens, got 'words'"):
        Mix(sources=(Source("a", 1),), rows=(None,), ratio_by="words")
