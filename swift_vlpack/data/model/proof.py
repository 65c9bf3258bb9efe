"""The isolation proof on a model and real packs: which samples, which forward, which cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import numpy as np
import torch

from swift_vlpack.core.errors import BoundaryError, DataError
from swift_vlpack.data.feeds.dataset import PackingDataset
from swift_vlpack.data.feeds.planned import PlannedPackingDataset
from swift_vlpack.data.model import attention
from swift_vlpack.data.model.collate import NOT_FOR_THE_MODEL, on_device, packed_row
from swift_vlpack.data.model.isolation import IsolationError, coarsest, diagnosis, proof_of, untouched
from swift_vlpack.data.model.prepare import unwrapped
from swift_vlpack.data.rows.contents import contents_of
from swift_vlpack.data.rows.samples import Encoded, SampleError

NUM_SAMPLES = 3
NUM_TRIED = 64


def prove(
    model: Any,
    template: Any,
    packs: PackingDataset,
    *,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> str:
    """Prove on real samples of `packs` that the model keeps the samples of a pack apart; the line that says so.

    Raises `IsolationError` with the likeliest cause. The model may be wrapped (all ranks then have to call it); it is
    left as it was. `forward_context` is what the trainer runs a forward in, autocast for one.
    """
    config = unwrapped(model).config
    name = attention.name_of(config)
    try:
        samples = short_samples(packs)
        with untouched(model):
            forward = forward_of(model, template, forward_context)
            precision = precision_of(model, lambda: forward(samples[:1]))
            proof = proof_of(forward, samples, is_ordinary_token(template.tokenizer), precision)
    except DataError:
        raise
    except (IsolationError, BoundaryError, ImportError) as error:
        cause = diagnosis(error, config, name)
        raise IsolationError(f"isolation could not be verified with attention {name}: {cause}. ({error})") from error
    except Exception as error:
        raise IsolationError(
            f"the isolation proof could not be run ({type(error).__name__}: {error}); mend that, or set "
            "packing_verify=false to train without a proof"
        ) from error
    return proof.line(name)


def short_samples(packs: PackingDataset) -> list[Encoded]:
    """A few short real samples, with and without images where there are both; the same ones on every rank."""
    encoded = _short_ones(packs) if isinstance(packs, PlannedPackingDataset) else packs.dataset.encoded()
    usable = (sample for sample in encoded if not isinstance(sample, SampleError))
    by_length = sorted(islice(usable, NUM_TRIED), key=lambda sample: int(sample["length"]))
    if not by_length:
        raise DataError("not one row could be encoded; the log has the reasons")
    with_images = [sample for sample in by_length if contents_of(sample).images][:2]
    text_only = [sample for sample in by_length if not contents_of(sample).images]
    chosen = [*with_images, *text_only, *by_length[len(with_images) :]][:NUM_SAMPLES]
    return chosen if len(chosen) > 1 else chosen * 2  # of a data set of one sample, two make a pack too


def _short_ones(packs: PlannedPackingDataset) -> Iterator[Encoded | SampleError]:
    """The shortest rows of the epoch, and the shortest with images."""
    sizes = packs.dataset.scheduled_sizes()
    by_length = np.argsort(sizes.lengths, kind="stable")
    usable = by_length[sizes.lengths[by_length] > 0]
    illustrated = usable[sizes.images[usable] > 0]
    for position in dict.fromkeys([*illustrated[:NUM_SAMPLES].tolist(), *usable[:NUM_SAMPLES].tolist()]):
        yield packs.dataset.sample_or_error(packs.dataset.address(position))


def forward_of(
    model: Any, template: Any, forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Callable[[Sequence[Encoded]], torch.Tensor]:
    """Collate as training does, and run the model."""
    device = next(model.parameters()).device

    def forward(samples: Sequence[Encoded]) -> torch.Tensor:
        row = packed_row(template, [dict(sample) for sample in samples])
        inputs = {key: value for key, value in row.items() if key not in ("labels", *NOT_FOR_THE_MODEL)}
        with forward_context():
            logits: torch.Tensor = model(**on_device(inputs, device)).logits
        return logits[0].float()

    return forward


def precision_of(model: Any, forward: Callable[[], Any]) -> torch.dtype:
    """The precision that limits the proof: that of the weights, or what autocast makes of it before the logits."""
    seen = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()][:1]
    head = getattr(unwrapped(model), "get_output_embeddings", lambda: None)()
    if head is not None:
        handle = head.register_forward_hook(lambda _, inputs, output: seen.extend([inputs[0].dtype, output.dtype]))
        try:
            forward()
        finally:
            handle.remove()
    return coarsest(seen)


def is_ordinary_token(tokenizer: Any) -> Callable[[int], bool]:
    """Tokens of text, which may be exchanged without moving images or turns."""
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return lambda token: token not in special
