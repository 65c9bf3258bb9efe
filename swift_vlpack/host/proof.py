"""Run the isolation proof on ms-swift's trainer: on the model before training, and on the first batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from swift.utils import to_device

from swift_vlpack.attention import attention
from swift_vlpack.attention.prepare import unwrapped
from swift_vlpack.errors import IsolationError
from swift_vlpack.feed.collate import Batch, batch_of
from swift_vlpack.feed.sequence import layout
from swift_vlpack.feed.waiting import waiting
from swift_vlpack.host.garbage import give_back_memory
from swift_vlpack.host.ranks import results_of_all
from swift_vlpack.proof.first_batch import FirstSequence, encoded_again
from swift_vlpack.proof.gradients import Parameters
from swift_vlpack.proof.perturb import kinds_of_media
from swift_vlpack.proof.prove import (
    FIRST_BATCH,
    compared_in_training,
    is_ordinary_token,
    line_of_first_batch,
    proof_of,
    wrong_batch,
    wrong_draws,
)
from swift_vlpack.proof.runner import CannotSee, Runner
from swift_vlpack.proof.same_inputs import wrong_in_first_batch, wrong_without_samples
from swift_vlpack.proof.verdict import Proof


def prove_isolation(trainer: Any) -> Proof:
    """Prove isolation on the model as it will train, before step 1. All ranks must call it and run equal forwards."""
    context = trainer.compute_loss_context_manager
    with waiting("the isolation proof"):  # the forwards of wrapped models exchange data between ranks
        try:
            proof = proof_of(
                model_of(trainer),
                trainer.template,
                trainer.feed.packs,
                forward_context=context,
                results_of_all=lambda work: results_of_all(work, "the isolation proof"),
            )
        finally:
            give_back_memory()
    trainer.limits_of_rounding = proof.limits  # for the first batch
    samples = [sample for one in proof.judged for sample in one.compared.samples]
    trainer.kinds_of_media = frozenset().union(*map(kinds_of_media, samples))
    return proof


class FirstBatches:
    """Prove isolation on a batch of the first step, and on batches of the next steps until enough was looked at.

    Enough is a sequence of several samples that is nearly full, each kind of media of the proof before training, and a
    batch of each dataloader worker. What goes wrong later is looked for twice: in one of the first hundred steps, and
    in the step after the first evaluation. The trainer is unchanged afterwards: no batch is used up, no random number
    drawn, no gradient and no metric left behind.
    """

    def __init__(self, num_workers: int, seed: int) -> None:
        self.num_workers = num_workers
        self.seed = seed
        self.num_steps = self.num_batches = 0
        self.left: set[str] = set()
        """Names of what this rank has not looked at."""
        self.is_done = False
        self._later_step = 0
        self._has_evaluated = self._is_after_evaluation = False

    def evaluated(self) -> None:
        """Look again in the next step, if this was the first evaluation."""
        self._is_after_evaluation = self._is_after_evaluation or not self._has_evaluated
        self._has_evaluated = True

    def prove(self, trainer: Any, batches: Sequence[Batch], num_items: Any) -> list[str]:
        """Look at the batches of a step, before it trains. All ranks must call it. Returns lines for the log."""
        self.num_steps += 1
        if self.num_steps == 1 and (last := min(LATER_STEPS, trainer.state.max_steps - trainer.state.global_step)) > 1:
            self._later_step = random.Random(self.seed).randint(2, last)
        said = [] if self.is_done else [self._look_first(trainer, batches, num_items)]
        if self.num_steps == self._later_step or (self._is_after_evaluation and self.num_steps > 1):
            self._is_after_evaluation = False
            said.append(prove_batch(trainer, batches, num_items, _batch_of(trainer)))
        return list(filter(None, said))

    def _look_first(self, trainer: Any, batches: Sequence[Batch], num_items: Any) -> str:
        covered = [self._covered(trainer, batch) for batch in batches]
        said = ""
        if self.num_steps == 1:
            self.left = {_FULL, *trainer.kinds_of_media, *map(_worker, range(1, self.num_workers + 1))}
            at = max(range(len(batches)), key=lambda at: _size(batches[at]))
            said = prove_batch(trainer, [batches[at]], num_items)
        else:
            at = max(range(len(batches)), key=lambda at: len(covered[at] & self.left))
            if any(results_of_all(lambda: bool(covered[at] & self.left), _FIRST)):
                prove_batch(trainer, [batches[at]], num_items, _batch_of(trainer), runs_alone=False)
        self.left -= covered[at]
        left: set[str] = set().union(*results_of_all(lambda: self.left, _FIRST))
        self.is_done = not left or self.num_steps >= MOST_STEPS
        if self.is_done and left:
            return f"isolation in training: not looked at in {self.num_steps} steps: {', '.join(sorted(left))}"
        return said

    def _covered(self, trainer: Any, batch: Batch) -> set[str]:
        """Return what a look at this batch would cover."""
        self.num_batches += 1  # a loader takes batches of its workers in turn
        record = batch.record
        if record is None or not record.sample_ids:
            return set()
        covered = set(kinds_of_media(dict(batch)))
        if self.num_workers:
            covered.add(_worker((self.num_batches - 1) % self.num_workers + 1))
        if len(record.lengths) > 1 and sum(record.lengths) >= FILLED * trainer.feed.config.packing_length:
            covered.add(_FULL)
        return covered


LATER_STEPS = 100
"""Number of first steps of which one is looked at again."""
MOST_STEPS = 20
"""Most steps of which batches are looked at."""
FILLED = 0.9
_FULL = "a sequence of several samples that is 90 % full"


def _worker(number: int) -> str:
    return f"worker {number}"


def _batch_of(trainer: Any) -> str:
    return f"a batch of step {trainer.state.global_step + 1}"


def prove_batch(
    trainer: Any,
    batches: Sequence[Batch],
    num_items: Any,
    where: str = FIRST_BATCH,
    *,
    runs_alone: bool = True,
) -> str:
    """Prove isolation on a batch of a step, before it trains. Returns the line for the log. All ranks must call it.

    `where` names the batch. Without `runs_alone` its inputs and neighbours are looked at, and its samples are not run
    alone. A later batch than the first must also draw other numbers from another random state.
    """
    batch = max(batches, key=_size)  # with prefixes if any has some; then most samples, so most boundaries
    sequences: list[FirstSequence] = []  # filled with that of this rank; batches are not sent to other ranks
    results_of_all(lambda: sequences.append(_checked_sequence(trainer, batch, where)), where)
    sequence, model = sequences[0], unwrapped(model_of(trainer))
    coefficient = trainer.model_info.is_moe_model and trainer.args.router_aux_loss_coef
    try:
        with _unseen(trainer):
            tokens = sequence.inputs["input_ids"]
            parameters = Parameters(model, all_trained=True, has_engine=trainer.is_deepspeed_enabled, tokens=tokens)
            loss = partial(_loss, trainer, batch, num_items)
            is_ordinary = is_ordinary_token(trainer.template.tokenizer)
            runner = Runner(model, sequence, is_ordinary, loss=loss, scale=_scale_of(trainer))
            compared = compared_in_training(runner, sequence, parameters, _on_all, runs_alone=runs_alone)
            draws_again = where != FIRST_BATCH and runs_alone and compared.has_drawn
            if draws_again and (wrong := wrong_draws(runner, sequence)):
                raise wrong_batch(where, wrong, "dropout or noise would be the same in every step")
            of_experts = ["the loss that balances experts over the sequence"] if coefficient else []
            limits, lines = trainer.limits_of_rounding, list[str]()
            results_of_all(
                lambda: lines.append(line_of_first_batch(compared, limits, sequence, parameters, of_experts, where)),
                where,
            )
    except CannotSee as error:  # raised on all ranks, because they have the same model
        return f"isolation in training: of {where} only tokens, labels and boundaries are verified ({error})"
    except IsolationError:
        raise
    except Exception as error:
        error.add_note(f"This was the proof on {where}; packing_verify=false trains without it.")
        raise
    give_back_memory()
    return lines[0]


_FIRST = "the first batch in training"


def _on_all(work: Callable[[], Any], *, is_collective: bool = False) -> list[Any]:
    """Return the results of all ranks; a rank that fails within a collective raises at once, the others name it."""
    if not is_collective:
        return results_of_all(work, _FIRST)
    with waiting(_FIRST):
        result = work()
    return results_of_all(lambda: result, _FIRST)


def _size(batch: Batch) -> tuple[bool, int, int]:
    lengths, shared = (batch.record.lengths, batch.record.shared) if batch.record is not None else ((), ())
    return bool(shared), len(lengths), sum(lengths)


def _checked_sequence(trainer: Any, batch: Batch, where: str) -> FirstSequence:
    """Compare the batch with its samples, encoded again in this process. Raises `IsolationError` if they differ."""
    feed, record, template = trainer.feed, batch.record, trainer.template
    assert record is not None
    workers = trainer.args.dataloader_num_workers
    samples = encoded_again(feed, record, rank=trainer.args.process_index, num_workers=workers)
    # Without samples, this rank has no data left, or none of its rows could be read: nothing to compare.
    if not record.sample_ids:
        wrong = None
    elif isinstance(samples, str):
        wrong = wrong_without_samples(batch, record)
    else:
        weighs_samples = feed.config.packing_loss != "token"
        wrong = wrong_in_first_batch(batch, samples, template, record, weighs_samples=weighs_samples)
    if wrong:
        cause = "the collator, or a dataloader worker, makes another batch than its samples are"
        raise wrong_batch(where, cause, f"{record}: {wrong}")
    return FirstSequence(batch, record, samples, template)


@contextmanager
def _unseen(trainer: Any) -> Iterator[None]:
    """Restore afterwards what computing a loss changes on the trainer: metrics, and the lengths that scale noise."""
    args = trainer.args
    before = trainer.custom_metrics, trainer.lengths_in_sequence, trainer.own_lengths, args.router_aux_loss_coef
    trainer.own_lengths = ()  # of the sequence that was trained last
    trainer.custom_metrics = {mode: type(one)(one.default_factory) for mode, one in before[0].items()}
    # Switch off the loss that balances experts: it is no sum over samples, so it differs for a sample alone.
    args.router_aux_loss_coef = 0.0
    try:
        yield
    finally:
        trainer.custom_metrics, trainer.lengths_in_sequence, trainer.own_lengths, coefficient = before
        args.router_aux_loss_coef = coefficient


def _loss(trainer: Any, batch: Batch, num_items: Any, inputs: Mapping[str, Any], packed: bool) -> torch.Tensor:
    """Compute the trainer's loss of the batch with other `inputs`, or of an un-packed batch, as a part of the step."""
    assert batch.record is not None
    sequence = to_device(batch_of(inputs, batch.record, batch.beside) if packed else dict(inputs), trainer.args.device)
    trainer.lengths_in_sequence = batch.record.lengths_in_sequence if packed else ()
    try:
        with layout(trainer.template, packed=packed), trainer.template.forward_context(trainer.model, sequence):
            sequence = trainer._prepare_inputs(sequence)
            with trainer.compute_loss_context_manager():
                # Unwrap the model: with its wrappers a rank would wait for the gradients of other ranks.
                model = unwrapped(model_of(trainer))
                loss: torch.Tensor = trainer.compute_loss(model, sequence, num_items_in_batch=num_items)
    finally:
        trainer.lengths_in_sequence = ()
    return loss


def _scale_of(trainer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    scaler = trainer.accelerator.scaler
    return scaler.scale if scaler is not None else lambda loss: loss


def attention_of(trainer: Any) -> str:
    """Return the name of the attention that the model uses."""
    return attention.name_of(unwrapped(model_of(trainer)).config)


def model_of(trainer: Any) -> Any:
    """Return the model as it will train, with its wrappers."""
    wrapped = getattr(trainer, "model_wrapped", None)
    return trainer.model if wrapped is None else wrapped  # a compiled model has no truth value
