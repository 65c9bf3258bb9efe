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
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from swift.arguments import ExportArguments, SftArguments
from swift.dataset import RowPreprocessor
from swift.pipelines.export.cached_dataset import ExportCachedDataset

from swift_vlpack import json_lines
from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.host.length_pass import with_all_lengths
from swift_vlpack.host.messages import said_by_swift
from swift_vlpack.host.run_flags import given_options, without_options
from swift_vlpack.host.sources import DrawnRows, load_drawn
from swift_vlpack.rows.encoder import Targets
from swift_vlpack.rows.left_out import as_json, deleted_by_loader
from swift_vlpack.rows.samples import LeftOut
from swift_vlpack.rows.sequences import SequencesEncoder, lengths_of_sequences
from swift_vlpack.rows.source import RowSource
from swift_vlpack.runlog.left_out import FILE as LEFT_OUT
from swift_vlpack.words import by_reason, counted

LENGTHS = "vlpack_lengths"
"""The column that passes lengths to ms-swift's preprocessor."""
_OF_TRAINING = ("packing", "packing_length", "packing_strategy", "packing_num_proc", "padding_free", "lazy_tokenize")
"""Fields of ms-swift's export arguments that a training file may set, and that are ignored in an export."""
_OF_CANDIDATES = ("embedding", "reranker", "generative_reranker")
"""Tasks of ms-swift in which a row has several candidates."""
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
        names = [str(given_options(flags).get("model"))]
        with said_by_swift("refuses the options", names):
            super().__init__(list(flags))
        if self.args.task_type in _OF_CANDIDATES:
            raise ConfigError(
                f"--task_type {self.args.task_type} is gone from vlpack export: use swift export --to_cached_dataset "
                "true, which encodes every row"
            )

    def _get_dataset(self) -> list[Any]:
        self._drawn = load_drawn(self.args)
        return [None if drawn is None else drawn.rows for drawn in self._drawn]

    def _encode_dataset(self, train_dataset: Any, val_dataset: Any, pre_process: bool = True) -> list[Any]:
        if self.args.truncation_strategy == "split":  # exports tokens in place of rows, so rows have to be encoded
            return super()._encode_dataset(train_dataset, val_dataset, pre_process)
        self._save_val_dataset(val_dataset)
        named = zip(("train", "val"), self._drawn, strict=True)
        return [None if drawn is None else self._measured(name, drawn) for name, drawn in named]

    def _measured(self, name: str, drawn: DrawnRows) -> Any:
        """Measure rows. Returns those that can be encoded, with their lengths; None if there are none."""
        args, options = self.args, self._options
        is_text = self.template.mode == "train" and self.template.task_type == "causal_lm"
        encoder = SequencesEncoder(self.template, Targets() if is_text else None)  # targets as packing masks them
        sources = with_all_lengths(drawn.sources, encoder, args, options.cache_dir, in_full=options.check_pixels)
        lengths = _in_order(sources, len(drawn.rows))
        self.parts[name] = part = _part_of(sources, lengths)
        self.left_out += [{**line, "of": name} for source in sources for line in _left_out(source)]
        rows = _WithLengths()(
            drawn.rows.add_column(LENGTHS, lengths),
            num_proc=args.dataset_num_proc,
            load_from_cache_file=args.load_from_cache_file,
            strict=args.strict,
            batch_size=_BATCH_OF_MEDIA if args.model_meta.is_multimodal else _BATCH_OF_TEXTS,
        )
        if len(rows) != part.num_rows:
            raise DataError(f"ms-swift kept {len(rows)} of {counted(part.num_rows, 'row')} that have a length")
        if not len(rows) and name == "train":
            reasons = by_reason(dict(sorted(part.left_out.items())))
            raise DataError(f"nothing would be exported: all {counted(len(lengths), 'row')} are left out ({reasons})")
        return rows if len(rows) else None


def _in_order(sources: Sequence[RowSource], num_rows: int) -> list[list[int]]:
    """Return `lengths` of every row in ms-swift's order."""
    lengths: list[list[int]] = [[] for _ in range(num_rows)]
    for source in sources:
        assert source.sizes is not None
        assert source.places is not None
        for place, of_row in zip(source.places.tolist(), lengths_of_sequences(source.sizes), strict=True):
            lengths[place] = of_row
    return lengths


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
    if pipeline.left_out:
        json_lines.append(folder / LEFT_OUT, pipeline.left_out, ensure_ascii=False)
    return {
        **{name: part.as_json() for name, part in pipeline.parts.items()},
        "template_mode": options.mode,
        "check_pixels": options.check_pixels,
        "seconds": round(time.perf_counter() - start, 2),
    }


def of_export(flags: Sequence[str]) -> list[str]:
    """Remove the flags that only training has, so that a training file can be used for an export.

    >>> of_export(["--model", "m", "--learning_rate", "1e-4", "--packing", "true", "--max_length", "64"])
    ['--model', 'm', '--max_length', '64']
    """
    known = {spec.name for spec in fields(ExportArguments)} - set(_OF_TRAINING)
    return without_options(flags, {spec.name for spec in fields(SftArguments)} - known | set(_OF_TRAINING))
