"""Plan an epoch: run the packer over lengths that are known ahead.

>>> config = PackingConfig(packing_length=10, packing_strategy="exact", packing_drop_last=False)
>>> packs = plan([6, 5, 4, 5, 7, 3], config)
>>> sorted(packs)
[[0, 2], [1, 3], [4, 5]]
>>> packs.lower_bound, packs.mean_fill
(3, 1.0)

A plan has the packs that one gets by pushing the items one by one. There is one exception: `exact` takes best fit over
the whole epoch (or, on small data, ms-swift's own packing) if that needs fewer packs than its buffer; `Plan.method`
says which.

With `packing_batch=samples`, items of one optimizer step alone share packs, and `effective_batch_size` counts them:

>>> steps = PackingConfig(packing_length=10, packing_batch="samples", effective_batch_size=4)
>>> packs = plan([6, 5, 4, 5, 7, 3], steps, num_ranks=2)
>>> list(packs), packs.batches.tolist()
([[0, 2], [1, 3], [4], [5]], [1, 1])
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swift_vlpack.config import SAMPLES, PackingConfig, checked_num_ranks, need_config
from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.plan.buffer import remainder_to_drop, use_of_caps
from swift_vlpack.plan.items import Item, is_left_out, must_be_alone
from swift_vlpack.plan.packer import Label, Packer
from swift_vlpack.plan.packs import Plan
from swift_vlpack.plan.same_steps import UnpackedStep, pack_steps
from swift_vlpack.plan.shuffle import permutation
from swift_vlpack.plan.strategies import best_fit_assignment, binpack
from swift_vlpack.reasons import Reason

Columns = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]
"""Lengths, images and patches of all items."""
Assignment = Callable[[NDArray[np.int32], int], tuple[NDArray[np.int32], int]]
"""Function of (lengths, capacity) that returns (the pack of every item, the number of packs)."""

_MS_SWIFT_BUFFER = 1000  # samples, as in ms-swift's own PackingDataset
# With more items, single packs hardly count, and `exact` needs fewer packs anyway: specs/PLAN.md, PLAN-10.
_MAX_ITEMS_AS_MS_SWIFT = 20_000
_CHUNK = 1 << 16  # items turned into Python objects at a time, so that memory stays flat


def plan(  # noqa: PLR0913 - columns of the data, then options with defaults
    lengths: ArrayLike,
    config: PackingConfig,
    *,
    images: ArrayLike | None = None,
    patches: ArrayLike | None = None,
    seed: int = 0,
    num_ranks: int = 1,
    label: Label | None = "item {!r}".format,
) -> Plan:
    """Plan a whole epoch of known lengths. `images` and `patches` are counts per item, for caps and costs; else 0.

    Under `packing_batch=samples` each step of `num_ranks` takes the next `effective_batch_size` items, and is packed by
    itself; other plans are shared by `Plan.align`.
    `label` returns the name of an item for the log, if it is left out or alone; None logs nothing.
    """
    refuse_lengths_alone(config)
    checked_num_ranks(num_ranks)
    columns = columns_of(lengths, config, images, patches)
    if config.packing_batch != SAMPLES:
        return pack_items(columns, config, seed=seed, label=label)
    if config.effective_batch_size is None:
        raise ConfigError(
            "packing_batch=samples plans optimizer steps: give effective_batch_size, the samples of a step over all "
            "ranks, or leave packing_batch out"
        )
    step = UnpackedStep(config.effective_batch_size, accumulation=1, num_ranks=1)
    batch = np.arange(len(columns["lengths"])) // step.num_samples
    return pack_steps(columns.pop("lengths"), batch, step, config=config, num_ranks=num_ranks, seed=seed, **columns)


def refuse_lengths_alone(config: PackingConfig) -> None:
    """Raise `ConfigError` for options that a plan of mere lengths would ignore."""
    need_config(config)
    for name, needs_no_row in (("packing_overflow", "keep"), ("packing_share", "none")):
        if (value := getattr(config, name)) != needs_no_row:
            raise ConfigError(
                f"{name}={value} needs to know where the media of a row are, which lengths do not say; plan the run "
                "itself (--config), or leave it out"
            )


def pack_items(
    columns: Mapping[str, NDArray[np.int32]],
    config: PackingConfig,
    *,
    samples: NDArray[Any] | None = None,
    seed: int = 0,
    label: Label | None = None,
) -> Plan:
    """Pack items any of which may share a pack. `samples` has the number of samples of each item; else 1."""
    sizes = columns["lengths"]
    shared = np.broadcast_to(np.int32(0), len(sizes))
    inputs = {"config": config, "seed": seed, "shared": shared, **columns}
    samples = np.broadcast_to(np.int32(1), len(sizes)) if samples is None else samples
    planned = _packed_in_buffers(inputs, samples, label)
    if config.packing_strategy != "exact" or config.has_caps:
        return planned
    for group, method, max_items in (
        (best_fit_assignment, "best_fit over the epoch", len(sizes)),
        (_as_ms_swift, "binpack over the epoch", _MAX_ITEMS_AS_MS_SWIFT),
    ):
        if len(planned) == planned.lower_bound or len(sizes) > max_items:
            break
        whole = _packed_at_once(inputs, samples, group, method)
        # Do not take fewer packs at the price of a sample: to leave more out is no gain.
        if len(whole) < len(planned) and len(whole.members) >= len(planned.members):
            planned = whole
    return planned


def columns_of(
    lengths: ArrayLike, config: PackingConfig, images: ArrayLike | None = None, patches: ArrayLike | None = None
) -> dict[str, NDArray[np.int32]]:
    """Check lengths, images and patches, and return them by name; absent ones are 0."""
    columns = {"lengths": whole_numbers(lengths, "length", least=1)}
    num_items = len(columns["lengths"])
    # A broadcast number is an array of any length that takes no memory.
    nothing = np.broadcast_to(np.int32(0), num_items)
    for name, given in (("images", images), ("patches", patches)):
        if given is None and getattr(config, f"packing_max_{name}") is not None:
            raise DataError(f"packing_max_{name} is set, but the plan was given no {name} per item")
        columns[name] = nothing if given is None else whole_numbers(given, name, least=0)
        if len(columns[name]) != num_items:
            raise DataError(f"{len(columns[name])} values of {name} for {num_items} lengths")
    return columns


def _packed_in_buffers(inputs: dict[str, Any], samples: NDArray[Any], label: Label | None) -> Plan:
    """Run the packer over the lengths, in chunks."""
    columns = (inputs["lengths"], inputs["images"], inputs["patches"])
    made = _Packs()
    packer = Packer(inputs["config"], seed=inputs["seed"], on_drop=made.drop, label=label)
    # An item that is pushed gets its serial number from 1 on, and an item in chunks its index.
    first, several = int(packer.buffer.is_in_order), np.flatnonzero(samples > 1)
    packer.buffer.num_samples = dict(zip((several + first).tolist(), samples[several].tolist(), strict=True))
    if packer.buffer.is_in_order:
        for item in _items(columns, np.arange(len(columns[0]))):
            # The columns were checked as arrays, so there is no need to check the items one by one.
            made.add([pack.ids for pack in packer.push_checked(item)])  # type: ignore[misc]
        made.add([pack.ids for pack in packer.flush()])  # type: ignore[misc]
    else:
        _pack_numbers(columns, samples, packer, made)
    whole = Plan(
        **inputs,
        members=_int32(made.members),
        offsets=_offsets(_int32(made.counts)),
        dropped={reason: _int32(items) for reason, items in made.dropped.items()},
        method=inputs["config"].packing_strategy,
    )
    order = np.argsort(_int32(made.times), kind="stable")
    return whole if (order[1:] > order[:-1]).all() else whole.reordered(order)


def _pack_numbers(columns: Columns, samples: NDArray[Any], packer: Packer, made: _Packs) -> None:
    """Give the packs that one gets by pushing the items one by one, without an object for each item."""
    lengths, config, buffer = columns[0], packer.config, packer.buffer
    is_alone = must_be_alone(*columns, config)
    # An item that cannot share leaves at once, whatever else waits, so do these first. Then sort all packs by the time
    # when each was made, which is the place of the newest item.
    for item in _items(columns, np.flatnonzero(is_alone)):
        made.add([pack.ids for pack in packer.push_checked(item)], time=item.id)  # type: ignore[misc, arg-type]
    shared = np.flatnonzero(~is_alone)
    buffer.shortest = int(lengths[shared].min(initial=config.packing_length))
    serials, sizes, images, patches = (_numbers(column, shared) for column in (np.arange(len(lengths)), *columns))
    uses = zip(*use_of_caps(_numbers(samples, shared), images, patches, config), strict=True)
    while buffer.fill(serials, sizes, uses):
        newest = buffer.serials[-1]
        made.add(buffer.step(), time=newest)
    dropped = np.array([item for items in made.dropped.values() for item in items], dtype=np.int64)
    packs, remainder = buffer.flush(int(samples.sum()) - int(samples[dropped].sum()))
    made.add(packs, time=len(lengths))
    if remainder:
        made.dropped[Reason.UNDERFILLED.value] = array("i", remainder)


class _Packs:
    """Collect packs and left-out items from a packer."""

    def __init__(self) -> None:
        # Use arrays of machine integers: in a list of ten million indices the pointers alone take 80 MB.
        self.members, self.counts, self.times = array("i"), array("i"), array("i")
        self.dropped: dict[str, array[int]] = {}

    def add(self, packs: Iterable[Sequence[int]], time: int = 0) -> None:
        for pack in packs:
            self.members.extend(pack)
            self.counts.append(len(pack))
            self.times.append(time)

    def drop(self, item: Item, reason: Reason) -> None:
        self.dropped.setdefault(reason.value, array("i")).append(item.id)  # type: ignore[arg-type]


def _as_ms_swift(lengths: NDArray[np.int32], capacity: int) -> tuple[NDArray[np.int32], int]:
    """Pack as ms-swift does, in buffers of 1,000, so that `exact` never needs more packs than ms-swift."""
    pack_of = np.empty(len(lengths), dtype=np.int32)
    num_packs, left = 0, np.empty(0, dtype=np.int64)
    for start in range(0, len(lengths), _MS_SWIFT_BUFFER):
        buffer = np.concatenate((left, np.arange(start, min(start + _MS_SWIFT_BUFFER, len(lengths)))))
        packs = binpack(lengths[buffer].tolist(), capacity)
        is_last = start + _MS_SWIFT_BUFFER >= len(lengths)
        # Like ms-swift, carry the last pack of a buffer over to the next buffer. The last buffer keeps all its packs.
        left = buffer[[] if is_last else packs.pop()]
        for pack in packs:
            pack_of[buffer[pack]] = num_packs
            num_packs += 1
    return pack_of, num_packs


def _packed_at_once(inputs: dict[str, Any], samples: NDArray[Any], group: Assignment, method: str) -> Plan:
    """Group all lengths at once, and put the packs in an order that does not depend on their sizes."""
    config, lengths = inputs["config"], inputs["lengths"]
    alone = lengths >= config.packing_length
    shared = np.flatnonzero(~alone)
    pack_of, num_packs = group(lengths[shared], config.packing_length)
    left_out = is_left_out(lengths, 0, 0, config)  # this function is called only if there are no caps
    singles = np.flatnonzero(alone & ~left_out)
    dropped = {Reason.OVERSIZE.value: np.flatnonzero(left_out).astype(np.int32)}
    owner = np.concatenate((pack_of, num_packs + np.arange(len(singles), dtype=np.int32)))
    items = np.concatenate((shared, singles)).astype(np.int32)
    counts = np.bincount(owner, minlength=num_packs + len(singles))
    whole = Plan(
        **inputs,
        members=items[np.argsort(owner, kind="stable")],
        offsets=_offsets(counts),
        dropped={reason: items for reason, items in dropped.items() if len(items)},
        method=method,
    )
    kept = _without_remainder(whole, samples, num_packs)
    # Shuffle: best fit lists packs by size, and training in that order would be an unwanted curriculum.
    return kept.reordered(permutation(len(kept), kept.seed, "epoch"))


def _without_remainder(whole: Plan, samples: NDArray[Any], num_shared: int) -> Plan:
    of_members = samples[whole.members]
    of_packs = np.diff(np.append(0, np.cumsum(of_members))[whole.offsets])
    tokens = whole.num_tokens_per_pack[:num_shared]
    config = whole.config
    remainder = remainder_to_drop(
        (tokens / config.packing_length).tolist(),
        (config.packing_length - tokens).tolist(),
        int(whole.lengths.min(initial=config.packing_length)),
        config,
        counts=of_packs[:num_shared].tolist(),
        num_items=int(of_members.sum()),
    )
    if remainder is None:
        return whole
    first, last = whole.offsets[remainder], whole.offsets[remainder + 1]
    counts = np.delete(whole.num_samples_per_pack, remainder)
    dropped = {**whole.dropped, Reason.UNDERFILLED.value: whole.members[first:last]}
    return replace(
        whole, members=np.delete(whole.members, slice(first, last)), offsets=_offsets(counts), dropped=dropped
    )


def _items(columns: Columns, where: NDArray[np.int64]) -> Iterator[Item]:
    """Yield the items at these places."""
    return map(Item._make, zip(where.tolist(), *(_numbers(column, where) for column in columns), strict=True))


def _numbers(column: NDArray[Any], where: NDArray[np.int64]) -> Iterator[int]:
    """Yield the numbers of a column at these places."""
    chunks = (where[start : start + _CHUNK] for start in range(0, len(where), _CHUNK))
    return chain.from_iterable(column[chunk].tolist() for chunk in chunks)


def whole_numbers(values: ArrayLike, name: str, *, least: int) -> NDArray[np.int32]:
    """Check a whole column. Raises `DataError`, which names the first wrong item."""
    try:
        numbers = np.asarray(values)
    except ValueError:
        raise DataError(f"{name}: not a flat list of numbers") from None
    if numbers.ndim != 1:
        raise DataError(f"{name}: expected a flat list of numbers, got {numbers.ndim} dimensions")
    if len(numbers) and numbers.dtype.kind not in "iu":
        objects = np.asarray(values, dtype=object).tolist()
        # Refuse booleans: they are integers in Python, but a column of them is a mistake in any file.
        at, value = next((i, v) for i, v in enumerate(objects) if isinstance(v, bool) or not isinstance(v, Integral))
        raise DataError(f"item {at}: {name} must be an integer, got {value!r} ({type(value).__name__})")
    wrong = np.flatnonzero((numbers < least) | (numbers > np.iinfo(np.int32).max))
    if len(wrong):
        raise DataError(f"item {wrong[0]}: {name} must be at least {least} and fit 32 bits, got {numbers[wrong[0]]}")
    return numbers.astype(np.int32, copy=False)


def _int32(values: array[int]) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def _offsets(counts: NDArray[Any]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
