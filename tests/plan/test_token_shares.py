from collections import Counter

import numpy as np
import pytest

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import ConfigError
from swift_vlpack.plan.epoch import Recipe, pack_epoch
from swift_vlpack.plan.mix import Mix, Source


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
