"""Progress: an epoch that ranks of changing number work on, every item exactly once."""

import json
import random

import numpy as np
import pytest

from swift_vlpack import PackingConfig, plan
from swift_vlpack.errors import PlanError
from swift_vlpack.plan.cuts import Cut, is_finished, num_consumed, share, with_consumed
from tests.cases import cases


def planned(case):
    lengths, images, patches = (
        [getattr(item, name) for item in case.items] for name in ("length", "images", "patches")
    )
    return plan(lengths, case.config, images=images, patches=patches, seed=case.seed, label=None)


def packed(made):
    return sorted(item for pack in made for item in pack)


def test_chain_of_cuts_with_changing_ranks_trains_every_item_once():
    """RESUME-1 RESUME-4: at every point of every epoch, with any ranks before and after."""
    num_chains = num_cut = 0
    for case in cases(150):
        made = planned(case)
        if not len(made):
            continue
        rng = random.Random(case.seed)
        cuts, trained = (), []
        while not is_finished(cuts):
            num_ranks = rng.randint(1, 5)
            packs, cuts = share(made, [Cut(*saved) for saved in json.loads(json.dumps(cuts))], num_ranks)
            assert packs.num_ranks == num_ranks
            assert len(packs) == cuts[-1].num_packs
            start, num_steps = cuts[-1].num_consumed, packs.num_packs_per_rank
            num_left = num_steps - start // num_ranks
            assert num_left, "an epoch with nothing left was not finished"
            num_trained = rng.randint(1, min(num_left, 5))
            for step in range(start // num_ranks, start // num_ranks + num_trained):
                together = packs[step * num_ranks : (step + 1) * num_ranks]
                assert any(together), "a step without a sample"
                trained += [item for pack in together for item in pack]
            cuts = with_consumed(cuts, num_trained * num_ranks)
            num_cut += 1
        left_out = [] if packs.num_dropped.get("underfilled") else made.dropped.get("underfilled", [])
        assert sorted(trained) == sorted([*packed(made), *left_out]), case.seed
        num_chains += 1
    assert num_chains > 100
    assert num_cut > 3 * num_chains


def test_these_very_packs_are_left_for_one_two_and_four_ranks():
    """RESUME-3 RESUME-4: by hand; in order, without balance, so that every pack is known."""
    config = PackingConfig(
        packing_length=100, packing_strategy="greedy", packing_drop_last=False, packing_balance=False
    )
    made = plan([60, 40] * 4, config)
    whole, cuts = share(made, (), 2)
    assert list(whole) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    behind = with_consumed(cuts, 2)  # one step of both ranks
    assert behind == (Cut(2, 4, 2),)
    same, cuts_of_two = share(made, behind, 2)
    assert [same[number] for number in range(2, 4)] == [[4, 5], [6, 7]]
    assert cuts_of_two == behind
    one, cuts_of_one = share(made, behind, 1)
    assert (list(one), cuts_of_one) == ([[4, 5], [6, 7]], (Cut(2, 4, 2), Cut(1, 2, 0)))
    four, cuts_of_four = share(made, behind, 4)
    assert (list(four), cuts_of_four) == ([[4], [5], [6], [7]], (Cut(2, 4, 2), Cut(4, 4, 0)))


def test_same_ranks_go_on_with_exactly_the_packs_that_would_have_come():
    """RESUME-3"""
    for case in cases(100, first_seed=1000):
        made = planned(case)
        if not len(made):
            continue
        rng = random.Random(case.seed)
        num_ranks = rng.randint(1, 4)
        whole, cuts = share(made, (), num_ranks, least_packs=0)
        for step in range(whole.num_packs_per_rank + 1):
            again, same = share(made, with_consumed(cuts, step * num_ranks), num_ranks)
            assert list(again) == list(whole)
            assert same == (Cut(num_ranks, len(whole), step * num_ranks),)


def test_rest_is_shared_by_splitting_and_has_empty_packs_only_where_nothing_can_be_split():
    """RESUME-4"""
    config = PackingConfig(packing_length=100, packing_strategy="greedy", packing_drop_last=False)
    pairs = plan([40, 60] * 8, config)
    rest, cuts = share(pairs, [Cut(2, 8, 4)], 3)
    assert (len(rest), rest.num_empty) == (6, 0), "4 packs of two, two of which were cut"
    assert cuts == (Cut(2, 8, 4), Cut(3, 6, 0))
    whole = plan([100] * 8, config)
    rest, _ = share(whole, [Cut(2, 8, 4)], 3)
    assert (len(rest), rest.num_empty) == (6, 2), "packs of one sample cannot be cut"
    one, _ = share(whole, [Cut(3, 9, 3)], 1)
    assert (len(one), one.num_empty) == (5, 0), "the empty pack of three ranks is nothing to one"


def test_longer_epoch_is_kept_through_a_cut():
    """RESUME-3: epochs of equal length, see PLAN-5."""
    made = plan([10] * 40, PackingConfig(packing_length=100, packing_strategy="greedy"))
    packs, cuts = share(made, (), 2, least_packs=10)
    assert (len(packs), cuts) == (10, (Cut(2, 10, 0),))
    again, cuts = share(made, with_consumed(cuts, 4), 2, least_packs=14)
    assert (len(again), cuts) == (10, (Cut(2, 10, 4),))


def test_finished_is_finished_for_all():
    """RESUME-1"""
    assert not is_finished(())
    assert not is_finished([Cut(2, 8, 6)])
    assert is_finished([Cut(2, 8, 4), Cut(1, 4, 4)])
    assert num_consumed([Cut(2, 8, 4), Cut(1, 4, 3)]) == 7


def test_rest_of_more_than_there_is_is_refused():
    """RESUME-6"""
    made = plan(np.full(4, 60), PackingConfig(packing_length=100))
    with pytest.raises(PlanError, match="5 packs of a plan of 4"):
        made.rest(5)
