"""The isolation proof on a model, its template and real packs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from swift_vlpack.attention import attention
from swift_vlpack.attention.prepare import unwrapped
from swift_vlpack.errors import DataError, VLPackError
from swift_vlpack.feed.packs import Packs
from swift_vlpack.feed.waiting import is_of_collective
from swift_vlpack.proof.causes import facts_of
from swift_vlpack.proof.changes import can_be_replaced
from swift_vlpack.proof.choose_samples import chosen_samples, rows_of_plan, short_samples, tokens_of_epoch
from swift_vlpack.proof.isolation import IsolationError, Proof, proved
from swift_vlpack.proof.proof_model import Subject, TemplateRows
from swift_vlpack.rows.contents import num_supervised


def prove(
    model: Any,
    template: Any,
    packs: Packs,
    *,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> str:
    """Prove on real samples of `packs` that the model trains them in a pack as it does alone; the line that says so.

    Raises `IsolationError` with the likeliest cause. The model may be wrapped (all ranks then have to call it); it is
    left as it was. `forward_context` is what the trainer runs a forward in, autocast for one.
    """
    proof = proof_of(model, template, packs, forward_context=forward_context)
    return proof.line(attention.name_of(unwrapped(model).config))


def proof_of(
    model: Any,
    template: Any,
    packs: Packs,
    *,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Proof:
    """What `prove` measures, in numbers."""
    rows = TemplateRows(template, packs.config.sequence_multiple)
    subject = Subject(unwrapped(model), rows, is_ordinary_token(template.tokenizer), forward_context)
    samples = chosen_samples(
        packs, lambda sample: num_supervised(sample) > 0 and can_be_replaced(sample, subject.is_ordinary)
    )
    if not samples:
        readable = short_samples(packs)  # of none this says so
        raise DataError(
            f"the isolation proof found no row that it can use, one with a label and two different tokens of text; "
            f"one that it cannot is {readable[0].get('sample_id')}. Set packing_verify=false to train without a proof"
        )
    try:
        return proved(
            subject, samples, rows_of_plan(packs, facts_of(subject.model.config)["window"]), tokens_of_epoch(packs)
        )
    except VLPackError:
        raise
    except Exception as error:
        if is_of_collective(error) or isinstance(error, torch.OutOfMemoryError):
            raise  # of the run and not of isolation: to leave the proof out would help nothing
        raise IsolationError(
            f"the isolation proof could not be run ({type(error).__name__}: {error}); mend that, or set "
            "packing_verify=false to train without a proof"
        ) from error


def is_ordinary_token(tokenizer: Any) -> Callable[[int], bool]:
    """Tokens of text, which may be exchanged without moving images or turns."""
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return lambda token: token not in special
