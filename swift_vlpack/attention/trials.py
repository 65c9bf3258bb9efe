"""Rows to try attention kernels on: of the run's device, type, heads and wishes, with random numbers in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from swift_vlpack.attention.attention_args import Asked
from swift_vlpack.attention.mask_functions import resized
from swift_vlpack.attention.masks import RowMask
from swift_vlpack.attention.row_kernels import RowKernel
from swift_vlpack.attention.samples import PackedRow, eager

LENGTHS = (37, 1, 64, 33, 40, 5, 64)
"""Of the row that kernels must be right on: equal, like and unlike ones, and the shortest."""
LONGEST_WINDOW = 16
"""On that row, so that a window or chunk shows."""
WORK = {"cpu": 1e9, "cuda": 2e12}
"""Most multiplications of a row that is timed: about a tenth of a second. A longer row is scaled down."""
SECONDS, MOST_RUNS = 0.1, 4
"""After either a kernel is timed well enough; the first run only warms it up."""

_EXACT = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers that ask for the same, and one call of theirs."""

    row: PackedRow
    num_layers: int

    def on(
        self, lengths: Sequence[int], longest_window: int, seed: int = 0, *, with_dropout: bool = False
    ) -> PackedRow:
        """The call on another row. Without dropout, unless it is wanted: with it no two kernels give the same."""
        num_tokens = sum(lengths)
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            made = torch.randn(*shape, generator=generator).to(self.row.query.device, self.row.query.dtype)
            return made.requires_grad_()

        query, key, value = (
            random(1, states.shape[1], num_tokens, states.shape[3])
            for states in (self.row.query, self.row.key, self.row.value)
        )
        return replace(
            self.row,
            query=query,
            key=key,
            value=value,
            mask=_mask_like(self.row.mask, num_tokens, longest_window),
            window=None if self.row.window is None else min(self.row.window, longest_window),
            asked=self._asked(random, self.row.asked.dropout if with_dropout else 0.0),
            ends=(0, *accumulate(lengths)),
        )

    def _asked(self, random: Callable[..., torch.Tensor], dropout: float) -> Asked:
        asked = self.row.asked
        sinks = None if asked.sinks is None else random(*asked.sinks.shape)
        # A bias is a matrix of the row, which no kernel but `segments` can do.
        return replace(asked, dropout=dropout, sinks=sinks, position_bias=None)

    def affordable(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """The same lengths in proportion, where the whole row would take too long."""
        size = self.row.query.shape[1] * (self.row.query.shape[3] + self.row.value.shape[3])
        work = 7 * size * sum(length * length for length in lengths)  # two products, and five backward
        most = WORK.get(self.row.query.device.type, WORK["cuda"])
        share = min(1.0, (most / max(1, work)) ** 0.5)
        return tuple(max(1, int(length * share)) for length in lengths)


def kinds_of(rows: Sequence[PackedRow]) -> list[Kind]:
    """The calls of a forward pass, those alike together."""
    alike: dict[tuple[object, ...], list[PackedRow]] = {}
    for row in rows:
        alike.setdefault(_signature(row), []).append(row)
    return [Kind(same[0], len(same)) for same in alike.values()]


def _signature(row: PackedRow) -> tuple[object, ...]:
    states = tuple((one.shape[1], one.shape[3]) for one in (row.query, row.key, row.value))
    mask = row.mask.signature if isinstance(row.mask, RowMask) else row.mask is None
    asked = row.asked
    wishes = (asked.scaling, asked.dropout, asked.softcap, asked.sinks is None, asked.position_bias is None, row.window)
    return (states, row.query.dtype, row.query.device, mask, wishes)


def _mask_like(mask: RowMask | torch.Tensor | None, num_tokens: int, longest_window: int) -> RowMask | None:
    if not isinstance(mask, RowMask):
        return None
    return mask.like(resized(mask.function, num_tokens, longest_window), num_tokens)


def reference(row: PackedRow) -> torch.Tensor:
    """The formula, sample by sample, in double precision where the device has it."""
    precise = torch.float32 if row.query.device.type == "mps" else torch.float64
    query, key, value = (states.to(precise) for states in (row.query, row.key, row.value))
    outputs = []
    for start, end in pairwise(row.ends):
        states = query[:, :, start:end], key[:, :, start:end], value[:, :, start:end]
        outputs.append(eager(states, row.mask_of(start, end), row.asked, is_training=False))
    return torch.cat(outputs, dim=1)


def results(row: PackedRow, kernel: RowKernel, weight: torch.Tensor | None = None) -> list[torch.Tensor]:
    """What a kernel gives, and the gradients of query, key, value and sinks, for a loss of these or random weights."""
    inputs = [row.query, row.key, row.value, *([] if row.asked.sinks is None else [row.asked.sinks])]
    with torch.enable_grad():
        made = kernel(row)
        if weight is None:
            weight = torch.randn(made.shape, generator=torch.Generator().manual_seed(1)).to(made)
        gradients = torch.autograd.grad(made, inputs, weight)
    return [made.detach(), *gradients]


def largest_gap(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    """The largest difference of any result, in units of the largest value of that result; NaN stays NaN."""
    gaps = [
        (one.double() - other.double()).abs().max() / one.double().abs().max().clamp_min(1e-30)
        for one, other in zip(expected, found, strict=True)
    ]
    return float(torch.stack(gaps).max())


def tolerance(dtype: torch.dtype, of_segments: float) -> float:
    """What rounding may make: of the type, or twice what it makes of `segments` on this device."""
    return max(_EXACT.get(dtype, _EXACT[torch.float32]), 2 * of_segments)


def seconds(row: PackedRow, kernel: RowKernel, clock: Callable[[], float] = time.perf_counter) -> float:
    """The fastest of a few runs, forward and backward; the first only warms up."""
    fastest, spent, num_runs = float("inf"), 0.0, 0
    heads, size = row.query.shape[1], row.value.shape[3]
    weight = row.value.new_ones(1, row.ends[-1], heads, size)
    while num_runs < 2 or (spent < SECONDS and num_runs < MOST_RUNS):
        start = clock()
        results(row, kernel, weight)
        if row.query.is_cuda:
            torch.cuda.synchronize(row.query.device)
        taken = clock() - start
        fastest = min(fastest, taken) if num_runs else fastest
        spent, num_runs = spent + taken, num_runs + 1
    return fastest
