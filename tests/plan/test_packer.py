import logging

import pytest

from swift_vlpack import Item, Packer, PackingConfig
from swift_vlpack.errors import DataError, StateMismatch
from swift_vlpack.plan import buffer as buffer_module
from swift_vlpack.plan.strategies import STRATEGIES
from tests.cases import cases
from tests.contract import Ledger, assert_resumes_at_every_step, run

STRATEGY_NAMES = tuple(STRATEGIES)


def make(**options):
    return Packer(PackingConfig(**{"packing_length": 100, "packing_strategy": "best_fit", **options}))


def test_conservation_and_capacity_at_every_push():
    """PACK-1 PACK-2 PACK-10"""
    for case in cases(300):
        ledger = Ledger(case.config, seed=case.seed)
        for item in case.items:
            ledger.push(item)
            if case.config.packing_strategy == "greedy":
                assert sum(held.length for held in ledger.packer.held) < case.config.packing_length
            else:
                assert ledger.packer.num_held < max(2, case.config.packing_buffer)
        ledger.flush()
        assert ledger.packer.num_held == 0
        assert ledger.packer.num_pushed == len(case.items)


def test_filled_group_leaves_and_the_rest_is_carried():
    """PACK-3"""
    packer = make(packing_buffer=3)
    assert packer.push(("a", 60)) == []
    assert packer.push(("b", 50)) == []
    assert [pack.ids for pack in packer.push(("c", 40))] == [("a", "c")]  # 60 + 40; 50 alone is underfilled
    assert [item.id for item in packer.held] == ["b"]
    assert packer.push(("d", 45)) == []
    assert [pack.ids for pack in packer.push(("e", 1))] == [("b", "d", "e")]


def test_min_fill_ratio_decides_who_waits():
    """PACK-3"""
    eager = make(packing_buffer=2, packing_min_fill_ratio=0.7)
    strict = make(packing_buffer=2, packing_min_fill_ratio=0.8)
    items = [("a", 75), ("b", 30)]
    assert [pack.ids for item in items for pack in eager.push(item)] == [("a",)]
    assert [len(pack.ids) for item in items for pack in strict.push(item)] == [1, 1]  # nothing is filled: all leave


def test_pack_filled_to_exactly_the_ratio_leaves_and_is_no_remainder():
    """PACK-3 PACK-4"""
    for name in STRATEGY_NAMES:
        if name != "greedy":
            packer = make(packing_strategy=name, packing_buffer=2, packing_min_fill_ratio=0.6)
            assert [pack.ids for item in [("a", 60), ("b", 50)] for pack in packer.push(item)] == [("a",)]
        packer = make(packing_strategy=name, packing_min_fill_ratio=0.6)
        assert [pack.ids for pack in run(packer, [("a", 60), ("b", 40), ("c", 55), ("d", 5)])] != []
        assert packer.num_dropped == {}


def test_pack_at_its_cap_is_filled():
    """PACK-3"""
    packer = make(packing_buffer=2, packing_max_samples=2)
    assert [pack.ids for item in [("a", 5), ("b", 5)] for pack in packer.push(item)] == [("a", "b")]


@pytest.mark.parametrize("name", STRATEGY_NAMES)
def test_underfilled_remainder_is_dropped_or_emitted(name):
    """PACK-4"""
    items = [*((n, 60 - n % 2 * 20) for n in range(50)), ("last", 20)]
    dropping = make(packing_strategy=name, packing_drop_last=True, packing_buffer=64)
    assert {len(pack.ids) for pack in run(dropping, items)} == {2}, f"{name} does not join every 60 with a 40"
    assert dropping.num_dropped == {"underfilled": 1}
    keeping = make(packing_strategy=name, packing_drop_last=False, packing_buffer=64)
    assert ("last",) in [pack.ids for pack in run(keeping, items)]
    assert keeping.num_dropped == {}


@pytest.mark.parametrize("name", STRATEGY_NAMES)
def test_remainder_that_is_a_large_part_of_its_epoch_is_emitted(name):
    """PACK-4: one item of 49 would be more than 2 % of them, and so are two of 98."""
    items = [*((n, 60 - n % 2 * 20) for n in range(48)), ("last", 20)]
    packer = make(packing_strategy=name, packing_drop_last=True, packing_buffer=64)
    assert ("last",) in [pack.ids for pack in run(packer, items)], f"{name} does not join every 60 with a 40"
    assert packer.num_dropped == {}
    items = [*((n, 60 - n % 2 * 20) for n in range(96)), ("last", 20), ("very last", 5)]
    packer = make(packing_strategy=name, packing_drop_last=True, packing_buffer=128)
    assert ("last", "very last") in [pack.ids for pack in run(packer, items)]
    assert packer.num_dropped == {}


@pytest.mark.parametrize("name", STRATEGY_NAMES)
def test_underfilled_pack_that_is_alone_in_its_epoch_is_emitted(name):
    """PACK-4"""
    packer = make(packing_strategy=name, packing_drop_last=True, packing_buffer=64)
    assert [len(pack.ids) for pack in run(packer, [(n, 3) for n in range(10)])] == [10]
    assert packer.num_dropped == {}


@pytest.mark.parametrize("name", STRATEGY_NAMES)
def test_remainder_is_at_most_one_pack(name):
    """PACK-4: 5 could have gone to any 55, but dropping them all would lose most of the data."""
    packer = make(packing_strategy=name, packing_drop_last=True, packing_buffer=64)
    packs = run(packer, [("small", 5), *((n, 55) for n in range(60))])
    assert len(packs) == 59
    assert sum(packer.num_dropped.values()) == 1


@pytest.mark.parametrize("name", STRATEGY_NAMES)
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packing_buffer": 1},
        {"packing_buffer": 2000},
        {"packing_buffer": 100},
        {"packing_min_fill_ratio": 1.0},
        {"packing_allow_single_long": False},
    ],
)
def test_a_thousand_items_that_fit_with_nothing_come_out(name, drop_last, options):
    """PACK-5"""
    packer = make(packing_strategy=name, packing_drop_last=drop_last, **options)
    assert len(run(packer, ((n, 55) for n in range(1000)))) == 1000
    assert packer.num_dropped == {}


@pytest.mark.parametrize("name", ["binpack", "first_fit", "best_fit", "exact"])
def test_an_item_leaves_after_it_was_carried_so_often(name, monkeypatch):
    """PACK-5: each buffer brings pairs that are full by themselves; the 64 finds nothing to share with."""
    for max_carry in (0, 1, 3, buffer_module.MAX_CARRY):
        monkeypatch.setattr(buffer_module, "MAX_CARRY", max_carry)
        packer = make(packing_strategy=name, packing_buffer=5)
        packer.push(("waits", 64))
        num_buffers = 0
        for number in range(60):
            packs = packer.push((f"half{number}", 50))
            num_buffers += bool(packs)
            if any("waits" in pack.ids for pack in packs):
                break
        # `exact` emits one pack a buffer; the 64 is its oldest again after the two pairs that were there before it.
        expected = max_carry + 1 if name != "exact" else 1 + 2 * max_carry
        assert num_buffers == expected, max_carry


def test_long_item_is_alone_counted_and_logged(caplog):
    """PACK-6"""
    packer = make()
    with caplog.at_level(logging.INFO):
        packs = packer.push(("exactly", 100)) + packer.push(("over", 101))
    assert [(pack.ids, pack.single_long) for pack in packs] == [(("exactly",), False), (("over",), True)]
    assert packer.num_single_long == 1
    assert "item 'over', 101 tokens (oversize)" in caplog.text
    assert "exactly" not in caplog.text


def test_long_item_is_skipped_when_asked(caplog):
    """PACK-6"""
    packer = make(packing_allow_single_long=False)
    assert packer.push(("exactly", 100)) + packer.push(("over", 101)) == []
    assert packer.num_dropped == {"oversize": 2}
    assert "left out: item 'over', 101 tokens (oversize)" in caplog.text


def test_every_long_item_is_logged_but_only_the_first_loudly(caplog):
    """PACK-6"""
    packer = make()
    with caplog.at_level(logging.DEBUG):
        for number in range(50):
            packer.push((number, 200))
    assert sum("200 tokens" in record.message for record in caplog.records) == 50
    assert sum(record.levelno == logging.INFO for record in caplog.records) == 21
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], "it is trained: no warning"


def test_item_over_a_cap_is_treated_like_a_long_one():
    """PACK-6"""
    packer = make(packing_max_images=2)
    assert [(pack.ids, pack.single_long) for pack in packer.push(("album", 10, 3))] == [(("album",), True)]
    skipping = make(packing_max_patches=9, packing_allow_single_long=False)
    assert skipping.push(("scan", 10, 1, 10)) == []
    assert skipping.num_dropped == {"over_cap": 1}


@pytest.mark.parametrize(
    ("item", "part"),
    [
        (("row7", 0), "'row7': length must be at least 1, got 0"),
        (("row7", -3), "'row7': length must be at least 1, got -3"),
        (("row7", 2.5), "'row7': length must be an integer, got 2.5"),
        (("row7", True), "'row7': length must be an integer"),
        (("row7", "12"), "'row7': length must be an integer, got '12'"),
        (("row7", None), "'row7': length must be an integer, got None"),
        (("row7", 3, -1), "'row7': images must be at least 0"),
    ],
)
def test_bad_number_names_the_item(item, part):
    """PACK-7"""
    packer = make()
    with pytest.raises(DataError, match="item"):
        packer.push(item)
    with pytest.raises(DataError) as refused:
        packer.push(item)
    assert part in str(refused.value)
    assert packer.num_pushed == 0


def test_items_keep_arrival_order_inside_a_pack():
    """PACK-8"""
    for case in cases(120, first_seed=1000):
        arrival = {item.id: number for number, item in enumerate(case.items)}
        for pack in run(Packer(case.config, seed=1), case.items):
            numbers = [arrival[key] for key in pack.ids]
            assert numbers == sorted(numbers)


@pytest.mark.parametrize("name", ["binpack", "first_fit", "best_fit"])
def test_packs_of_a_window_are_shuffled_by_the_seed(name):
    """PACK-9: largest-first strategies would otherwise begin every window with the biggest samples."""
    items = [(n, 30 + n % 60) for n in range(400)]
    config = PackingConfig(packing_length=100, packing_strategy=name, packing_buffer=400, packing_drop_last=False)
    orders = [[max(i.length for i in pack.items) for pack in run(Packer(config, seed=seed), items)] for seed in (0, 1)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])
    half = len(orders[0]) // 2
    assert abs(sum(orders[0][:half]) / half - sum(orders[0][half:]) / (len(orders[0]) - half)) < 8


def test_greedy_keeps_strict_order_around_long_items():
    """PACK-9"""
    packs = run(make(packing_strategy="greedy"), [("a", 10), ("b", 20), ("long", 300), ("c", 80), ("d", 30), ("e", 70)])
    assert [pack.ids for pack in packs] == [("a", "b"), ("long",), ("c",), ("d", "e")]


def test_state_at_every_step_gives_the_same_future():
    """PACK-10"""
    num_tested = 0
    for case in cases(60, first_seed=2000):
        items = case.items[:40]
        num_tested += len(items)
        assert_resumes_at_every_step(case.config, items, seed=case.seed)
    assert num_tested > 500


def test_ids_that_are_tuples_survive_the_state():
    """PACK-10"""
    packer = make()
    packer.push((("captions", 7), 30))
    again = make()
    again.load(packer.state())
    assert again.held == (Item(("captions", 7), 30),)


def test_state_of_another_config_is_refused_by_field():
    """STATE-2"""
    state = make(packing_buffer=8).state()
    with pytest.raises(StateMismatch, match=r"packing_buffer \(8, now 9\)"):
        make(packing_buffer=9).load(state)
    make(packing_buffer=8, packing_verify=False).load(state)  # decides nothing about packs


def test_same_input_same_packs():
    """PACK-11"""
    for case in cases(60, first_seed=3000):
        first, second = (run(Packer(case.config, seed=3), case.items) for _ in range(2))
        assert first == second


def test_default_is_ms_swifts_grouping():
    """PACK-12: `calculate_matched_group` puts each item into the emptiest pack with room, not the fullest."""
    config = PackingConfig(packing_length=10, packing_drop_last=False)
    packs = run(Packer(config), [("a", 7), ("b", 6), ("c", 1), ("d", 2)])
    assert sorted(pack.ids for pack in packs) == [("a", "c"), ("b", "d")]
    tight = PackingConfig(packing_length=10, packing_drop_last=False, packing_strategy="best_fit")
    packs = run(Packer(tight), [("a", 7), ("b", 6), ("c", 1), ("d", 2)])
    assert sorted(pack.ids for pack in packs) == [("a", "c", "d"), ("b",)]
