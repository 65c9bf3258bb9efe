"""Encode planned packs in a dataloader worker: take the address of a pack, encode its rows, keep the ones that fit."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from swift_vlpack.config import PackingConfig
from swift_vlpack.cores import num_cores
from swift_vlpack.feed.failures import counted_failure
from swift_vlpack.feed.packs import packed_samples
from swift_vlpack.feed.units import Unit, UnitsOfPack
from swift_vlpack.reasons import Reason
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.media import media
from swift_vlpack.rows.prefixes import has_pixels
from swift_vlpack.rows.randomness import RandomStream
from swift_vlpack.rows.samples import Address, Encoded, LeftOut, PackAddress, PackedSamples, SampleError
from swift_vlpack.rows.sizes import RowSize
from swift_vlpack.rows.source import Row

logger = logging.getLogger(__name__)


class PackReader(Dataset[PackedSamples]):
    """Encode packs by their addresses. Needs neither plan nor schedule, nor the sizes of rows."""

    def __init__(self, dataset: FusionCaptionDataset, config: PackingConfig, seed: int, num_packs: int) -> None:
        self.dataset = copy.copy(dataset) if dataset.changes else dataset  # goes to the epoch of each pack
        self.config = config
        self.seed = seed
        self._num_packs = num_packs
        self._num_failed_in_a_row = 0
        self._failed_row: tuple[int, int] | None = None  # the last row that failed
        self._draws_at_random = False  # True once the template has drawn a random number

    def __len__(self) -> int:
        """Return the number of packs of an epoch, over all ranks, which a trainer shows."""
        return self._num_packs

    def __getstate__(self) -> dict[str, Any]:
        unsized = self.dataset.with_sources(
            [replace(source, sizes=None, prefixes=None, lengths=None) for source in self.dataset.sources]
        )
        return {**self.__dict__, "dataset": unsized}

    def __getitem__(self, address: PackAddress) -> PackedSamples:
        """Encode the samples of a pack. A sample that is longer than planned and no longer fits is left out."""
        left_out: list[LeftOut] = []
        shared = (*(address.shared or (0,) * len(address.samples)), 0)
        units = UnitsOfPack()
        encoded = self.encoded(address, may_lack_pixels=True)
        for at, (where, size, sample) in enumerate(zip(address.samples, address.sizes, encoded, strict=True)):
            if not shared[at]:
                units.close()
            elif (
                not isinstance(sample, SampleError)
                and not has_pixels(sample)
                and not units.can_join(sample, shared[at])
            ):
                sample = self.dataset.sample_or_error(where)
            if isinstance(sample, SampleError):
                # Count a row once: all of its parts fail with it.
                self._num_failed_in_a_row += where[:2] != self._failed_row
                self._failed_row = where[:2]
                left_out.append(counted_failure(sample, self._num_failed_in_a_row))
                continue
            self._num_failed_in_a_row = 0
            planned = RowSize(*size)
            if where.span is None and sample["length"] != planned.length:  # a part always has its planned length
                said = "%s: %d tokens, but %d were planned"
                logger.warning(said, sample["sample_id"], sample["length"], planned.length)
            unit = units.add(sample, shared[at] or shared[at + 1])
            if sample["length"] > planned.length or (shared[at] and unit is not units.open):
                unit.takes_more.add(len(unit.samples) - 1)
        kept, longer = self._fitting(units.units)
        num_apart = sum(sample["sample_id"] in units.apart for sample in kept)
        left_out += longer
        return packed_samples(kept, address.epoch, address.number, self.config, left_out, num_apart=num_apart)

    def _fitting(self, units: list[Unit]) -> tuple[list[Encoded], list[LeftOut]]:
        """Choose the samples that fit into the pack. Returns them in their order, and the samples that are left out."""
        kept: list[list[int]] = [[] for _ in units]
        left_out, num_tokens = [], 0
        # If rows are cut, a row that has grown beyond a pack must be cut too: the next run does it, with the new size.
        may_be_longer = self.config.packing_allow_single_long and not self.config.cuts_rows
        # Place samples as long as planned first: they fit by the plan, and samples that have grown give way to them.
        in_turn = [
            (at in unit.takes_more, number, at) for number, unit in enumerate(units) for at in range(len(unit.samples))
        ]
        for takes_more, number, at in sorted(in_turn):
            unit = units[number]
            sample = unit.samples[at]
            length = sample["length"] - (unit.prefix if kept[number] else 0)
            is_alone = not any(kept) and (may_be_longer or not takes_more)
            if is_alone or num_tokens + length <= self.config.packing_length:
                kept[number].append(at)
                num_tokens += length
                continue
            capacity = self.config.packing_length
            said = f"{length} tokens do not fit into its pack with {num_tokens} others (packing_length {capacity})"
            left_out.append(LeftOut(sample["sample_id"], Reason.LONGER_THAN_PLANNED.value, said))
            logger.warning("%s: left out: %s", sample["sample_id"], said)
        return [
            sample for unit, of_unit in zip(units, kept, strict=True) for sample in unit.in_pack(sorted(of_unit))
        ], left_out

    def encoded(self, address: PackAddress, *, may_lack_pixels: bool = False) -> list[Encoded | SampleError]:
        """Encode the samples of a pack; a row that is cut is encoded once for all of its parts in the pack.

        With `may_lack_pixels`, samples that share media with the sample before them need not bring these again.
        """
        self.dataset.begin(address.epoch)
        whole = [where for where in address.samples if where.span is None]
        cut = list(dict.fromkeys(_row_of(where) for where in address.samples if where.span is not None))
        num_shared = [0] * len(whole)
        if may_lack_pixels and address.shared:  # a row that is cut shares with no other
            num_shared = [num for where, num in zip(address.samples, address.shared, strict=True) if where.span is None]
        encoded = self._rows(address, cut, whole, num_shared)
        rows = dict(zip(cut, encoded, strict=False))  # `encoded` begins with the rows that are cut
        samples = iter(encoded[len(cut) :])
        return [
            next(samples) if where.span is None else self.dataset.part_or_error(where, rows[_row_of(where)])
            for where in address.samples
        ]

    def _rows(
        self, address: PackAddress, cut: list[Address], whole: list[Address], num_shared: list[int]
    ) -> list[Encoded | SampleError]:
        """Encode rows; those that name media in as many threads as this worker may use.

        Images are decoded outside of Python's lock, and texts are encoded inside of it: threads would only pass it on.
        Threads draw random numbers in no order, so the rows of a template that draws are encoded one after the other.
        `num_shared` has the tokens that each row shares with the row before it. A branch is encoded without pixels,
        unless the template draws: then its image may come out different.
        """
        places, name = cut + whole, (self.seed, address.epoch, address.number)
        num_threads = min(len(places), threads_per_worker())
        rows: list[Row | None] = [None] * len(places)  # rows that were read already
        if num_threads > 1 and not self._draws_at_random:
            with RandomStream(*name) as stream, suppress(SampleError):  # a row that cannot be read fails again below
                rows = [self.dataset.row(where) for where in places]
            if cut and stream.has_drawn:  # rows to cut are read with random numbers of their own
                self._draws_at_random, rows = True, [None] * len(places)
            elif sum(map(_names_media, rows)) > 1:
                with RandomStream(*name) as stream:
                    encoded = self._in_threads(places, rows, [0] * len(cut) + num_shared, num_threads)
                self._draws_at_random = stream.has_drawn
                if not self._draws_at_random:
                    return encoded
                rows = [None] * len(places)
        # Encode again if random numbers were drawn: in threads, each went to whichever row came first.
        given = num_shared if not self._draws_at_random else [0] * len(whole)
        with RandomStream(*name) as stream:
            of_cut = [self._row_to_cut(*one, address.epoch) for one in zip(cut, rows, strict=False)]
            encoded = of_cut + list(map(self._row, whole, rows[len(cut) :], given))
        if any(given) and stream.has_drawn:
            self._draws_at_random = True
            return self._rows(address, cut, whole, num_shared)
        return encoded

    def _in_threads(
        self, places: list[Address], rows: list[Row | None], num_shared: list[int], num_threads: int
    ) -> list[Encoded | SampleError]:
        with ThreadPoolExecutor(num_threads) as threads:
            given = list(zip(places, rows, num_shared, strict=True))
            begun = [threads.submit(self._row, *one) if _names_media(one[1]) else None for one in given]
            ended = [self._row(*one) if future is None else future for future, one in zip(begun, given, strict=True)]
            return [one.result() if isinstance(one, Future) else one for one in ended]

    def _row(self, where: Address, row: Row | None, num_shared: int) -> Encoded | SampleError:
        branch = self.dataset.encode_branch(where, row) if num_shared else None
        return self.dataset.sample_or_error(where, row) if branch is None else branch

    def _row_to_cut(self, where: Address, row: Row | None, epoch: int) -> Encoded | SampleError:
        """Encode a row with random numbers of its own, so that all packs with parts of it get the same tokens."""
        with RandomStream(self.seed, epoch, "parts", *where[:2]):
            return self.dataset.sample_or_error(where, row)


def _row_of(where: Address) -> Address:
    return where._replace(span=None)


def _names_media(row: Row | None) -> bool:
    return row is not None and next(media(row), None) is not None


def lives_on() -> bool:
    """Tell whether this is a dataloader worker that lives on in the next epoch; False if torch does not say."""
    worker: Any = multiprocessing.current_process()
    with suppress(AttributeError, KeyError, TypeError):
        return bool(signature(worker._target).bind(*worker._args).arguments["persistent_workers"])
    return False


def threads_per_worker() -> int:
    """Return this worker's share of the cores. All ranks on the machine and their workers have equal shares."""
    worker = get_worker_info()
    num_sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) * (worker.num_workers if worker else 1)
    return max(1, num_cores() // num_sharing)
