"""What the collator returns: a dictionary for `model(**batch)`, with the mask of packed rows beside it."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

MASK = "attention_mask"


class PackedBatch(dict[str, Any]):
    """The inputs of one step. Of packed rows the 2-D mask is not among them, but `batch["attention_mask"]` has it.

    A transformers model that is given a 2-D mask no longer looks at positions (masking_utils), nor does flash-attn at
    boundaries, and documents would see each other. Padding needs no mask there: it is a segment of its own. So who asks
    by name finds the mask (`[]`, `in`, `get`, `pop`), and what goes through the items, as `**batch` does, does not.
    """

    mask: Any = None
    """The 2-D mask of packed rows, 0 for padding; None where it is among the inputs."""

    def to(self, device: Any, non_blocking: bool = False) -> PackedBatch:
        """The batch on a device."""
        moved = PackedBatch({name: value.to(device, non_blocking=non_blocking) for name, value in self.items()})
        moved.mask = None if self.mask is None else self.mask.to(device, non_blocking=non_blocking)
        return moved

    def __missing__(self, name: str) -> Any:
        if name == MASK and self.mask is not None:
            return self.mask
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (name == MASK and self.mask is not None)

    def get(self, name: str, default: Any = None) -> Any:
        """The value under a name, the mask too."""
        return self.mask if name == MASK and self.mask is not None else super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        """Take a value out, the mask too."""
        if name == MASK and self.mask is not None:
            mask, self.mask = self.mask, None
            return mask
        return super().pop(name, *default)


def batch_of(arrays: dict[str, NDArray[Any]], *, is_packed: bool, return_tensors: str) -> PackedBatch:
    """The arrays as a batch of tensors, or of arrays, which no transformers model takes, so that all are inputs."""
    if return_tensors == "np":
        return PackedBatch(arrays)
    import torch

    batch = PackedBatch({name: torch.from_numpy(value) for name, value in arrays.items()})
    if is_packed:
        batch.mask = batch.pop(MASK)
    return batch
