"""Find the whole parameters of a model whose engine leaves each rank only a part of them (FSDP2, ZeRO-3).

An engine gathers the parameters of a layer when the layer runs, and lets go of them afterwards. In between, autograd
has ordinary whole parameters, on every rank, and gives whole gradients for the samples of this rank alone; only later
does the engine add up those of all ranks. So each rank can compare its own packs with its own samples, and no gradient
has to be sent. All that ranks share is the gathering: they must run equally many forwards and backwards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

FSDP_2, ZERO_3, UNKNOWN = "FSDP2", "ZeRO-3", "an engine"


def sharded_by(model: torch.nn.Module) -> str:
    """Name the engine that leaves each rank only a part of the parameters; empty if every rank has all of them."""
    if _units(model):
        return FSDP_2
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return ZERO_3
    # Other engines: a tensor that is spread over ranks has a device mesh, or is replaced by an empty tensor.
    is_part = any(hasattr(parameter, "device_mesh") or not parameter.numel() for parameter in model.parameters())
    return UNKNOWN if is_part else ""


def is_sharded(model: torch.nn.Module) -> bool:
    """Tell whether each rank holds only a part of the parameters. All ranks must run equally many passes then."""
    return bool(sharded_by(model))


def shape_of(parameter: torch.Tensor) -> Sequence[int]:
    """Return the shape of the whole parameter, of which this rank may hold a part."""
    shape: Sequence[int] = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 leaves an empty tensor
    return shape


def whole(model: torch.nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return, by name, the whole parameters that autograd sees in a forward. All ranks must call it.

    The mapping is empty if the engine is not known. The parameters may have no data until the next forward, but their
    shape is whole. Call it before `requires_grad` is changed, because FSDP2 checks the parameters that it gathers.
    """
    engine, owners = sharded_by(model), {name: name.rpartition(".") for name in names}
    if engine == UNKNOWN:
        return {}
    slots = {name: (model.get_submodule(path), own) for name, (path, _, own) in owners.items()}
    if engine != FSDP_2:  # ZeRO-3 gathers into the parameter itself
        return {name: getattr(module, own) for name, (module, own) in slots.items()}
    found: dict[str, torch.Tensor] = {}
    for unit in _units(model):
        unit.unshard()
        inner = set(unit.modules())
        for name, (module, own) in slots.items():
            # Skip the parameters of inner units: they are still sharded, so they have a mesh.
            if module in inner and name not in found and not hasattr(getattr(module, own), "device_mesh"):
                found[name] = getattr(module, own)
        unit.reshard()
    return found


def let_go(model: torch.nn.Module) -> None:
    """Release gathered parameters, so that `named_parameters` has those of the optimizer again.

    Needed because FSDP2 keeps the last layers gathered after a forward, and reads `requires_grad` only when it gathers.
    """
    for unit in _units(model):
        unit.reshard()


def class_of(module: Any) -> type:
    """Return the class of a module; for a module of FSDP2, the class that FSDP2 has replaced."""
    return type(module).__mro__[2] if _is_unit(module) else type(module)


def _units(model: torch.nn.Module) -> list[Any]:
    """Return the modules that FSDP2 gathers as a whole."""
    return [module for module in model.modules() if _is_unit(module)]


def _is_unit(module: Any) -> bool:
    # Look up instead of importing: code that shards a model has imported FSDP, and other runs save the import.
    return isinstance(module, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ()))
