"""The proof that a packed sample is trained as it is alone, on the model as it will train.

Measured against the model's own truth: its own attention, each sample alone, collated by the host as without packing.
(a) Tokens of some samples are replaced, then media: their own logits must move, those of the others must not.
(b) Packed must equal alone, in logits, labels, loss weights and in the gradient of a small set of parameters.
(c) Whole rows of the plan must equal their samples alone, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils.checkpoint import CheckpointError

from swift_vlpack.core.errors import BoundaryError, VLPackError
from swift_vlpack.core.words import counted
from swift_vlpack.data.model import attention
from swift_vlpack.data.proof.causes import cause_of, of_linear_attention
from swift_vlpack.data.proof.changes import kinds_of_media, with_other_media
from swift_vlpack.data.proof.evidence import evidence_of, where
from swift_vlpack.data.proof.measure import Measured, measured
from swift_vlpack.data.proof.subject import Subject
from swift_vlpack.data.proof.tolerance import Limits, worst
from swift_vlpack.data.rows.samples import Encoded


class IsolationError(VLPackError):
    """Samples of a pack see each other, or the proof cannot be made; names the cause."""

    def __init__(self, message: str, *, cause: str = "", measured: Proof | None = None) -> None:
        """`measured` are the numbers of a proof that does not hold, where it came to numbers."""
        super().__init__(message)
        self.cause = cause
        self.measured = measured


_RUN_AGAIN = (
    "a layer that is run again in the backward (gradient checkpointing) does something else than in the forward: what "
    "it looks at, such as boundaries, is gone by then. The backward of a pack is not that of its samples one by one"
)


@dataclass(frozen=True, slots=True)
class Proof:
    """What was measured, in units of the logits."""

    num_samples: int
    moved: float
    """Most that a logit moved when another sample of the pack changed."""
    alone: float
    """Most that a logit differs between packed and the model's own, alone."""
    gradient: float | None
    """Most that the gradient of a part of the model differs, as a share; none where no rank has a whole one."""
    largest_logit: float
    num_more: int = 0
    """Samples in rows of the plan."""
    num_rows_left_out: int = 0
    """Rows of the plan that would have taken too long."""
    limits: Limits | None = None
    """What rounding may do on this model."""

    def line(self, attention: str) -> str:
        """The line that the log shows."""
        gradient = "not compared, parameters are sharded" if self.gradient is None else f"within {self.gradient:.1e}"
        more = f"; so do {counted(self.num_more, 'sample')} in rows of the plan" if self.num_more else ""
        left = f"; {counted(self.num_rows_left_out, 'long row')} of the plan left out" if self.num_rows_left_out else ""
        return (
            f"isolation verified: max difference {self.moved} over {self.num_samples} samples, attention {attention} "
            f"(packed equals the model's own attention within {self.alone:.1e} of logits up to "
            f"{self.largest_logit:.1f}, gradients {gradient}{more}{left})"
        )


class Finding(NamedTuple):
    """What is wrong, in numbers, and the row to look at for its cause; none where the numbers say it all."""

    said: str
    row: Sequence[Encoded] | None = None
    cause: str = ""


def proved(
    subject: Subject, samples: Sequence[Encoded], rows: Sequence[Sequence[Encoded]] = (), tokens_of_epoch: int = 0
) -> Proof:
    """Prove it on these samples, in one pack with twins of those with media, and on rows of the plan.

    Raises `IsolationError` with the likeliest cause.
    """
    name, numbers = attention.name_of(subject.model.config), None
    try:
        of = measured(subject, with_twins(samples), rows, tokens_of_epoch)
        finding = finding_in(of)
        if finding is None:
            return proof_from(of)
        cause, seen, numbers = finding.cause, "", proof_from(of)
        if finding.row is not None:
            evidence = evidence_of(subject, finding.row, of.limits)
            cause, seen = cause_of(evidence), where(finding.row, evidence)
    except BoundaryError as error:
        finding, cause, seen = Finding(str(error)), "positions are not restarted at the boundaries", ""
    except ImportError as error:
        finding, cause, seen = Finding(str(error)), of_linear_attention(), ""
    except CheckpointError as error:
        finding, cause, seen = Finding(str(error).strip().splitlines()[0]), _RUN_AGAIN, ""
    details = "; ".join(filter(None, (finding.said, seen)))
    said = f"isolation could not be verified with attention {name}: {cause}. ({details})"
    raise IsolationError(said, cause=cause, measured=numbers)


def proof_from(of: Measured) -> Proof:
    """The numbers of a proof, whether it holds or not."""
    gaps = [gap for row in of.rows for gap in row.gaps]
    return Proof(
        num_samples=len(of.samples),
        moved=worst([*of.moves, *of.moves_by_media]),
        alone=worst([gap.most for gap in gaps]),
        gradient=worst(list(of.gradient.values())) if of.gradient else None,
        largest_logit=of.largest_logit,
        num_more=sum(len(row.samples) for row in of.rows_of_plan),
        num_rows_left_out=of.num_rows_left_out,
        limits=of.limits,
    )


def finding_in(of: Measured) -> Finding | None:
    """The first thing that is wrong; none where the proof holds. `not <=` and `not >`, so that NaN is wrong, too."""
    limits, said = of.limits, f"(largest logit {of.largest_logit:.3g}, {of.dtype})"
    if not all(bool(torch.isfinite(logits).all()) for logits in of.alone):
        return Finding(f"logits are nan or infinite {said}", cause="the model itself gives them, without packing, too")
    if targets := next(filter(None, (row.targets for row in of.rows)), None):
        return Finding(targets, cause="labels or loss weights of the row are not those of its samples")
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
    for number, row in enumerate(of.rows):
        if not all(map(limits.allow, row.gaps)):
            turned = ", while a row before it, of the same samples in another order, is right" if number == 1 else ""
            return Finding(
                f"a packed sample does not give what the model's own attention gives it alone: logits differ by "
                f"{worst([gap.most for gap in row.gaps]):.3g}{turned} {said}",
                row.samples,
            )
    return _misplaced_media(of) or _blindness(of, said) or _gradient(of)


def with_twins(samples: Sequence[Encoded]) -> list[Encoded]:
    """The samples, and behind them one more for each kind of media: the same tokens, other pixels.

    So that whoever hands the images of one sample to another is noticed, also where all have the same size.
    """
    twins, seen = [], set[frozenset[str]]()
    for sample in samples:
        kinds = kinds_of_media(sample)
        if kinds and kinds not in seen:
            seen.add(kinds)
            twins.append(with_other_media(sample))
    return [*samples, *twins]


def _of_repeated(of: Measured) -> str:
    """The pack was run where gradients are asked for, all else without."""
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
    """Also where the model hardly minds, as with grids of a model in 16 bits."""
    name = next(filter(None, (row.inputs for row in of.rows)), None)
    if name is None:
        return None
    return Finding(
        f"{name} of a row is not that of its samples, one after the other",
        cause="what the row has of media is in the wrong order: images, videos or sounds, or their grids, exchanged",
    )


def _blindness(of: Measured, said: str) -> Finding | None:
    """A model that does not look at what was changed would pass everything else."""
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
    wrong = {part: off for part, off in of.gradient.items() if not off <= of.limits.gradient}
    if not wrong:
        return None
    part = max(wrong, key=wrong.__getitem__)
    return Finding(
        f"the gradient of the {part} part is off by {wrong[part]:.3g} of its length, while logits and labels are equal",
        cause="the backward of a pack is not that of its samples one by one: a function with a backward of its own "
        "(the attention, a fused kernel), or something that is detached",
    )


def _name(of: Measured, at: int) -> str:
    return str(of.samples[at].get("sample_id", f"sample {at + 1}"))
