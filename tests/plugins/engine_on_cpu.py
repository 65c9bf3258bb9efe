"""What `--external_plugins` loads so that an engine shards on CPUs, and notes what it has sharded.

The variable TEST_ENGINE names the engine: ddp, zero2, zero3 or fsdp2. Two things are done that GPUs do not need:

- DeepSpeed takes the group of ranks that it finds, so one over gloo is made for it before ms-swift asks for any.
- accelerate shards by FSDP on devices only, and under `--use_cpu true` trains plain DDP without a word. So its state is
  told that it shards.

`--callbacks engine_notes` writes `engine_rank0.json` and so on into the output directory: how the parameters and the
optimizer are shared out, and how often each optimizer step has entered the vision tower.
"""

import functools
import json
import multiprocessing
import os
from pathlib import Path

ENGINE = os.environ.get("TEST_ENGINE", "ddp")
NORMS = []
"""Of the gradients of each step of DDP."""


def give_deepspeed_a_group():
    import deepspeed
    import torch.distributed as dist

    if not dist.is_initialized():
        deepspeed.init_distributed("gloo")


def shard_by_fsdp_on_cpus():
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    init = AcceleratorState.__init__
    if hasattr(init, "__wrapped__"):
        return

    @functools.wraps(init)
    def sharding(self, *args, fsdp_plugin=None, **kwargs):
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            # What accelerate does for its list of devices, to which CPUs do not belong.
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = sharding


def parameters_of(model):
    """How many parameters there are, how many are shared out, and how many numbers of them this rank holds."""
    from torch.distributed.tensor import DTensor

    own = list(model.parameters())
    with_id = [one for one in own if hasattr(one, "ds_id")]
    # ZeRO-3 keeps small parameters whole on every rank, beside their parts.
    large = [one for one in with_id if not one.ds_persist]
    return {
        "num_parameters": len(own),
        "num_dtensors": sum(isinstance(one, DTensor) for one in own),
        "num_with_ds_id": len(with_id),
        "num_large": len(large),
        "num_large_partitioned": sum(one.ds_status.name == "NOT_AVAILABLE" for one in large),
        "num_numbers": sum(map(whole_size, own)),
        "num_numbers_trained": sum(whole_size(one) for one in own if one.requires_grad),
        "num_numbers_held": sum(map(held_size, own)),
    }


def whole_size(parameter):
    return getattr(parameter, "ds_numel", parameter.numel())


def held_size(parameter):
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor.numel()
    return parameter.to_local().numel() if hasattr(parameter, "to_local") else parameter.numel()


def optimizer_of(optimizer):
    """How many numbers of a moment of the optimizer this rank holds."""
    inner = optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    return {"num_states_held": sum(held_size(state["exp_avg"]) for state in inner.state.values() if "exp_avg" in state)}


def note_exact_norms():
    """Note gradient norms of DDP in float64: in float32 torch adds up 270,000 squares with an error of 1e-5."""
    from accelerate import Accelerator

    clip = getattr(Accelerator.clip_grad_norm_, "__wrapped__", Accelerator.clip_grad_norm_)

    @functools.wraps(clip)
    def noting(self, parameters, *args, **kwargs):
        parameters = list(parameters)
        squares = [one.grad.double().square().sum().item() for one in parameters if one.grad is not None]
        NORMS.append(sum(squares) ** 0.5)
        return clip(self, parameters, *args, **kwargs)

    Accelerator.clip_grad_norm_ = noting


def register_notes():
    from swift.callbacks import TrainerCallback, callbacks_map

    class EngineNotes(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            self.noted = {
                "engine": ENGINE,
                "model": type(self.trainer.model_wrapped).__name__,
                "towers": [],
                "norms": NORMS,
            }
            NORMS.clear()
            self.num_entered = 0
            self.noted |= parameters_of(self.trainer.model_wrapped)
            towers = [module for name, module in self.trainer.model_wrapped.named_modules() if name.endswith("visual")]
            for tower in towers:
                tower.register_forward_pre_hook(self.enter)

        def enter(self, *args):
            self.num_entered += 1

        def on_step_begin(self, args, state, control, **kwargs):
            self.num_entered = 0

        def on_step_end(self, args, state, control, **kwargs):
            self.noted["towers"].append(self.num_entered)

        def on_train_end(self, args, state, control, **kwargs):
            self.noted |= optimizer_of(self.trainer.optimizer)
            path = Path(args.output_dir) / f"engine_rank{args.process_index}.json"
            path.write_text(json.dumps(self.noted))

    class TowerForgotten(TrainerCallback):
        """Undo what swift_vlpack.host.tower does, so that a pack without an image does not enter the tower."""

        def on_train_begin(self, args, state, control, **kwargs):
            from swift.model.models import qwen

            qwen.is_deepspeed_enabled = qwen.is_deepspeed_enabled.__wrapped__

    callbacks_map["engine_notes"] = EngineNotes
    callbacks_map["tower_forgotten"] = TowerForgotten


if multiprocessing.parent_process() is None:  # not in a dataloader worker that loads plugins again
    register_notes()
    if ENGINE == "ddp":
        note_exact_norms()
    if ENGINE.startswith("zero"):
        give_deepspeed_a_group()
    if ENGINE == "fsdp2":
        shard_by_fsdp_on_cpus()
