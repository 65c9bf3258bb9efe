"""Run ms-swift's Megatron commands on CPUs up to their trainer: arguments, template, data set, packs, batches.

    python -m torch.distributed.run --nproc_per_node N tests/plugins/megatron_on_cpu.py COMMAND RESULT [its flags]

megatron-core and mcore-bridge import without a GPU; Transformer Engine, whose kernels they call, is not built for CPUs.
So its names are placeholders here, which only the trainer would call. Everything else is what `megatron sft` runs.
"""

import json
import sys
import types
from pathlib import Path


def without_kernels() -> None:
    """Put placeholders in place of Transformer Engine."""
    import swift.megatron  # noqa: F401 - before the placeholders, because peft looks for Transformer Engine, too
    from megatron.core.extensions import transformer_engine as used
    from torch import nn

    for name in [name for name in vars(used) if name.startswith("TE") and getattr(used, name) is None]:
        setattr(used, name, type(name, (nn.Module,), {}))
    package, of_torch = (types.ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch"))
    package.pytorch = of_torch
    sys.modules |= {"transformer_engine": package, "transformer_engine.pytorch": of_torch}


def prepared(command: str, flags: list) -> dict:
    """Do what `megatron sft` or `megatron rlhf` does before it makes its trainer, and return what it trains on."""
    from swift.megatron.pipelines.train.rlhf import MegatronRLHF
    from swift.megatron.pipelines.train.sft import MegatronSft
    from swift.megatron.utils import get_padding_to

    run = {"sft": MegatronSft, "rlhf": MegatronRLHF}[command](flags)
    train, val = run._prepare_dataset()
    run.args.init_iters(train, val)
    to = get_padding_to(run.args)
    batches = [run.template.data_collator(train[number], padding_to=to) for number in range(len(train))]
    return {
        "packs": train.packed_idx,
        "lengths": train.packed_length,
        "lengths_of_batches": [batch["input_ids"].shape[1] for batch in batches],
        "num_images": [len(batch.get("image_grid_thw", ())) for batch in batches],
        "num_val_packs": len(val),
        "num_steps": run.args.train_iters,
        "is_with_vlpack": "swift_vlpack" in sys.modules,
    }


if __name__ == "__main__":  # packing spawns processes, which import this file
    _, command, result, *flags = sys.argv
    without_kernels()
    found = prepared(command, flags)
    import torch.distributed as dist

    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
