"""Mix several sources into epochs; each row is encoded when it is asked for.

>>> sources = [RowSource(name="chat", rows=[{}] * 4), RowSource(name="scans", rows=[{}] * 4, ratio=0.5)]
>>> rows = FusionCaptionDataset(sources, template=None)
>>> len(rows), sorted(source for source, row in rows.schedule)
(6, [0, 0, 0, 0, 1, 1])
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset
from tqdm import tqdm

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import DataError
from swift_vlpack.plan.mix import Mix, Schedule, Source
from swift_vlpack.plan.parts import CutRows
from swift_vlpack.plan.shares import EVERYTHING, Share
from swift_vlpack.plan.shuffle import permutation
from swift_vlpack.rows.contents import size_of
from swift_vlpack.rows.cutting import left_out_part, part_sizes
from swift_vlpack.rows.encoder import RowEncoder, Template, sample_or_error
from swift_vlpack.rows.faults import fault_of_reading
from swift_vlpack.rows.prefixes import without_pixels
from swift_vlpack.rows.randomness import RandomStream
from swift_vlpack.rows.samples import Address, Encoded, LeftOut, SampleError, SampleId
from swift_vlpack.rows.sizes import LengthIndex, RowSize, rows_to_compare
from swift_vlpack.rows.source import Row, RowSource, set_epoch
from swift_vlpack.words import counted

logger = logging.getLogger(__name__)

NUM_COMPARED = 64
"""Rows of each kind whose lengths are compared before those of another epoch, or those that are declared, are used."""
SECONDS_UNSAID = 1.0
"""Longest time that encoding rows for their lengths may take without a word."""


class FusionCaptionDataset(Dataset[Encoded]):
    """The rows of several sources; `dataset[i]` encodes the i-th row of an epoch (`RowEncoder.sample`).

    The number of an epoch decides its rows (`mix`). With `ratio_by="tokens"`, lengths decide too, so only a plan can
    choose them. `set_epoch` is for direct use of this data set; feeds pass the epoch themselves. With `strict`, a row
    that cannot be encoded ends the run; otherwise it raises `SampleError`, which feeds turn into a counted reason.
    """

    def __init__(  # noqa: PLR0913 - what it reads, then how it is drawn and encoded
        self,
        sources: Sequence[RowSource],
        template: Template | None,
        *,
        seed: int = 0,
        strict: bool = False,
        shuffle: bool = True,
        ratio_by: str = "rows",
        pixel_free: Callable[[Any], Any] | None = None,
    ) -> None:
        """`pixel_free` makes of a template one that encodes rows without pixels; without it, images are decoded."""
        if not sources:
            raise DataError("there is no source of data; give at least one")
        self.sources = tuple(sources)
        self.template = template
        self.strict = strict
        self.epoch = 0
        self.tell_sources()
        self.mix = mix_of(self.sources, seed=seed, shuffle=shuffle, ratio_by=ratio_by)
        self._pixel_free = pixel_free
        self._take_encoder(RowEncoder(template))
        self._needs_full_sizes = False  # True if a plan needs more of a row than its tokens
        self._schedule: Schedule | None = None  # made when `dataset[i]` is first used, which packing never does

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the schedule, which a spawned worker makes again if it needs one."""
        return {**self.__dict__, "_schedule": None}

    def __repr__(self) -> str:
        return f"<FusionCaptionDataset: {', '.join(map(repr, self.sources))}>"

    def set_epoch(self, epoch: int) -> None:
        """Make `dataset[i]` the i-th row of this epoch. Sources that change draw first, and are mixed afterwards."""
        if epoch != self.epoch:
            self.epoch, self._schedule = epoch, None
            if self.changes:
                self.tell_sources()
                old = self.mix
                self.mix = mix_of(self.sources, seed=old.seed, shuffle=old.shuffle, ratio_by=old.ratio_by)

    @property
    def changes(self) -> bool:
        """Tell whether a source has other rows in every epoch."""
        return any(source.changes for source in self.sources)

    def begin(self, epoch: int) -> None:
        """Let sources that change draw the rows of an epoch, before one of them is read."""
        if self.changes:
            self.set_epoch(epoch)

    def tell_sources(self) -> None:
        """Let sources that change draw the rows of this epoch, if they were told another one last."""
        for source in self.sources:
            set_epoch(source.rows, self.epoch)

    @property
    def schedule(self) -> Schedule:
        """The order of rows in the epoch that was set."""
        if self._schedule is None:
            self._schedule = self.mix.schedule(self.epoch)
        return self._schedule

    def __len__(self) -> int:
        return len(self.schedule)

    def __getitem__(self, position: int) -> Encoded:
        return self.encode(Address(*self.schedule[position]))

    def sample_id(self, address: Address) -> SampleId:
        """Return the name of a row, or of a part of it."""
        row = self.sources[address.source].sample_id(address.row_index)
        return row if address.span is None else row._replace(part=address.span.number)

    def row(self, address: Address) -> Row:
        """Return a copy of a row, with the system prompt of its source. Raises `SampleError` if its data set fails."""
        source = self.sources[address.source]
        try:
            set_epoch(source.rows, self.epoch)
            return source.row(address.row_index)
        except Exception as error:
            sample_id, fault = source.sample_id(address.row_index), fault_of_reading(error)
            if self.strict:
                raise DataError(f"{sample_id}: {fault.reason}: {fault.error}") from error
            raise SampleError(sample_id, fault.reason, fault.error) from error

    def encode(self, address: Address, row: Row | None = None) -> Encoded:
        """Encode the row at an address or, if the address has a span, that part of the row.

        Pass `row` if it was read already.
        """
        source, encoder = self.sources[address.source], self.encoders[address.source]
        sample_id = source.sample_id(address.row_index)
        sample = encoder.sample(self.row(address) if row is None else row, sample_id, strict=self.strict)
        return sample if address.span is None else self._part(address, sample)

    def encode_branch(self, address: Address, row: Row | None = None) -> Encoded | None:
        """Encode a whole row whose media another row brings: without decoding them, and without pixels.

        Every other field is as `encode` makes it. Returns None if that is not certain, for example for a video that is
        a list of frames, or without ms-swift's header encoding. Then call `encode`.
        """
        encoder = self._branch_encoders[address.source]
        if encoder is None or address.span is not None:
            return None
        row = self.row(address) if row is None else row
        try:
            sample = encoder.sample(row, self.sources[address.source].sample_id(address.row_index))
        except SampleError:
            return None  # the full encoding says why, or can do it
        return without_pixels(sample)

    def _part(self, address: Address, row: Encoded) -> Encoded:
        cutter = self.encoder.cutter
        assert cutter is not None, "a plan has parts of rows only where they are cut"
        assert address.span is not None
        return cutter.planned(row, address.span)

    def sample_or_error(self, address: Address, row: Row | None = None) -> Encoded | SampleError:
        """Encode one row, or return why it cannot be encoded."""
        return sample_or_error(self.encode, address, row)

    def alone(self, address: Address) -> Encoded | SampleError:
        """Encode a row with random numbers of its own, so that all ranks get the same."""
        with RandomStream(self.mix.seed, self.epoch, "parts", *address[:2]):
            return self.sample_or_error(address)

    def part_or_error(self, address: Address, row: Encoded | SampleError) -> Encoded | SampleError:
        """Make the part at an address from its encoded row, or return why it cannot be made."""
        assert address.span is not None
        if isinstance(row, SampleError):
            return row.of_part(address.span.number)
        return sample_or_error(self._part, address, row)

    def has_shards_for(self, num_shares: int) -> bool:
        """Tell whether no row is read by two shares: always, because rows are found by their numbers."""
        return True

    def why_not_again(self, sample_ids: Collection[SampleId]) -> str | None:
        """Say why samples cannot be encoded a second time: never, as rows are found by their numbers."""
        return None

    def numbers_in(self, share: Share, epoch: int, sample_ids: Collection[SampleId]) -> set[int]:
        """Return the numbers of rows in a share of an epoch, by their ids, for `samples(held=...)`."""
        self.begin(epoch)
        schedule, missing, numbers = self.mix.schedule(epoch), set(sample_ids), set()
        for number, position in enumerate(range(share.number, len(schedule), share.num_shares)):
            if not missing:
                break
            if (sample_id := self.sample_id(Address(*schedule[position]))) in missing:
                missing.remove(sample_id)
                numbers.add(number)
        return numbers

    def samples(
        self, epoch: int, share: Share = EVERYTHING, *, start: int = 0, held: Collection[int] = ()
    ) -> Iterator[Encoded | SampleError]:
        """Yield the samples of a share of an epoch: first its rows with the numbers `held`, then all from `start` on.

        A row that cannot be encoded is yielded as its error.
        """
        self.begin(epoch)
        schedule = self.mix.schedule(epoch)
        positions = range(share.row(start), len(schedule), share.num_shares)
        # Held rows come first, because the interrupted run read them before row `start`.
        for position in chain(map(share.row, sorted(held)), positions):
            # Draw by position and not by row: a row that comes twice in an epoch draws twice.
            with RandomStream(self.mix.seed, epoch, position):
                sample = self.sample_or_error(Address(*schedule[position]))
            yield sample

    def at(self, epoch: int) -> FusionCaptionDataset:
        """Return a copy in another epoch. A source that changes is measured, unless its rows kept their lengths."""
        other = copy.copy(self)
        other.begin(epoch)
        for number, source in enumerate(self.sources):
            # Lengths say neither where images are now, nor whether a row that failed can be read now.
            is_known = source.changes and source.declared_lengths is None and not self._needs_full_sizes
            known = source.sizes if is_known and source.sizes and not source.sizes.failures else None
            is_kept = known and len(known) == len(source.rows) and other._difference(number, known) is None
            if source.changes and not is_kept:
                other._take_sizes(number, None)
        other.measure()
        return other

    def measure(self) -> None:
        """Find the sizes of sources that have none: the lengths that they declare, or by encoding each row once.

        Raises `DataError` if a row that is compared has another length than declared.
        """
        for number, source in enumerate(self.sources):
            if source.sizes is None:
                declared = None if self._needs_full_sizes else source.declared_lengths
                sizes = self._measured(number, source) if declared is None else LengthIndex.of(map(RowSize, declared))
                if declared is not None and (said := self._difference(number, sizes)):
                    raise DataError(f"{said} as declared: lengths count the tokens of an encoded row, images expanded")
                self._take_sizes(number, sizes)

    def _take_sizes(self, number: int, sizes: LengthIndex | None) -> None:
        source = replace(self.sources[number], sizes=sizes)
        self.sources = (*self.sources[:number], source, *self.sources[number + 1 :])

    def _difference(self, number: int, sizes: LengthIndex) -> str | None:
        """Encode some rows; return the first with another length than its size has, in words."""
        for index in rows_to_compare(sizes, self.sources[number].name, NUM_COMPARED):
            sample, length = self.alone(Address(number, index)), int(sizes.lengths[index])
            if not isinstance(sample, SampleError) and sample["length"] != length:
                return f"{sample['sample_id']} has {counted(sample['length'], 'token')}, not {length}"
        return None

    def _measured(self, number: int, source: RowSource) -> LengthIndex:
        sizes, faults, parts = [], {}, {}
        start = time.monotonic()
        cutter = self.encoder.cutter
        for index in tqdm(range(len(source.rows)), desc=f"Lengths of {source.name}", dynamic_ncols=True):
            sample = self.alone(Address(number, index))
            if isinstance(sample, SampleError):
                faults[index] = sample.fault
                logger.warning("%s: cannot be encoded: %s", sample.sample_id, sample.detail)
            elif of_row := part_sizes(sample, cutter):
                parts[index] = of_row
            sizes.append(RowSize(0) if isinstance(sample, SampleError) else size_of(sample))
        if (seconds := time.monotonic() - start) > SECONDS_UNSAID:
            logger.warning(
                "source %s: %d rows were encoded once to learn their lengths, which took %.1f s (%.1f ms a row); give "
                "lengths=, or its class a method length(index), to plan without that",
                *(source.name, len(sizes), seconds, 1000 * seconds / len(sizes)),
            )
        cut = None if cutter is None else CutRows.of(parts)
        return LengthIndex.of(sizes, {index: fault.reason for index, fault in faults.items()}, faults, cut)

    def encode_for(self, config: PackingConfig) -> None:
        """Encode rows for a run with these options from now on: mask labels, and cut rows."""
        self._take_encoder(RowEncoder.of(self.template, config))
        # Declared lengths say nothing of images, nor where a row can be cut.
        self._needs_full_sizes = config.cuts_rows or bool(config.packing_max_images or config.packing_max_patches)

    def _take_encoder(self, encoder: RowEncoder) -> None:
        self.encoder = encoder
        self.encoders = [encoder.for_source(source) for source in self.sources]
        # Made here and not when they are asked for, because a spawned worker has no sizes to decide by.
        self._branch_encoders = [self._branch_encoder(*one) for one in zip(self.sources, self.encoders, strict=True)]

    def _branch_encoder(self, source: RowSource, encoder: RowEncoder) -> RowEncoder | None:
        shares = self._pixel_free is not None and source.prefixes is not None and source.prefixes.num_sharing
        # Headers that were found to be wrong would give other tokens.
        if not shares or source.sizes is None or source.sizes.without_headers is not None:
            return None
        assert self._pixel_free is not None
        return encoder.using(self._pixel_free(encoder.template))

    def with_sources(self, sources: Sequence[RowSource]) -> FusionCaptionDataset:
        """Return a copy with the same sources and encoders, but new facts about the sources, such as sizes."""
        other = copy.copy(self)
        other.sources = tuple(sources)
        return other

    def failed(self, address: Address) -> LeftOut:
        """Return why a row has no length, or why cutting left out a part of a row."""
        source, index = self.sources[address.source], address.row_index
        assert source.sizes is not None
        if address.span is not None:
            assert source.sizes.cut is not None
            part = source.sizes.cut.parts(index)[address.span.number]
            return left_out_part(source.sample_id(index), part)
        return LeftOut(source.sample_id(index), *source.sizes.fault(index))


def mix_of(sources: Sequence[RowSource], *, seed: int, shuffle: bool, ratio_by: str = "rows") -> Mix:
    """Make the `Mix` that schedules these sources; a source with a `sample_limit` draws its rows here."""
    return Mix(
        sources=tuple(Source(source.name, source.num_used, source.ratio) for source in sources),
        rows=tuple(_limited_rows(source, seed) if source.num_used < len(source.rows) else None for source in sources),
        seed=seed,
        seeds={source.name: source.seed for source in sources if source.seed is not None},
        shuffle=shuffle,
        ratio_by=ratio_by,
    )


def _limited_rows(source: RowSource, seed: int) -> NDArray[np.int64]:
    drawn = permutation(len(source.rows), source.seed if source.seed is not None else seed, source.name, "limit")
    # Sort, so that an epoch without shuffling keeps the order of the file.
    return np.sort(drawn[: source.num_used])
