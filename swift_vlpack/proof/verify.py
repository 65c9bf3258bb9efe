"""Run the isolation proof on a model and a collator of documents, without a template, packs or a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice, pairwise
from typing import Any

import torch

from swift_vlpack.attention import attention
from swift_vlpack.attention.prepare import unwrapped
from swift_vlpack.errors import DataError, IsolationError
from swift_vlpack.proof.perturb import can_be_replaced
from swift_vlpack.proof.proof_model import Collated, ProofModel
from swift_vlpack.proof.prove import run_proof
from swift_vlpack.rows.contents import NO_LABEL, num_supervised
from swift_vlpack.rows.samples import Encoded

NUM_EXAMPLES = 16
"""Rows that are read: their shortest documents are compared as one pack, and the first rows as whole sequences."""
NUM_DOCUMENTS, NUM_ROWS = 4, 4

Collator = Callable[[list[Mapping[str, Any]]], Mapping[str, Any]]
Examples = Iterable[Mapping[str, Any]]


def verify(
    model: Any,
    collator: Collator,
    examples: Examples,
    *,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> str:
    """Prove that documents of a row do not see each other in `model(**collator(rows))`. Returns a line for the log.

    `examples` are rows as the collator takes them: `input_ids` with `document_starts`. Every document must give the
    logits, labels and gradients that the model's own attention gives it alone. Raises `IsolationError` with the
    likeliest cause. The model may be wrapped and is left as it was. `forward_context` makes the context of a forward,
    such as autocast.
    """
    name = attention.name_of(unwrapped(model).config)
    rows = [documents_of(row) for row in islice(examples, NUM_EXAMPLES)]
    proof_model = ProofModel(unwrapped(model), CollatorBatches(collator), _is_ordinary(collator), forward_context)
    usable = [
        document for row in rows for document in row
        if num_supervised(document) and can_be_replaced(document, proof_model.is_ordinary)
    ]  # fmt: skip
    if not usable:
        raise DataError("verify found no document with a target and two different tokens of text; give it other rows")
    samples = sorted(usable, key=lambda document: int(document["length"]))[:NUM_DOCUMENTS]
    try:
        proof = run_proof(proof_model, samples if len(samples) > 1 else samples * 2, rows[:NUM_ROWS])
    except IsolationError as error:
        with proof_model.batches.batch(samples, packed=True) as batch:
            hint = "" if "cu_seq_lens_q" in batch.inputs and name == attention.NAME else _hint(proof_model.model)
        raise IsolationError(f"{error}{hint}", cause=error.cause, measured=error.measured) from error.__cause__
    return proof.line(name)


def documents_of(row: Mapping[str, Any]) -> list[Encoded]:
    """Split a row into its documents."""
    tokens = _numbers(row["input_ids"])
    labels = _numbers(row["labels"]) if row.get("labels") is not None else tokens
    starts = _numbers(row["document_starts"]) if row.get("document_starts") is not None else [0]
    return [
        {"input_ids": tokens[start:end], "labels": labels[start:end], "length": end - start}
        for start, end in pairwise([*starts, len(tokens)])
    ]


class CollatorBatches:
    """Makes both kinds of input: a sequence by the user's collator, or a padded batch with a mask, without it."""

    def __init__(self, collator: Collator) -> None:
        self.collator = collator

    @contextmanager
    def batch(self, samples: Sequence[Encoded], *, packed: bool) -> Iterator[Collated]:
        """Yield the inputs of the model and its labels."""
        yield Collated.of(self._packed(samples) if packed else self._padded(samples))

    def _packed(self, samples: Sequence[Encoded]) -> dict[str, Any]:
        starts = [0]
        for sample in samples[:-1]:
            starts.append(starts[-1] + int(sample["length"]))
        row = {
            "input_ids": [token for sample in samples for token in sample["input_ids"]],
            "labels": [label for sample in samples for label in sample["labels"]],
            "document_starts": starts,
        }
        made = _tensors(self.collator([row]))
        if made["input_ids"].shape[0] != 1:
            raise DataError(f"the collator made {made['input_ids'].shape[0]} rows of one")
        return made

    def _padded(self, samples: Sequence[Encoded]) -> dict[str, Any]:
        """Pad the samples; only the labels are the collator's, because its options decide them (`train_on_eos`)."""
        longest = max(int(sample["length"]) for sample in samples)
        shape = (len(samples), longest)
        made = {
            "input_ids": torch.zeros(shape, dtype=torch.long),
            "attention_mask": torch.zeros(shape, dtype=torch.long),
        }
        made["labels"] = torch.full(shape, NO_LABEL)
        for at, sample in enumerate(samples):
            length = int(sample["length"])
            made["input_ids"][at, :length] = torch.tensor(sample["input_ids"])
            made["attention_mask"][at, :length] = 1
            made["labels"][at, :length] = self._packed([sample])["labels"][0, :length]
        return made


def _tensors(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, torch.Tensor) else torch.as_tensor(value) for name, value in batch.items()}


def _numbers(values: Any) -> list[int]:
    numbers: list[int] = values.tolist() if hasattr(values, "tolist") else list(values)
    return numbers


def _is_ordinary(collator: Any) -> Callable[[int], bool]:
    """Make a function that tells whether a token has no special meaning to the collator and to chat templates."""
    tokenizer = getattr(collator, "tokenizer", None)
    special = {getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    special |= set(getattr(tokenizer, "all_special_ids", ()))
    return lambda token: token not in special


def _hint(model: Any) -> str:
    """Return a hint for models that rely on restarted positions; empty if the model uses no cache."""
    if not getattr(model.config, "use_cache", False):
        return ""
    return (
        ". Where positions alone keep documents apart, transformers looks at them only without a cache: set "
        "model.config.use_cache to False, or use the attention vlpack with PackedCollator(cu_seqlens=True)"
    )
