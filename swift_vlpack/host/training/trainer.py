"""ms-swift's trainer for packed runs: its loader, its collator, its counters, and a loss for rows without labels."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from swift.trainers import Seq2SeqTrainer
from swift.utils import get_logger, is_master
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import seed_worker

from swift_vlpack.core.account.remedies import warning_of_left_out
from swift_vlpack.core.account.telemetry import Telemetry
from swift_vlpack.core.config import RECORD_PACKS, is_switched_on
from swift_vlpack.core.epoch.cuts import advanced, cuts_from, is_finished, num_consumed
from swift_vlpack.core.errors import ConfigError, DataError, StateMismatch
from swift_vlpack.core.files import sync_folder
from swift_vlpack.data.feeds.buffered import Progress
from swift_vlpack.data.feeds.dataset import PackingDataset
from swift_vlpack.data.feeds.failures import FEWEST_ROWS_OF_EPOCH, FailedShare
from swift_vlpack.data.feeds.planned import PlannedPackingDataset
from swift_vlpack.data.feeds.transport import WorkerCollator
from swift_vlpack.data.model.collate import Batch, Collator, layout
from swift_vlpack.data.rows.contents import NO_LABEL
from swift_vlpack.data.rows.fusion import RowSource
from swift_vlpack.data.rows.left_out import LeftOutRows, deleted_by_loader
from swift_vlpack.data.rows.randomness import RandomStream
from swift_vlpack.data.rows.samples import LeftOut, PackRecord
from swift_vlpack.host.ranks import check_equal, gathered, together, tolerate_packs_without_images, versions
from swift_vlpack.host.training.callback import report_epoch
from swift_vlpack.host.training.checkpoints import nothing_deleted, rotate, save_training_args, sync
from swift_vlpack.host.training.loader import PackLoader, pack_loader
from swift_vlpack.host.training.losses import MeanOfStep, shifts_smoothed_labels, warn_of_what_differs
from swift_vlpack.host.training.state import (
    BUFFER,
    FILE,
    PLAN,
    WAY_OUT,
    Rows,
    buffer_fingerprint,
    load_progress,
    load_state,
    plan_fingerprint,
    save_progress,
    save_state,
)

logger = get_logger()


class PackingTrainer(Seq2SeqTrainer):
    """Trains packs, evaluates padded batches, with one template."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        training_args = kwargs["args"]
        packs = kwargs["train_dataset"]
        if not isinstance(packs, PackingDataset):
            raise ConfigError(f"PackingTrainer trains a PackingDataset, got {type(packs).__name__}")
        self.packs: Any = packs
        self.stats = self._no_counts()
        self._in_step: list[PackRecord] = []  # trained, but their optimizer step is not taken yet
        self._num_trained = 0  # packs of this rank in this epoch, since it was begun or resumed
        self._num_samples_trained = 0  # of this rank, since the run was begun or resumed
        self._global_step_before: int | None = None  # of the checkpoint, where one is resumed
        self._fingerprint: dict[str, Any] = {}
        self._failed_share = FailedShare(packs.config.packing_max_failed_share)
        self._left_out_rows = LeftOutRows(Path(training_args.output_dir) / "vlpack" / "left_out.jsonl", self._sources)
        self._is_saving = False  # a checkpoint, which is not complete yet
        self._records_packs = is_switched_on(RECORD_PACKS, os.environ)
        num_workers = training_args.dataloader_num_workers
        self.progress = Progress(num_workers)
        tolerate_packs_without_images(kwargs["model"], training_args)
        self.is_evaluating = False
        self.lengths_in_row: tuple[int, ...] = ()  # of the samples that are trained now
        super().__init__(*args, **kwargs)
        warn_of_what_differs(self)
        if self.label_smoother is not None:
            self.label_smoother = MeanOfStep(self.label_smoother, self)
        training_args.dataloader_num_workers = num_workers  # ms-swift allows iterable data one worker; ours shares rows

    def _get_data_collator(self, args: Any, template: Any) -> Collator:
        padding_to = template.max_length if args.tuner_type == "longlora" else None
        return WorkerCollator(template, padding_to, for_model=False, seed=self.packs.seed)

    def get_train_dataloader(self, skip_batches: int = 0) -> PackLoader:
        """The packs of this rank. What was trained before a resume is no part of them, whatever `skip_batches` says."""
        if skip_batches:
            return self.callback_handler.train_dataloader  # one loader for all epochs, as without a resume
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
        timeout = timedelta(seconds=args.ddp_timeout)
        return pack_loader(
            self.packs, self.accelerator.device, rank=args.process_index, vote_timeout=timeout, **options
        )

    def training_step(self, model: Any, inputs: Batch, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train one pack; it is counted when its optimizer step is taken."""
        record = inputs.record
        assert record is not None
        self.lengths_in_row = record.lengths
        with layout(self.template, packed=True):
            loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        self._in_step.append(record)
        return loss

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Evaluate a padded batch, or a pack where `eval_packing` made one."""
        is_pack = getattr(inputs, "record", None) is not None
        with layout(self.template, packed=is_pack):
            return super().prediction_step(model, inputs, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate beside the random numbers of training: a loader that lives on draws only once in a run."""
        with RandomStream(self.args.seed, "evaluation", self.state.global_step):
            return super().evaluate(*args, **kwargs)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """ms-swift's loss; a row without a label has the loss 0, where a mean over nothing would be NaN."""
        if self.label_smoother is not None:  # ms-swift does not tell it
            self.label_smoother.num_items = num_items_in_batch
        labels = inputs.get("labels")
        if not self.model.training or labels is None or bool((labels != NO_LABEL).any()):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        unused = ("labels", "loss_scale", "channel", "text_position_ids", "compute_loss_func", "logits_to_keep")
        outputs = model(**{key: value for key, value in inputs.items() if key not in unused})
        loss = outputs.logits.float().sum() * 0.0
        return (loss, outputs) if return_outputs else loss

    def prepare_logits_to_keep(self, inputs: dict[str, Any]) -> None:
        """Drop the logits without a target, but for a loss that wants them.

        Where ms-swift smooths each token at its own position, the last target of a sample would meet the logits of the
        next sample's first; in a padded batch it does not.
        """
        if self.is_evaluating or self.label_smoother is None or shifts_smoothed_labels(self):
            super().prepare_logits_to_keep(inputs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """ms-swift's log line; the last one of training gives the speed in rows, which is packs, and gets samples."""
        if "train_samples_per_second" in logs:
            num_samples = sum(gathered(self._num_samples_trained))
            logs["train_samples_per_second"] = round(num_samples / logs["train_runtime"], 3)
        super().log(logs, *args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Batches of one optimizer step. At the end of a stream's epoch rows without loss complete it.

        The trainer steps after every `num_batches`-th batch of an epoch whose length it does not know; the gradients
        of an incomplete group would end in the next epoch's first step, with its number of tokens.
        """
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches and not self._is_planned:
            empty = self.callback_handler.train_dataloader.empty_batch
            batches += [empty() for _ in range(num_batches - len(batches))]
        return batches, num_items

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, if all ranks have the same data; from a checkpoint on, the data goes on where it was."""
        self._rows = Rows(self.packs.dataset)
        self._fingerprint = (
            plan_fingerprint(self.packs, self._rows)
            if self._is_planned
            else buffer_fingerprint(self.packs, self.progress.num_workers, self._rows)
        )
        check_equal("data and versions", {**versions(), **self._fingerprint})
        for source in self._sources if is_master() else ():
            self._left_out_rows.add(None, deleted_by_loader(source))
        if resume_from_checkpoint:
            self._resume(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    @property
    def _is_planned(self) -> bool:
        return isinstance(self.packs, PlannedPackingDataset)

    def _resume(self, checkpoint: Path) -> None:
        """Continue behind the last pack that the checkpoint was trained on."""
        self._global_step_before = _global_step(checkpoint)
        if self.args.ignore_data_skip:  # the trainer's own way to say that the data shall start anew
            return
        kind = PLAN if self._is_planned else BUFFER
        saved, *_ = together(lambda: load_state(checkpoint, kind, self._fingerprint, self._rows))
        if saved is None:
            return
        if not self._is_planned:
            self._restore_stream(checkpoint, saved)
            return
        if (fingerprint := plan_fingerprint(self.packs, self._rows)) != self._fingerprint:
            self._fingerprint = fingerprint
            self.packs.plan_with(self._rows.sources)
        digest = self.packs.resume(saved["epoch"], cuts_from(saved["cuts"]))
        if digest != saved["plan"]:
            raise StateMismatch(
                f"{checkpoint}: the same data and options give another plan of epoch {saved['epoch']} than then "
                f"({digest}, then {saved['plan']}): swift_vlpack, numpy or binpacking is another version. {WAY_OUT}"
            )
        counted = Telemetry.from_state(saved["counted"])
        if is_finished(self.packs.cuts):
            if is_master():  # the run may have ended before it could
                report_epoch(self, counted)
            self.packs.set_epoch(saved["epoch"] + 1)
        elif is_master():
            self.stats = counted

    def _restore_stream(self, checkpoint: Path, saved: dict[str, Any]) -> None:
        rank, step = self.args.process_index, self._global_step_before or 0
        self.progress = together(lambda: load_progress(checkpoint, rank, step))[rank]
        self.packs.restore(self.progress)
        if is_master():
            self.stats = Telemetry.from_state(saved["counted"])

    def _num_skipped(self) -> int:
        """Batches of the epoch that the trainer shall believe to have trained: whole steps, as it accumulates now."""
        accumulation = self.args.gradient_accumulation_steps
        packs_per_step = self.packs.num_ranks * accumulation
        return int(num_consumed(self.packs.cuts) // packs_per_step * accumulation)

    def _steps_of_epoch(self) -> tuple[int, int]:
        """Batches and optimizer steps of the epoch: those believed to be trained, and those that are left."""
        num_batches = self._num_skipped() + self.packs.num_steps_left
        return num_batches, math.ceil(num_batches / self.args.gradient_accumulation_steps)

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The trainer's epochs and steps; of a resumed run those of the checkpoint and those that are left."""
        values: tuple[Any, ...] = super().set_initial_training_values(*args, **kwargs)
        if self._global_step_before is None:
            return values
        num_epochs, steps_per_epoch, *others, max_steps = values
        if not self._is_planned:  # as many epochs as it takes, but none if all steps are trained
            is_done = self._global_step_before >= max_steps
            return self.packs.epoch if is_done else num_epochs, steps_per_epoch, *others, max_steps
        epoch, before = self.packs.epoch, self._global_step_before
        steps_skipped = self._num_skipped() // self.args.gradient_accumulation_steps
        _, steps_of_epoch = self._steps_of_epoch()
        if self.args.max_steps <= 0:  # so max_steps is that of a run which always had as many ranks as this one
            max_steps += before - epoch * steps_per_epoch - steps_skipped
            if self.args.num_train_epochs - epoch >= 1:
                max_steps += steps_of_epoch - steps_per_epoch
        steps_after = max_steps - before - (steps_of_epoch - steps_skipped)
        num_epochs = epoch + 1 + max(0, math.ceil(steps_after / steps_per_epoch)) if max_steps > before else epoch
        return num_epochs, steps_per_epoch, *others, max_steps

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """The epoch to go on in, and how many of its batches are trained.

        A stream's loader goes on by itself; the number makes the trainer step where it would have stepped.
        """
        trained: tuple[int, int] = super()._init_training_state(*args, **kwargs)
        if self._global_step_before is None:
            return trained
        return self.packs.epoch, self._num_skipped() if self._is_planned else self.progress.num_trained

    def _run_epoch(
        self, *args: Any, epoch: int, steps_in_epoch: int, num_update_steps_per_epoch: int, **kwargs: Any
    ) -> None:
        """Train an epoch on the same plan on all ranks; a resumed one can have more or fewer steps than the others."""
        self._failed_share.check(FEWEST_ROWS_OF_EPOCH)  # the epoch before may have had too few rows to say so
        if self._is_planned:
            self.packs.set_epoch(epoch)
            check_equal(f"plan of epoch {epoch}", {"digest": self.packs.plan.digest(), "packs": len(self.packs)})
            _warn(self.packs.warning_of_left_out())
            steps_in_epoch, num_update_steps_per_epoch = self._steps_of_epoch()
            if is_master():
                self._left_out_rows.add(epoch, self.packs.left_out_by_plan())
        super()._run_epoch(
            *args,
            epoch=epoch,
            steps_in_epoch=steps_in_epoch,
            num_update_steps_per_epoch=num_update_steps_per_epoch,
            **kwargs,
        )
        if not self._is_planned:
            counted = self.counted_by_all_ranks()
            if not counted.num_packs:
                raise DataError(f"epoch {epoch} has no pack; of its rows were left out: {dict(counted.num_dropped)}")
            _warn(warning_of_left_out(counted.num_dropped, num_rows=counted.num_read))
        self.stats, self._num_trained = self._no_counts(), 0

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """ms-swift's checkpoint, then the state of the data, which marks it as complete; then an older one may go."""
        if self.args.should_save:
            (self._checkpoint / FILE).unlink(missing_ok=True)  # of an earlier run into the same directory
        self._is_saving = True
        with nothing_deleted(self.args):
            result = super()._save_checkpoint(*args, **kwargs)
        self._is_saving = False
        if not self._is_planned:
            together(self._save_progress, "where the readers stand, for a checkpoint")
        counted = self.counted_by_all_ranks()  # by now all ranks have written what is theirs
        together(self._sync_checkpoint, "a checkpoint that is brought to the disk")
        together(lambda: self._complete_checkpoint(counted), "the state of a checkpoint")
        self._update_last_checkpoint_symlink(barrier=False)
        return result

    def _sync_checkpoint(self) -> None:
        """On every machine, whose files these may be."""
        if self.args.should_save:
            save_training_args(self._checkpoint, self.args)
        if self.args.local_process_index == 0:
            sync(self._checkpoint)

    def _complete_checkpoint(self, counted: Telemetry) -> None:
        if not self.args.should_save:
            return
        self._save_state(counted)
        sync_folder(self._checkpoint)
        rotate(self._checkpoint, self.args.save_total_limit, self.state.best_model_checkpoint)

    def _update_last_checkpoint_symlink(self, barrier: bool = True) -> None:
        """The name `last-checkpoint` is there to be resumed from, so it waits for the state."""
        if not self._is_saving:
            super()._update_last_checkpoint_symlink(barrier=barrier)

    @property
    def _checkpoint(self) -> Path:
        return Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"

    def _save_progress(self) -> None:
        save_progress(self._checkpoint, self.args.process_index, self.state.global_step, self.progress)

    def _save_state(self, counted: Telemetry) -> None:
        state = {"epoch": self.packs.epoch, "counted": counted.state()}
        if self._is_planned:
            state["cuts"] = advanced(self.packs.cuts, self._num_trained * self.packs.num_ranks)
            state["plan"] = self.packs.plan.digest()
        kind = PLAN if self._is_planned else BUFFER
        save_state(self._checkpoint, kind, self._fingerprint, state, self._rows)

    @property
    def global_step(self) -> int:
        """Optimizer steps taken, those before a resume included."""
        return max(self.state.global_step, self._global_step_before or 0)

    def count_step(self) -> None:
        """Count the packs whose optimizer step has just been taken: consumed means trained."""
        for record in self._in_step:
            self._count(record)
            self.progress.trained(record)
            self._num_samples_trained += len(record.sample_ids)
        self._num_trained += len(self._in_step)
        if self._records_packs:
            self._record_packs()
        self._in_step.clear()
        self._failed_share.check()

    def _record_packs(self) -> None:
        path = Path(self.args.output_dir) / "vlpack" / f"packs_rank{self.args.process_index}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            for record in self._in_step:
                pack = {"step": self.state.global_step + 1, "epoch": record.epoch, "pack": record.number}
                file.write(json.dumps({**pack, "ids": [str(sample_id) for sample_id in record.sample_ids]}) + "\n")

    def counted_by_all_ranks(self) -> Telemetry:
        """The epoch's counts so far; all ranks have to call it."""
        total = self._no_counts()
        for counts in gathered(self.stats, "the counts of the epoch"):
            total.merge(counts)
        return total

    def close_epoch(self) -> None:
        """Count what was left out behind the last pack of the epoch, where a stream's readers found such."""
        if not self._is_planned:
            self._count_left_out(self.packs.epoch, self.packs.left_out_behind)
            self.packs.left_out_behind = []

    def count_what_the_plan_left_out(self, total: Telemetry) -> None:
        """Add the rows of the epoch, and those that are in no pack; the plan is the same on all ranks, so only once."""
        if not self._is_planned:
            return
        schedule = self.packs.dataset.schedule
        for name, num_rows in zip(schedule.names, schedule.num_rows_per_source, strict=True):
            total.read(name, num_rows)
        for left_out in self.packs.left_out_by_plan():
            total.dropped(left_out.sample_id.source, left_out.reason)

    def _no_counts(self) -> Telemetry:
        return Telemetry(packing_length=self.packs.config.packing_length)

    def num_lost_by_loader(self) -> dict[str, int | None]:
        """Rows that ms-swift's loader deleted, by source; None where a source cannot name its rows."""
        return {source.name: source.num_lost for source in self._sources}

    @property
    def _sources(self) -> tuple[RowSource, ...]:
        """None where the rows are a stream."""
        return tuple(getattr(self.packs.dataset, "sources", ()))

    def _count(self, record: PackRecord) -> None:
        samples = [(key.source, length) for key, length in zip(record.sample_ids, record.lengths, strict=True)]
        if not self._is_planned:
            for source, _ in samples:
                self.stats.read(source)
        self._failed_share.count(len(samples))
        self._count_left_out(record.epoch, record.left_out)
        if not samples:
            return
        self.stats.packed(samples, num_images=record.num_images, single_long=record.single_long)
        metrics = self.custom_metrics["train"]
        metrics["pack/fill"].update(sum(record.lengths) / self.packs.config.packing_length)
        metrics["pack/samples"].update(float(len(samples)))
        metrics["pack/images"].update(float(record.num_images))

    def _count_left_out(self, epoch: int, left_out: Sequence[LeftOut]) -> None:
        self._failed_share.count(0, left_out)
        self._left_out_rows.add(epoch, left_out)
        for one in left_out:
            if not self._is_planned:
                self.stats.read(one.sample_id.source)
            self.stats.dropped(one.sample_id.source, one.reason)


def _warn(warning: str | None) -> None:
    if warning and is_master():
        logger.warning(f"packing: {warning}")


def _global_step(checkpoint: Path) -> int:
    """Steps of the checkpoint, where the trainer will find them too."""
    path = checkpoint / TRAINER_STATE_NAME
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["global_step"]) if path.is_file() else 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateMismatch(
            f"{path}: damaged: {type(error).__name__}: {error}. Resume from an earlier checkpoint"
        ) from error
