"""Run each sample of a sequence of the plan alone, as the reference for the sequence.

A sequence may have hundreds of short texts. Texts share un-packed batches of the host, if a trial shows that such a
batch gives the results of its samples alone. Samples with media always run alone, because a vision tower that mixes
images would mix them in an un-packed batch, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from swift_vlpack.proof.limits import coarsest, gap_of, has_experts, without_noise
from swift_vlpack.proof.perturb import kinds_of_media
from swift_vlpack.proof.proof_model import ProofModel, RunResult, length_of
from swift_vlpack.proof.reference import Reference, longest_for_own, own_attention, run_alone
from swift_vlpack.proof.shards import is_sharded
from swift_vlpack.rows.samples import Encoded

TOKENS_TOGETHER, FEWEST_TOGETHER = 2048, 8
"""Most tokens of a shared batch, padding included; and the fewest texts for which shared batches save forwards, because
the trial itself takes three forwards."""


def each_alone(
    proof_model: ProofModel, reference: Reference, sequence: Sequence[Encoded]
) -> Iterator[RunResult | None]:
    """Yield the results of each sample alone; None for a sample that has no reference."""
    shared = _together(proof_model, sequence)
    for at, sample in enumerate(sequence):
        if at in shared:
            yield shared.pop(at)
        else:
            yield run_alone(proof_model, sample) if reference.is_for([sample]) else None


def _together(proof_model: ProofModel, sequence: Sequence[Encoded]) -> dict[int, RunResult]:
    """Run the short texts of a sequence in un-packed batches. Returns their results by their number in the sequence."""
    limit = longest_for_own(proof_model.model)
    texts = [at for at, one in enumerate(sequence) if not kinds_of_media(one) and length_of(one) <= limit]
    texts.sort(key=lambda at: length_of(sequence[at]))
    # Ranks with sharded parameters wait for each other in every forward, so the result of a forward must not decide how
    # many forwards follow. And with experts, rounding in another shape may send a token to another expert.
    if len(texts) < FEWEST_TOGETHER or is_sharded(proof_model.model) or has_experts(proof_model.model):
        return {}
    if not _is_same_together(proof_model, [sequence[at] for at in (texts[0], texts[-1])]):
        return {}
    results = {}
    for group in _groups([length_of(sequence[at]) for at in texts], limit):
        with own_attention(proof_model.model):
            ran = proof_model.run([sequence[at] for at in texts[group]], packed=False)
        results.update({at: ran.of_sample(number) for number, at in enumerate(texts[group])})
    return results


def _groups(lengths: Sequence[int], limit: int) -> Iterator[slice]:
    """Cut lengths, the shortest first, into batches of at most `TOKENS_TOGETHER`; `limit` as of `longest_for_own`."""
    start = 0
    while start < len(lengths):
        end = start + 1
        # Lengths grow, so the last sample of a batch is its longest, and the others are padded to it.
        while end < len(lengths) and (end + 1 - start) * lengths[end] <= min(TOKENS_TOGETHER, limit**2 // lengths[end]):
            end += 1
        yield slice(start, end)
        start = end


def _is_same_together(proof_model: ProofModel, samples: Sequence[Encoded]) -> bool:
    """Tell whether samples give the same results in one un-packed batch as alone."""
    alone = [run_alone(proof_model, sample).logits[0] for sample in samples]
    try:
        with own_attention(proof_model.model):
            together = proof_model.run(samples, packed=False).logits
    except Exception:  # the host cannot batch them, and may raise anything
        return False
    return all(
        gap_of(*pair).most <= without_noise(coarsest([pair[0].dtype]), pair[0])
        for pair in zip(alone, together, strict=True)
    )
