"""Load packs with ms-swift's own dataloader: workers encode, and the feed decides which batches are trained."""

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
"""Seconds to wait for the exit code of a worker whose sockets are closed already."""


def collator_of(args: Any, template: Any, seed: int) -> Collator:
    """Make the collator of a run's packs; `args` are those of training, or of the whole run."""
    padding_to = template.max_length if args.tuner_type == "longlora" else None
    return WorkerCollator(template, padding_to, for_model=False, seed=seed)


class WorkerDied(VLPackError):
    """A dataloader worker was killed, or exited by itself."""


class PackLoader(DataLoaderShard):
    """Load the packs of one rank.

    The base class is ms-swift's, because ms-swift recognizes its loaders by it on resume. The loader has a random
    generator of its own: otherwise each iterator would draw from the state of the process, and change what is trained.
    """

    def __init__(self, dataset: Any, device: Any = None, *, feed: Feed, **options: Any) -> None:
        super().__init__(dataset, device, generator=own_generator(), **options)
        self.feed = feed

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the trainer begins the epoch of its feed before it asks for batches."""

    def __iter__(self) -> Iterator[Batch]:
        return self.feed.batches(self._loaded())

    def _loaded(self) -> Iterator[Batch]:
        try:
            yield from super().__iter__()
        except (OSError, EOFError) as error:  # this is the only sign that a worker died while its batch was fetched
            if not (dead := self._dead_workers()):
                raise
            raise WorkerDied(
                f"{'; '.join(dead)}, and its batch is lost. Signal 9 often means that memory ran out: take fewer "
                "dataloader_num_workers or a smaller dataloader_prefetch_factor"
            ) from error

    def _get_iterator(self) -> Any:
        # Keep the iterator, because only the iterator knows the worker processes.
        self._reading = super()._get_iterator()
        return self._reading

    def _dead_workers(self) -> list[str]:
        """Describe the workers that ended with an error."""
        workers = getattr(self._reading, "_workers", ())
        # Wait a moment: a dying worker closes its sockets before it has an exit code.
        gone = wait([worker.sentinel for worker in workers], SECONDS_TO_DIE)
        for worker in workers:
            if worker.sentinel in gone:
                worker.join(SECONDS_TO_DIE)
        codes = [(number, worker.pid, worker.exitcode) for number, worker in enumerate(workers)]
        return [
            f"dataloader worker {number} (pid {pid}) "
            + (f"was killed by signal {-code}" if code < 0 else f"exited: {code}")
            for number, pid, code in codes
            if code
        ]
