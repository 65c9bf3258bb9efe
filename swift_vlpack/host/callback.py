"""Act on ms-swift's events: choose and prove the attention before step 1, count each step, report each epoch.

The facts that are known before the first step are logged as a summary (`runlog/summary.py`), and saved in the run log
for `vlpack report` and `vlpack inspect --run`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swift.callbacks import TrainerCallback
from swift.utils import get_logger, is_master

from swift_vlpack.attention.sequence_effects import noise_by_sample
from swift_vlpack.config import MEDIA, SAMPLES
from swift_vlpack.feed.epoch_report import data_report, plan_facts
from swift_vlpack.host.losses import add_up
from swift_vlpack.host.proof import attention_of, prove_isolation
from swift_vlpack.host.same_on_ranks import versions
from swift_vlpack.host.tower import drop_gradients_of_empty_images
from swift_vlpack.host.use_attention import choose_for
from swift_vlpack.lengths.context import variables_named_by
from swift_vlpack.plan.epoch import EpochPlan
from swift_vlpack.rows.families import merge_size
from swift_vlpack.runlog.losses import LOG
from swift_vlpack.runlog.summary import end_text, start_text

logger = get_logger()

_ROOT_OF_IMAGES = "ROOT_IMAGE_DIR"
"""The variable with the folder in which ms-swift looks for images with relative paths."""
_NOT_KEPT = ("checkpoint", "step", "output_dir", "data")
"""Facts of the summary that are not copied to the run log. Of `data`, `_kept` copies a part."""


class PackingCallback(TrainerCallback):
    """ms-swift's callback `vlpack`, on a `PackingTrainer`."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Choose the attention, and prove isolation on the model as it will train. A failed proof ends the run."""
        # Choose the kernel first, because the proof has to run with the kernel that trains.
        chosen = choose_for(self.trainer)
        if is_master():
            logger.info(chosen)
        is_wanted = self.trainer.feed.config.packing_verify
        proof = prove_isolation(self.trainer).line(attention_of(self.trainer)) if is_wanted else None
        if proof is not None and is_master():
            logger.info(proof)
        if is_wanted or self.trainer.compute_loss_func is not None or self.trainer.feed.config.packing_batch == SAMPLES:
            add_up(self.trainer)
        noise_by_sample(self.trainer)
        kept: dict[str, Any] = {}
        if is_master():
            facts = facts_at_start(self.trainer, attention=chosen, proof=proof)
            logger.info(text := start_text(facts))
            show_in_tensorboard(self.trainer, text, state.global_step)
            kept = {**_kept(facts), **_facts_to_look_back(self.trainer)}
        self.trainer.events.begin(state.global_step, self.trainer.checkpoint_resumed, kept)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave a tower alone that has seen no image in this step."""
        drop_gradients_of_empty_images(self.trainer.model)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the packs of this step. They count as trained now."""
        self.trainer.count_step()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add up the epoch over all ranks, log the account and write it to `vlpack/epoch_N.json`."""
        self.trainer.close_epoch()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record that the run was not interrupted, and log what it trained and which command reports it."""
        trainer = self.trainer
        trainer.events.end(state.global_step)
        if is_master():
            text = end_text(
                trainer.events.of_run,
                step=state.global_step,
                num_steps=state.max_steps,
                num_ranks=trainer.feed.num_ranks,
                output_dir=args.output_dir,
            )
            logger.info(text)


def show_in_tensorboard(trainer: Any, text: str, step: int) -> None:
    """Add the summary to the text page of TensorBoard, if the run reports to TensorBoard."""
    for callback in trainer.callback_handler.callbacks:
        if (writer := getattr(callback, "tb_writer", None)) is not None:
            # Indent the text: TensorBoard reads Markdown, which keeps the lines of an indented block.
            writer.add_text("packing", "".join(f"    {line}\n" for line in text.splitlines()), step)


# -- facts at the start -----------------------------------------------------------------------------------------------


def facts_at_start(trainer: Any, *, attention: str, proof: str | None) -> dict[str, Any]:
    """Collect what is known before the first step, on rank 0. `plan` and `data` are None without a plan."""
    feed, args, state = trainer.feed, trainer.args, trainer.state
    plan = feed.epoch_plan
    checkpoint = trainer.checkpoint_resumed
    accumulation = args.gradient_accumulation_steps if feed.kept_step is None else feed.kept_step.accumulation
    return {
        "versions": versions(),
        "output_dir": args.output_dir,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "step": state.global_step,
        "num_steps": state.max_steps,
        "num_epochs": state.num_train_epochs,
        "epoch": feed.epoch,
        "num_ranks": feed.num_ranks,
        "gradient_accumulation_steps": accumulation,
        "num_workers": args.dataloader_num_workers,
        "unpacked_batch_size": feed.unpacked_batch_size,
        "mode": feed.kind,
        "packing_length": feed.config.packing_length,
        "packing_strategy": feed.config.packing_strategy,
        **({"packing_share": MEDIA} if feed.config.shares_media else {}),
        "attention": attention,
        "proof": proof,
        "plan": None if plan is None else _plan_facts(feed, args.gradient_accumulation_steps),
        "data": None if plan is None else _data_facts(plan, feed.dataset, trainer.template),
    }


def _plan_facts(feed: Any, accumulation: int) -> dict[str, Any]:
    return plan_facts(feed.epoch_plan, accumulation=accumulation, is_decoded_ahead=feed.is_decoded_ahead)


def _data_facts(plan: EpochPlan, dataset: Any, template: Any) -> dict[str, Any]:
    remembered = sum(source.sizes.num_remembered for source in dataset.sources if source.sizes is not None)
    report = data_report(plan, dataset, merge_size(template))
    return {**report, "num_remembered": remembered, "ratio_by": dataset.mix.ratio_by}


def _kept(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Select the facts that the run log saves for the report."""
    data = facts["data"] or {}
    sources = {
        name: {"rows": source["rows"], "ratio": source["asked_ratio"], "asked_share": source["asked_share"]}
        for name, source in data.get("sources", {}).items()
    }
    kept = {name: value for name, value in facts.items() if name not in _NOT_KEPT}
    return {**kept, "sources": sources, **{name: data.get(name) for name in ("num_remembered", "ratio_by")}}


def _facts_to_look_back(trainer: Any) -> dict[str, Any]:
    """Collect what cannot be found out after the run, for `vlpack inspect --run` and for a reader of the log."""
    feed = trainer.feed
    names = {*variables_named_by(type(trainer.template)), _ROOT_OF_IMAGES}
    log = Path(trainer.args.output_dir) / LOG
    return {
        "options": feed.config.changed(),
        "variables": {name: os.environ[name] for name in sorted(names) if name in os.environ},
        "origins": {source.name: source.origin or source.name for source in feed.sources},
        # ms-swift appends to the log of an earlier run in the same folder; this run's lines begin here.
        "log_bytes": log.stat().st_size if log.is_file() else 0,
    }
