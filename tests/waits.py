"""Calls that would make the host wait for a GPU, each with who made it; counted on a CPU, where they cost nothing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import swift_vlpack

READS = {
    *("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__"),
    *("cpu", "numpy", "nonzero", "argwhere", "equal", "allclose", "masked_select", "unique", "unique_consecutive"),
}
"""Functions that need a value of a tensor on the host, most of them to know a shape."""
MAKES = {"tensor", "as_tensor"}
"""Functions that make a tensor of numbers of the host. With a device, the copy is waited for."""
PACKAGE = str(Path(swift_vlpack.__file__).parent)
NOT_IN_STEPS = {("collate.py", "batch_of"), ("packs.py", "epoch"), ("proof.py", "prove")}
"""Functions of ours that read tensors which are on the host still, or that look at a step on purpose."""


class _Counted(TorchFunctionMode):
    def __init__(self) -> None:
        self.ours: Counter[str] = Counter()
        self.of_host = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _waits(getattr(function, "__name__", ""), args, kwargs or {}):
            if (where := _who(sys._getframe(1))) is None:
                self.of_host += 1
            elif where:
                self.ours[f"{function.__name__} by {where}"] += 1
        return function(*args, **(kwargs or {}))


def _waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(one, list) or getattr(one, "dtype", None) is torch.bool for one in index)
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name == "repeat_interleave":
        is_by_tensor = any(isinstance(one, torch.Tensor) for one in (*args[1:], kwargs.get("repeats")))
        return is_by_tensor and kwargs.get("output_size") is None
    return name in READS or (name in MAKES and kwargs.get("device") is not None)


def _who(frame: FrameType | None) -> str | None:
    """Our function that asked; None if the host did, empty if it is not of a step.

    A method of ours that only calls the one that it overrides has not asked.
    """
    called, found, all_of_ours = "", None, []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            all_of_ours.append((Path(code.co_filename).name, code.co_name))
            if len(all_of_ours) == 1:
                found = None if code.co_name == called else f"{code.co_filename[len(PACKAGE) + 1 :]}:{code.co_name}"
        called, frame = code.co_name, frame.f_back
    return "" if NOT_IN_STEPS & {*all_of_ours} else found


@contextmanager
def waits_of_steps(first: int, last: int) -> Iterator[_Counted]:
    """Count from the end of a step to the end of another, in runs with the callback `waits`."""
    from swift.callbacks import TrainerCallback, callbacks_map

    counted = _Counted()

    class Waits(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == first:
                counted.__enter__()
            elif state.global_step == last:
                counted.__exit__(None, None, None)

    callbacks_map["waits"] = Waits
    yield counted
    del callbacks_map["waits"]
