"""Prove that a packed sample is trained as it is alone, on the model as it will train.

The reference is each sample alone, run by the model's own attention and collated by the host as without packing.
(a) Replace the tokens, then the media, of some samples: their own logits must move, and those of the others must not.
(b) Compare packed with alone: logits, labels, loss weights and gradients of a small set of parameters must be equal.
(c) Compare whole sequences of the plan with their samples alone: they must be equal, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils.checkpoint import CheckpointError

from swift_vlpack.attention import attention
from swift_vlpack.errors import BoundaryError, VLPackError
from swift_vlpack.proof.causes import Evidence, cause_of, of_linear_attention
from swift_vlpack.proof.changes import kinds_of_media, with_other_media
from swift_vlpack.proof.evidence import evidence_of, where
from swift_vlpack.proof.measure import NOTHING_LEFT_OUT, InSingle, LeftOut, Measured, measured
from swift_vlpack.proof.proof_model import Subject
from swift_vlpack.proof.tolerance import Limits, worst
from swift_vlpack.rows.samples import Encoded
from swift_vlpack.words import counted


class IsolationError(VLPackError):
    """Samples of a pack see each other, or the proof cannot be made; the message names the cause."""

    def __init__(self, message: str, *, cause: str = "", measured: Proof | None = None) -> None:
        """Take as `measured` the numbers of the failed proof, if it failed after they were measured."""
        super().__init__(message)
        self.cause = cause
        self.measured = measured


_RUN_AGAIN = (
    "a layer that is run again in the backward (gradient checkpointing) does something else than in the forward: what "
    "it looks at, such as boundaries, is gone by then. The backward of a pack is not that of its samples one by one"
)


@dataclass(frozen=True, slots=True)
class Proof:
    """The numbers of a proof, in units of the logits."""

    num_samples: int
    moved: float
    """Largest change of a logit when another sample of the pack changed."""
    alone: float
    """Largest difference between a logit in the pack and the same logit of the sample alone."""
    gradient: float | None
    """Largest difference of a gradient, as a share, over parts of the model; None if no rank has a whole gradient."""
    largest_logit: float
    num_more: int = 0
    """Number of samples that were compared in sequences of the plan."""
    left_out: LeftOut = NOTHING_LEFT_OUT
    """Sequences and samples of the plan that were not compared."""
    limits: Limits | None = None
    """Largest differences that count as rounding on this model."""
    dtype: str = ""
    """Name of the data type that the model computes in."""
    in_single: InSingleSaid | None = None
    """Differences in float32, for a model that computes in 16 bits; None if they were not measured."""
    not_in_single: str = ""
    """Reason why a model in 16 bits could not be compared in float32; empty for other models."""

    @property
    def num_rows_left_out(self) -> int:
        """Return how many sequences of the plan were not compared."""
        return self.left_out.num_rows

    @property
    def is_sharp(self) -> bool:
        """Return whether the limits were narrow enough that a mistake would have exceeded them."""
        return self.in_single is not None or self.limits is None or self.limits.would_notice(self.largest_logit)

    def line(self, attention: str) -> str:
        """Return the line for the log. It says "verified" only if the limits were narrow enough (`is_sharp`)."""
        over = f"max difference {self.moved} over {self.num_samples} samples, attention {attention}"
        if self.is_sharp:
            return f"isolation verified: {over} ({'; '.join(self._parts())})"
        return f"isolation: no sample sees another, {over}; the rest is not sharp ({'; '.join(self._parts())})"

    def _parts(self) -> Iterator[str]:
        """Yield the parts of the log line: what was compared, how far it differs, and what was left out."""
        of_logits, of_gradient = f"logits up to {self.largest_logit:.1f}", _within(self.gradient)
        if self.in_single is not None:
            of_single = "not compared in float32, for memory"
            if self.in_single.gradient is not None:
                of_single = _within(self.in_single.gradient)
            yield (
                f"in float32 packed equals the model's own attention within {self.in_single.alone:.1e} of {of_logits}, "
                f"gradients {of_single}; in {self.dtype}, as it trains, within {self.alone:.1e}, gradients "
                f"{of_gradient}, which is rounding"
            )
        elif self.is_sharp:
            own = f"packed equals the model's own attention within {self.alone:.1e} of {of_logits}"
            yield f"{own}, gradients {of_gradient}"
        else:
            assert self.limits is not None
            yield (
                f"packed equals the model's own attention only up to the rounding of {self.dtype}: within "
                f"{self.alone:.1e} of {of_logits}, and {self.limits.alone:.1e} would pass; gradients {of_gradient}, "
                f"and {self.limits.gradient:.1e} would pass"
            )
            if self.not_in_single:
                yield f"not compared in float32: {self.not_in_single}"
        if self.num_more:
            in_dtype = f" in {self.dtype}" if self.in_single is not None else ""
            yield f"so do {counted(self.num_more, 'sample')} in rows of the plan{in_dtype}"
        if self.left_out.num_rows:
            yield (
                f"{counted(self.left_out.num_rows, 'long row')} of the plan left out, "
                f"{counted(self.left_out.num_tokens, 'token')}"
            )
        if self.left_out.num_samples:
            yield f"{counted(self.left_out.num_samples, 'sample')} too long for the model's own attention left out"


class InSingleSaid(NamedTuple):
    """Largest differences between packed and alone in float32."""

    alone: float
    gradient: float | None
    """Largest difference of a gradient, as in `Proof`; None if the backward would take too much memory."""


def _within(gradient: float | None) -> str:
    return "not compared, parameters are sharded" if gradient is None else f"within {gradient:.1e}"


class Finding(NamedTuple):
    """A failure in words, with either the sequence to examine for its cause, or the cause itself."""

    said: str
    row: Sequence[Encoded] | None = None
    cause: str = ""
    is_in_single: bool = False
    """True if the failure was found in float32; then its cause is looked for in float32, too."""


def proved(
    subject: Subject, samples: Sequence[Encoded], rows: Sequence[Sequence[Encoded]] = (), tokens_of_epoch: int = 0
) -> Proof:
    """Prove isolation on one pack of these samples and on sequences of the plan.

    The pack also holds twins of samples with media (`with_twins`). `rows` are sequences of the plan, and
    `tokens_of_epoch` decides how many of them are compared. Raises `IsolationError` with the likeliest cause.
    """
    name, numbers = attention.name_of(subject.model.config), None
    try:
        of = measured(subject, with_twins(samples), rows, tokens_of_epoch)
        finding = finding_in(of)
        if finding is None:
            return proof_from(of)
        cause, seen, numbers = finding.cause, "", proof_from(of)
        if finding.row is not None:
            evidence = _evidence(subject, of, finding)
            cause, seen = cause_of(evidence), where(finding.row, evidence)
    except BoundaryError as error:
        is_of_positions = "position" in str(error)
        cause = "positions are not restarted at the boundaries" if is_of_positions else "the row is not its samples"
        finding, seen = Finding(str(error)), ""
    except ImportError as error:
        finding, cause, seen = Finding(str(error)), of_linear_attention(), ""
    except CheckpointError as error:
        finding, cause, seen = Finding(str(error).strip().splitlines()[0]), _RUN_AGAIN, ""
    details = "; ".join(filter(None, (finding.said, seen)))
    said = f"isolation could not be verified with attention {name}: {cause}. ({details})"
    raise IsolationError(said, cause=cause, measured=numbers)


def _evidence(subject: Subject, of: Measured, finding: Finding) -> Evidence:
    assert finding.row is not None
    if finding.is_in_single and of.in_single is not None:
        return evidence_of(of.in_single.subject, finding.row, of.in_single.limits)
    return evidence_of(subject, finding.row, of.limits)


def proof_from(of: Measured) -> Proof:
    """Summarize the measurements as a `Proof`, whether or not it holds."""
    gaps = [gap for row in of.rows for gap in row.gaps]
    return Proof(
        num_samples=len(of.samples),
        moved=worst([*of.moves, *of.moves_by_media]),
        alone=worst([gap.most for gap in gaps]),
        gradient=worst(list(of.gradient.values())) if of.gradient else None,
        largest_logit=of.largest_logit,
        num_more=sum(len(row.gaps) for row in of.rows_of_plan),
        left_out=of.left_out,
        limits=of.limits,
        dtype=str(of.dtype).removeprefix("torch."),
        in_single=None if of.in_single is None else _said_of(of.in_single),
        not_in_single=of.not_in_single,
    )


def _said_of(single: InSingle) -> InSingleSaid:
    gradient = worst(list(single.gradient.values())) if single.gradient else None
    return InSingleSaid(worst([gap.most for gap in single.row.gaps]), gradient)


def finding_in(of: Measured) -> Finding | None:
    """Return the first failure, None if the proof holds. Compares by `not <=` and `not >`, so that NaN fails, too."""
    limits, said = of.limits, f"(largest logit {of.largest_logit:.3g}, {of.dtype})"
    if not all(bool(torch.isfinite(logits).all()) for logits in of.alone):
        return Finding(f"logits are nan or infinite {said}", cause="the model itself gives them, without packing, too")
    if targets := next(filter(None, (row.targets for row in of.rows)), None):
        return Finding(targets, cause="labels or loss weights of the row are not those of its samples")
    if tokens := next(filter(None, (row.tokens for row in of.rows)), None):
        return Finding("compared as whole numbers, which no rounding moves", cause=tokens)
    if not of.repeated <= limits.alone:
        return Finding(
            f"the same row gave logits that differ by {of.repeated:.3g} when it was run again {said}",
            cause=_of_repeated(of),
        )
    if not (moved := worst(of.moves)) <= limits.moved:
        return Finding(
            "samples of a pack see each other: replacing the tokens of one moved the logits of another by "
            f"{moved:.3g} {said}",
            of.samples,
        )
    if not (moved := worst(of.moves_by_media)) <= limits.moved:
        return Finding(
            f"samples of a pack see each other: replacing the media of one moved the logits of another by {moved:.3g} "
            f"{said}",
            of.samples,
        )
    if finding := _in_single(of):
        return finding
    for number, row in enumerate(of.rows):
        if not all(map(limits.allow, row.gaps)):
            turned = ", while a row before it, of the same samples in another order, is right" if number == 1 else ""
            return Finding(
                f"a packed sample does not give what the model's own attention gives it alone: logits differ by "
                f"{worst([gap.most for gap in row.gaps]):.3g}{turned} {said}{_or_rounding(of)}",
                row.samples,
            )
    return _misplaced_media(of) or _blindness(of, said) or _gradient(of)


def with_twins(samples: Sequence[Encoded]) -> list[Encoded]:
    """Append a twin of one sample for each kind of media: the same tokens with other pixels.

    Twins show when a sample is given the images of another one, even if all images have the same size.
    """
    twins, seen = [], set[frozenset[str]]()
    for sample in samples:
        kinds = kinds_of_media(sample)
        if kinds and kinds not in seen:
            seen.add(kinds)
            twins.append(with_other_media(sample))
    return [*samples, *twins]


def _in_single(of: Measured) -> Finding | None:
    """Return a failure if logits differ in float32, where rounding cannot be the reason."""
    single = of.in_single
    if single is None or all(map(single.limits.allow, single.row.gaps)):
        return None
    return Finding(
        "a packed sample does not give what the model's own attention gives it alone, in float32 too: logits differ by "
        f"{worst([gap.most for gap in single.row.gaps]):.3g} (largest logit {of.largest_logit:.3g})",
        single.row.samples,
        is_in_single=True,
    )


def _or_rounding(of: Measured) -> str:
    """Return a hint that a failure may be rounding, for a model that computes in 16 bits; else an empty text."""
    if torch.finfo(of.dtype).bits > 16:
        return ""
    known = "in float32 they are equal" if of.in_single else "it could not be repeated in float32"
    return f"; {known}, so it may be rounding: `vlpack verify` with --torch_dtype float32 tells it from a mistake"


def _of_repeated(of: Measured) -> str:
    """Name the cause if the same pack gave other logits in a second run.

    Only the first run of the pack was made with gradients. If just that run differs from the samples alone, the cause
    is in what gradients change.
    """
    with_gradients, without = (all(map(of.limits.allow, row.gaps)) for row in of.rows[:2])
    if without and not with_gradients:
        return (
            "where gradients are asked for, as in training, the row is computed by something else than without them "
            "(a kernel with a backward of its own), and that does not keep samples apart"
        )
    return (
        "something stays in the model from one forward to the next (a cache, a state), or it draws at random what no "
        "dropout rate of its own switches off"
    )


def _misplaced_media(of: Measured) -> Finding | None:
    """Return a failure if media inputs are in the wrong order, even if logits hardly differ (grids, in 16 bits)."""
    name = next(filter(None, (row.inputs for row in of.rows)), None)
    if name is None:
        return None
    return Finding(
        f"{name} of a row is not that of its samples, one after the other",
        cause="what the row has of media is in the wrong order: images, videos or sounds, or their grids, exchanged",
    )


def _blindness(of: Measured, said: str) -> Finding | None:
    """Return a failure if a sample's own logits ignore its tokens or media: such a model passes all other checks."""
    blind = [at for at, moved in enumerate(of.own) if not moved > 2 * of.limits.moved]
    if blind:
        return Finding(
            f"replacing the tokens of {_name(of, blind[0])} did not move its own logits {said}",
            cause="the model does not look at its tokens, so nothing can be seen by changing them",
        )
    blind = [at for at, moved in of.own_media.items() if not moved > 2 * of.limits.moved]
    if blind:
        return Finding(
            f"replacing or exchanging the media of {_name(of, blind[0])} did not move its logits {said}",
            cause="media do not reach the model, so nobody can see whether they reach the right sample",
        )
    return None


def _gradient(of: Measured) -> Finding | None:
    single = of.in_single
    compared = [(of.gradient, of.limits, _or_rounding(of))]
    if single is not None:
        compared = [(single.gradient, single.limits, ", in float32 too"), *compared]
    wrong = [
        (off, part, said)
        for gradient, limits, said in compared
        for part, off in gradient.items()
        if not off <= limits.gradient
    ]
    if not wrong:
        return None
    off, part, said = wrong[0]
    return Finding(
        f"the gradient of the {part} part is off by {off:.3g} of its length, while logits and labels are equal{said}",
        cause="the backward of a pack is not that of its samples one by one: a function with a backward of its own "
        "(the attention, a fused kernel), or something that is detached",
    )


def _name(of: Measured, at: int) -> str:
    return str(of.samples[at].get("sample_id", f"sample {at + 1}"))
