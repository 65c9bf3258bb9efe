"""Which kernel computes the attention of packed rows: the quickest equal to the reference, or the one asked for.

On the run's own device, with its types, heads and wishes, on a row like those of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from swift_vlpack.core.errors import ConfigError
from swift_vlpack.core.words import counted
from swift_vlpack.data.kernels import trials
from swift_vlpack.data.kernels.row_kernels import KERNELS, CannotDo, RowKernel
from swift_vlpack.data.kernels.samples import PackedRow, segments
from swift_vlpack.data.kernels.trials import Kind, kinds_of
from swift_vlpack.data.model import attention

OfAll = Callable[[Callable[[], Any]], list[Any]]
"""Does work on every rank, and gives everyone all results, in order of rank."""
AUTO, DEFAULT = "auto", "segments"
GAIN = 0.95
"""Of the time of `segments` that another kernel may take to be worth it: less is what two measurements differ by."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What was found of one kernel."""

    seconds: float | None
    """Forward and backward of all layers on the row; None where it must not be used."""
    reason: str = ""


def alone(work: Callable[[], Any]) -> list[Any]:
    """The only rank."""
    return [work()]


def choose(
    model: torch.nn.Module,
    forward: Callable[[], Any],
    lengths: Sequence[int],
    *,
    wanted: str = AUTO,
    results_of_all: OfAll = alone,
    kernels: Mapping[str, RowKernel] = KERNELS,
) -> str:
    """Choose for this model, switch to it, and say in a line what and why.

    `forward` runs the model on a packed row, whatever it holds, to see what its layers ask for; `lengths` are those of
    the samples of a typical row. With many ranks, `results_of_all` does the work on each of them: all choose the same.
    """
    attention.use_kernel(model, segments)
    if wanted == DEFAULT:
        return "attention vlpack: segments, as asked for"
    names = list(kernels) if wanted == AUTO else [DEFAULT, wanted]

    def measure() -> dict[str, Trial]:
        return _tried(kinds_of(_calls(model, forward)), lengths, {name: kernels[name] for name in names})

    found = _slowest(results_of_all(measure))
    chosen = _quickest(found) if wanted == AUTO else wanted
    if found[chosen].seconds is None:
        raise ConfigError(f"packing_attention={chosen}: the kernel {found[chosen].reason}; set packing_attention=auto")
    attention.use_kernel(model, kernels[chosen])
    return _line(chosen, found, lengths, is_asked_for=wanted != AUTO)


def _calls(model: torch.nn.Module, forward: Callable[[], Any]) -> list[PackedRow]:
    """The calls of attention in training. Its dropout counts: a kernel that cannot do it would not train."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        rows = _recorded(forward)
        # Nothing but attention trains meanwhile: other parts would draw, count and be checkpointed.
        for module in {id(row.module): row.module for row in rows}.values():
            module.training = True
        with _own_numbers():
            rows = _recorded(forward) or rows
    finally:
        for module, was_training in modes:
            module.training = was_training
    if not rows:
        raise ConfigError("no layer of the model calls the attention vlpack with boundaries; train without packing")
    return rows


def _own_numbers() -> AbstractContextManager[None]:
    """What is drawn inside is not taken from the numbers of training."""
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_available() else ())


def _recorded(forward: Callable[[], Any]) -> list[PackedRow]:
    with torch.no_grad(), attention.recorded_rows() as rows:
        forward()
    return rows


class _Wrong(Exception):
    """A kernel does not give what the reference gives."""


def _tried(kinds: Sequence[Kind], lengths: Sequence[int], kernels: Mapping[str, RowKernel]) -> dict[str, Trial]:
    found: dict[str, Trial] = {}
    of_segments: list[float | None] = []
    for name, kernel in kernels.items():
        if name == "flex" and found.get("varlen", Trial(None)).seconds is not None:
            found[name] = Trial(None, "was not compiled, as varlen does it")  # which would take longer than all else
            continue
        try:
            reasons: list[str] = []
            taken = [_seconds(kind, lengths, kernel, reasons) for kind in kinds]
        except Exception as error:  # whatever a kernel breaks with on a device nobody tried it on
            why = str(error) if isinstance(error, _Wrong) else f"breaks with {type(error).__name__}: {error}"
            found[name] = Trial(None, why.splitlines()[0])
            continue
        of_segments = of_segments or taken
        does_nothing = all(of_layer is None for of_layer in taken)
        found[name] = Trial(None, reasons[0]) if does_nothing else Trial(_total(kinds, taken, of_segments))
    return found


def _total(kinds: Sequence[Kind], taken: Sequence[float | None], of_segments: Sequence[float | None]) -> float:
    """Of all layers: those that a kernel cannot do are left to `segments`."""
    return sum(
        kind.num_layers * ((theirs if own is None else own) or 0.0)
        for kind, own, theirs in zip(kinds, taken, of_segments, strict=True)
    )


def _seconds(kind: Kind, lengths: Sequence[int], kernel: RowKernel, reasons: list[str]) -> float | None:
    """Of one layer, after the kernel was found equal to the reference; None, with the reason, where it cannot do it."""
    row = kind.on(trials.LENGTHS, trials.LONGEST_WINDOW)
    try:
        made = trials.results(row, kernel)
    except CannotDo as reason:
        reasons.append(str(reason))
        return None
    if kernel is not segments:
        expected = trials.results(row, trials.reference)
        gap, of_segments = (trials.largest_gap(expected, one) for one in (made, trials.results(row, segments)))
        if not gap <= trials.tolerance(row.query.dtype, of_segments):
            raise _Wrong(f"differs from the reference by {gap:.1e} of the largest value (segments {of_segments:.1e})")
    try:
        with _own_numbers():
            return trials.seconds(kind.on(kind.affordable(lengths), max(lengths), with_dropout=True), kernel)
    except CannotDo as reason:
        reasons.append(str(reason))
        return None


def _slowest(of_ranks: Sequence[Mapping[str, Trial]]) -> dict[str, Trial]:
    """What holds on every rank: a kernel that one of them cannot use none of them uses."""
    merged = {}
    for name in of_ranks[0]:
        of_kernel = [found[name] for found in of_ranks]
        unfit = [trial for trial in of_kernel if trial.seconds is None]
        merged[name] = unfit[0] if unfit else max(of_kernel, key=lambda trial: trial.seconds or 0.0)
    return merged


def _quickest(found: Mapping[str, Trial]) -> str:
    usable = {name: trial.seconds for name, trial in found.items() if trial.seconds is not None}
    best = min(usable, key=lambda name: usable[name], default=DEFAULT)
    return best if best == DEFAULT or usable[best] < GAIN * usable.get(DEFAULT, float("inf")) else DEFAULT


def _line(chosen: str, found: Mapping[str, Trial], lengths: Sequence[int], *, is_asked_for: bool) -> str:
    def told(name: str) -> str:
        trial = found[name]
        return f"{name} {trial.reason}" if trial.seconds is None else f"{name} {1000 * trial.seconds:.1f} ms"

    others = ", ".join(told(name) for name in found if name != chosen)
    why = "as asked for" if is_asked_for else "the quickest that is equal to the reference"
    row = f"{counted(len(lengths), 'sample')} of {sum(lengths)} tokens"
    return f"attention vlpack: {told(chosen)}, {why} (all layers, forward and backward, {row}; {others})"
