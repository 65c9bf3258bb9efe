"""Around training: the proof before the first step, the account after every epoch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from swift.callbacks import TrainerCallback
from swift.utils import get_logger, is_master

from swift_vlpack.host.proof import prove_isolation

logger = get_logger()


class PackingCallback(TrainerCallback):
    """Registered with ms-swift as `vlpack`; `trainer` is a `PackingTrainer`."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prove isolation on the model as it will train, or stop."""
        if self.trainer.packs.config.packing_verify:
            line = prove_isolation(self.trainer)
            if is_master():
                logger.info(line)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the epoch's account over all ranks, log it and write it beside the checkpoints."""
        stats = self.trainer.close_epoch()
        others: list[Any] = [stats]
        if dist.is_initialized() and dist.get_world_size() > 1:
            others = [None] * dist.get_world_size()
            dist.all_gather_object(others, stats)
        if not is_master():
            return
        total, *rest = others
        for other in rest:
            total.merge(other)
        epoch = self.trainer.packs.epoch
        logger.info(f"packing: {total.line(epoch=epoch)}")
        facts = {"global_step": state.global_step, "loader_deleted": self.trainer.num_lost_by_loader()}
        write_json(Path(args.output_dir) / "vlpack" / f"epoch_{epoch}.json", {**total.as_json(epoch=epoch), **facts})


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
