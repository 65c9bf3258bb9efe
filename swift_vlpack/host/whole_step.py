"""Train a number of sequences in an optimizer step that differs from step to step.

With `packing_batch=samples`, a step has as many sequences as its samples need, but transformers' loop accumulates the
same number in every step. So the loop accumulates nothing and takes an optimizer step after each "batch", which is a
`WholeStep`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.utils import DistributedType

from swift_vlpack.feed.collate import Batch


class WholeStep(tuple[Batch, ...]):
    """The sequences that this rank trains in one optimizer step. Every rank has the same number."""

    __slots__ = ()

    def trained(
        self, trainer: Any, train: Callable[..., torch.Tensor], model: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Train the sequences one by one; ranks add up gradients only with the last. Returns the sum of the losses."""
        accelerator = trainer.accelerator
        # The loop of transformers has the same rule. DeepSpeed adds up gradients by itself, and steps when they are
        # synchronised.
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
