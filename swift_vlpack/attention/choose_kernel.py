"""Choose the kernel for packed attention: the fastest that equals the reference on this device, or the requested one.

Each kernel is tried with the data type, heads and arguments of the model's own layers, on a short sequence of random
numbers. Its results and gradients must equal those of `reference`, also on a sequence with shared prefixes if rows
share prefixes. `segments` and `grouped` need not be timed, because the lengths of a sequence decide which of the two is
quicker (`by_lengths`). If another kernel is right too, all of them are timed on a sequence like the run's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from swift_vlpack.attention import attention
from swift_vlpack.attention.kernels import KERNELS, CannotDo, Kernel, by_lengths, eager, segments
from swift_vlpack.attention.masks import SequenceMask, resized
from swift_vlpack.attention.packed_sequence import PackedSequence
from swift_vlpack.comm import ALONE, OfAll
from swift_vlpack.errors import ConfigError
from swift_vlpack.plan.boundaries import ROOT, Boundaries
from swift_vlpack.words import counted

AUTO, DEFAULT, GROUPED = "auto", "segments", "grouped"
CHOSEN_BY_LENGTHS = frozenset({DEFAULT, GROUPED})
GAIN = 0.95
"""Another kernel must take less than this share of the time of `segments`; smaller gains are measurement noise."""
LENGTHS = (37, 1, 64, 33, 40, 5, 64)
"""Lengths of the samples on which a kernel must be right: equal, similar and different ones, and the shortest."""
WITH_BRANCHES = Boundaries((37, 5, 1, 20, 18, 33, 12, 30, 31, 1, 9), (ROOT, 0, 0, 0, 0, ROOT, ROOT, 6, 6, ROOT, 9))
"""Boundaries on which a kernel must be right if rows share prefixes: longer and shorter ones than the window."""
LONGEST_WINDOW = 16
"""Longest window or chunk when kernels are tried: shorter than most of `LENGTHS`, so that the window hides tokens."""
WORK = {"cpu": 1e9, "cuda": 2e12}
"""Most multiplications in a sequence that is timed, by device: about a tenth of a second. `LayerKind.affordable` makes
the samples of a longer sequence shorter."""
SECONDS, MOST_RUNS = 0.1, 4
"""Timing of a kernel ends after this many seconds or runs, whichever comes first; the first run only warms it up."""

_EXACT = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of trying one kernel."""

    seconds: float | None = None
    """Time for forward and backward of all layers, if the kernel was timed."""
    why_not: str = ""
    """Why the kernel must not be used; empty if it may."""

    @property
    def is_right(self) -> bool:
        """Tell whether the kernel may be used."""
        return not self.why_not


def choose(
    model: torch.nn.Module,
    forward: Callable[[], Any],
    lengths: Sequence[int] | Boundaries,
    *,
    wanted: str = AUTO,
    results_of_all: OfAll = ALONE.results_of_all,
    kernels: Mapping[str, Kernel] = KERNELS,
) -> str:
    """Choose a kernel, let the model use it, and return a line for the log that names the kernel and the reason.

    `forward` runs the model on any packed sequence, to record what its layers ask of attention. `lengths` are the
    lengths of the samples in a typical sequence, or its boundaries: if they have prefixes, a kernel must be right there
    too, else `segments` compute what has prefixes. `results_of_all` tries the kernels on every rank, and all ranks
    choose the same one. Raises `ConfigError` if the wanted kernel cannot be used.
    """
    typical = _boundaries(lengths)
    attention.use_kernel(model, segments)
    if wanted == DEFAULT:
        return "attention vlpack: segments, as asked for"
    names = list(kernels) if wanted == AUTO else [DEFAULT, wanted]

    def measure() -> dict[str, Trial]:
        kinds = layer_kinds(_calls(model, forward))
        return _tried(kinds, typical, {name: kernels[name] for name in names}, is_asked_for=wanted != AUTO)

    found = _slowest(results_of_all(measure))
    chosen = _quickest(found) if wanted == AUTO else wanted
    if found[chosen].why_not:
        raise ConfigError(f"packing_attention={chosen}: the kernel {found[chosen].why_not}; set packing_attention=auto")
    if wanted == AUTO and chosen in CHOSEN_BY_LENGTHS and GROUPED in found and found[GROUPED].is_right:
        attention.use_kernel(model, by_lengths, by_lengths if typical.parents else segments)
        return _line(f"{DEFAULT} or {GROUPED}", found, typical, "by the lengths of each sequence")
    attention.use_kernel(model, kernels[chosen], kernels[chosen] if typical.parents else segments)
    why = "as asked for" if wanted != AUTO else "the quickest that is equal to the reference"
    return _line(chosen, found, typical, why)


def _calls(model: torch.nn.Module, forward: Callable[[], Any]) -> list[PackedSequence]:
    """Record the calls of attention in training mode, where they include dropout, which some kernels do not support.

    Raises `ConfigError` if no layer calls the attention with boundaries.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        calls = _recorded(forward)
        # Set only attention to training mode: other modules would draw numbers, update statistics or checkpoint.
        for module in {id(call.module): call.module for call in calls}.values():
            module.training = True
        with _own_numbers():
            calls = _recorded(forward) or calls
    finally:
        for module, was_training in modes:
            module.training = was_training
    if not calls:
        raise ConfigError("no layer of the model calls the attention vlpack with boundaries; train without packing")
    return calls


def _own_numbers() -> AbstractContextManager[None]:
    """Fork the random generators, so that draws inside do not change the random numbers of training."""
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_available() else ())


def _recorded(forward: Callable[[], Any]) -> list[PackedSequence]:
    with torch.no_grad(), attention.recorded_calls() as calls:
        forward()
    return calls


class _Wrong(Exception):
    """Raised when a kernel gives another result than the reference."""


def _tried(
    kinds: Sequence[LayerKind], typical: Boundaries, kernels: Mapping[str, Kernel], *, is_asked_for: bool
) -> dict[str, Trial]:
    """Compare every kernel with the reference. Time those that are equal, unless the choice needs no stopwatch."""
    found: dict[str, Trial] = {}
    layouts = [Boundaries(LENGTHS), *([WITH_BRANCHES] if typical.parents else [])]
    for name, kernel in kernels.items():
        if name == "flex" and "varlen" in found and found["varlen"].is_right:
            # Compiling flex takes longer than all other trials together, and varlen already runs on this device.
            found[name] = Trial(why_not="was not compiled, as varlen does it")
        else:
            found[name] = _of(partial(_checked, [(kind, layout) for kind in kinds for layout in layouts], kernel))
    right = [name for name, trial in found.items() if trial.is_right]
    if is_asked_for or {*right} <= CHOSEN_BY_LENGTHS:
        return found
    return found | {name: _of(partial(_timed, kinds, typical, kernels[name])) for name in right}


def _of(work: Callable[[], Trial]) -> Trial:
    """Run a trial, and turn any exception into its reason: on an untested device a kernel may raise anything."""
    try:
        return work()
    except Exception as error:
        why = str(error) if isinstance(error, _Wrong) else f"breaks with {type(error).__name__}: {error}"
        return Trial(why_not=why.splitlines()[0])


def _checked(cases: Sequence[tuple[LayerKind, Boundaries]], kernel: Kernel) -> Trial:
    """Compare the results for all kinds of layers with the reference. Raises `_Wrong` if one differs."""
    reasons = []
    for kind, layout in cases:
        sequence = kind.random(layout, LONGEST_WINDOW)
        try:
            made = results(sequence, kernel)
            if sequence.args.dropout != kind.call.args.dropout:
                with _own_numbers():
                    kernel(kind.random(layout, LONGEST_WINDOW, with_dropout=True))
        except CannotDo as reason:
            reasons.append(str(reason))
            continue
        if kernel is not segments:
            expected = results(sequence, reference)
            gap, of_segments = (largest_gap(expected, one) for one in (made, results(sequence, segments)))
            if not gap <= tolerance(sequence.query.dtype, of_segments):
                raise _Wrong(
                    f"differs from the reference by {gap:.1e} of the largest value (segments {of_segments:.1e})"
                    + (", where rows share a prefix" if layout.parents else "")
                )
    return Trial(why_not=reasons[0] if len(reasons) == len(cases) else "")


def _timed(kinds: Sequence[LayerKind], typical: Boundaries, kernel: Kernel) -> Trial:
    """Add up the times of all layers; a layer that the kernel does not support counts with the time of `segments`."""

    def or_segments(sequence: PackedSequence) -> torch.Tensor:
        try:
            return kernel(sequence)
        except CannotDo:
            return segments(sequence)

    with _own_numbers():
        longest = max(sum(end - start for start, end in sample) for sample in typical.samples)
        sequences = [kind.random(kind.affordable(typical), longest, with_dropout=True) for kind in kinds]
        taken = [fastest_run(sequence, or_segments) for sequence in sequences]
    return Trial(sum(kind.num_layers * seconds for kind, seconds in zip(kinds, taken, strict=True)))


def _slowest(of_ranks: Sequence[Mapping[str, Trial]]) -> dict[str, Trial]:
    """Merge the trials of all ranks: keep the slowest time, and let a kernel that fails on one rank fail on all."""
    merged = {}
    for name in of_ranks[0]:
        of_kernel = [found[name] for found in of_ranks]
        unfit = [trial for trial in of_kernel if not trial.is_right]
        merged[name] = unfit[0] if unfit else max(of_kernel, key=lambda trial: trial.seconds or 0.0)
    return merged


def _quickest(found: Mapping[str, Trial]) -> str:
    usable = {name: trial.seconds for name, trial in found.items() if trial.is_right and trial.seconds is not None}
    best = min(usable, key=lambda name: usable[name], default=DEFAULT)
    return best if best == DEFAULT or usable[best] < GAIN * usable.get(DEFAULT, float("inf")) else DEFAULT


def _line(chosen: str, found: Mapping[str, Trial], typical: Boundaries, why: str) -> str:
    """Write the log line: the kernel, the reason for it, and the time of each kernel or why it cannot be used."""
    known = [f"{name} {trial.why_not}" for name, trial in found.items() if trial.why_not]
    times = [f"{name} {1000 * trial.seconds:.1f} ms" for name, trial in found.items() if trial.seconds is not None]
    if times:
        sequence = f"{counted(len(typical.samples), 'sample')} of {typical.num_tokens} tokens"
        known.insert(0, f"{', '.join(times)}, all layers forward and backward, {sequence}")
    return f"attention vlpack: {chosen}, {why}" + (f" ({'; '.join(known)})" if known else "")


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A group of layers that call attention with the same sizes and arguments: one recorded call stands for all."""

    call: PackedSequence
    num_layers: int

    def random(
        self,
        lengths: Sequence[int] | Boundaries,
        longest_window: int,
        seed: int = 0,
        *,
        with_dropout: bool = False,
    ) -> PackedSequence:
        """Make the same call on random numbers, for samples of these lengths.

        Dropout is off unless asked for, because with it two correct kernels give different results.
        """
        boundaries = _boundaries(lengths)
        num_tokens, ends = boundaries.num_tokens, boundaries.cu_seqlens
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            made = torch.randn(*shape, generator=generator).to(self.call.query.device, self.call.query.dtype)
            return made.requires_grad_()

        query, key, value = (
            random(1, states.shape[1], num_tokens, states.shape[3])
            for states in (self.call.query, self.call.key, self.call.value)
        )
        args = self.call.args
        return replace(
            self.call,
            query=query,
            key=key,
            value=value,
            mask=_mask_like(self.call.mask, ends, longest_window),
            window=None if self.call.window is None else min(self.call.window, longest_window),
            args=replace(
                args,
                dropout=args.dropout if with_dropout else 0.0,
                sinks=None if args.sinks is None else random(*args.sinks.shape),
                position_bias=None,  # a matrix for the whole sequence, which no kernel but `segments` supports
            ),
            ends=ends,
            parents=boundaries.parents,
        )

    def affordable(self, typical: Boundaries) -> Boundaries:
        """Scale the lengths down in proportion if the whole sequence would take too long."""
        size = self.call.query.shape[1] * (self.call.query.shape[3] + self.call.value.shape[3])
        rows = zip(typical.lengths, typical.starts_of_positions, strict=True)
        work = 7 * size * sum(own * (prefix + own) for own, prefix in rows)  # two products forward, five backward
        most = WORK.get(self.call.query.device.type, WORK["cuda"])
        share = min(1.0, (most / max(1, work)) ** 0.5)
        return Boundaries(tuple(max(1, int(length * share)) for length in typical.lengths), typical.parents)


def _boundaries(lengths: Sequence[int] | Boundaries) -> Boundaries:
    return lengths if isinstance(lengths, Boundaries) else Boundaries(tuple(lengths))


def layer_kinds(calls: Sequence[PackedSequence]) -> list[LayerKind]:
    """Group the calls of a forward into kinds of layers."""
    alike: dict[tuple[object, ...], list[PackedSequence]] = {}
    for call in calls:
        alike.setdefault(_signature(call), []).append(call)
    return [LayerKind(same[0], len(same)) for same in alike.values()]


def _signature(call: PackedSequence) -> tuple[object, ...]:
    states = tuple((one.shape[1], one.shape[3]) for one in (call.query, call.key, call.value))
    mask = call.mask.signature if isinstance(call.mask, SequenceMask) else call.mask is None
    args = call.args
    of_args = (args.scaling, args.dropout, args.softcap, args.sinks is None, args.position_bias is None, call.window)
    return (states, call.query.dtype, call.query.device, mask, of_args)


def _mask_like(
    mask: SequenceMask | torch.Tensor | None, ends: tuple[int, ...], longest_window: int
) -> SequenceMask | None:
    if not isinstance(mask, SequenceMask):
        return None
    return mask.like(resized(mask.function, ends, longest_window), ends[-1])


def reference(sequence: PackedSequence) -> torch.Tensor:
    """Compute the formula sample by sample, in double precision where the device has it."""
    precise = torch.float32 if sequence.query.device.type == "mps" else torch.float64
    query, key, value = (states.to(precise) for states in (sequence.query, sequence.key, sequence.value))
    outputs = []
    for segment in sequence.segments:
        states = query[:, :, segment.start : segment.end], segment.of(key, dim=2), segment.of(value, dim=2)
        outputs.append(eager(states, sequence.mask_of(segment), sequence.args, is_training=False))
    return torch.cat(outputs, dim=1)


def results(sequence: PackedSequence, kernel: Kernel, weight: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Return the output of a kernel, and the gradients of query, key, value and sinks.

    The gradients are of the sum of outputs times `weight`, which is random if not given.
    """
    sinks = [] if sequence.args.sinks is None else [sequence.args.sinks]
    inputs = [sequence.query, sequence.key, sequence.value, *sinks]
    with torch.enable_grad():
        made = kernel(sequence)
        if weight is None:
            weight = torch.randn(made.shape, generator=torch.Generator().manual_seed(1)).to(made)
        gradients = torch.autograd.grad(made, inputs, weight)
    return [made.detach(), *gradients]


def largest_gap(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    """Return the largest difference over all results, each as a share of its largest expected value; NaN stays NaN."""
    gaps = [
        (one.double() - other.double()).abs().max() / one.double().abs().max().clamp_min(1e-30)
        for one, other in zip(expected, found, strict=True)
    ]
    return float(torch.stack(gaps).max())


def tolerance(dtype: torch.dtype, of_segments: float) -> float:
    """Return the gap that rounding may cause: that of the data type, or twice the gap of `segments` on this device."""
    return max(_EXACT.get(dtype, _EXACT[torch.float32]), 2 * of_segments)


def fastest_run(sequence: PackedSequence, kernel: Kernel, clock: Callable[[], float] = time.perf_counter) -> float:
    """Time a few runs, forward and backward, and return the seconds of the fastest; the first run only warms up."""
    fastest, spent, num_runs = float("inf"), 0.0, 0
    heads, size = sequence.query.shape[1], sequence.value.shape[3]
    weight = sequence.value.new_ones(1, sequence.ends[-1], heads, size)
    while num_runs < 2 or (spent < SECONDS and num_runs < MOST_RUNS):
        start = clock()
        results(sequence, kernel, weight)
        if sequence.query.is_cuda:
            torch.cuda.synchronize(sequence.query.device)
        taken = clock() - start
        fastest = min(fastest, taken) if num_runs else fastest
        spent, num_runs = spent + taken, num_runs + 1
    return fastest
