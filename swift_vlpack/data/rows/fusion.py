"""FusionCaptionDataset: several sources as one epoch, each row encoded when it is asked for."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset
from tqdm import tqdm

from swift_vlpack.core.epoch.mix import Schedule, Source, schedule
from swift_vlpack.core.epoch.shares import EVERYTHING, Share
from swift_vlpack.core.errors import ConfigError, DataError
from swift_vlpack.core.shuffle import permutation
from swift_vlpack.data.lengths.cache import LengthCache
from swift_vlpack.data.lengths.sizes import NUM_COLUMNS, LengthIndex, RowSize, size_of
from swift_vlpack.data.rows.contents import contents_of, found, patch_size_of
from swift_vlpack.data.rows.faults import ReadTimeout, check_openable, fault_of, is_lasting
from swift_vlpack.data.rows.media import media
from swift_vlpack.data.rows.places import place
from swift_vlpack.data.rows.randomness import RandomStream
from swift_vlpack.data.rows.samples import Address, Encoded, LeftOut, SampleError, SampleId
from swift_vlpack.data.rows.watch import Waits, watched

logger = logging.getLogger(__name__)

Row = dict[str, Any]


class Template(Protocol):
    """What is asked of the host's template."""

    packing: bool
    padding_free: bool

    def encode(self, inputs: Any, return_length: bool = False) -> Any:
        """Tokens, labels and tensors of one row."""

    def data_collator(self, batch: list[Any]) -> dict[str, Any]:
        """One batch of encoded rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSource:
    """One data set of the mix, loaded: its rows, what they are called, and how they take part."""

    name: str
    rows: Sequence[Row]
    ratio: float = 1.0
    sample_limit: int | None = None
    """At most so many rows of the source, the same ones in every epoch."""
    system: str | None = None
    """System prompt of the rows that bring none."""
    max_pixels: int | None = None
    """Pixel limit of this source's images, in place of the template's."""
    seed: int | None = None
    """Seed of this source's draws, in place of the run's."""
    row_numbers: Sequence[int] | None = None
    """Number of each row in its file; None where all rows of the file are there."""
    is_numbered: bool = True
    """Whether it is known which rows of the file these are; otherwise a row's number is its place among the loaded."""
    sizes: LengthIndex | None = None
    """Length of each row; None until a length pass has run."""
    cache: LengthCache | None = None
    """Where lengths are remembered, to correct one that turns out wrong."""
    num_lost: int | None = 0
    """Rows of the file that never became rows, because the loader deleted them; None where that is not known."""
    lost_rows: Sequence[int] = ()
    """Their numbers in the file, as far as they are known."""
    origin: str | None = None
    """The local file with its whole path, or the folder's or hub's name; None where the rows are from neither."""

    def __post_init__(self) -> None:
        if self.sample_limit is not None and self.sample_limit < 1:
            raise ConfigError(f"source {self.name!r}: sample_limit must be at least 1, got {self.sample_limit}")
        if self.sizes is not None and len(self.sizes) != len(self.rows):
            raise DataError(f"source {self.name!r}: {len(self.sizes)} lengths for {len(self.rows)} rows")

    @property
    def num_used(self) -> int:
        """Rows that take part."""
        return len(self.rows) if self.sample_limit is None else min(self.sample_limit, len(self.rows))

    def sample_id(self, index: int) -> SampleId:
        """The name of a row, which stays right when the loader dropped others."""
        return SampleId(self.name, self.row_number(index), not self.is_numbered)

    def row_number(self, index: int) -> int:
        """The number of a row in its file, from 0, or, where the source is not numbered, in what was loaded."""
        return index if self.row_numbers is None else int(self.row_numbers[index])

    def where(self, index: int) -> str:
        """The place to look at for a row: `file:line`, or the file or data set and the row in it."""
        return place(self.origin or self.name, self.row_number(index), is_loaded=not self.is_numbered)


class FusionCaptionDataset(Dataset[Encoded]):
    """The scheduled rows of one epoch; `dataset[i]` encodes the i-th and adds what `encode_row` adds.

    `set_epoch` draws and mixes anew. With `strict`, a row that cannot be encoded raises; otherwise it raises
    `SampleError`, which the packing data set turns into a counted reason.
    """

    def __init__(
        self,
        sources: Sequence[RowSource],
        template: Template,
        *,
        seed: int = 0,
        strict: bool = False,
        shuffle: bool = True,
    ) -> None:
        if not sources:
            raise DataError("no source of data; give at least one")
        self.sources = tuple(sources)
        self.template = template
        self.strict = strict
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = -1
        self.schedule: Schedule
        self._limited = [
            None if source.num_used == len(source.rows) else _limited_rows(source, seed) for source in self.sources
        ]
        self.templates = [own_template(template, source) for source in self.sources]
        self._usable: dict[str, NDArray[np.bool_]] = {}
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw and mix the rows of this epoch."""
        if epoch == self.epoch:
            return
        self.epoch = epoch
        entries = [Source(source.name, source.num_used, source.ratio) for source in self.sources]
        seeds = {source.name: source.seed for source in self.sources if source.seed is not None}
        self.schedule = schedule(
            entries, seed=self.seed, epoch=epoch, seeds=seeds, shuffle=self.shuffle, usable=self._usable
        )

    def draw_usable(self, is_usable: Callable[[LengthIndex], NDArray[np.bool_]]) -> None:
        """Let every epoch have equally many rows of those that can be trained, as far as their sizes tell."""
        for number, source in enumerate(self.sources):
            assert source.sizes is not None
            usable, limited = is_usable(source.sizes), self._limited[number]
            self._usable[source.name] = usable if limited is None else usable[limited]
        self.epoch, epoch = -1, self.epoch
        self.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.schedule)

    def __getitem__(self, position: int) -> Encoded:
        return self.encode(self.address(position))

    def address(self, position: int) -> Address:
        """Where the row at a position of the schedule is to be found."""
        source, row = self.schedule[position]
        limited = self._limited[source]
        return Address(source, row if limited is None else int(limited[row]))

    def addresses(self) -> Iterator[Address]:
        """All of the epoch, in order."""
        return (self.address(position) for position in range(len(self)))

    def sample_id(self, address: Address) -> SampleId:
        """The name of a row."""
        return self.sources[address.source].sample_id(address.row_index)

    def encode(self, address: Address) -> Encoded:
        """Encode one row with the template."""
        source = self.sources[address.source]
        row = with_system(source.rows[address.row_index], source.system)
        return encode_row(self.templates[address.source], row, source.sample_id(address.row_index), strict=self.strict)

    def encoded(
        self, share: Share = EVERYTHING, *, start: int = 0, held: Collection[int] = ()
    ) -> Iterator[Encoded | SampleError]:
        """The share's rows from the `start`-th on, after those `held` before: the sample, or why there is none."""
        for position in chain(map(share.row, sorted(held)), range(share.row(start), len(self), share.num_shares)):
            with RandomStream(self.seed, self.epoch, position):
                sample = self.sample_or_error(self.address(position))
            yield sample

    def sample_or_error(self, address: Address) -> Encoded | SampleError:
        """Encode one row, or say why it cannot be."""
        return sample_or_error(self.encode, address)

    def correct(self, address: Address, sample: Encoded) -> None:
        """Remember the true size of a row where another one was planned, so that the next run plans with it."""
        source, size, planned = self.sources[address.source], size_of(sample), self.planned_size(address)
        if source.cache is None or planned is None or size == planned:
            return
        logger.warning("%s: %d tokens, planned were %d", sample["sample_id"], size.length, planned.length)
        row = with_system(source.rows[address.row_index], source.system)
        source.cache.remember(row, size, contents_of(sample).aspect)

    def planned_size(self, address: Address) -> RowSize | None:
        """The size that a row was found to have before the epoch; None without a length pass."""
        sizes = self.sources[address.source].sizes
        return None if sizes is None else RowSize(*sizes.columns[:, address.row_index].tolist())

    def measure(self) -> None:
        """Give every source that has none its lengths, by encoding each row once."""
        self.sources = tuple(
            source if source.sizes is not None else replace(source, sizes=self._measured(number, source))
            for number, source in enumerate(self.sources)
        )

    def _measured(self, number: int, source: RowSource) -> LengthIndex:
        sizes, faults = [], {}
        for index in tqdm(range(len(source.rows)), desc=f"Lengths of {source.name}", dynamic_ncols=True):
            sample = self.sample_or_error(Address(number, index))
            if isinstance(sample, SampleError):
                faults[index] = sample.fault
                logger.warning("%s: cannot be encoded: %s", sample.sample_id, sample.detail)
            sizes.append(RowSize(0) if isinstance(sample, SampleError) else size_of(sample))
        return LengthIndex.of(sizes, {index: fault.reason for index, fault in faults.items()}, faults)

    def scheduled_sizes(self) -> LengthIndex:
        """The sizes of every position of the schedule."""
        columns = np.zeros((NUM_COLUMNS, len(self)), dtype=np.int64)
        for number, source in enumerate(self.sources):
            assert source.sizes is not None
            here = self.schedule.source == number
            rows = self.schedule.row[here]
            limited = self._limited[number]
            columns[:, here] = source.sizes.columns[:, rows if limited is None else limited[rows]]
        return LengthIndex(columns, {})

    def failed(self, address: Address) -> LeftOut:
        """A row without a length: why it cannot be encoded."""
        source, index = self.sources[address.source], address.row_index
        assert source.sizes is not None
        return LeftOut(source.sample_id(index), *source.sizes.fault(index))


def own_template(template: Template, source: RowSource) -> Any:
    """The template for a source: the run's, or a copy with the source's own pixel limit, which shares the processor."""
    if source.max_pixels is None:
        return template
    own: Any = copy.copy(template)
    own.max_pixels = source.max_pixels
    return own


def with_system(row: Row, system: str | None) -> Row:
    """Give a row the source's system prompt, unless it brings one."""
    row = dict(row)
    messages = row.get("messages")
    if system is None or not isinstance(messages, (list, tuple)) or not messages:
        return row
    if not isinstance(messages[0], Mapping) or messages[0].get("role") != "system":
        row["messages"] = [{"role": "system", "content": system}, *messages]
    return row


def encode_row(
    template: Template, row: Row, sample_id: SampleId, *, strict: bool = False, is_watched: bool = False
) -> Encoded:
    """Encode a row and add its `length`, `contents`, `source` and `sample_id`.

    A failure is a `SampleError` that names the row, or, with `strict`, an end of the run that names it.
    A read that never ends is a failure too; with `is_watched` the caller sees to that, for many rows at once.
    """
    try:
        encoded = _encoded(template, row) if is_watched else _watched(template, row)
    except Exception as error:
        reason, said, files = fault_of(error, row)
        if strict:
            raise DataError(f"{sample_id}: {reason}: {said}") from error
        raise SampleError(sample_id, reason, said, is_lasting(error, reason, row), files) from error
    if isinstance(encoded, list):
        raise ConfigError(
            f"{sample_id}: the template made {len(encoded)} samples of one row; packing needs one sample a row, "
            "so truncation_strategy=split cannot be used with it"
        )
    encoded["length"] = int(encoded.get("length") or len(encoded["input_ids"]))
    encoded["contents"] = found(encoded, row, patch_size=patch_size_of(template))
    encoded["source"] = sample_id.source
    encoded["sample_id"] = sample_id
    return encoded


def _encoded(template: Template, row: Row) -> Any:
    check_openable(row)
    return template.encode(row, return_length=True)


def _watched(template: Template, row: Row) -> Any:
    if next(media(row), None) is None:
        return _encoded(template, row)
    try:
        return watched(lambda: _encoded(template, row))
    except Waits as error:
        raise ReadTimeout(str(error)) from None


def _limited_rows(source: RowSource, seed: int) -> NDArray[np.int64]:
    drawn = permutation(len(source.rows), source.seed if source.seed is not None else seed, source.name, "limit")
    return np.sort(drawn[: source.num_used])


def sample_or_error(encode: Callable[..., Encoded], *args: Any) -> Encoded | SampleError:
    """Encode, or say why that cannot be."""
    try:
        return encode(*args)
    except SampleError as error:
        return error
