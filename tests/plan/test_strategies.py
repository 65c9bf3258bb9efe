import random
import subprocess
import sys
from itertools import combinations

import pytest

from swift_vlpack.plan import exact as exact_module
from swift_vlpack.plan.exact import Shelf, fill_oldest
from swift_vlpack.plan.strategies import (
    STRATEGIES,
    Caps,
    best_fit,
    binpack,
    exact,
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
    """STRAT-2: ours is another algorithm, so many ties, many packs and a full buffer are compared too."""
    from swift.dataset.packing import calculate_matched_group

    rng = random.Random(0)
    buffers = [([rng.choice((205, 222, 250, 291, 331)) for _ in range(512)], 1000)]
    buffers += [([rng.randint(350, 650) for _ in range(512)], 1000), ([rng.randint(1, 30) for _ in range(512)], 1000)]
    for lengths, capacity in (*workloads(60), *buffers):
        theirs, rest = calculate_matched_group(list(enumerate(lengths)), capacity)
        assert rest == []
        assert binpack(lengths, capacity) == [sorted(index for index, _ in pack) for pack in theirs]


def test_binpack_does_not_import_ms_swift():
    """STRAT-2: which takes seconds, where a file of lengths is planned in less."""
    code = (
        "import sys; from swift_vlpack.plan import strategies as s; "
        "print(s.binpack([4, 5, 3], 8)); assert not {'swift', 'binpacking'} & set(sys.modules)"
    )
    without = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert without.strip() == "[[1], [0, 2]]"


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


def pack_of_the_oldest(lengths, capacity):
    """As STRAT-5 says it, by every subset: the fullest, and of those the one whose newest items are the oldest."""
    others = range(1, len(lengths))
    packs = [(0, *some) for num in range(len(lengths)) for some in combinations(others, num)]
    full = [(sum(lengths[i] for i in pack), pack) for pack in packs]
    most = max(total for total, _ in full if total <= capacity)
    return min((pack for total, pack in full if total == most), key=lambda pack: pack[::-1])


def test_every_way_of_exact_gives_the_one_answer():
    """STRAT-5: which way is taken is a matter of speed alone."""
    num_left_out = num_one_long = 0
    for seed in range(600):
        rng = random.Random(seed)
        capacity = rng.choice((7, 20, 100, 10_000))
        low, high = rng.choice(((0, 1), (0, 0.3), (0.08, 0.13), (0.2, 0.5), (0.35, 0.65), (0.3, 0.36)))
        lengths = [max(1, int(capacity * rng.uniform(low, high))) for _ in range(rng.randint(1, 11))]
        lengths[rng.randrange(len(lengths))] = lengths[-1]  # equal ones meet more often than by chance
        expected = list(pack_of_the_oldest(lengths, capacity))
        assert exact_module._putting_in(lengths, capacity)[0] == expected
        left_out = exact_module._leaving_out(lengths, capacity)
        one_long = exact_module._with_one_long(lengths, sorted(lengths[1:]), capacity)
        assert left_out is None or left_out[0] == expected
        assert one_long is None or one_long == expected
        num_left_out, num_one_long = num_left_out + (left_out is not None), num_one_long + (one_long is not None)
    assert num_left_out > 100
    assert num_one_long > 300


def test_shelf_answers_the_same_with_and_without_what_it_remembers():
    """STRAT-5: over a stream, in which lengths come, leave and are put last, as the packer does it."""
    for low, high in ((0.2, 0.5), (0.35, 0.65), (0.01, 0.3), (0.01, 0.03)):
        rng = random.Random(f"{low}")
        draw = lambda num: [int(100_000 * rng.uniform(low, high)) for _ in range(num)]  # noqa: B023, E731
        shelf, num_remembered = Shelf(100_000, draw(150)), 0
        for _ in range(150):
            num_remembered += shelf._ascending is not None
            inside = shelf.fullest()
            assert inside == fill_oldest(shelf.lengths, 100_000)
            if rng.random() < 0.2:
                shelf.put_oldest_last()
            else:
                left = [length for index, length in enumerate(shelf.lengths) if index not in inside]
                shelf.take(inside)
                assert shelf.lengths == left
                shelf.add(draw(len(inside)))
        assert (num_remembered > 100) == (low > 0.1)


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
