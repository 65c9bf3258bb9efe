"""Choose the kernel for attention in packed sequences: the fastest that equals the reference, or the requested one.

Kernels are tried on the run's device, with its data types, heads and attention arguments, on a sequence like its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from swift_vlpack.attention import attention, trials
from swift_vlpack.attention.row_kernels import KERNELS, CannotDo, RowKernel
from swift_vlpack.attention.samples import PackedRow, segments
from swift_vlpack.attention.trials import Kind, kinds_of
from swift_vlpack.errors import ConfigError
from swift_vlpack.words import counted

OfAll = Callable[[Callable[[], Any]], list[Any]]
"""Runs a function on every rank and returns all results, in order of rank, on each of them."""
AUTO, DEFAULT = "auto", "segments"
GAIN = 0.95
"""Another kernel must take less than this share of the time of `segments`; smaller gains are measurement noise."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of trying one kernel."""

    seconds: float | None
    """Time for forward and backward of all layers; None if the kernel must not be used."""
    reason: str = ""


def alone(work: Callable[[], Any]) -> list[Any]:
    """Run a function in a run of one rank."""
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
    """Choose a kernel, let the model use it, and return a line that says which one and why.

    `forward` runs the model on any packed sequence, to record what its layers ask of attention. `lengths` are the
    lengths of the samples in a typical sequence. `results_of_all` tries the kernels on every rank, and all ranks choose
    the same one. Raises `ConfigError` if the wanted kernel cannot be used.
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
    """Record the calls of attention in training mode, so that a kernel without support for its dropout is not used.

    Raises `ConfigError` if no layer calls the attention with boundaries.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        rows = _recorded(forward)
        # Set only attention to training mode: other modules would draw numbers, update statistics or checkpoint.
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
    """Fork the random generators, so that draws inside do not change the random numbers of training."""
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_available() else ())


def _recorded(forward: Callable[[], Any]) -> list[PackedRow]:
    with torch.no_grad(), attention.recorded_rows() as rows:
        forward()
    return rows


class _Wrong(Exception):
    """A kernel gives another result than the reference."""


def _tried(kinds: Sequence[Kind], lengths: Sequence[int], kernels: Mapping[str, RowKernel]) -> dict[str, Trial]:
    found: dict[str, Trial] = {}
    of_segments: list[float | None] = []
    for name, kernel in kernels.items():
        if name == "flex" and found.get("varlen", Trial(None)).seconds is not None:
            found[name] = Trial(None, "was not compiled, as varlen does it")  # compiling takes longest of all
            continue
        try:
            reasons: list[str] = []
            taken = [_seconds(kind, lengths, kernel, reasons) for kind in kinds]
        except Exception as error:  # a kernel may raise anything on an untested device
            why = str(error) if isinstance(error, _Wrong) else f"breaks with {type(error).__name__}: {error}"
            found[name] = Trial(None, why.splitlines()[0])
            continue
        of_segments = of_segments or taken
        does_nothing = all(of_layer is None for of_layer in taken)
        found[name] = Trial(None, reasons[0]) if does_nothing else Trial(_total(kinds, taken, of_segments))
    return found


def _total(kinds: Sequence[Kind], taken: Sequence[float | None], of_segments: Sequence[float | None]) -> float:
    """Add up the times of all layers; a layer that the kernel cannot do takes the time of `segments`."""
    return sum(
        kind.num_layers * ((theirs if own is None else own) or 0.0)
        for kind, own, theirs in zip(kinds, taken, of_segments, strict=True)
    )


def _seconds(kind: Kind, lengths: Sequence[int], kernel: RowKernel, reasons: list[str]) -> float | None:
    """Return the time of one layer, once the kernel was found equal to the reference.

    Returns None, and adds to `reasons`, if the kernel cannot do the layer. Raises `_Wrong` if its result differs.
    """
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
    """Merge the trials of all ranks: take the slowest time; a kernel that fails on one rank is used on none."""
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
