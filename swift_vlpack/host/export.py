"""Export a cached data set like `swift export --to_cached_dataset true`, but with lengths from image headers.

ms-swift's own pipeline runs, from its arguments to its files. Only two of its steps are replaced:

    _get_dataset       loads the same rows in the same order, and keeps the source and number of each row
    _encode_dataset    measures the rows (`length_pass.py`), and lets ms-swift write a column `lengths`

Rows, columns and lengths are those of ms-swift's export, with one exception: a row with a good header and broken pixels
is exported too, unless all pixels are decoded (`check_pixels`). The report says how many images were not decoded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from swift.arguments import ExportArguments, SftArguments
from swift.dataset import RowPreprocessor
from swift.pipelines.export.cached_dataset import ExportCachedDataset
from swift.utils import get_logger

from swift_vlpack import json_lines
from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.host.args import data_seed
from swift_vlpack.host.cached import write_settings
from swift_vlpack.host.length_pass import with_all_lengths
from swift_vlpack.host.messages import said_by_swift
from swift_vlpack.host.run_flags import given_options, without_options
from swift_vlpack.host.sources import DrawnRows, load_drawn
from swift_vlpack.plan.packed_index import write_index
from swift_vlpack.plan.planner import plan
from swift_vlpack.rows.encoder import Targets
from swift_vlpack.rows.left_out import as_json, deleted_by_loader
from swift_vlpack.rows.samples import LeftOut
from swift_vlpack.rows.sequences import SequencesEncoder, lengths_of_sequences, rounded_up
from swift_vlpack.rows.sizes import NUM_COLUMNS
from swift_vlpack.rows.source import RowSource
from swift_vlpack.runlog.left_out import FILE as LEFT_OUT
from swift_vlpack.words import by_reason, counted

logger = get_logger()

LENGTHS = "vlpack_lengths"
"""The column that passes lengths to ms-swift's preprocessor."""
INDEX = "packed"
"""Folder of the index of packs."""
_OF_TRAINING = ("packing", "packing_length", "packing_strategy", "packing_num_proc", "padding_free", "lazy_tokenize")
"""Fields of ms-swift's export arguments that a training file may set, and that are ignored in an export."""
_BATCH_OF_MEDIA, _BATCH_OF_TEXTS = 100, 1000
"""Rows of a batch, equal to those of ms-swift's export, because the first batch decides the types of columns."""
_OF_PRETRAINING = ("--use_chat_template", "false", "--loss_scale", "all")
"""The defaults of `swift pt`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """Options of an export in addition to ms-swift's flags."""

    mode: str = "train"
    """`--template_mode` of ms-swift's export."""
    check_pixels: bool = False
    """Decode every image, so that rows with broken pixels are left out."""
    multiple: int = 1
    """The trainer pads every sequence to a multiple of this."""
    index: PackingConfig | None = None
    """Write an index of packs by these options; without `has_length`, `packing_length` is `--max_length`."""
    has_length: bool = False
    num_ranks: int = 1
    """Ranks that share the packs of the index."""
    cache_dir: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedPart:
    """Counts of the exported training rows, or of the validation rows."""

    num_rows: int
    num_tokens: int
    left_out: Counter[str] = field(default_factory=Counter)
    """How many rows are left out, by reason."""
    num_images: int = 0
    num_images_not_decoded: int = 0
    num_rows_not_rounded: int = 0
    """Rows with a length that would exceed `--max_length` if it was rounded up, and so becomes `--max_length`."""

    def as_json(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return {spec.name: getattr(self, spec.name) for spec in fields(self)} | {
            "left_out": dict(sorted(self.left_out.items()))
        }


class HeaderExport(ExportCachedDataset):
    """ms-swift's export of a cached data set, with lengths from image headers."""

    def __init__(self, flags: Sequence[str], options: ExportOptions) -> None:
        self._options = options
        self.parts: dict[str, ExportedPart] = {}
        """Counts by folder: `train`, `val`."""
        self.left_out: list[dict[str, Any]] = []
        self.sizes: dict[str, NDArray[np.float64]] = {}
        """By name of the folder, (5, num_rows): the fields of `RowSize` of every exported row, and its aspect."""
        self.rounded: dict[str, NDArray[np.int64]] = {}
        """By name of the folder: tokens of every exported row as the trainer pads them."""
        names = [str(given_options(flags).get("model"))]
        with said_by_swift("refuses the options", names):
            super().__init__(list(flags))

    def _get_dataset(self) -> list[Any]:
        self._drawn = load_drawn(self.args)
        return [None if drawn is None else drawn.rows for drawn in self._drawn]

    def _encode_dataset(self, train_dataset: Any, val_dataset: Any, pre_process: bool = True) -> list[Any]:
        if self.args.truncation_strategy == "split":  # exports tokens in place of rows, so rows have to be encoded
            self._refuse_what_needs_lengths()
            return super()._encode_dataset(train_dataset, val_dataset, pre_process)
        self._save_val_dataset(val_dataset)
        named = zip(("train", "val"), self._drawn, strict=True)
        return [None if drawn is None else self._measured(name, drawn) for name, drawn in named]

    def _refuse_what_needs_lengths(self) -> None:
        if self._options.multiple > 1 or self._options.index is not None:
            raise ConfigError(
                "--truncation_strategy split exports tokens in place of rows, which neither rounded lengths nor "
                "--packed can be made of; leave it out"
            )

    def _measured(self, name: str, drawn: DrawnRows) -> Any:
        """Measure rows. Returns those that can be encoded, with their lengths; None if there are none."""
        args, options = self.args, self._options
        is_text = self.template.mode == "train" and self.template.task_type == "causal_lm"
        encoder = SequencesEncoder(self.template, Targets() if is_text else None)  # targets as packing masks them
        sources = with_all_lengths(drawn.sources, encoder, args, options.cache_dir, in_full=options.check_pixels)
        lengths, columns = _in_order(sources, len(drawn.rows))
        part = _part_of(sources, lengths)
        if options.multiple > 1:
            lengths, num_not_rounded = _rounded(lengths, options.multiple, self.template.max_length)
            part = replace(part, num_tokens=sum(map(sum, lengths)), num_rows_not_rounded=num_not_rounded)
            _warn_of_length(name, num_not_rounded, self.template.max_length)
        self.parts[name] = part
        self.left_out += [{**line, "of": name} for source in sources for line in _left_out(source)]
        is_kept = np.array([bool(of_row) for of_row in lengths])
        self.sizes[name] = columns[:, is_kept]
        self.rounded[name] = np.array([sum(of_row) for of_row in lengths], dtype=np.int64)[is_kept]
        rows = _WithLengths()(
            drawn.rows.add_column(LENGTHS, lengths),
            num_proc=args.dataset_num_proc,
            load_from_cache_file=args.load_from_cache_file,
            strict=args.strict,
            batch_size=_BATCH_OF_MEDIA if args.model_meta.is_multimodal else _BATCH_OF_TEXTS,
        )
        if len(rows) != is_kept.sum():
            raise DataError(f"ms-swift kept {len(rows)} of {counted(int(is_kept.sum()), 'row')} that have a length")
        if not len(rows) and name == "train":
            reasons = by_reason(dict(sorted(part.left_out.items())))
            raise DataError(f"nothing would be exported: all {counted(len(lengths), 'row')} are left out ({reasons})")
        return rows if len(rows) else None


def _in_order(sources: Sequence[RowSource], num_rows: int) -> tuple[list[list[int]], NDArray[np.float64]]:
    """Return `lengths` of every row in ms-swift's order, and (5, num_rows) the fields of `RowSize` and the aspect."""
    lengths: list[list[int]] = [[] for _ in range(num_rows)]
    columns = np.zeros((NUM_COLUMNS + 1, num_rows))
    for source in sources:
        assert source.sizes is not None
        assert source.places is not None
        columns[:-1, source.places], columns[-1, source.places] = source.sizes.columns, source.sizes.aspects
        for place, of_row in zip(source.places.tolist(), lengths_of_sequences(source.sizes), strict=True):
            lengths[place] = of_row
    return lengths, columns


def _rounded(lengths: Sequence[list[int]], multiple: int, most: int | None) -> tuple[list[list[int]], int]:
    """Round lengths up, but none above `most`. Returns (lengths, number of rows with a length kept at `most`)."""
    rounded = [rounded_up(of_row, multiple, most) for of_row in lengths]
    return rounded, sum(any(length % multiple for length in of_row) for of_row in rounded)


def _warn_of_length(name: str, num_rows: int, max_length: int | None) -> None:
    if num_rows:
        logger.warning(
            f"{name}: {counted(num_rows, 'row')} would be longer than --max_length ({max_length}) once rounded up, and "
            "ms-swift would delete them; their lengths stay at --max_length, so a pack with one of them can become "
            "longer than planned"
        )


class _WithLengths(RowPreprocessor):
    """Give rows their `lengths`, and leave out rows without lengths, as ms-swift's own preprocessor does."""

    def preprocess(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """Return a row as ms-swift's export has it."""
        lengths = row.pop(LENGTHS)
        return {**row, "lengths": lengths} if lengths else None


def _part_of(sources: Sequence[RowSource], lengths: Sequence[Sequence[int]]) -> ExportedPart:
    sizes = [source.sizes for source in sources if source.sizes is not None]
    unseen = [int(one.images[one.is_from_header].sum()) for one in sizes if one.is_from_header is not None]
    return ExportedPart(
        num_rows=sum(map(bool, lengths)),
        num_tokens=sum(map(sum, lengths)),
        left_out=Counter(line["reason"] for source in sources for line in _left_out(source)),
        num_images=sum(int(one.images.sum()) for one in sizes),
        num_images_not_decoded=sum(unseen),
    )


def _left_out(source: RowSource) -> Iterator[dict[str, Any]]:
    """List the rows of a source that are not exported, as lines of a list of left-out rows."""
    origins = {source.name: source.origin or source.name}
    for one in deleted_by_loader(source):
        yield as_json(one, None, origins)
    assert source.sizes is not None
    for index in sorted(source.sizes.failures):
        yield as_json(LeftOut(source.sample_id(index), *source.sizes.fault(index)), None, origins)


def export(flags: Sequence[str], folder: Path, options: ExportOptions, *, command: str = "sft") -> dict[str, Any]:
    """Export the data that ms-swift's flags name into a folder. Returns the report."""
    start = time.perf_counter()
    given = [*(_OF_PRETRAINING if command == "pt" else ()), *of_export(flags)]
    own = ("--to_cached_dataset", "true", "--template_mode", options.mode, "--output_dir", str(folder))
    pipeline = HeaderExport([*given, *own, "--exist_ok", "true"], options)
    if pipeline.args.cached_dataset or pipeline.args.cached_val_dataset:
        raise ConfigError("--cached_dataset is an export already; name what it was made of with --dataset")
    with said_by_swift("cannot export the data"):
        pipeline.main()
    plugins = pipeline.args.external_plugins or []
    write_settings(folder, pipeline.template, plugins, options.multiple, pipeline.sizes)
    if pipeline.left_out:
        json_lines.append(folder / LEFT_OUT, pipeline.left_out, ensure_ascii=False)
    return {
        **{name: part.as_json() for name, part in pipeline.parts.items()},
        **({} if options.index is None else {"packed": _write_index(pipeline, folder, options)}),
        "template_mode": options.mode,
        "check_pixels": options.check_pixels,
        "multiple": options.multiple,
        "seconds": round(time.perf_counter() - start, 2),
    }


def _write_index(pipeline: HeaderExport, folder: Path, options: ExportOptions) -> dict[str, Any]:
    """Pack the training rows and write the index. Returns what `index.json` says."""
    config = options.index
    assert config is not None
    if not options.has_length:
        config = replace(config, packing_length=pipeline.template.max_length)
    _, images, patches, *_ = pipeline.sizes["train"].astype(np.int64)
    tokens, seed = pipeline.rounded["train"], data_seed(pipeline.args)
    packs = plan(tokens, config, images=images, patches=patches, seed=seed, label=None)
    if not len(packs):
        raise DataError(f"--packed: there is no pack; all rows are left out ({by_reason(packs.num_dropped)})")
    return write_index(folder / INDEX, packs.align(options.num_ranks))


def of_export(flags: Sequence[str]) -> list[str]:
    """Remove the flags that only training has, so that a training file can be used for an export.

    >>> of_export(["--model", "m", "--learning_rate", "1e-4", "--packing", "true", "--max_length", "64"])
    ['--model', 'm', '--max_length', '64']
    """
    known = {spec.name for spec in fields(ExportArguments)} - set(_OF_TRAINING)
    return without_options(flags, {spec.name for spec in fields(SftArguments)} - known | set(_OF_TRAINING))
