"""The isolation proof on ms-swift's trainer: which samples, which forward, which cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from swift.utils import to_device

from swift_vlpack.core.errors import BoundaryError, DataError
from swift_vlpack.data.collate import NOT_FOR_THE_MODEL
from swift_vlpack.data.isolation import IsolationError, diagnosis, prove, untouched
from swift_vlpack.data.planned import PlannedPackingDataset
from swift_vlpack.data.samples import Encoded, SampleError, num_images

NUM_SAMPLES = 3
NUM_TRIED = 64


def prove_isolation(trainer: Any) -> str:
    """Run the proof and return its line, or stop training with the cause. All ranks run the same forwards."""
    model, config = trainer.model, trainer.accelerator.unwrap_model(trainer.model).config
    attention = attention_of(config)
    try:
        samples = short_samples(trainer)
        with untouched(model):
            proof = prove(
                forward_of(trainer), samples, is_ordinary_token(trainer.template.tokenizer), dtype_of(trainer)
            )
    except DataError:
        raise
    except (IsolationError, BoundaryError, ImportError) as error:
        cause = diagnosis(error, config, attention)
        raise IsolationError(
            f"isolation could not be verified with attention {attention}: {cause}. ({error})"
        ) from error
    except Exception as error:
        raise IsolationError(
            f"the isolation proof could not be run ({type(error).__name__}: {error}); mend that, or set "
            "packing_verify=false to train without a proof"
        ) from error
    return proof.line(attention)


def attention_of(config: Any) -> str:
    """The attention implementation of the language model."""
    text = getattr(config, "text_config", config)
    return str(getattr(text, "_attn_implementation", None) or config._attn_implementation)


def short_samples(trainer: Any) -> list[Encoded]:
    """A few short real samples, with and without images where there are both; the same ones on every rank."""
    packs = trainer.packs
    encoded = _short_ones(packs) if isinstance(packs, PlannedPackingDataset) else packs.dataset.encoded()
    usable = (sample for sample in encoded if not isinstance(sample, SampleError))
    by_length = sorted(islice(usable, NUM_TRIED), key=lambda sample: int(sample["length"]))
    if not by_length:
        raise DataError("not one row could be encoded; the log has the reasons")
    with_images = [sample for sample in by_length if num_images(sample)][:2]
    text_only = [sample for sample in by_length if not num_images(sample)]
    chosen = [*with_images, *text_only, *by_length[len(with_images) :]][:NUM_SAMPLES]
    return chosen if len(chosen) > 1 else chosen * 2  # of a data set of one sample, two make a pack too


def _short_ones(packs: PlannedPackingDataset) -> Iterator[Encoded | SampleError]:
    """The shortest rows of the epoch, and the shortest with images."""
    sizes = packs.dataset.scheduled_sizes()
    by_length = np.argsort(sizes.lengths, kind="stable")
    usable = by_length[sizes.lengths[by_length] > 0]
    illustrated = usable[sizes.images[usable] > 0]
    for position in dict.fromkeys([*illustrated[:NUM_SAMPLES].tolist(), *usable[:NUM_SAMPLES].tolist()]):
        yield packs.dataset.tried(packs.dataset.address(position))


def forward_of(trainer: Any) -> Callable[[Sequence[Encoded]], torch.Tensor]:
    """Collate as training does, and run the wrapped model."""
    model = getattr(trainer, "model_wrapped", None) or trainer.model
    device = trainer.accelerator.device

    def forward(samples: Sequence[Encoded]) -> torch.Tensor:
        row = trainer.data_collator.row(list(samples))
        inputs = {key: value for key, value in row.items() if key not in ("labels", *NOT_FOR_THE_MODEL)}
        with trainer.compute_loss_context_manager():
            logits: torch.Tensor = model(**to_device(inputs, device)).logits
        return logits[0].float()

    return forward


def dtype_of(trainer: Any) -> torch.dtype:
    """The precision that limits the proof: that of the weights, or of autocast."""
    if trainer.args.bf16 and not trainer.args.use_cpu:
        return torch.bfloat16
    if trainer.args.fp16 and torch.cuda.is_available():
        return torch.float16
    return next(parameter.dtype for parameter in trainer.model.parameters() if parameter.is_floating_point())


def is_ordinary_token(tokenizer: Any) -> Callable[[int], bool]:
    """Tokens of text, which may be exchanged without moving images or turns."""
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return lambda token: token not in special
