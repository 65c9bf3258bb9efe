"""Check before step 1 that the losses of the sequences of a step add up to the loss of the whole step.

ms-swift adds up the losses of the sequences that one optimizer step accumulates. That is right for a sum over tokens
that is divided by `num_items_in_batch`, the tokens of the whole step. So the losses of two real samples are computed,
apart and together. They show what kind of loss the run has:

    a sum over tokens             nothing to do
    a mean over its own tokens    `MeanOfStep` weighs each sequence by its share of the step's tokens
    anything else                 refused, with the numbers
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftModel
from swift.utils import get_logger, to_device

from swift_vlpack.config import SAMPLES
from swift_vlpack.errors import ConfigError, IsolationError, VLPackError
from swift_vlpack.feed.packs import packed_samples
from swift_vlpack.feed.sequence import layout
from swift_vlpack.feed.sequence_loss import SCALE, TOLERANCE, Losses, MeanOfStep, with_fewer_targets
from swift_vlpack.feed.waiting import is_of_collective
from swift_vlpack.host.proof import model_of
from swift_vlpack.proof.choose_samples import short_samples
from swift_vlpack.proof.perturb import replaced
from swift_vlpack.proof.prove import is_ordinary_token
from swift_vlpack.proof.reference import untouched
from swift_vlpack.rows.contents import NO_LABEL, num_supervised
from swift_vlpack.rows.samples import Encoded

logger = get_logger()

CAUSAL_LM = "cross_entropy"
"""The only one of ms-swift's loss types that is for causal_lm."""


class LossNotAdditive(ConfigError):
    """The losses of sequences do not add up to the loss of a step."""


def add_up(trainer: Any) -> None:
    """Make the losses of sequences add up to the loss of their step, or stop before step 1."""
    coefficient = trainer.args.router_aux_loss_coef
    trainer.args.router_aux_loss_coef = 0.0  # the loss that balances experts over a sequence is no sum over samples
    try:
        with untouched(trainer.model):
            losses = measured(trainer)
            _refuse_what_sees_others(trainer, losses)
    except VLPackError:
        raise
    except Exception as error:
        if is_of_collective(error):
            raise
        raise LossNotAdditive(
            "whether the losses of sequences add up to the loss of a step could not be checked "
            f"({type(error).__name__}: {error}); repair that, or set packing_verify=false to train the model's own "
            "loss without a check"
        ) from error
    finally:
        trainer.args.router_aux_loss_coef = coefficient
        trainer.custom_metrics["eval"].clear()  # the forwards above filled these metrics, but were no evaluation
    tolerance = TOLERANCE[_precision(trainer)]
    if losses is None:
        return
    if losses.is_sum(tolerance):
        check_weights(trainer)
        return
    if trainer.compute_loss_func is None or not losses.is_mean(tolerance):
        raise LossNotAdditive(_refusal(trainer, losses))
    if trainer.feed.config.packing_batch == SAMPLES:
        raise ConfigError(
            f"--loss_type {trainer.args.loss_type} is a mean over the tokens of a batch, so un-packed training weighs "
            "samples by the batch that they are in, which packing_batch=samples does not keep; leave one of them out"
        )
    trainer.compute_loss_func = MeanOfStep(trainer.compute_loss_func)
    logger.info(
        f"packing: --loss_type {trainer.args.loss_type} is a mean over the tokens of a sequence; the sequences of a "
        "step are weighted by their tokens"
    )


def _refuse_what_sees_others(trainer: Any, losses: Losses | None) -> None:
    """Raise `IsolationError` if losses do not add up because one sample sees another.

    In that case another loss function would not help. The first sample gets no labels, so replacing its words must not
    change the loss, whatever the loss divides by.
    """
    tolerance = TOLERANCE[_precision(trainer)]
    if losses is None or losses.is_sum(tolerance) or losses.is_mean(tolerance):
        return
    _refuse_kept_logits(trainer, tolerance)
    first, second = two_samples(trainer)
    silent = {**first, "labels": [NO_LABEL] * len(first["labels"])}
    num_items = num_supervised(second)
    before, after = (
        loss_of(trainer, [one, second], num_items)
        for one in (silent, replaced(silent, is_ordinary_token(trainer.template.tokenizer)))
    )
    if abs(before - after) <= tolerance / 10 * max(abs(before), 1e-6):
        return
    cause = (
        "on the way that training takes, samples of a sequence see each other: what stands between the collator and "
        "the model (the trainer, a hook, a plugin) loses the boundaries or the positions of the sequence"
    )
    raise IsolationError(
        f"{cause}. (other words in the first of two samples, which has no label, move the loss of the second from "
        f"{before:.6g} to {after:.6g})",
        cause=cause,
    )


def _refuse_kept_logits(trainer: Any, tolerance: float) -> None:
    """Raise `IsolationError` if losses add up when all logits are computed, and not when some are left out."""
    chosen, trainer.args.use_logits_to_keep = trainer.args.use_logits_to_keep, False
    try:
        losses = measured(trainer)
    finally:
        trainer.args.use_logits_to_keep = chosen
    if losses is not None and losses.is_sum(tolerance):
        cause = "logits or labels are shifted where only the logits of targets are computed (logits_to_keep)"
        raise IsolationError(f"{cause}. (with --use_logits_to_keep false the losses of sequences add up)", cause=cause)


def check_weights(trainer: Any) -> None:
    """Check that the code of training gives two samples the weights of `packing_loss`. Raises `LossNotAdditive`."""
    if (kind := trainer.feed.config.packing_loss) == "token":
        return
    samples = two_samples(trainer)
    sequence = trainer.data_collator.sequence(packed_samples(samples, 0, 0, trainer.feed.config, ()))
    scale = sequence.get(SCALE)
    before = torch.ones(sequence["labels"].shape) if scale is None else scale.clone()
    (weighed,), _ = trainer.weighed_batches(iter([sequence]), 1, trainer.accelerator.device)
    nums = list(map(num_supervised, samples))
    weights = [num**0.5 if kind == "sqrt" else 1.0 for num in nums]
    start = 0
    for number, (sample, num, weight) in enumerate(zip(samples, nums, weights, strict=True), start=1):
        own = slice(start, start + int(sample["length"]))
        start = own.stop
        counts = weighed["labels"][0, own] != NO_LABEL
        expected = before[0, own][counts.cpu()] * weight / num * sum(nums) / sum(weights)
        found = weighed[SCALE][0, own][counts].cpu()
        if not torch.allclose(found, expected, rtol=1e-4):
            raise LossNotAdditive(
                f"packing_loss={kind}: sample {number} of a sequence of two, with {num} of {sum(nums)} targets, should "
                f"weigh {float(expected.mean()):.6g} a token and weighs {float(found.mean()):.6g}; something changes "
                "the weights on their way (a plugin that replaces the trainer's or the collator's methods)"
            )


def two_samples(trainer: Any) -> list[Encoded]:
    """Return two short real samples, the second with fewer targets; an empty list if the data has none with targets."""
    with_targets = [sample for sample in short_samples(trainer.feed) if num_supervised(sample) > 2]
    return [with_targets[0], with_fewer_targets(with_targets[-1])] if with_targets else []


def measured(trainer: Any) -> Losses | None:
    """Compute the losses of two real samples, apart and together; None if no sample of the data has targets."""
    samples = two_samples(trainer)
    if not samples:
        return None
    first, second = samples
    in_first, in_second = num_supervised(first), num_supervised(second)
    num_items = in_first + in_second
    return Losses(
        first=loss_of(trainer, [first], num_items),
        second=loss_of(trainer, [second], num_items),
        together=loss_of(trainer, [first, second], num_items),
        together_in_twice_the_step=loss_of(trainer, [first, second], 2 * num_items),
        share_of_first=in_first / num_items,
    )


def loss_of(trainer: Any, samples: Sequence[Encoded], num_items: int) -> float:
    """Return the loss of one sequence in a step of `num_items` tokens, computed as in training."""
    device = trainer.accelerator.device
    pack = packed_samples(samples, 0, 0, trainer.feed.config, ())
    inputs = to_device(trainer.data_collator.sequence(pack), device)
    model = model_of(trainer)
    with layout(trainer.template, packed=True), trainer.template.forward_context(trainer.model, inputs):
        inputs = trainer._prepare_inputs(inputs)
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, inputs, num_items_in_batch=torch.tensor(num_items, device=device))
    return float(loss)


def is_mean(trainer: Any) -> bool:
    """Tell whether the loss of a batch is a mean over its own tokens, not over the tokens of the whole step."""
    if trainer.compute_loss_func is not None:
        return isinstance(trainer.compute_loss_func, MeanOfStep)
    return trainer.label_smoother is not None


def refuse_experts_of_packs(trainer: Any) -> None:
    """Raise `ConfigError` for a loss that balances experts over a batch of rows, if such batches have to be kept."""
    coefficient = trainer.args.router_aux_loss_coef
    if not (trainer.model_info.is_moe_model and coefficient):
        return
    if trainer.feed.config.packing_batch == SAMPLES:
        raise ConfigError(
            f"packing_batch=samples cannot be used with --router_aux_loss_coef {coefficient}: it balances the experts "
            "over an un-packed batch, which packs do not keep; leave one of them out"
        )
    if trainer.feed.config.eval_packing:
        raise ConfigError(
            f"eval_packing cannot be used with --router_aux_loss_coef {coefficient}: it balances the experts over a "
            "batch of rows, which packs are not; leave one of them out"
        )


def refuse_means_of_batches(trainer: Any) -> None:
    """Refuse a model to which ms-swift does not give the tokens of a step, where un-packed steps are to be kept."""
    if trainer.feed.config.packing_batch == SAMPLES and not trainer.model_accepts_loss_kwargs:
        raise ConfigError(
            f"packing_batch=samples cannot be used with {_model_name(trainer)}: ms-swift trains it by the mean of each "
            "un-packed batch (model_accepts_loss_kwargs of its template is False), and packs do not keep these "
            "batches; leave packing_batch out"
        )


def warn_of_what_differs(trainer: Any) -> None:
    """Warn of options that give packs another loss than rows, and of a loss that ms-swift computes unexpectedly."""
    args = trainer.args
    if trainer.model_info.is_moe_model and args.router_aux_loss_coef:
        logger.warning(
            f"packing: --router_aux_loss_coef {args.router_aux_loss_coef} balances the experts over one sequence, "
            "where it would be a padded batch; sequences are weighted by their tokens"
        )
    if trainer.label_smoother is not None and not shifts_smoothed_labels(trainer):
        logger.warning(
            f"--label_smoothing_factor {args.label_smoothing_factor}: for {_model_name(trainer)} ms-swift smooths the "
            "loss of predicting each token at its own position, not at the one before; so it does without packing, "
            "too. Leave it out unless that is what you want"
        )


def refuse_loss_type(loss_type: str | None) -> None:
    """Raise `ConfigError` for a loss that ms-swift does not know, or that is for other tasks than causal_lm."""
    from swift.loss import loss_map

    if loss_type is None or loss_type == CAUSAL_LM:
        return
    if loss_type not in loss_map:
        raise ConfigError(f"--loss_type {loss_type} is not known; known are {', '.join(sorted(loss_map))}")
    if not loss_map[loss_type].__module__.startswith("swift."):
        return
    raise ConfigError(
        f"--loss_type {loss_type} cannot be used with packing: it compares samples, options or sentences, and is not a "
        f"loss over tokens; leave it out, or take {CAUSAL_LM}, or a loss of your own that divides by num_items_in_batch"
    )


def shifts_smoothed_labels(trainer: Any) -> bool:
    """Tell whether ms-swift shifts smoothed labels. It decides by the name of the model's class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return _model_name(trainer) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _model_name(trainer: Any) -> str:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return str((model.model if isinstance(model, PeftModel) else model)._get_name())


def _refusal(trainer: Any, losses: Losses) -> str:
    whose = (
        f"--loss_type {trainer.args.loss_type}" if trainer.compute_loss_func else f"the loss of {_model_name(trainer)}"
    )
    return (
        f"{whose} cannot be used with packing: it is neither a sum over tokens divided by num_items_in_batch, nor a "
        f"mean over the tokens of its sequence, so sequences do not add up to a step (two sequences of a step: "
        f"{losses.first:.6g} and {losses.second:.6g}, both samples in one: {losses.together:.6g}). Divide the sum "
        "by num_items_in_batch, or train without packing"
    )


def _precision(trainer: Any) -> torch.dtype:
    """Return the precision of autocast, else of the weights. Logits cannot be asked, because fused losses make none."""
    if trainer.args.bf16 and not trainer.args.use_cpu:
        return torch.bfloat16
    if trainer.args.fp16 and torch.cuda.is_available():
        return torch.float16
    return next(parameter.dtype for parameter in trainer.model.parameters() if parameter.is_floating_point())
