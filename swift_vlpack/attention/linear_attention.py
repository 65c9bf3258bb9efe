"""Restart layers that keep a state along the sequence (linear attention, short convolutions) with every sample.

The forward of such a layer takes no boundaries, or only some of its kernels do. So hooks run the samples through the
layer in batches of samples of similar length. A hook before the call runs all batches but the last; the call itself
runs the last one. The state only looks back, so padding on the right changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from swift_vlpack.attention.packed_sequence import Bounds, Groups, boundaries_of, groups_of, layer_name
from swift_vlpack.errors import AttentionError
from swift_vlpack.rows.families import KEEPS_STATE, RESTARTED, text_config_of

_handles: WeakKeyDictionary[torch.nn.Module, list[Any]] = WeakKeyDictionary()


def restart_at_boundaries(model: torch.nn.Module, leave: Sequence[str] = ()) -> int:
    """Restart the state of the layers in `RESTARTED` with every sample. Returns the number of layers. Idempotent.

    `leave` names classes that need no restart, because their kernels are given the boundaries. Raises `AttentionError`
    for a model with other layers that keep a state.
    """
    layers = [(layer, mixer) for layer in model.modules() for mixer in layer.children()]
    left = [layer for layer, mixer in layers if type(mixer).__name__ in leave]
    found = [one for one in layers if type(one[1]).__name__ in RESTARTED and type(one[1]).__name__ not in leave]
    if not found and not left:
        _refuse_unknown_state(model)
    for handle in _handles.pop(model, ()):
        handle.remove()
    _handles[model] = [handle for layer, mixer in found for handle in _Restart().on(layer, mixer)]
    _handles[model] += [layer.register_forward_pre_hook(_refuse_branches, with_kwargs=True) for layer in left]
    return len(found)


def _refuse_branches(layer: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise `AttentionError` for a sequence with shared prefixes: every branch would need a copy of the state."""
    ends = kwargs.get("cu_seq_lens_q")
    if ends is not None and ends.ndim > 1:
        raise AttentionError(
            f"{layer_name(layer)} keeps a state along the sequence, which branches of one prefix cannot share; set "
            "packing_share=none"
        )


def _refuse_unknown_state(model: Any) -> None:
    config = text_config_of(model.config)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    keeping = sorted({kind for kind in kinds or () if any(word in str(kind) for word in KEEPS_STATE)})
    if kinds is None and any(getattr(module, "_is_stateful", False) for module in model.modules()):
        keeping = [config.model_type]  # such a model has layers of one kind
    if keeping:
        raise AttentionError(
            f"the model has layers of the kind {', '.join(keeping)}, which keep a state along the sequence that would "
            "pass from sample to sample; packing can restart that of "
            f"{', '.join(RESTARTED)} only: train without packing"
        )


class _Restart:
    """Hold the hooks of one layer. A class and not a closure, so that a model with hooks can be pickled and copied."""

    def __init__(self) -> None:
        self.ends: tuple[int, ...] = ()
        self.groups: Groups | None = None
        self.outputs: list[torch.Tensor] = []

    def on(self, layer: torch.nn.Module, mixer: torch.nn.Module) -> list[Any]:
        """Register the hooks and return their handles. The layer around the mixer is given the boundaries."""
        return [
            layer.register_forward_pre_hook(self.read_boundaries, with_kwargs=True),
            mixer.register_forward_pre_hook(self.run_all_but_one, with_kwargs=True),
            mixer.register_forward_hook(self.put_together),
        ]

    def read_boundaries(self, layer: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Keep the boundaries of the sequence if it has more than one sample."""
        _refuse_branches(layer, args, kwargs)
        ends = kwargs.get("cu_seq_lens_q")
        self.ends = boundaries_of(ends).ends if ends is not None and len(ends) > 2 else ()

    def run_all_but_one(self, mixer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run every group but the last, and replace the arguments of the call by the last group."""
        self.groups, self.outputs = None, []
        if not self.ends:
            return None
        states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        if states.shape[:2] != (1, self.ends[-1]):
            raise AttentionError(
                f"{type(mixer).__name__}: the boundaries cu_seq_lens_q go to {self.ends[-1]}, but the batch is "
                f"{states.shape[0]} sequence(s) of {states.shape[1]} tokens; give a pack as one sequence"
            )
        self.groups = groups_of(Bounds(self.ends), states.device)
        batches = [states[0][group.tokens] for group in self.groups.groups]
        self.outputs = [mixer.forward(batch) for batch in batches[:-1]]
        return (batches[-1],), {}

    def put_together(self, mixer: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        """Add the output of the last group, and return all outputs in the order of the sequence."""
        if self.groups is None:
            return None
        groups, outputs = self.groups, [*self.outputs, output]
        self.groups, self.outputs = None, []
        return groups.in_sequence_order(outputs, dim=0)
