"""Check that gradients are those of the loss: what losses are divided by, and the number at which backward begins.

A wrong factor between the loss and the optimizer changes what is trained, and neither the logged loss nor a comparison
of samples shows it.

    every log line    the tokens that losses were divided by are the targets of the steps since the last line
    step 1            the same, and backward begins at the loss, times the factor that accumulation asks for
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from swift_vlpack.errors import ConfigError
from swift_vlpack.feed.collate import Batch
from swift_vlpack.host.ranks import gathered

TOLERANCE = 1e-2
"""Largest relative difference of two losses that count as equal: more than 16 bits round, less than any factor."""


class StepIsOther(ConfigError):
    """An optimizer step does not follow the gradient of its loss."""


class StepCheck:
    """The targets of this rank's steps, and what the trainer divides their losses by."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._num_targets = 0
        self._num_divisors = 0  # what divisors must add up to: the targets of each step, once for each sequence
        self._divisors: Any = 0  # the sum of `num_items_in_batch`, on the device, where reading it would wait
        self._is_open = False
        self._is_wanted = trainer.feed.config.packing_verify
        self._is_first = self._is_wanted
        self._wrong = ""

    def begin(self, batches: Sequence[Batch]) -> None:
        """Count the targets of a step that begins."""
        num_targets = sum(batch.record.num_targets for batch in batches if batch.record is not None)
        self._num_targets += num_targets
        self._num_divisors += num_targets * len(batches)

    @contextmanager
    def sequence(self) -> Iterator[None]:
        """Note what the loss of a sequence is divided by. In step 1, compare the loss with where backward begins."""
        self._is_open = True
        with self._first_backward() if self._is_first else nullcontext():
            yield
        self._is_open = False

    def divide(self, num_items: Any) -> None:
        """Note the number that a loss is divided by; None if it is a mean over its sequence."""
        if self._is_open and num_items is not None:
            self._divisors = self._divisors + num_items

    @contextmanager
    def _first_backward(self) -> Iterator[None]:
        losses: list[tuple[torch.Tensor, Any]] = []  # with the number that each is divided by
        starts: list[torch.Tensor] = []
        trainer, begin_backward = self._trainer, torch.autograd.backward
        compute_loss = trainer.compute_loss

        def noted_loss(*args: Any, **kwargs: Any) -> Any:
            loss = compute_loss(*args, **kwargs)
            losses.append((loss.detach(), kwargs.get("num_items_in_batch")))
            return loss

        def noted_backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            start = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
            given = grad_tensors[0] if isinstance(grad_tensors, (list, tuple)) else grad_tensors
            starts.append(start.detach() if given is None else start.detach() * given)
            return begin_backward(tensors, grad_tensors, *args, **kwargs)

        trainer.compute_loss, torch.autograd.backward = noted_loss, noted_backward
        try:
            yield
        finally:
            del trainer.compute_loss
            torch.autograd.backward = begin_backward
        # Layers that are run again in the backward begin backwards of their own, after that of the loss.
        self._wrong = self._wrong or self._compared(*losses[0], float(starts[0]))

    def _compared(self, loss: torch.Tensor, num_items: Any, start: float) -> str:
        trainer = self._trainer
        # The rule of transformers' `training_step`.
        is_divided = trainer.model_accepts_loss_kwargs and num_items is not None
        is_whole = is_divided or trainer.compute_loss_func is not None
        factor = 1.0 if is_whole else 1 / trainer.current_gradient_accumulation_steps
        expected = float(loss) * factor * _scale_of_16_bits(trainer)
        if abs(start - expected) <= TOLERANCE * abs(expected):
            return ""
        return (
            f"backward begins at {start:.6g}, and the loss of the sequence times what accumulation asks for is "
            f"{expected:.6g}: something between compute_loss and the optimizer scales it"
        )

    def end(self) -> None:
        """Check step 1 once its optimizer step is taken. All ranks must call it. Raises `StepIsOther`."""
        if self._is_first:
            self._is_first = False
            self._check("step 1")

    def targets_since_line(self) -> int:
        """Return the targets of all ranks since the last call, and check them. All ranks must call it."""
        num_targets = self._check(f"one of the steps up to {self._trainer.state.global_step}")
        self._num_targets = 0
        return num_targets

    def _check(self, steps: str) -> int:
        """Compare the divisors of every rank with the targets, in one exchange. Returns the targets of all ranks."""
        mine = (self._num_targets, self._num_divisors, float(self._divisors), self._wrong)
        self._num_divisors, self._divisors = 0, 0
        of_ranks = gathered(mine, "a check of the step")
        of_all = sum(expected for _, expected, _, _ in of_ranks)
        for _, of_rank, divisors, wrong in of_ranks if self._is_wanted else ():
            expected = of_all if self._trainer.args.average_tokens_across_devices else of_rank
            # The sum is 0 if every loss is a mean over its own sequence.
            if not wrong and divisors not in (0.0, expected):
                wrong = (
                    f"losses are divided by {divisors:.0f} tokens in all, and their steps have {expected:.0f} targets: "
                    "num_items_in_batch is not that of the step"
                )
            if wrong:
                raise StepIsOther(
                    f"{steps} follows another gradient than that of its loss: {wrong}. Look for a plugin that "
                    "replaces methods of the trainer or of accelerate; packing_verify=false trains without this check"
                )
        return sum(num_targets for num_targets, _, _, _ in of_ranks)


def _scale_of_16_bits(trainer: Any) -> float:
    """Return what fp16 multiplies the loss by before the backward."""
    if trainer.is_deepspeed_enabled:
        return float(getattr(getattr(trainer.model_wrapped, "optimizer", None), "loss_scale", 1.0))
    scaler = trainer.accelerator.scaler
    return 1.0 if scaler is None else float(scaler.get_scale())
