"""The training dataloader of ms-swift over a feed: its workers encode, the feed decides what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

from swift.dataloader import DataLoaderShard

from swift_vlpack.errors import VLPackError
from swift_vlpack.feed.collate import Batch, Collator, WorkerCollator
from swift_vlpack.feed.feed import Feed
from swift_vlpack.rows.randomness import own_generator

SECONDS_TO_DIE = 1.0


def collator_of(args: Any, template: Any, seed: int) -> Collator:
    """What makes rows of a run's packs; `args` are those of training, or of the whole run."""
    padding_to = template.max_length if args.tuner_type == "longlora" else None
    return WorkerCollator(template, padding_to, for_model=False, seed=seed)


class WorkerDied(VLPackError):
    """A dataloader worker was killed, or left."""


class PackLoader(DataLoaderShard):
    """The packs of one rank; ms-swift recognises the base class when it resumes.

    It draws from no random state of the process, however many iterators it makes.
    """

    def __init__(self, dataset: Any, device: Any = None, *, feed: Feed, **options: Any) -> None:
        super().__init__(dataset, device, generator=own_generator(), **options)
        self.feed = feed

    def set_epoch(self, epoch: int) -> None:
        """Nothing: the trainer has begun the epoch with its feed before it asks for batches."""

    def __iter__(self) -> Iterator[Batch]:
        return self.feed.batches(self._loaded())

    def _loaded(self) -> Iterator[Batch]:
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
        # Noted, because the loader has no public name for its workers' processes.
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
