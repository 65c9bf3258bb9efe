"""Plans are those of the pinned package: every pack of every rank in every step, and what is left out."""

from __future__ import annotations

from typing import Any

import pytest

from swift_vlpack import Packer, PackingConfig, plan, schedule
from tests.pinned import pins
from tests.pinned.adapter import plan_of

LENGTHS = pins.read("lengths")
STRATEGIES = ("binpack", "greedy", "first_fit", "best_fit", "exact")


def text(length: int) -> list[tuple[int, int, int]]:
    return [(length, 0, 0)] if length else []


def with_image(number: int, length: int) -> list[tuple[int, int, int]]:
    """A row of this length: of three rows two have images, and every seventh of those has two of them."""
    if length < 24 or number % 3 == 0:
        return text(length)
    tokens, num = min(length * 2 // 3, 256), 1 + (number % 7 == 0)
    media = [(tokens // num, 1, 4 * (tokens // num))] * num
    return [(4, 0, 0), *media, (length - 4 - sum(run[0] for run in media), 0, 0)]


TEXTS = {name: [text(length) for length in lengths] for name, lengths in LENGTHS.items()}
ROWS = {name: [with_image(*row) for row in enumerate(lengths)] for name, lengths in LENGTHS.items()}
BROKEN = [row if number % 11 else [] for number, row in enumerate(ROWS["captions"])]
MIX = {"a": ROWS["captions"], "b": TEXTS["instructions"], "c": BROKEN[:90]}
RATIOS = {"a": 0.5, "b": 1.25, "c": 1.0}
LONG = {"m": ROWS["mixed"][:60], "t": TEXTS["instructions"][:40]}


def case(sources: dict[str, Any] | str, options: dict[str, Any] | None = None, **facts: Any) -> dict[str, Any]:
    rows = {sources: ROWS[sources]} if isinstance(sources, str) else sources
    return {"sources": rows, "options": options or {}, **facts}


def packing(strategy: str = "exact", **options: Any) -> dict[str, Any]:
    return {f"packing_{name}": value for name, value in {"strategy": strategy, **options}.items()}


CASES: dict[str, dict[str, Any]] = {
    "defaults": case("captions"),
    "defaults of a mix": case(MIX, ratios=RATIOS, num_ranks=2),
    # Every strategy, on every shape of lengths.
    **{f"{name} of {shape}": case(shape, packing(name))
       for name in STRATEGIES for shape in ("captions", "instructions")},
    **{f"{name} of near halves": case("near_halves", packing(name, length=1060)) for name in STRATEGIES},
    **{f"{name} of a wide mix": case("mixed", packing(name, length=2048)) for name in STRATEGIES},
    **{f"{name} of small packs": case({"s": TEXTS["short"]}, packing(name, length=64)) for name in STRATEGIES},
    **{f"{name} that keeps the last": case("instructions", packing(name, drop_last=False)) for name in STRATEGIES},
    **{f"{name} without long ones": case("mixed", packing(name, allow_single_long=False)) for name in STRATEGIES},
    **{f"{name} for 3 ranks": case("captions", packing(name), num_ranks=3, seed=7) for name in STRATEGIES},
    **{f"{name} in small buffers": case("captions", packing(name, buffer=16, max_carry=1)) for name in STRATEGIES},
    # Options of the packer.
    "fill ratio": case("near_halves", packing("best_fit", length=1060, buffer=24, min_fill_ratio=0.95, max_carry=2)),
    "most samples": case({"s": TEXTS["short"]}, packing("first_fit", length=128, max_samples=3)),
    "most images": case("captions", packing("best_fit", length=1024, max_images=2)),
    "most patches": case("captions", packing("greedy", length=1024, max_patches=1500)),
    "most images, exact": case("captions", packing("exact", length=1024, max_images=1)),
    "not balanced": case("mixed", packing("exact", balance=False, length=1024), num_ranks=4),
    "balanced": case("mixed", packing("exact", length=1024), num_ranks=4),
    "padded": case("captions", packing("exact", pad_to=64), num_ranks=2),
    # Ranks, accumulation, epochs.
    "4 ranks, accumulation 3": case("captions", packing(), num_ranks=4, accumulation=3),
    "more ranks than packs": case({"t": TEXTS["instructions"][:9]}, packing(length=2048), num_ranks=8),
    "second of 3 epochs": case("instructions", packing(), num_epochs=3, epoch=1, num_ranks=2),
    "third of 3 epochs": case("instructions", packing(), num_epochs=3, epoch=2, num_ranks=2),
    "epochs by steps": case("instructions", packing("binpack"), num_packs=400, epoch=3, num_ranks=2),
    "in order": case("captions", packing("greedy"), shuffle=False),
    "in order, exact": case(MIX, packing(), shuffle=False, ratios=RATIOS, num_ranks=2),
    # Sources.
    "mix": case(MIX, packing(), ratios=RATIOS),
    "mix, other epoch": case(MIX, packing(), ratios=RATIOS, epoch=1, num_epochs=2),
    "mix by tokens": case(MIX, packing(), ratios={"a": 0.6, "b": 0.3, "c": 0.1}, by_tokens=True),
    "mix with a seed of one source": case(MIX, packing(), ratios=RATIOS, seeds={"b": 99}),
    "mix of some rows": case(MIX, packing(), ratios=RATIOS, some={"a": range(10, 60), "c": range(0, 90, 2)}),
    "source at ratio 0": case(MIX, packing("binpack"), ratios={"a": 1.0, "b": 0.0, "c": 2.5}),
    "rows that cannot be encoded": case({"c": BROKEN}, packing("best_fit"), num_ranks=2),
    # Rows longer than a pack.
    **{f"{how}, {name}": case(LONG, packing(name, overflow=how)) for how in ("split", "truncate", "drop")
       for name in ("binpack", "exact")},
    "split with stride": case(LONG, packing(overflow="split", stride=32, min_len=40), num_ranks=2),
    "split, one image a pack": case(LONG, packing("best_fit", overflow="split", max_images=1)),
    "split, ratios": case(LONG, packing(overflow="split"), ratios={"m": 1.0, "t": 2.0}),
    # Epochs that others began: (ranks, packs of each rank) of every run before.
    "2 ranks after 2": case("captions", packing(), past=[(2, 5)], num_ranks=2),
    "3 ranks after 2": case("captions", packing(), past=[(2, 5)], num_ranks=3),
    "1 rank after 4 and 2": case("captions", packing("binpack"), past=[(4, 3), (2, 4)], num_ranks=1),
    "5 ranks after 2, second epoch": case(MIX, packing(), ratios=RATIOS, past=[(2, 7)], num_ranks=5, epoch=1,
                                          num_epochs=2),
    "4 ranks after 1, split": case(LONG, packing(overflow="split", stride=16), past=[(1, 11)], num_ranks=4),
    "nothing left": case({"t": TEXTS["short"][:20]}, packing("greedy", length=256), past=[(1, 3)], num_ranks=1),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_plan_is_as_pinned(name):
    made = plan_of(**CASES[name])
    steps = made["steps"]
    shown = {
        rank: {step: packs for step, packs in of_rank.items() if int(step) <= 2} for rank, of_rank in steps.items()
    }
    counts = {reason: len(ids) for reason, ids in made["left_out"].items()}
    value = {"digest": pins.digest(made), "num_steps": len(steps["0"]), "first_steps": shown, "left_out": counts}
    pins.check("plans", name, value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_public_plan_is_as_pinned(strategy):
    """Of `swift_vlpack.plan`, aligned, with what is left for other ranks."""
    config = PackingConfig(packing_length=512, packing_strategy=strategy)
    made = plan(LENGTHS["captions"], config, seed=3)
    two = made.align(2)
    rest = two.rest(8).align(3)
    value = {
        "digests": [pins.digest(list(one)) for one in (made, two, rest)],
        "of ranks": [list(two.for_rank(rank))[:3] for rank in range(2)],
        "dropped": made.num_dropped,
        "method": made.method,
        "lower_bound": made.lower_bound,
        "mean_fill": made.mean_fill,
        "slowest_to_mean": two.balance.slowest_to_mean,
        "first": [list(one)[:4] for one in (made, two, rest)],
    }
    pins.check("plans", f"public plan by {strategy}", value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_packs_come_when_they_came(strategy):
    """Item by item, with how many are held between."""
    config = PackingConfig(packing_length=512, packing_strategy=strategy, packing_buffer=12)
    packer = Packer(config, seed=5)
    items = enumerate(LENGTHS["instructions"])
    seen = [[[list(pack.ids) for pack in packer.push(item)], len(packer.held)] for item in items]
    seen.append([[list(pack.ids) for pack in packer.flush()], len(packer.held)])
    value = {"digest": pins.digest(seen), "first": [one for one in seen if one[0]][:3], "dropped": packer.num_dropped}
    pins.check("plans", f"pushed, {strategy}", value)


def test_schedule_is_as_pinned():
    value = {}
    for name, options in {"mixed": {}, "in order": {"shuffle": False}, "own seed": {"seeds": {"b": 4}}}.items():
        order = schedule([("a", 40, 0.5), ("b", 25), ("c", 10, 2.3)], seed=9, epoch=2, **options)
        value[name] = [list(order[place]) for place in range(len(order))]
    pins.check("plans", "schedule", value)
