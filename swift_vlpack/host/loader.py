"""The training dataloader: the sampler knows the plan and hands out addresses, the workers only encode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from swift.dataloader import DataLoaderShard

from swift_vlpack.data.buffered import BufferedPackingDataset
from swift_vlpack.data.planned import PlannedPackingDataset
from swift_vlpack.data.samples import PackAddress


class PackSampler:
    """The packs of one rank in order, as addresses, so that workers that live on need not know the epoch's plan."""

    def __init__(self, packs: PlannedPackingDataset, *, rank: int) -> None:
        self.packs = packs
        self.rank = rank

    @property
    def epoch(self) -> int:
        """The epoch the packs are of; ms-swift reads it when it rebuilds a loader on resume."""
        return self.packs.epoch

    def set_epoch(self, epoch: int) -> None:
        """Mix and plan anew."""
        self.packs.set_epoch(epoch)

    def __len__(self) -> int:
        """Packs of a whole epoch, from which the trainer computes its steps; a resumed epoch yields what is left."""
        return self.packs.num_packs // self.packs.num_ranks

    def __iter__(self) -> Iterator[list[PackAddress]]:
        return ([address] for address in self.packs.addresses_left(self.rank))


class PackLoader(DataLoaderShard):
    """A dataloader over packs; ms-swift recognises its base class when it resumes."""

    def set_epoch(self, epoch: int) -> None:
        """Reach the sources, in the sampler's process or in the workers."""
        self.dataset.set_epoch(epoch)


def pack_loader(
    packs: PlannedPackingDataset | BufferedPackingDataset, device: Any, *, rank: int, **options: Any
) -> PackLoader:
    """The loader of one rank."""
    if isinstance(packs, PlannedPackingDataset):
        sampler = PackSampler(packs, rank=rank)
        return PackLoader(packs, device=device, batch_sampler=sampler, **options)
    return PackLoader(packs, device=device, batch_size=1, **options)
