"""Train all sequences of an optimizer step at once, where the trainer's loop would always accumulate as many.

With `packing_batch=samples` a step takes as many sequences as its samples need. The loop of transformers is told to
accumulate nothing, so it takes an optimizer step after each "batch", and that batch is a `WholeStep`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.utils import DistributedType

from swift_vlpack.feed.collate import Batch


class WholeStep(tuple[Batch, ...]):
    """The sequences that this rank trains in one optimizer step; every rank has as many."""

    __slots__ = ()

    def trained(
        self, trainer: Any, train: Callable[..., torch.Tensor], model: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Train one sequence after the other. Ranks add up their gradients with the last. Returns the sum of losses."""
        accelerator = trainer.accelerator
        # As in the loop of transformers; DeepSpeed adds up gradients by itself, and steps when they are synchronised.
        always = accelerator.distributed_type == DistributedType.DEEPSPEED or (
            accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        )
        losses = []
        for number, batch in enumerate(self, 1):
            is_last = number == len(self)
            accelerator.gradient_state._set_sync_gradients(is_last)
            with nullcontext() if is_last or always else accelerator.no_sync(model):
                losses.append(train(batch, *args, **kwargs))
        return torch.stack(losses).sum()
