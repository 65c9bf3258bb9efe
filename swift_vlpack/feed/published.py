"""Addresses of packs for dataloader workers that outlive an epoch: written by the training process, read by them.

A plain `DataLoader` hands its workers numbers, and persistent workers keep the data set as it was when they began. So
the training process writes which rows each pack of the present epoch has, and a worker looks there; it never plans.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from swift_vlpack.plan.epoch import EpochPlan
from swift_vlpack.plan.parts import Span
from swift_vlpack.rows.samples import Address, PackAddress

SAMPLE = np.dtype([("source", "<i4"), ("row", "<i8"), ("size", "<i4", (4,)), ("span", "<i4", (len(Span._fields),))])


class PublishedAddresses:
    """The addresses of the epoch that the training process is in, in files that workers map into their memory."""

    def __init__(self) -> None:
        # Named now, so that workers that are forked before anything is published know where to look.
        self._folder = Path(tempfile.gettempdir()) / f"vlpack-epoch-{uuid.uuid4().hex}"
        # In shared memory, so that workers see that there is another epoch: the number of its files, 0 for none.
        self._latest = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._read: tuple[int, NDArray[np.int64], NDArray[np.void]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self._folder, "_latest": self._latest, "_read": None}

    @property
    def is_there(self) -> bool:
        """Whether anything was published."""
        return int(self._latest[0]) > 0

    def publish(self, plan: EpochPlan) -> None:
        """In the training process: what workers deliver from now on."""
        if not self.is_there:
            # For the owner only: temporary folders are shared by all users of a machine.
            self._folder.mkdir(mode=0o700)
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        members = plan.packs.members
        samples = np.zeros(len(members), SAMPLE)
        samples["source"], samples["row"] = plan.schedule.source[members], plan.schedule.row[members]
        samples["size"] = plan.sizes[:, members].T
        if plan.spans is not None:
            samples["span"] = plan.spans[:, members].T
        latest = int(self._latest[0])
        np.save(self._file(latest + 1, "samples"), samples)
        np.save(self._file(latest + 1, "offsets"), np.append(plan.packs.offsets, plan.epoch))
        # Last: a worker that sees the number finds both files whole.
        self._latest[0] = latest + 1
        for name in ("samples", "offsets"):  # of the epoch before the last one, which nobody reads any more
            self._file(latest - 1, name).unlink(missing_ok=True)

    def address(self, number: int) -> PackAddress:
        """In a worker: the address of a pack of the latest epoch."""
        ends, samples = self._arrays()
        if not -len(self) <= number < len(self):
            raise IndexError(f"pack {number} of {len(self)} packs")
        number %= len(self)
        inside = samples[ends[number] : ends[number + 1]]
        spans = (Span(*span) if any(span) else None for span in inside["span"].tolist())
        where = zip(inside["source"].tolist(), inside["row"].tolist(), spans, strict=True)
        sizes = tuple(map(tuple, inside["size"].tolist()))
        return PackAddress(int(ends[-1]), number, tuple(Address(*one) for one in where), sizes)

    def __len__(self) -> int:
        """Packs of the latest epoch."""
        return len(self._arrays()[0]) - 2

    def _arrays(self) -> tuple[NDArray[np.int64], NDArray[np.void]]:
        """Where packs begin, with the end of the last and the number of the epoch; and their samples."""
        latest = int(self._latest[0])
        if self._read is None or self._read[0] != latest:
            # Mapped and not read: all workers of a machine share the pages.
            offsets, samples = (np.load(self._file(latest, name), mmap_mode="r") for name in ("offsets", "samples"))
            self._read = latest, offsets, samples
        return self._read[1:]

    def _file(self, number: int, name: str) -> Path:
        return self._folder / f"{number}-{name}.npy"
