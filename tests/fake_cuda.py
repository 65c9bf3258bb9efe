"""Rehearse CUDA without a driver: fake tensors have a device, a type, a shape and strides, and no numbers.

Whatever would need a number of a tensor on the host raises, as it would make the host wait on a GPU. Copies that would
be waited for are collected. It cannot see a backward, numbers, speed, memory, or what a driver or a compiler refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from swift_vlpack.attention import attention, kernels, packed_sequence
from swift_vlpack.attention.kernels import Kernel
from swift_vlpack.attention.packed_sequence import PackedSequence

CACHES = [one for module in (kernels, packed_sequence) for one in vars(module).values() if hasattr(one, "cache_clear")]
HOPPER = (9, 0)


class Copies(TorchDispatchMode):
    """Copies between host and device that the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_for: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in ("_to_copy", "copy_"):
            given = args[0] if name == "_to_copy" else args[1]
            is_async = (kwargs or {}).get("non_blocking") or args[2:] == (True,)
            pair = given.device.type, made.device.type
            if pair == ("cuda", "cpu") or (pair == ("cpu", "cuda") and not is_async):
                self.waited_for.append(f"{tuple(given.shape)} from {pair[0]} to {pair[1]}")
        return made


@contextmanager
def rehearsal(*, compiles: bool = False) -> Iterator[list[str]]:
    """Make tensors fake, on any device, until the end; yields the copies that were waited for.

    Copies are not seen where torch `compiles`, which it does not while they are looked at.
    """
    _forget()
    hopper = mock.patch("torch.cuda.get_device_capability", return_value=HOPPER)
    copies = Copies()
    with hopper, FakeTensorMode(allow_non_fake_inputs=True), nullcontext() if compiles else copies, torch.no_grad():
        yield copies.waited_for
    _forget()


def _forget() -> None:
    for cached in CACHES:
        cached.cache_clear()


def on_cuda(auto: Any, config: Any) -> Any:
    """Build the model of a config on the device, in 16 bits, with our attention, as it trains."""
    attention.register()
    with torch.device("cuda"):
        model = auto.from_config(config, attn_implementation=attention.NAME, dtype=torch.bfloat16)
    return model.train()


def use_watched(model: Any, kernel: Kernel) -> list[torch.Tensor]:
    """Let a model use a kernel; returns what it will have computed, without what it could not do."""
    computed: list[torch.Tensor] = []

    def watched(sequence: PackedSequence) -> torch.Tensor:
        computed.append(kernel(sequence))
        return computed[-1]

    attention.use_kernel(model, watched, watched)
    return computed
