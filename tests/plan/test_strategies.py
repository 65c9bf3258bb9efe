import random
import subprocess
import sys
from itertools import combinations

import pytest

from swift_vlpack.plan.strategies import (
    STRATEGIES,
    Caps,
    best_fit,
    binpack,
    constant_volume,
    exact,
    fill_oldest,
    first_fit,
    greedy,
    lower_bound,
)
from tests.cases import lengths as random_lengths

OURS = [name for name in STRATEGIES if name != "binpack"]


def workloads(num_cases, *, max_items=60):
    for seed in range(num_cases):
        rng = random.Random(seed)
        capacity = rng.choice((7, 20, 100, 1000))
        yield random_lengths(rng, rng.randint(0, max_items), capacity), capacity


def naive_decreasing(lengths, capacity, *, best):
    """First or best fit decreasing as in a textbook: look at every pack for every item."""
    packs, free = [], []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [pack for pack in range(len(packs)) if free[pack] >= lengths[index]]
        if not fitting:
            packs.append([])
            free.append(capacity)
            fitting = [len(packs) - 1]
        pack = min(fitting, key=lambda p: (free[p], p)) if best else fitting[0]
        packs[pack].append(index)
        free[pack] -= lengths[index]
    return [sorted(pack) for pack in packs]


def optimum(lengths, capacity):
    """Fewest packs, by trying every assignment (small sets only)."""
    best = len(lengths)

    def place(index, free):
        nonlocal best
        if len(free) >= best:
            return
        if index == len(lengths):
            best = len(free)
            return
        for pack in range(len(free)):
            if free[pack] >= lengths[index]:
                place(index + 1, [*free[:pack], free[pack] - lengths[index], *free[pack + 1 :]])
        place(index + 1, [*free, capacity - lengths[index]])

    place(0, [])
    return best


@pytest.mark.parametrize(
    ("strategy", "groups"),
    [
        (greedy, [[0], [1, 2], [3], [4], [5]]),  # 6 | 5 4 | 5 | 7 | 4
        (first_fit, [[4], [0, 2], [1, 3], [5]]),  # 7 | 6 4 | 5 5 | 4
        (best_fit, [[4], [0, 2], [1, 3], [5]]),
        (exact, [[0, 2], [1, 3], [4], [5]]),
        (binpack, [[4], [0, 2], [1, 3], [5]]),
    ],
)
def test_six_items_by_hand(strategy, groups):
    """STRAT-1"""
    assert strategy([6, 5, 4, 5, 7, 4], 10) == groups


def test_first_and_best_fit_differ_where_they_should():
    """STRAT-4: 7, 6 and 6 are open with room 3, 4 and 4 when 4 comes; best fit and first fit then part at the 3."""
    lengths = [6, 7, 3, 4]
    assert first_fit(lengths, 10) == [[1, 2], [0, 3]]
    assert best_fit([8, 5, 3, 2], 10) == [[0, 3], [1, 2]]
    assert first_fit([5, 6, 2, 3], 10) == [[1, 3], [0, 2]]
    assert best_fit([5, 6, 2, 3], 10) == [[1, 3], [0, 2]]


def test_ties_go_to_the_lower_index():
    """STRAT-4"""
    assert best_fit([5, 5, 5, 5], 10) == [[0, 1], [2, 3]]
    assert first_fit([5, 5, 5, 5], 10) == [[0, 1], [2, 3]]
    assert best_fit([6, 6, 4], 10) == [[0, 2], [1]]


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_index_once_and_no_group_over_capacity(name):
    """STRAT-1"""
    for lengths, capacity in workloads(150):
        groups = STRATEGIES[name](lengths, capacity)
        assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
        assert all(0 < sum(lengths[i] for i in group) <= capacity for group in groups)
        assert all(group == sorted(group) for group in groups)
        assert STRATEGIES[name](tuple(lengths), capacity) == groups


def test_binpack_is_what_ms_swift_packs():
    """STRAT-2"""
    from swift.dataset.packing import calculate_matched_group

    for lengths, capacity in workloads(40):
        theirs, rest = calculate_matched_group(list(enumerate(lengths)), capacity)
        assert rest == []
        assert binpack(lengths, capacity) == [sorted(index for index, _ in pack) for pack in theirs]
        assert constant_volume(lengths, capacity) == binpack(lengths, capacity), "as without ms-swift"


def test_binpack_without_ms_swift_gives_the_same_and_import_is_lazy():
    """STRAT-2"""
    lengths = [random.Random(1).randint(1, 60) for _ in range(200)]
    code = (
        "import sys; from swift_vlpack.plan import strategies as s; assert 'swift' not in sys.modules; "
        "sys.modules['swift'] = None; "
        f"print(s.binpack({lengths}, 100)); assert sys.modules['swift'] is None"
    )
    without = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert without.strip() == str(binpack(lengths, 100))


def test_greedy_keeps_the_order():
    """STRAT-3"""
    for lengths, capacity in workloads(60):
        assert [index for group in greedy(lengths, capacity) for index in group] == list(range(len(lengths)))
        for before, after in zip(greedy(lengths, capacity), greedy(lengths, capacity)[1:], strict=False):
            assert sum(lengths[i] for i in before) + lengths[after[0]] > capacity


@pytest.mark.parametrize(("strategy", "best"), [(first_fit, False), (best_fit, True)])
def test_fast_decreasing_fit_equals_the_naive_one(strategy, best):
    """STRAT-4"""
    for lengths, capacity in workloads(400):
        assert strategy(lengths, capacity) == naive_decreasing(lengths, capacity, best=best)


def test_exact_fills_the_pack_of_the_oldest_as_full_as_any_subset_can():
    """STRAT-5"""
    for lengths, capacity in workloads(150, max_items=11):
        if not lengths:
            continue
        inside = fill_oldest(lengths, capacity)
        others = range(1, len(lengths))
        sums = (
            lengths[0] + sum(lengths[i] for i in some) for n in range(len(lengths)) for some in combinations(others, n)
        )
        assert inside[0] == 0
        assert sum(lengths[i] for i in inside) == max(total for total in sums if total <= capacity)


def test_exact_prefers_older_items_among_equally_full_packs():
    """STRAT-5"""
    assert fill_oldest([6, 4, 4], 10) == [0, 1]
    assert fill_oldest([2, 3, 5, 8], 10) == [0, 1, 2]


@pytest.mark.parametrize("name", OURS)
def test_caps_hold_in_every_group(name):
    """STRAT-6"""
    for seed, (lengths, capacity) in enumerate(workloads(150)):
        rng = random.Random(seed)
        caps = Caps((3, 4), [(1, rng.randint(0, 4)) for _ in lengths])
        groups = STRATEGIES[name](lengths, capacity, caps)
        assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
        for group in groups:
            assert sum(lengths[i] for i in group) <= capacity
            assert len(group) <= 3
            assert sum(caps.uses[i][1] for i in group) <= 4


@pytest.mark.parametrize("name", OURS)
def test_caps_by_hand(name):
    """STRAT-6"""
    two_samples = Caps((2,), [(1,)] * 5)
    assert len(STRATEGIES[name]([1] * 5, 100, two_samples)) == 3
    one_image = Caps((1,), [(1,), (0,), (1,), (0,)])
    groups = STRATEGIES[name]([10, 10, 10, 10], 100, one_image)
    assert sum(len(group) for group in groups) == 4
    assert len(groups) == 2


@pytest.mark.parametrize("name", STRATEGIES)
def test_lower_bound_and_optimum_are_never_beaten(name):
    """STRAT-7"""
    for lengths, capacity in workloads(120, max_items=8):
        fewest = optimum(lengths, capacity)
        assert lower_bound(lengths, capacity) <= fewest <= len(STRATEGIES[name](lengths, capacity))


def test_lower_bound_by_hand():
    """STRAT-7"""
    assert lower_bound([6, 6, 6], 10) == 3  # three above one half
    assert lower_bound([5, 5, 5], 10) == 2  # 15 tokens
    assert lower_bound([8, 8, 3, 3, 3], 10) == 3  # no 3 fits beside an 8; 9 tokens make one more pack
    assert lower_bound([12, 4, 4], 10) == 2  # one that is over-long has a pack of its own
    assert lower_bound([], 10) == 0


def test_exact_is_close_to_optimal_on_small_sets():
    """STRAT-5: the tightest strategy is not beaten by next fit, and is at most one pack from the optimum here."""
    for lengths, capacity in workloads(120, max_items=8):
        assert len(exact(lengths, capacity)) <= optimum(lengths, capacity) + 1
