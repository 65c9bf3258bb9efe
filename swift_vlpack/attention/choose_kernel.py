"""Choose the kernel for packed attention: a right one on this device, or the requested one.

Each kernel is tried with the heads and arguments of the model's own layers, on a short sequence of random numbers, in
the run's data type and in float32. Its results and gradients must equal those of `reference`, also on a sequence with
shared prefixes if rows share prefixes. `varlen` is taken where it is right. Else, and in layers that it does not
support, each sequence takes `segments` or `grouped` by its lengths (`by_lengths`) and by the price of a call, which is
measured on a device other than a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.benchmark import Timer

from swift_vlpack.attention import attention
from swift_vlpack.attention.kernels import KERNELS, CannotDo, Kernel, by_first_able, by_lengths, eager, segments
from swift_vlpack.attention.masks import SequenceMask, resized
from swift_vlpack.attention.packed_sequence import PackedSequence
from swift_vlpack.comm import ALONE, OfAll
from swift_vlpack.errors import ConfigError
from swift_vlpack.plan.boundaries import ROOT, Boundaries

AUTO, SEGMENTS, GROUPED, VARLEN = "auto", "segments", "grouped", "varlen"
TRIED_BY_AUTO = (SEGMENTS, GROUPED, VARLEN)
"""`flex` is tried only where it is asked for: to compile it takes longer than all other trials together."""
LENGTHS = (37, 1, 64, 33, 40, 5, 64)
"""Lengths of the samples on which a kernel must be right: equal, similar and different ones, and the shortest."""
WITH_BRANCHES = Boundaries((37, 5, 1, 20, 18, 33, 12, 30, 31, 1, 9), (ROOT, 0, 0, 0, 0, ROOT, ROOT, 6, 6, ROOT, 9))
"""Boundaries on which a kernel must be right if rows share prefixes: longer and shorter ones than the window."""
LONGEST_WINDOW = 16
"""Longest window or chunk when kernels are tried: shorter than most of `LENGTHS`, so that the window hides tokens."""

_EXACT = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def choose(
    model: torch.nn.Module,
    forward: Callable[[], Any],
    *,
    shares_prefixes: bool = False,
    wanted: str = AUTO,
    results_of_all: OfAll = ALONE.results_of_all,
    kernels: Mapping[str, Kernel] = KERNELS,
) -> str:
    """Choose a kernel, let the model use it, and return a line for the log that names the kernel and the reason.

    `forward` runs the model on any packed sequence, to record what its layers ask of attention. If sequences share
    prefixes, a kernel must be right there too. `results_of_all` tries the kernels on every rank, and all ranks choose
    the same one. Raises `ConfigError` if the wanted kernel cannot be used.
    """
    attention.use_kernel(model, segments)
    if wanted == SEGMENTS:
        return "attention vlpack: segments, as asked for"
    names = [name for name in TRIED_BY_AUTO if name in kernels] if wanted == AUTO else [wanted]
    layouts = [Boundaries(LENGTHS), *([WITH_BRANCHES] if shares_prefixes else [])]

    kinds: list[LayerKind] = []

    def try_all() -> dict[str, Tried]:
        kinds.extend(layer_kinds(_calls(model, forward)))
        return {name: _tried([(kind, layout) for kind in kinds for layout in layouts], kernels[name]) for name in names}

    # A kernel that one rank cannot use is used by no rank.
    of_ranks = results_of_all(try_all)
    why_not = {name: next(filter(None, (found[name].why_not for found in of_ranks)), "") for name in names}
    right = [name for name in (VARLEN, GROUPED) if not why_not.get(name, "is not tried")]
    chosen = next(iter(right), SEGMENTS) if wanted == AUTO else wanted
    if why_not[chosen]:
        raise ConfigError(f"packing_attention={chosen}: the kernel {why_not[chosen]}; set packing_attention=auto")
    others = "; ".join(f"{name} {why}" for name, why in why_not.items() if why)
    others = f" ({others})" if others else ""
    kernel, how = kernels[chosen], f"{chosen}, {'equal to the reference' if wanted == AUTO else 'as asked for'}"
    used = right if wanted == AUTO else [wanted]
    if wanted == AUTO and GROUPED in used:
        quicker: Kernel = by_lengths
        if kinds[0].is_on_device:
            price = max(results_of_all(lambda: bytes_of_call(kinds[0])))
            quicker = partial(by_lengths, bytes_of_call=price)
            others = f", where a call costs what copying {price / 2**20:.3g} MiB costs{others}"
        kernel = quicker if chosen == GROUPED else partial(by_first_able, kernel, quicker)
        how = f"{SEGMENTS} or {GROUPED}, by the lengths of each sequence" if chosen == GROUPED else how
    attention.use_kernel(model, kernel, kernel if shares_prefixes else segments)
    return f"attention vlpack: {how}{others}{_launches(kinds[0], [of_ranks[0][name].reasons for name in used])}"


def _launches(kind: LayerKind, reasons: Sequence[Sequence[str]]) -> str:
    """Say that layers launch kernels for every sample; `reasons` are those of each kernel in use, case by case."""
    why = next((f" ({of_case[-1]})" for of_case in zip(*reasons, strict=True) if all(of_case)), "")
    if not kind.is_on_device or (reasons and not why):
        return ""
    return (
        f"; {'some' if reasons else 'all'} layers launch their kernels for every sample{why}: pack longer samples, or "
        "train with --attn_impl flash_attn where the model has it"
    )


def bytes_of_call(kind: LayerKind) -> float:
    """Measure how many bytes the device copies in the time of a call on a short sample, to a power of two.

    The gradients are included in both.
    """
    few, many = (kind.random((16,) * num, LONGEST_WINDOW) for num in (8, 40))
    of_call = (_seconds(lambda: results(many, segments)) - _seconds(lambda: results(few, segments))) / 32
    states = torch.zeros(2**12, 2**12, device=kind.call.query.device, requires_grad=True)
    tokens = torch.arange(len(states), device=states.device)
    of_all = _seconds(lambda: torch.autograd.grad(states.index_select(0, tokens), states, states.detach()))
    return float(2 ** round(math.log2(min(max(of_call / of_all * states.nbytes, 2**10), 2**30))))


def _seconds(compute: Callable[[], Any]) -> float:
    timer: Any = Timer("compute()", globals={"compute": compute})  # waits for the device
    return float(min(timer.timeit(2).mean for _ in range(4)))


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


class Tried(NamedTuple):
    """A kernel that was compared with the reference."""

    why_not: str  # in one line; empty if it may be used
    reasons: tuple[str, ...] = ()  # for each case, why the kernel does not support it; empty if it does


def _tried(cases: Sequence[tuple[LayerKind, Boundaries]], kernel: Kernel) -> Tried:
    """Try a kernel, which on an untested device may raise anything."""
    try:
        reasons = tuple(_checked(cases, kernel))
    except Exception as error:
        why = str(error) if isinstance(error, _Wrong) else f"breaks with {type(error).__name__}: {error}"
        return Tried(why.splitlines()[0])
    return Tried(reasons[0] if all(reasons) else "", reasons)


def _checked(cases: Sequence[tuple[LayerKind, Boundaries]], kernel: Kernel) -> Iterator[str]:
    """Compare the results for all kinds of layers with the reference. Raises `_Wrong` if one differs.

    Yields the reason why the kernel does not support a case, empty if it does. Another kernel computes such a layer.
    """
    for kind, layout in cases:
        sequence = kind.random(layout, LONGEST_WINDOW)
        try:
            _compare(sequence, kernel)
            if sequence.args.dropout != kind.call.args.dropout:
                with _own_numbers():
                    kernel(kind.random(layout, LONGEST_WINDOW, with_dropout=True))
        except CannotDo as reason:
            yield str(reason)
            continue
        if sequence.query.dtype in (torch.bfloat16, torch.float16):
            _compare_in_float32(kind.random(layout, LONGEST_WINDOW, dtype=torch.float32), kernel)
        yield ""


def _compare(sequence: PackedSequence, kernel: Kernel) -> None:
    """Raise `_Wrong` if the kernel gives another result than the reference."""
    made = results(sequence, kernel)
    if kernel is segments:
        return
    expected = results(sequence, reference)
    gap, of_segments = (largest_gap(expected, one) for one in (made, results(sequence, segments)))
    if not gap <= tolerance(sequence.query.dtype, of_segments):
        raise _Wrong(
            f"differs from the reference by {gap:.1e} of the largest value (segments {of_segments:.1e}) in "
            f"{str(sequence.query.dtype).removeprefix('torch.')}"
            + (", where rows share a prefix" if sequence.parents else "")
        )


def gaps_of_kernels(model: torch.nn.Module, forward: Callable[[], Any]) -> dict[str, dict[str, float | str]]:
    """Compare all kernels with the reference for all kinds of layers, in the data type of the model and in float32.

    Returns for each kernel the largest gap in each data type; or why it does not compute there.
    """
    kinds = layer_kinds(_calls(model, forward))
    return {name: _gaps(kinds, kernel) for name, kernel in KERNELS.items()}


def _gaps(kinds: Sequence[LayerKind], kernel: Kernel) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for dtype in dict.fromkeys((kinds[0].call.query.dtype, torch.float32)):
        sequences = [kind.random(LENGTHS, LONGEST_WINDOW, dtype=dtype) for kind in kinds]
        try:
            gaps = [largest_gap(results(one, reference), results(one, kernel)) for one in sequences]
        except Exception as error:
            found[str(dtype).removeprefix("torch.")] = next(iter(str(error).splitlines()), type(error).__name__)
        else:
            found[str(dtype).removeprefix("torch.")] = float(torch.tensor(gaps).max())
    return found


def _compare_in_float32(sequence: PackedSequence, kernel: Kernel) -> None:
    """Compare where limits are a thousand times smaller than in 16 bits. A kernel that refuses float32 passes."""
    try:
        _compare(sequence, kernel)
    except _Wrong:
        raise
    except Exception:  # kernels of 16 bits refuse float32 with errors of many kinds
        return


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A group of layers that call attention with the same sizes and arguments: one recorded call stands for all."""

    call: PackedSequence

    @property
    def is_on_device(self) -> bool:
        """Tell whether a call launches kernels on another device than a CPU."""
        return self.call.query.device.type != "cpu"

    def random(
        self,
        lengths: Sequence[int] | Boundaries,
        longest_window: int,
        seed: int = 0,
        *,
        with_dropout: bool = False,
        dtype: torch.dtype | None = None,
    ) -> PackedSequence:
        """Make the same call on random numbers, for samples of these lengths; in `dtype`, or in that of the call.

        Dropout is off unless asked for, because with it two correct kernels give different results.
        """
        boundaries = lengths if isinstance(lengths, Boundaries) else Boundaries(tuple(lengths))
        num_tokens, ends = boundaries.num_tokens, boundaries.cu_seqlens
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            made = torch.randn(*shape, generator=generator).to(self.call.query.device, dtype or self.call.query.dtype)
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


def layer_kinds(calls: Sequence[PackedSequence]) -> list[LayerKind]:
    """Group the calls of a forward into kinds of layers."""
    alike: dict[tuple[object, ...], PackedSequence] = {}
    for call in calls:
        alike.setdefault(_signature(call), call)
    return [LayerKind(call) for call in alike.values()]


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


def results(sequence: PackedSequence, kernel: Kernel) -> list[torch.Tensor]:
    """Return the output of a kernel, and the gradients of query, key, value and sinks.

    The gradients are of the sum of outputs times random weights.
    """
    sinks = [] if sequence.args.sinks is None else [sequence.args.sinks]
    inputs = [sequence.query, sequence.key, sequence.value, *sinks]
    with torch.enable_grad():
        made = kernel(sequence)
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
