"""Run each sample alone as the reference of the proof, and compare a packed sequence with it.

The reference is the model's own attention on the sample as the host collates it without packing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from swift_vlpack.proof.proof_model import Ran, Subject, length_of
from swift_vlpack.proof.reference import OWN, QUICK, fitting, longest_for_own, own_attention
from swift_vlpack.proof.tolerance import FLOORS, Gap, coarsest, gap_of
from swift_vlpack.rows.contents import NO_LABEL
from swift_vlpack.rows.samples import Encoded

_FEW_WORDS = 200
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k")
"""Boundaries, counted from the start of the sequence. `wrong_inputs_of` must skip them: two samples with padding have
as many boundaries as both samples alone, but other values."""
_OF_THE_BATCH = (*_BOUNDARIES, "position_ids", "attention_mask", "cache_position")
"""Inputs that rightly differ between a pack and a sample alone; `wrong_positions_of` compares positions."""
_AXES = ("time", "height", "width")


class Truth:
    """Runs samples alone by the model's own attention; longer ones by sdpa, if it is equal on this model."""

    def __init__(self, subject: Subject, samples: Sequence[Encoded]) -> None:
        self.subject = subject
        self.limit = longest_for_own(subject.model)
        self.short = _words_of(min(samples, key=length_of), subject.is_ordinary)

    def is_for(self, samples: Sequence[Encoded]) -> bool:
        """Return whether all these samples can be run alone as a reference."""
        return all(length_of(sample) <= self.limit for sample in samples) or self._has_equal

    def known(self, samples: Sequence[Encoded]) -> Sequence[Encoded]:
        """Select the samples that can be run alone; only the two shortest if even they are too long."""
        by_length = sorted(samples, key=length_of)
        return [one for one in samples if self.is_for([one])] if self.is_for(by_length[:2]) else by_length[:2]

    def of(self, sample: Encoded) -> Ran:
        """Run one sample alone."""
        with own_attention(self.subject.model, fitting(self.subject.model, length_of(sample))):
            return self.subject.run([sample], packed=False)

    @cached_property
    def _has_equal(self) -> bool:
        """Return whether sdpa equals the model's own attention on a few words.

        sdpa needs no matrix of L x L, so it can run long samples. But it may ignore what the model asks of attention.
        """
        logits = []
        for name in (OWN, QUICK):
            with own_attention(self.subject.model, name):
                logits.append(self.subject.run([self.short], packed=False).logits[0])
        limit = 4 * FLOORS[coarsest([logits[0].dtype])].logits
        return gap_of(*logits).most <= limit * max(1.0, float(logits[0].abs().max()))


class AgainstAlone(NamedTuple):
    """Comparison of a packed sequence with its samples alone."""

    samples: Sequence[Encoded]
    gaps: Sequence[Gap]
    """Difference of logits for each sample that was compared."""
    targets: str | None
    """A mistake in labels or loss weights, in words; None if there is none."""
    inputs: str | None
    """Name of a media input that is not in the order of the samples; None if all are."""
    tokens: str | None
    """A mistake in boundaries, positions or other per-token integers, in words; None if there is none."""

    @classmethod
    def of(cls, samples: Sequence[Encoded], packed: Ran, alone: Iterable[Ran | None]) -> AgainstAlone:
        """Compare a sequence with its samples alone; None in `alone` skips a sample that could not be run alone.

        `alone` may be a generator: it is read one sample at a time, because logits are large.
        """
        gaps, targets, inputs, tokens = [], [], [], [wrong_boundaries_of(packed.inputs, list(map(length_of, samples)))]
        for at, (sample, ran) in enumerate(zip(samples, alone, strict=True)):
            inputs.append({} if ran is None else ran.inputs)
            if ran is None:
                continue
            gaps.append(gap_of(packed.logits[at], ran.logits[0]))
            targets.append(wrong_targets_of(sample, at, packed, ran))
            start = sum(map(length_of, samples[:at]))
            tokens.append(
                wrong_positions_of(sample, at, packed, ran) or wrong_tokens_of(sample, at, start, packed, ran)
            )
        media = wrong_inputs_of(packed.inputs, inputs) if len(gaps) == len(samples) else None
        return cls(samples, gaps, next(filter(None, targets), None), media, next(filter(None, tokens), None))


def wrong_inputs_of(packed: Mapping[str, Any], alone: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the name of a media input that is not in the order of the samples; None if all are right.

    Compares inputs with one entry for each image, video or sound, in the sequence as alone. Inputs that are padded to
    another shape are skipped; mistakes in them show in the logits. For inputs with one entry for each token see
    `wrong_tokens_of`.
    """
    for name, joined in packed.items():
        if name in _BOUNDARIES:
            continue
        parts = [inputs[name] for inputs in alone if inputs.get(name) is not None]
        if parts and all(isinstance(part, torch.Tensor) and part.dim() for part in (joined, *parts)):
            is_joined = sum(map(len, parts)) == len(joined) and all(one.shape[1:] == joined.shape[1:] for one in parts)
            if is_joined and not torch.equal(torch.cat(parts), joined):
                return name
    return None


def wrong_boundaries_of(inputs: Mapping[str, Any], lengths: Sequence[int]) -> str | None:
    """Describe a mistake in the boundaries among the inputs, None if there is none. Padding may follow the samples."""
    ends = [0, *accumulate(lengths)]
    for name in _BOUNDARIES:
        if (given := inputs.get(name)) is None:
            continue
        found = [end for end in dict.fromkeys(given.flatten().tolist()) if end <= ends[-1]]
        if found == ends:
            continue
        lost = ", ".join(str(at + 1) for at, end in enumerate(ends[:-1]) if end not in found)
        if set(found) <= set(ends):
            return f"the boundary before sample {lost or len(ends)} of the row is lost (wrong {name})"
        return f"a boundary is shifted: where sample {lost} of the row starts, {name} has another token (wrong {name})"
    return None


def wrong_positions_of(sample: Encoded, at: int, packed: Ran, alone: Ran) -> str | None:
    """Describe a mistake in the positions of a sample in the sequence; None if there is none.

    They must equal its positions alone up to one constant for all tokens and axes, because rotary embeddings see only
    differences of positions.
    """
    if not packed.positions or not alone.positions:
        return None
    here, there = (ran.positions[number].long().cpu() for ran, number in ((packed, at), (alone, 0)))
    axes = max(len(here), len(there))
    moved = here.expand(axes, -1) - there.expand(axes, -1)
    wrong = torch.nonzero(moved != moved[0, 0])
    if not len(wrong):
        return None
    token = int(wrong[:, 1].min())
    axis = int(wrong[wrong[:, 1] == token][0, 0])
    named = f" ({_AXES[axis]})" if axes == len(_AXES) else ""
    return (
        f"positions of {_name(sample, at)} in the row are not those that it has alone, from its token {token} on{named}"
    )


def wrong_tokens_of(sample: Encoded, at: int, start: int, packed: Ran, alone: Ran) -> str | None:
    """Name another per-token integer input that differs from the sample alone; None if none does."""
    length = length_of(sample)
    for name, joined in packed.inputs.items():
        own: Any = alone.inputs.get(name)
        if name in _OF_THE_BATCH or not (_is_of_tokens(joined, start + length) and _is_of_tokens(own, length)):
            continue
        if own.shape[1] == length and not torch.equal(joined[:, start : start + length].cpu(), own.cpu()):
            return f"{name} of {_name(sample, at)} in the row are not those that it has alone"
    return None


def _is_of_tokens(value: Any, at_least: int) -> bool:
    is_whole = isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex()
    return is_whole and value.dim() == 2 and value.shape[0] == 1 and value.shape[1] >= at_least


def _name(sample: Encoded, at: int) -> str:
    return str(sample.get("sample_id", f"sample {at + 1}"))


def wrong_targets_of(sample: Encoded, at: int, packed: Ran, alone: Ran) -> str | None:
    """Describe how labels or loss weights of a sample differ from the sample alone; None if they do not."""
    name = _name(sample, at)
    labels, expected = packed.labels[at], alone.labels[0]
    assert labels is not None
    assert expected is not None
    if at and int(labels[0]) != NO_LABEL:
        return f"the first token of {name} is a target of the sample before it: labels are shifted over a boundary"
    if (wrong := _first_difference(labels, expected)) is not None:
        return f"labels of {name} in the row are not those that it has alone, from its token {wrong} on"
    ones = torch.ones(length_of(sample))
    weights, expected = (ones if one is None else one for one in (packed.weights[at], alone.weights[0]))
    counted = (labels != NO_LABEL).cpu()
    if (wrong := _first_difference(weights.cpu() * counted, expected.cpu() * counted)) is not None:
        return f"loss weights of {name} in the row are not those that it has alone, from its token {wrong} on"
    return None


def _first_difference(one: torch.Tensor, other: torch.Tensor) -> int | None:
    """Return the first token whose values differ, None if none do. Skips token 0, which is never a target."""
    wrong = torch.nonzero(one[1:].cpu() != other[1:].cpu()).flatten()
    return int(wrong[0]) + 1 if len(wrong) else None


def _words_of(sample: Encoded, is_ordinary: Callable[[int], bool]) -> Encoded:
    """Make a sample of a few words of another sample."""
    tokens = [token for token in sample["input_ids"] if is_ordinary(token)][:_FEW_WORDS]
    return {"input_ids": tokens, "labels": [NO_LABEL, *tokens[1:]], "length": len(tokens)}
