"""Train packs around a class as projects write it around ms-swift, by transformers' Trainer, on ranks of `torchrun`.

`torchrun -m tests.own_run MODEL OUTPUT DIE_AT FILE=RATIO ...`: the last rank kills itself at the step DIE_AT. Lines of
OUTPUT/trained_rankN.jsonl have what was trained. It goes on from the last checkpoint, if there is one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

FAMILY = "qwen2_5_vl"
NUM_EPOCHS = 3
SEED = 11


class FusionCaptionDataset:
    """Mixes files of rows by ratios, anew in every epoch, and encodes by itself. Nothing in it is of this package."""

    def __init__(self, files: dict[str, float], template: Any, seed: int) -> None:
        self.pools = {
            Path(file).stem: [json.loads(line) for line in Path(file).read_text().splitlines()] for file in files
        }
        self.ratios = {Path(file).stem: ratio for file, ratio in files.items()}
        self.template = template
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw and shuffle the epoch's rows."""
        rng, self.schedule = random.Random(f"{self.seed} {epoch}"), []
        for name, pool in self.pools.items():
            whole, rest = divmod(round(len(pool) * self.ratios[name]), len(pool))
            self.schedule += [(name, row) for row in [*range(len(pool))] * whole + rng.sample(range(len(pool)), rest)]
        rng.shuffle(self.schedule)

    def __len__(self) -> int:
        return len(self.schedule)

    def __getitem__(self, index: int) -> dict[str, Any]:
        name, row = self.schedule[index]
        sample: dict[str, Any] = self.template.encode(self.pools[name][row], return_length=True)
        return {**sample, "sample_id": f"{name}-{row}", "source": name}


def main(model_folder: str, output: str, die_at: str, *given: str) -> None:
    """Train, and write a line for every sequence of every optimizer step."""
    import torch
    from swift.model import get_model_processor
    from swift.template import get_template
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    from swift_vlpack import Collator, PackingConfig, PackingDataset, prepare_model
    from tests.tiny import use_ids_of_tokenizer

    use_ids_of_tokenizer()
    arguments = TrainingArguments(
        output_dir=output, per_device_train_batch_size=1, num_train_epochs=NUM_EPOCHS, learning_rate=1e-3,
        optim="sgd", use_cpu=True, ddp_backend="gloo", ddp_find_unused_parameters=True, report_to="none", save_steps=3,
        dataloader_num_workers=1, dataloader_persistent_workers=True, disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    arguments.max_epochs = None  # ms-swift, once it is loaded, asks every Trainer's arguments for it
    model, processor = get_model_processor(
        model_folder, model_type=FAMILY, torch_dtype=torch.float32, attn_impl="sdpa", use_hf=True
    )
    template = get_template(processor, template_type=FAMILY, max_length=2048)
    prepare_model(model, template)
    data = FusionCaptionDataset({file: float(ratio) for file, _, ratio in (one.partition("=") for one in given)},
                                template, SEED)  # fmt: skip
    config = PackingConfig(packing_length=300, packing_drop_last=False)
    ranks = arguments.world_size
    packs = PackingDataset(data, template, config, num_ranks=ranks, num_epochs=NUM_EPOCHS)

    class WithIds(Collator):
        def sequence(self, pack: Any) -> Any:
            batch = super().sequence(pack)
            batch["ids"] = [sample["sample_id"] for sample in pack]
            return batch

    class Packed(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return packs.sampler

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            ids, step = inputs.pop("ids"), self.state.global_step
            if step == int(die_at) and arguments.process_index == ranks - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            line = {"step": step, "epoch": inputs.record.epoch, "ids": ids, "steps": self.state.max_steps}
            with (Path(output) / f"trained_rank{arguments.process_index}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = Packed(model=model, args=arguments, train_dataset=packs, data_collator=WithIds(template))
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output))


if __name__ == "__main__":
    main(*sys.argv[1:])
