"""Prove that a packed sample is trained as it is alone, on the very model, with real samples.

>>> model = tiny_llama(attn_implementation="vlpack")  # any causal model of transformers
>>> row = {"input_ids": [5, 6, 7, 8, 9, 10, 11, 12, 13], "document_starts": [0, 4]}
>>> print(verify(model, collator, [row]))  # doctest: +ELLIPSIS
isolation verified: max difference 0.0 over 2 samples, attention vlpack (packed equals the model's own attention ...)
>>> verify(tiny_llama(attn_implementation="sdpa"), collator, [row])  # doctest: +ELLIPSIS
Traceback (most recent call last):
swift_vlpack.errors.IsolationError: isolation could not be verified with attention sdpa: positions begin again ...

There are two proofs. The one before training takes short samples of every kind and sequences of the plan:

    choose_samples  ->  measure (forwards and backwards of a `ProofModel`)  ->  verdict  ->  a line for the log

(a) Replace the tokens, then the media, of some samples: their own logits must move, and those of the others must not.
(b) Compare packed with alone, by the model's own attention and the host's own collator (`reference`): logits, labels,
    loss weights, positions and gradients must be equal, up to the rounding that is measured on this model (`limits`).
(c) Compare whole sequences of the plan with their samples alone: they must be equal, too.

The other proof takes the first batch, with the trainer's own loss, wrappers, random draws and checkpointing:
first_batch -> in_training -> verdict. If the proof before training fails, `explain` finds which sample moved which, at
which tokens and first in which module, and names the likeliest cause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointError

from swift_vlpack.attention import attention
from swift_vlpack.attention.prepare import unwrapped
from swift_vlpack.comm import ALONE, OfAll
from swift_vlpack.errors import BoundaryError, DataError, IsolationError, VLPackError
from swift_vlpack.feed.packs import Packs
from swift_vlpack.feed.waiting import is_of_collective
from swift_vlpack.proof.choose_samples import chosen_samples, sequences_of_plan, short_samples, tokens_of_epoch
from swift_vlpack.proof.explain import explain, facts_of, of_linear_attention
from swift_vlpack.proof.in_training import InTraining
from swift_vlpack.proof.measure import Measurements, measure_pack
from swift_vlpack.proof.perturb import can_be_replaced, with_twins
from swift_vlpack.proof.proof_model import ProofModel, TemplateBatches
from swift_vlpack.proof.shards import is_sharded
from swift_vlpack.proof.verdict import Finding, Proof, finding_in, finding_in_training, line_in_training
from swift_vlpack.rows.contents import num_supervised
from swift_vlpack.rows.samples import Encoded

_RUN_AGAIN = (
    "a layer that is run again in the backward (gradient checkpointing) does something else than in the forward: what "
    "it looks at, such as boundaries, is gone by then. The backward of a pack is not that of its samples one by one"
)

_NOT_ON_ALL = (
    "a rank found it and another did not, or other numbers; parameters are sharded, so the cause cannot be looked for"
)


def prove(
    model: Any,
    template: Any,
    packs: Packs,
    *,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> str:
    """Prove on real samples of `packs` that the model trains them packed as it does alone. Returns a line for the log.

    Raises `IsolationError` with the likeliest cause. The model may be wrapped (all ranks must call this function then),
    and is left as it was. `forward_context` makes the context in which the trainer runs a forward, such as autocast.
    """
    proof = proof_of(model, template, packs, forward_context=forward_context)
    return proof.line(attention.name_of(unwrapped(model).config))


def proof_of(
    model: Any,
    template: Any,
    packs: Packs,
    *,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    results_of_all: OfAll = ALONE.results_of_all,
) -> Proof:
    """Run `prove` and return its numbers. Ranks whose parameters are sharded agree by `results_of_all`."""
    batches = TemplateBatches(template, packs.config.sequence_multiple)
    proof_model = ProofModel(unwrapped(model), batches, is_ordinary_token(template.tokenizer), forward_context)
    samples = chosen_samples(
        packs, lambda sample: num_supervised(sample) > 0 and can_be_replaced(sample, proof_model.is_ordinary)
    )
    if not samples:
        readable = short_samples(packs)  # raises if no row can be read
        if packs.epoch_plan is None and not any(map(num_supervised, readable)):  # a plan has some, or is refused
            raise DataError(
                "there is nothing to train: none of the first rows has a label, all are -100, such as those of "
                f"{readable[0].get('sample_id')}. Give rows with answers"
            )
        raise DataError(
            f"the isolation proof found no row that it can use, one with a label and two different tokens of text; "
            f"one that it cannot is {readable[0].get('sample_id')}. Set packing_verify=false to train without a proof"
        )
    try:
        sequences = sequences_of_plan(packs, facts_of(proof_model.model.config)["window"])
        return run_proof(proof_model, samples, sequences, tokens_of_epoch(packs), results_of_all=results_of_all)
    except VLPackError:
        raise
    except Exception as error:
        if is_of_collective(error) or isinstance(error, torch.OutOfMemoryError):
            raise  # a failure of the run, not of isolation: it would fail without the proof, too
        raise IsolationError(
            f"the isolation proof could not be run ({type(error).__name__}: {error}); repair that, or set "
            "packing_verify=false to train without a proof"
        ) from error


def is_ordinary_token(tokenizer: Any) -> Callable[[int], bool]:
    """Make a function that tells whether a token is plain text: replacing it moves neither images nor turns."""
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return lambda token: token not in special


def run_proof(
    proof_model: ProofModel,
    samples: Sequence[Encoded],
    sequences: Sequence[Sequence[Encoded]] = (),
    tokens_of_epoch: int = 0,
    *,
    results_of_all: OfAll = ALONE.results_of_all,
) -> Proof:
    """Prove isolation on one pack of these samples and on sequences of the plan.

    The pack also holds twins of samples with media (`with_twins`). `tokens_of_epoch` decides how many of the
    `sequences` are compared. Raises `IsolationError` with the likeliest cause.
    """
    name, numbers = attention.name_of(proof_model.model.config), None
    try:
        measured = measure_pack(proof_model, with_twins(samples), sequences, tokens_of_epoch)
        finding = _agreed(proof_model, finding_in(measured), results_of_all)
        if finding is None:
            return Proof.of(measured)
        cause, seen, numbers = finding.cause, "", Proof.of(measured)
        if finding.sequence is not None:
            cause, seen = _explained(measured, finding)
    except BoundaryError as error:
        positions, other = "positions are not restarted at the boundaries", "the sequence is not its samples"
        cause = positions if "position" in str(error) else other
        finding, seen = Finding(str(error)), ""
    except ImportError as error:
        finding, cause, seen = Finding(str(error)), of_linear_attention(), ""
    except CheckpointError as error:
        finding, cause, seen = Finding(str(error).strip().splitlines()[0]), _RUN_AGAIN, ""
    details = "; ".join(filter(None, (finding.said, seen)))
    said = f"isolation could not be verified with attention {name}: {cause}. ({details})"
    raise IsolationError(said, cause=cause, measured=numbers)


def _agreed(proof_model: ProofModel, finding: Finding | None, results_of_all: OfAll) -> Finding | None:
    """Return the same finding on all ranks if parameters are sharded, because naming its cause runs forwards."""
    if not is_sharded(proof_model.model):
        return finding
    said = results_of_all(lambda: None if finding is None else finding.said)
    if len(set(said)) == 1:
        return finding
    return Finding(next(filter(None, said)), _NOT_ON_ALL)


def _explained(measured: Measurements, finding: Finding) -> tuple[str, str]:
    assert finding.sequence is not None
    single = measured.in_float32 if finding.is_in_float32 else None
    return explain((single or measured).proof_model, finding.sequence, (single or measured).limits)


def prove_in_training(measured: InTraining) -> str:
    """Judge the measurements of the first batch. Returns a line for the log, or raises `IsolationError`."""
    finding = finding_in_training(measured)
    if finding is not None:
        raise wrong_first_batch(finding.cause, finding.said)
    return line_in_training(measured)


def wrong_first_batch(cause: str, said: str) -> IsolationError:
    """Make the error of a failed proof on the first batch."""
    return IsolationError(f"isolation does not hold in the first batch of the trainer: {cause}. ({said})", cause=cause)
