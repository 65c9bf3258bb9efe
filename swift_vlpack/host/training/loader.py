"""The training dataloader: the sampler knows the plan and hands out addresses, the workers only encode."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

from swift.dataloader import DataLoaderShard

from swift_vlpack.core.errors import VLPackError
from swift_vlpack.data.feeds.buffered import BufferedPackingDataset
from swift_vlpack.data.feeds.planned import PlannedPackingDataset
from swift_vlpack.data.rows.randomness import own_generator
from swift_vlpack.data.rows.samples import PackAddress

SECONDS_TO_DIE = 1.0


class WorkerDied(VLPackError):
    """A dataloader worker was killed, or left."""


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

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from super().__iter__()
        except (OSError, EOFError) as error:  # which is what is seen of a worker that dies while its batch is fetched
            if not (dead := self._dead_workers()):
                raise
            raise WorkerDied(
                f"{'; '.join(dead)}, and its batch is lost. Signal 9 often means that memory ran out: take fewer "
                "dataloader_num_workers or a smaller dataloader_prefetch_factor"
            ) from error

    def _get_iterator(self) -> Any:
        self._reading = super()._get_iterator()
        return self._reading

    def _dead_workers(self) -> list[str]:
        """The workers that ended with an error, in words."""
        workers = getattr(self._reading, "_workers", ())
        # Its sockets are gone before it is: without waiting, the error that names it comes while another is printed.
        gone = wait([worker.sentinel for worker in workers], SECONDS_TO_DIE)
        for worker in workers:
            if worker.sentinel in gone:  # its files are closed; a moment later it has an exit code
                worker.join(SECONDS_TO_DIE)
        codes = [(number, worker.pid, worker.exitcode) for number, worker in enumerate(workers)]
        return [
            f"dataloader worker {number} (pid {pid}) "
            + (f"was killed by signal {-code}" if code < 0 else f"exited: {code}")
            for number, pid, code in codes
            if code
        ]


def pack_loader(
    packs: PlannedPackingDataset | BufferedPackingDataset,
    device: Any,
    *,
    rank: int,
    vote_timeout: timedelta | None = None,
    **options: Any,
) -> PackLoader:
    """The loader of one rank. It draws from no random state of the process, however many iterators it makes."""
    options["generator"] = own_generator()
    from swift_vlpack.host.training.stream_loader import StreamLoader  # which is a PackLoader

    if isinstance(packs, PlannedPackingDataset):
        sampler = PackSampler(packs, rank=rank)
        return PackLoader(packs, device=device, batch_sampler=sampler, **options)
    return StreamLoader(packs, device=device, vote_timeout=vote_timeout, **options)
