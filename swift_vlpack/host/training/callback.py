"""Around training: the proof before the first step, the account after every epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swift.callbacks import TrainerCallback
from swift.utils import get_logger, is_master

from swift_vlpack.core.account.telemetry import Telemetry
from swift_vlpack.core.files import write_json
from swift_vlpack.host.training.losses import add_up
from swift_vlpack.host.training.proof import prove_isolation
from swift_vlpack.host.training.row_effects import noise_by_sample

logger = get_logger()


class PackingCallback(TrainerCallback):
    """Registered with ms-swift as `vlpack`; `trainer` is a `PackingTrainer`."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prove isolation on the model as it will train, or stop."""
        if self.trainer.packs.config.packing_verify:
            line = prove_isolation(self.trainer)
            if is_master():
                logger.info(line)
        if self.trainer.packs.config.packing_verify or self.trainer.compute_loss_func is not None:
            add_up(self.trainer)
        noise_by_sample(self.trainer)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The packs of this step are trained now."""
        self.trainer.count_step()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the epoch's account over all ranks, log it and write it beside the checkpoints."""
        self.trainer.close_epoch()
        total = self.trainer.counted_by_all_ranks()
        if is_master():
            report_epoch(self.trainer, total)


def report_epoch(trainer: Any, total: Telemetry) -> None:
    """Log the account of the epoch that the packs are of, and write it."""
    epoch = trainer.packs.epoch
    trainer.count_what_the_plan_left_out(total)
    logger.info(f"packing: {total.line(epoch=epoch)}")
    facts = {"global_step": trainer.global_step, "loader_deleted": trainer.num_lost_by_loader()}
    path = Path(trainer.args.output_dir) / "vlpack" / f"epoch_{epoch}.json"
    try:
        write_json(path, {**total.as_json(epoch=epoch), **facts})
    except OSError as error:
        logger.warning(f"packing: the report of epoch {epoch} is in the log only, {path} cannot be written: {error}")
