"""Train packs with ms-swift's trainer: one sequence is one batch.

The feed knows the data and how it is packed. The trainer asks the feed, and works alike for every kind of feed
(`feed/feed.py`):

    train      feed.begin(epoch) -> feed.loader(...) -> training_step(batch) -> count_step -> feed.consumed(records)
    save       ms-swift's checkpoint, then feed.state() marks it as complete
    resume     feed.restore(state), then the trainer's epochs and steps are computed from what is left

A pack counts as trained when its optimizer step is taken. Only counted packs are saved, logged and reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from swift.utils import get_logger, is_master
from transformers.trainer_utils import seed_worker

from swift_vlpack.attention.packed_sequence import to_device
from swift_vlpack.attention.prepare import have_targets
from swift_vlpack.config import SAMPLES
from swift_vlpack.errors import ConfigError, StateMismatch
from swift_vlpack.feed.collate import Batch, Collator
from swift_vlpack.feed.feed import Feed
from swift_vlpack.feed.sequence import layout
from swift_vlpack.feed.sequence_loss import MeanOfStep, weigh_samples
from swift_vlpack.feed.waiting import waiting
from swift_vlpack.files import sync_folder
from swift_vlpack.host.checkpoint_files import Records, recorded
from swift_vlpack.host.checkpoints import nothing_deleted, rotate, save_training_args, sync
from swift_vlpack.host.evaluation import EvaluatesRows
from swift_vlpack.host.loader import PackLoader, collator_of
from swift_vlpack.host.losses import (
    refuse_experts_of_packs,
    refuse_means_of_batches,
    shifts_smoothed_labels,
    warn_of_what_differs,
)
from swift_vlpack.host.proof import FirstBatches
from swift_vlpack.host.ranks import RanksOfRun, num_ranks, results_of_all
from swift_vlpack.host.run_events import RunEvents
from swift_vlpack.host.same_on_ranks import check_equal, check_same_parameters, refuse_differences, versions
from swift_vlpack.host.state import (
    FILE,
    SAVED_SETTINGS,
    WAY_OUT,
    check_settings,
    load_rank_state,
    load_state,
    read_trainer_state,
    save_rank_state,
    save_state,
)
from swift_vlpack.host.step_check import StepCheck
from swift_vlpack.host.together import check_engine
from swift_vlpack.host.tower import refuse_unlike_media, tolerate_packs_without_images, towers_skipped
from swift_vlpack.host.voting import Ranks, leave_at_exit
from swift_vlpack.host.weights import load_renamed
from swift_vlpack.host.whole_step import WholeStep
from swift_vlpack.lengths.context import by_name, values_of_config
from swift_vlpack.plan.resume_schedule import Bounds, ResumeSchedule, num_steps
from swift_vlpack.proof.verdict import Limits
from swift_vlpack.rows.randomness import RandomStream
from swift_vlpack.rows.samples import PackRecord
from swift_vlpack.runlog.counts import Counts

logger = get_logger()


class PackingTrainer(EvaluatesRows):
    """Train a feed, which ms-swift passes as `train_dataset`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        training_args = kwargs["args"]
        self.feed: Feed = _checked(kwargs["train_dataset"])
        self.events = RunEvents(self.feed, training_args.output_dir, training_args.process_index)
        self.checkpoint_resumed: Path | None = None
        self._fingerprint: dict[str, Any] = {}
        self._settings: dict[str, Any] = {}
        self._global_step_before: int | None = None  # the step of the checkpoint from which the run resumes
        self._is_saving = False  # True while a checkpoint is written
        num_workers = training_args.dataloader_num_workers
        self.first_batches = FirstBatches(num_workers, training_args.seed) if self.feed.config.packing_verify else None
        self.kinds_of_media: frozenset[str] = frozenset()  # of the proof before training
        self.limits_of_rounding: Limits | None = None  # as that proof measured them
        tolerate_packs_without_images(kwargs["model"], training_args)
        self._towers_skipped: dict[str, list[str]] = {}  # by a sequence without media, in training and in evaluation
        self.step_check = StepCheck(self)
        self.lengths_in_sequence: tuple[int, ...] = ()  # of the sequence that is trained now
        self.own_lengths: tuple[int, ...] = ()  # of its samples, if some share a prefix
        self._has_targets = False  # of the sequence that is trained now; ms-swift asks with a part of its labels
        self._sequences_of_steps: Iterator[int] = iter(())  # of the steps to come, where they keep their samples
        super().__init__(*args, **kwargs)
        if training_args.fsdp and not self.is_fsdp_enabled:
            _warn("--fsdp has no effect: accelerate shards on devices, and under --use_cpu this run is plain DDP")
        refuse_experts_of_packs(self)
        refuse_means_of_batches(self)
        warn_of_what_differs(self)
        smoother: Any = self.label_smoother  # type: ignore[has-type]
        if smoother is not None:
            self.label_smoother = MeanOfStep(smoother)
        # Undo ms-swift's setting: it takes one worker for data without a length, because its workers would all read all
        # rows.
        training_args.dataloader_num_workers = num_workers

    # -- batches ----------------------------------------------------------------------------------------------------

    def _get_data_collator(self, args: Any, template: Any) -> Collator:
        return collator_of(args, template, self.feed.seed)

    def get_train_dataloader(self, skip_batches: int = 0) -> PackLoader:
        """Return the loader of this rank's packs, one for all epochs."""
        if skip_batches:  # a resume: the feed itself skips what was trained
            return self.callback_handler.train_dataloader
        args = self.args
        options = {
            "collate_fn": self.data_collator,
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory,
            "persistent_workers": args.dataloader_persistent_workers and args.dataloader_num_workers > 0,
            "prefetch_factor": args.dataloader_prefetch_factor if args.dataloader_num_workers > 0 else None,
            "worker_init_fn": partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
            **self._maybe_multiprocessing_context(args),
        }
        shared_by, there_are = self.feed.num_ranks, num_ranks()
        assert shared_by == there_are, f"packs are shared by {shared_by} ranks, and there are {there_are}"
        ranks = partial(Ranks, timedelta(seconds=args.ddp_timeout))
        return self.feed.loader(args.process_index, PackLoader, ranks=ranks, device=self.accelerator.device, **options)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Return the batches of one optimizer step. In the first steps, prove isolation on some of them."""
        num_batches = next(self._sequences_of_steps, num_batches)
        batches, num_items = self.weighed_batches(epoch_iterator, num_batches, device)
        if not batches:
            return batches, num_items
        self._refuse_to_wait(batches, "train")
        self.step_check.begin(batches)
        if self.first_batches is not None:
            for said in self.first_batches.prove(self, batches, num_items):
                if is_master():
                    logger.info(said)
        return ([WholeStep(batches)] if self.feed.config.packing_batch == SAMPLES else batches), num_items

    def _refuse_to_wait(self, batches: list[Any], verb: str) -> None:
        """Raise if a rank with an image would enter sharded layers that a rank without an image does not enter."""
        if verb not in self._towers_skipped:
            self._towers_skipped[verb] = towers_skipped(self)
        if towers := self._towers_skipped[verb]:
            refuse_unlike_media(batches, towers, RanksOfRun(), verb)

    def weighed_batches(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Return the batches of one optimizer step, weighed by `packing_loss`. The feed fills up the last step."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, num_items
        batches = batches + self.feed.fill_up(num_batches - len(batches))
        if (kind := self.feed.config.packing_loss) != "token":
            weigh_samples(batches, kind, self._over_ranks)
        return batches, num_items

    def _over_ranks(self, numbers: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.accelerator.reduce(numbers.to(self.accelerator.device), reduction="sum")
        return total

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch, unless it would let ranks wait for each other."""
        self._refuse_to_wait([inputs], "evaluate")
        return super().prediction_step(model, inputs, *args, **kwargs)

    # -- a step -----------------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Batch | WholeStep, num_items_in_batch: Any = None) -> torch.Tensor:
        """Train one pack, or all packs of a step. A pack counts when its optimizer step is taken."""
        if isinstance(inputs, WholeStep):
            return inputs.trained(self, partial(self.training_step, model), model, num_items_in_batch)
        record = inputs.record
        assert record is not None
        self.lengths_in_sequence = record.lengths_in_sequence
        self.own_lengths = (*record.own_lengths, record.num_padding) if record.shared else ()
        self._has_targets = "labels" in inputs and have_targets(inputs["labels"])
        with layout(self.template, packed=True), self.step_check.sequence():
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self._has_targets = False
        self.events.trained(record)
        return loss

    def get_cu_seqlens(self, position_ids: Any, logits_to_keep: Any) -> torch.Tensor:
        """Say where samples start, for the loss by channel and the accuracy. A branch begins with what is its own."""
        if self.own_lengths and self.model.training:
            starts = np.concatenate([np.arange(num) for num in self.own_lengths])
            position_ids = to_device(starts, position_ids.device)[None]
        cu_seqlens: torch.Tensor = super().get_cu_seqlens(position_ids, logits_to_keep)
        return cu_seqlens

    def floating_point_ops(self, inputs: Any) -> int:
        """Count the operations of a pack, or of all packs of a step."""
        each = inputs if isinstance(inputs, WholeStep) else [inputs]
        return sum(int(super(PackingTrainer, self).floating_point_ops(batch)) for batch in each)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for batch in inputs if isinstance(inputs, WholeStep) else [inputs]:
            super()._track_num_input_tokens(batch)

    def count_step(self) -> None:
        """Count the packs whose optimizer step has just been taken."""
        records, counts = self.events.take_step(self.state.global_step + 1)
        self.feed.consumed(records)
        self.step_check.end()
        for record in records:
            self._show(record)
        self._show_share("pack/padding_saved", counts.num_padding_saved, counts.num_tokens_unpacked)
        self._show_share("pack/vision_share", counts.num_vision_tokens, counts.num_tokens)
        if self.feed.config.shares_media:
            self._show_share("pack/sharing_saved", counts.num_shared_tokens, counts.num_tokens_alone)

    def _show(self, record: PackRecord) -> None:
        if not record.sample_ids:
            return
        metrics = self.custom_metrics["train"]
        metrics["pack/fill"].update(record.num_tokens / self.feed.config.packing_length)
        metrics["pack/samples"].update(float(len(record.sample_ids)))
        metrics["pack/images"].update(float(record.num_images))

    def _show_share(self, name: str, part: int, whole: int) -> None:
        """Log a token-weighted share; a mean over packs would over-weight short packs."""
        metric = self.custom_metrics["train"][name]
        metric.state += part
        metric.count += whole

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute ms-swift's loss. It is 0 for a sequence without a target, where a mean would be NaN."""
        labels = inputs.get("labels")
        if self.model.training:
            self.step_check.divide(num_items_in_batch)
        if not self.model.training or labels is None or self._has_targets or have_targets(labels):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        unused = ("labels", "loss_scale", "channel", "text_position_ids", "compute_loss_func", "logits_to_keep")
        outputs = model(**{key: value for key, value in inputs.items() if key not in unused})
        loss = outputs.logits.float().sum() * 0.0
        return (loss, outputs) if return_outputs else loss

    def prepare_logits_to_keep(self, inputs: dict[str, Any]) -> None:
        """Let ms-swift drop logits without a target, unless it smooths labels without shifting them.

        In that case the last target of a sample would be compared with the first logits of the next sample. That cannot
        happen in a padded batch.
        """
        is_batch = self.is_evaluating and not self.template.packing
        if is_batch or self.label_smoother is None or shifts_smoothed_labels(self):
            super().prepare_logits_to_keep(inputs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add speed and targets to a log line. In the last line, count samples a second; ms-swift counts packs."""
        self.events.note_steps(self.state.global_step)
        if "loss" in logs and (counts := self.events.since_line()) is not None:
            supervised = self.step_check.targets_since_line()
            logs["pack/tokens_per_second"] = round(counts.num_tokens / max(counts.seconds, 1e-3), 1)
            logs["pack/supervised_tokens"] = round(supervised / counts.num_steps, 1)
        if "train_samples_per_second" in logs:
            logs["train_samples_per_second"] = round(self.events.of_run.num_packed / logs["train_runtime"], 3)
        super().log(logs, *args, **kwargs)

    # -- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate with separate random numbers, so that an evaluation does not change what is trained next."""
        if self.first_batches is not None:
            self.first_batches.evaluated()
        with self.events.paused(), RandomStream(self.args.seed, "evaluation", self.state.global_step):
            return super().evaluate(*args, **kwargs)

    # -- epochs -----------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, after a check that all ranks have the same data. A resume continues with the next pack."""
        self._fingerprint = self.feed.fingerprint()
        check_equal("data and versions", {**versions(), **self._fingerprint})
        check_same_parameters(self.model, RanksOfRun())
        config = values_of_config(self.model.config)
        check_equal("values of the model's config", config)
        settings = by_name({**self.feed.settings, "config": config})
        self._settings = {name: value for name, value in settings.items() if name.startswith(SAVED_SETTINGS)}
        self.events.list_deleted_rows()
        if resume_from_checkpoint:
            self.checkpoint_resumed = Path(resume_from_checkpoint)
            if not self.args.resume_only_model:
                check_engine(self.checkpoint_resumed, self._engine, RanksOfRun())
            self._resume(self.checkpoint_resumed)
        with waiting("training"):  # lets a failing rank tell the others why
            trained = super().train(resume_from_checkpoint, *args, **kwargs)
        leave_at_exit()
        return trained

    def _run_epoch(
        self, *args: Any, epoch: int, steps_in_epoch: int, num_update_steps_per_epoch: int, **kwargs: Any
    ) -> None:
        """Train one epoch. A resumed epoch can have more or fewer steps left than the trainer computed."""
        start = self.feed.begin(epoch)
        self.events.list_left_out(epoch, start.left_out)
        check_equal(f"plan of epoch {epoch}", start.must_agree)
        self.events.begin_epoch(max(self.state.global_step, self._global_step_before or 0), start.facts)
        _warn(start.warning)
        if (left := self.feed.batches_left) is not None:
            accumulation = self.args.gradient_accumulation_steps
            steps_in_epoch = self.feed.batches_trained(accumulation) + left
            num_update_steps_per_epoch = num_steps(steps_in_epoch, accumulation)
        self._sequences_of_steps = self.feed.sequences_of_steps()
        super()._run_epoch(
            *args,
            epoch=epoch,
            steps_in_epoch=steps_in_epoch,
            num_update_steps_per_epoch=num_update_steps_per_epoch,
            **kwargs,
        )
        self.events.forget_epoch()

    def close_epoch(self) -> None:
        """Add up the counts of the epoch over all ranks, and report them."""
        self.events.note_steps(self.state.global_step)  # write an event here, so that none spans two epochs
        self.events.leave_out(self.feed.epoch, self.feed.left_out_after())
        self._report(self.events.over_all_ranks())

    def _report(self, counted: Counts) -> None:
        self.feed.count_rows(counted)
        if is_master():
            self.events.report_epoch(counted, max(self.state.global_step, self._global_step_before or 0))
        _warn(self.feed.end(counted))

    # -- resuming ---------------------------------------------------------------------------------------------------

    def _resume(self, checkpoint: Path) -> None:
        """Restore the feed to the pack after the last one that the checkpoint was trained on."""
        step = self._global_step_before = int(read_trainer_state(checkpoint).get("global_step", 0))
        if self.args.ignore_data_skip:  # transformers' option to start the data anew
            return
        everyone = results_of_all(
            lambda: load_state(checkpoint, self.feed.kind, self._fingerprint, self.feed.saved_rows)
        )
        refuse_differences("saved state of the data", [state or {} for state in everyone])
        if (saved := everyone[0]) is None:
            return
        check_settings(checkpoint, saved, self._settings, model=self.template.model_info.model_dir)
        rank = self.args.process_index
        is_of_rank = self.feed.rank_state() is not None
        rank_state = results_of_all(lambda: load_rank_state(checkpoint, rank, step) if is_of_rank else None)[rank]
        try:
            self.feed.restore(saved, rank_state)
        except StateMismatch as error:
            raise StateMismatch(f"{checkpoint / FILE}: {error}. {WAY_OUT}") from error
        self._fingerprint = self.feed.fingerprint()
        counted = Counts.from_state(saved["counted"])
        if self.feed.is_finished:  # the run may have been killed before it could report the epoch
            self._report(counted)
            self.feed.begin(self.feed.epoch + 1)
        elif is_master():
            self.events.of_epoch = counted

    @property
    def _engine(self) -> str:
        return "DeepSpeed" if self.is_deepspeed_enabled else "FSDP" if self.is_fsdp_enabled else "DDP"

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        has_parts = any(Path(resume_from_checkpoint).glob("pytorch_model_fsdp*"))
        if self._engine == "FSDP" and self.args.resume_only_model and not has_parts:
            return  # ms-swift has loaded the model from the checkpoint, whose whole weights FSDP cannot read
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self._engine == "DDP":  # FSDP and DeepSpeed have formats of their own
            load_renamed(self.model if model is None else model, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self._engine == "DDP":
            load_renamed(self.model, Path(self.state.best_model_checkpoint))

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the trainer's epochs and steps; in a resumed run, from the checkpoint and what is left."""
        values: tuple[Any, ...] = super().set_initial_training_values(*args, **kwargs)
        if self._global_step_before is None:
            return values
        num_epochs, steps_per_epoch, *others, max_steps = values
        accumulation = self.args.gradient_accumulation_steps
        rest = ResumeSchedule(
            epoch=self.feed.epoch,
            global_step=self._global_step_before,
            batches_trained=self.feed.batches_trained(accumulation),
            batches_left=self.feed.batches_left,
            accumulation=accumulation,
        )
        bounds = rest.bounds(
            Bounds(num_epochs, max_steps),
            steps_per_epoch=steps_per_epoch,
            num_train_epochs=self.args.num_train_epochs,
            are_steps_given=self.args.max_steps > 0,
        )
        return bounds.num_epochs, steps_per_epoch, *others, bounds.max_steps

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return the epoch to continue, and how many of its batches are trained."""
        trained: tuple[int, int] = super()._init_training_state(*args, **kwargs)
        if self._global_step_before is None:
            return trained
        # Without this, transformers saves, evaluates and logs as often as the run that wrote the checkpoint.
        self.state.compute_steps(self.args, self.state.max_steps)
        return self.feed.epoch, self.feed.batches_trained(self.args.gradient_accumulation_steps)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Save ms-swift's checkpoint, then the feed's state, which completes it. Only then delete older checkpoints."""
        # Write an event here, so that the steps that a kill loses are exactly those in later events.
        self.events.note_steps(self.state.global_step)
        with self.events.paused():
            result = self._save_whole_checkpoint(*args, **kwargs)
        self.events.checkpoint(self.state.global_step, self._checkpoint)
        return result

    def _save_whole_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        if self.args.should_save:
            (self._checkpoint / FILE).unlink(missing_ok=True)  # left by an earlier run in the same directory
        self._is_saving = True
        with nothing_deleted(self.args):
            result = super()._save_checkpoint(*args, **kwargs)
        self._is_saving = False
        results_of_all(self._save_rank_state, "the progress of every rank, for a checkpoint")
        counted = self.events.over_all_ranks()
        is_first = self.args.local_process_index == 0  # one rank of each machine
        results_of_all(lambda: sync(self._checkpoint) if is_first else None, "a checkpoint that is flushed to the disk")
        files = recorded(self._checkpoint, RanksOfRun(), is_first=is_first)
        results_of_all(lambda: self._complete_checkpoint(counted, files), "the state of a checkpoint")
        self._update_last_checkpoint_symlink(barrier=False)
        return result

    def _save_rank_state(self) -> None:
        if (state := self.feed.rank_state()) is not None:
            save_rank_state(self._checkpoint, self.args.process_index, self.state.global_step, state)
        if self.args.should_save:
            save_training_args(self._checkpoint, self.args)

    def _complete_checkpoint(self, counted: Counts, files: Records) -> None:
        if not self.args.should_save:
            return
        state = {**self.feed.state(), "counted": counted.state(), "files": files, "settings": self._settings}
        save_state(self._checkpoint, self.feed.kind, self._fingerprint, state, self.feed.saved_rows)
        sync_folder(self._checkpoint)
        rotate(self._checkpoint, self.args.save_total_limit, self.state.best_model_checkpoint)

    def _update_last_checkpoint_symlink(self, barrier: bool = True) -> None:
        """Point `last-checkpoint` to the checkpoint, but not before it is complete."""
        if not self._is_saving:
            super()._update_last_checkpoint_symlink(barrier=barrier)

    @property
    def _checkpoint(self) -> Path:
        return Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"


def _checked(feed: Any) -> Feed:
    if not isinstance(feed, Feed):
        raise ConfigError(f"PackingTrainer trains a feed as `build_feed` makes it, got {type(feed).__name__}")
    return feed


def _warn(warning: str | None) -> None:
    if warning and is_master():
        logger.warning(f"packing: {warning}")
