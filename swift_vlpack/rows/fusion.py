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

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.plan.cut_rows import CutRows, PartSize
from swift_vlpack.plan.mix import Mix, Schedule, Source
from swift_vlpack.plan.shares import EVERYTHING, Share
from swift_vlpack.plan.shuffle import permutation
from swift_vlpack.plan.windows import lost_part
from swift_vlpack.rows.contents import contents_of, found, patch_size_of
from swift_vlpack.rows.faults import ReadTimeout, check_openable, fault_of, is_lasting
from swift_vlpack.rows.media import media
from swift_vlpack.rows.part_sizes import part_sizes
from swift_vlpack.rows.places import place
from swift_vlpack.rows.randomness import RandomStream
from swift_vlpack.rows.row_cutter import RowCutter, cutter_of, for_training, left_out_part
from swift_vlpack.rows.samples import Address, Encoded, LeftOut, SampleError, SampleId
from swift_vlpack.rows.sizes import LengthIndex, RowSize, size_of
from swift_vlpack.rows.targets import encoded
from swift_vlpack.rows.watch import Waits, watched
from swift_vlpack.words import counted

logger = logging.getLogger(__name__)

Row = dict[str, Any]


class Template(Protocol):
    """What is asked of the host's template."""

    packing: bool
    padding_free: bool
    tokenizer: Any

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
    remember_size: Callable[[Row, RowSize, float, Sequence[PartSize]], None] | None = None
    """Save the true size, aspect and parts of a row for the next run; None if nobody keeps lengths."""
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

    def __repr__(self) -> str:
        limit = "" if self.sample_limit is None else f", at most {self.sample_limit} of them"
        return f"<RowSource {self.name}: {counted(len(self.rows), 'row')}{limit}, ratio {self.ratio:g}>"

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
    """The rows of several sources; `dataset[i]` encodes the i-th of an epoch (`encode_row`).

    Which rows an epoch has is a function of its number (`mix`); with `ratio_by="tokens"` of their lengths too, so that
    only planned packs can tell. `set_epoch` is for those who read the data set itself:
    packs know their epoch and never ask. With `strict`, a row that cannot be encoded raises; otherwise it raises
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
        ratio_by: str = "rows",
    ) -> None:
        if not sources:
            raise DataError("no source of data; give at least one")
        self.sources = tuple(sources)
        self.template = template
        self.strict = strict
        self.mix = mix_of(self.sources, seed=seed, shuffle=shuffle, ratio_by=ratio_by)
        self.templates = [own_template(template, source) for source in self.sources]
        self.epoch = 0
        self._schedule: Schedule | None = None  # of the epoch that is read here, which is rarely any

    def __getstate__(self) -> dict[str, Any]:
        """For spawned workers, which can mix again."""
        return {**self.__dict__, "_schedule": None}

    def __repr__(self) -> str:
        return f"<FusionCaptionDataset: {', '.join(map(repr, self.sources))}>"

    def set_epoch(self, epoch: int) -> None:
        """Let `dataset[i]` be the i-th row of this epoch."""
        if epoch != self.epoch:
            self.epoch, self._schedule = epoch, None

    @property
    def schedule(self) -> Schedule:
        """The order of the epoch that was set."""
        if self._schedule is None:
            self._schedule = self.mix.schedule(self.epoch)
        return self._schedule

    def __len__(self) -> int:
        return len(self.schedule)

    def __getitem__(self, position: int) -> Encoded:
        return self.encode(Address(*self.schedule[position]))

    def sample_id(self, address: Address) -> SampleId:
        """The name of a row, or of a part of it."""
        row = self.sources[address.source].sample_id(address.row_index)
        return row if address.span is None else row._replace(part=address.span.number)

    def encode(self, address: Address) -> Encoded:
        """Encode one row with the template; of an address with a span the part that it says."""
        source, template = self.sources[address.source], self.templates[address.source]
        row = with_system(source.rows[address.row_index], source.system)
        sample = encode_row(template, row, source.sample_id(address.row_index), strict=self.strict)
        return sample if address.span is None else self._part(address, sample)

    def _part(self, address: Address, row: Encoded) -> Encoded:
        cutter = cutter_of(self.templates[address.source])
        assert cutter is not None, "a plan has parts of rows only where they are cut"
        assert address.span is not None
        try:
            return cutter.planned(row, address.span)
        except SampleError:
            # Of all parts of the row, so that the next run plans with them.
            self._remember(address, row, cutter)
            raise

    def sample_or_error(self, address: Address) -> Encoded | SampleError:
        """Encode one row, or say why it cannot be."""
        return sample_or_error(self.encode, address)

    def part_or_error(self, address: Address, row: Encoded | SampleError) -> Encoded | SampleError:
        """The part that an address says of a row that is encoded already, or why there is none."""
        assert address.span is not None
        if isinstance(row, SampleError):
            return row.of_part(address.span.number)
        return sample_or_error(self._part, address, row)

    def samples(
        self, epoch: int, share: Share = EVERYTHING, *, start: int = 0, held: Collection[int] = ()
    ) -> Iterator[Encoded | SampleError]:
        """The share's rows of an epoch: those of the numbers `held`, then all from the `start`-th on.

        Each is the sample, or why there is none.
        """
        schedule = self.mix.schedule(epoch)
        positions = range(share.row(start), len(schedule), share.num_shares)
        # What is held was read before all others, and a reader that goes on asks for it first.
        for position in chain(map(share.row, sorted(held)), positions):
            # By position and not by row: a row that comes twice in an epoch draws twice.
            with RandomStream(self.mix.seed, epoch, position):
                sample = self.sample_or_error(Address(*schedule[position]))
            yield sample

    def correct(self, address: Address, planned: RowSize, sample: Encoded) -> None:
        """Remember the true size of a row where another one was planned, so that the next run plans with it."""
        size = size_of(sample)
        # A part is as long as planned, or it is no sample at all.
        if address.span is not None or size == planned:
            return
        logger.warning("%s: %d tokens, planned were %d", sample["sample_id"], size.length, planned.length)
        self._remember(address, sample, cutter_of(self.templates[address.source]))

    def _remember(self, address: Address, sample: Encoded, cutter: RowCutter | None) -> None:
        source = self.sources[address.source]
        if source.remember_size is not None:
            row = with_system(source.rows[address.row_index], source.system)
            source.remember_size(row, size_of(sample), contents_of(sample).aspect, part_sizes(sample, cutter))

    def measure(self) -> None:
        """Give every source that has none its lengths, by encoding each row once."""
        self.sources = tuple(
            source if source.sizes is not None else replace(source, sizes=self._measured(number, source))
            for number, source in enumerate(self.sources)
        )

    def _measured(self, number: int, source: RowSource) -> LengthIndex:
        sizes, faults, parts = [], {}, {}
        cutter = cutter_of(self.templates[number])
        for index in tqdm(range(len(source.rows)), desc=f"Lengths of {source.name}", dynamic_ncols=True):
            sample = self.sample_or_error(Address(number, index))
            if isinstance(sample, SampleError):
                faults[index] = sample.fault
                logger.warning("%s: cannot be encoded: %s", sample.sample_id, sample.detail)
            elif of_row := part_sizes(sample, cutter):
                parts[index] = of_row
            sizes.append(RowSize(0) if isinstance(sample, SampleError) else size_of(sample))
        cut = None if cutter is None else CutRows.of(parts)
        return LengthIndex.of(sizes, {index: fault.reason for index, fault in faults.items()}, faults, cut)

    def cut_by(self, config: PackingConfig) -> None:
        """Encode rows to be cut as the options say, from now on."""
        self.template = for_training(self.template, config)
        self.templates = [for_training(template, config) for template in self.templates]

    def with_sources(self, sources: Sequence[RowSource]) -> FusionCaptionDataset:
        """The same with other facts about the rows; of a copy, so that nobody else's change."""
        other = copy.copy(self)
        other.sources = tuple(sources)
        return other

    def failed(self, address: Address) -> LeftOut:
        """A row without a length: why it cannot be encoded; a part without one: why cutting left it out."""
        source, index = self.sources[address.source], address.row_index
        assert source.sizes is not None
        if address.span is not None:
            assert source.sizes.cut is not None
            parts, span, cutter = source.sizes.cut.parts(index), address.span, cutter_of(self.templates[address.source])
            if cutter is not None and cutter.lays_end_to_end:
                return left_out_part(source.sample_id(index), lost_part(parts, span, cutter.cutting))
            return left_out_part(source.sample_id(index), parts[span.number].part(span.number))
        return LeftOut(source.sample_id(index), *source.sizes.fault(index))


def mix_of(sources: Sequence[RowSource], *, seed: int, shuffle: bool, ratio_by: str = "rows") -> Mix:
    """How the sources take part in every epoch."""
    return Mix(
        sources=tuple(Source(source.name, source.num_used, source.ratio) for source in sources),
        rows=tuple(_limited_rows(source, seed) if source.num_used < len(source.rows) else None for source in sources),
        seed=seed,
        seeds={source.name: source.seed for source in sources if source.seed is not None},
        shuffle=shuffle,
        ratio_by=ratio_by,
    )


def own_template(template: Template, source: RowSource) -> Any:
    """The template for a source: the run's, or a copy with the source's own pixel limit, which shares the processor."""
    if source.max_pixels is None:
        return template
    own: Any = copy.copy(template)
    own.max_pixels = source.max_pixels
    return own


def with_system(row: Row, system: str | None) -> Row:
    """Give a row the source's system prompt, unless it brings one."""
    # ms-swift may give a row that is shared, or cached; what is added here is nobody else's.
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
        sample = _encoded(template, row) if is_watched else _watched(template, row)
    except Exception as error:
        reason, said, files = fault_of(error, row)
        if strict:
            raise DataError(f"{sample_id}: {reason}: {said}") from error
        raise SampleError(sample_id, reason, said, is_lasting(error, reason, row), files) from error
    if isinstance(sample, list):
        raise ConfigError(
            f"{sample_id}: the template made {len(sample)} samples of one row; packing needs one sample a row, "
            "so use packing_overflow=split in place of truncation_strategy=split"
        )
    sample["length"] = int(sample.get("length") or len(sample["input_ids"]))
    sample["contents"] = found(sample, row, patch_size=patch_size_of(template))
    sample["source"] = sample_id.source
    sample["sample_id"] = sample_id
    return sample


def _encoded(template: Template, row: Row) -> Any:
    check_openable(row)
    return encoded(template, row, return_length=True)


def _watched(template: Template, row: Row) -> Any:
    # A text waits for no disk, and there are many of them: it is spared a thread.
    if next(media(row), None) is None:
        return _encoded(template, row)
    try:
        return watched(lambda: _encoded(template, row))
    except Waits as error:
        raise ReadTimeout(str(error)) from None


def _limited_rows(source: RowSource, seed: int) -> NDArray[np.int64]:
    drawn = permutation(len(source.rows), source.seed if source.seed is not None else seed, source.name, "limit")
    # In the order of the file, which is what an epoch without shuffling has.
    return np.sort(drawn[: source.num_used])


def sample_or_error(encode: Callable[..., Encoded], *args: Any) -> Encoded | SampleError:
    """Encode, or say why that cannot be."""
    try:
        return encode(*args)
    except SampleError as error:
        return error
