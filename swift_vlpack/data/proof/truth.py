"""What a sample gives: by the model's own attention, alone, as the host collates it un-packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from swift_vlpack.data.proof.reference import OWN, QUICK, fitting, longest_for_own, own_attention
from swift_vlpack.data.proof.subject import Ran, Subject, length_of
from swift_vlpack.data.proof.tolerance import FLOORS, coarsest, gap_of
from swift_vlpack.data.rows.contents import NO_LABEL
from swift_vlpack.data.rows.samples import Encoded

_FEW_WORDS = 200


class Truth:
    """The attention that says what a sample gives: the model's own, or, for samples too long for that, its equal."""

    def __init__(self, subject: Subject, samples: Sequence[Encoded]) -> None:
        self.subject = subject
        self.limit = longest_for_own(subject.model)
        self.short = _words_of(min(samples, key=length_of), subject.is_ordinary)

    def is_for(self, samples: Sequence[Encoded]) -> bool:
        """Whether it can be said for all of them."""
        return all(length_of(sample) <= self.limit for sample in samples) or self._has_equal

    def known(self, samples: Sequence[Encoded]) -> Sequence[Encoded]:
        """Those of which it can be said; the shortest two in any case."""
        by_length = sorted(samples, key=length_of)
        return [one for one in samples if self.is_for([one])] if self.is_for(by_length[:2]) else by_length[:2]

    def of(self, sample: Encoded) -> Ran:
        """One sample alone."""
        with own_attention(self.subject.model, fitting(self.subject.model, length_of(sample))):
            return self.subject.run([sample], packed=False)

    @cached_property
    def _has_equal(self) -> bool:
        """sdpa needs no matrix of L x L, and may drop what the model asks for: so it is compared, on a few words."""
        logits = []
        for name in (OWN, QUICK):
            with own_attention(self.subject.model, name):
                logits.append(self.subject.run([self.short], packed=False).logits[0])
        limit = 4 * FLOORS[coarsest([logits[0].dtype])].logits
        return gap_of(*logits).most <= limit * max(1.0, float(logits[0].abs().max()))


def _words_of(sample: Encoded, is_ordinary: Callable[[int], bool]) -> Encoded:
    """A few words of a sample, as a sample."""
    tokens = [token for token in sample["input_ids"] if is_ordinary(token)][:_FEW_WORDS]
    return {"input_ids": tokens, "labels": [NO_LABEL, *tokens[1:]], "length": len(tokens)}
