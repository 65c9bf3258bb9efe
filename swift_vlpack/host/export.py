"""Export a cached data set with lengths from image headers: what `swift export --to_cached_dataset true` writes.

ms-swift's own pipeline runs, from its arguments to its files. Only two of its steps are replaced:

    _get_dataset       loads the same rows in the same order, and keeps where each of them comes from
    _encode_dataset    measures them (`length_pass.py`), and lets ms-swift write `lengths` beside each row

Rows, columns and lengths are those of ms-swift's export. A row with a good header and broken pixels is in it, too,
unless all pixels are to be decoded (`check_pixels`); the report says how many images were not.
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
from swift_vlpack.errors import DataError
from swift_vlpack.host.length_pass import with_all_lengths
from swift_vlpack.host.messages import said_by_swift
from swift_vlpack.host.run_flags import given_options, without_options
from swift_vlpack.host.sources import DrawnRows, load_drawn
from swift_vlpack.rows.left_out import as_json, deleted_by_loader
from swift_vlpack.rows.samples import LeftOut
from swift_vlpack.rows.sequences import SequencesEncoder, lengths_of_sequences
from swift_vlpack.rows.source import RowSource
from swift_vlpack.words import by_reason, counted

LENGTHS = "vlpack_lengths"
"""The column by which lengths travel to ms-swift's preprocessor."""
LEFT_OUT = "left_out.jsonl"
"""The list of rows that are not exported; written if there are any."""
_OF_TRAINING = ("packing", "packing_length", "packing_strategy", "packing_num_proc", "padding_free", "lazy_tokenize")
"""Fields of ms-swift's export that a training file may set and that an export does not take."""
_BATCH_OF_MEDIA, _BATCH_OF_TEXTS = 100, 1000
"""Rows of a batch in ms-swift's export. Types of columns follow from the first batch, so these are the same."""
_OF_PRETRAINING = ("--use_chat_template", "false", "--loss_scale", "all")
"""The defaults of `swift pt`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedPart:
    """What was exported of the training rows, or of the validation rows."""

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

    def __init__(self, flags: Sequence[str], *, check_pixels: bool = False, cache_dir: str | None = None) -> None:
        self._check_pixels = check_pixels
        self._cache_dir = cache_dir
        self.parts: dict[str, ExportedPart] = {}
        """By name of the folder: `train`, `val`."""
        self.left_out: list[dict[str, Any]] = []
        names = [str(given_options(flags).get("model"))]
        with said_by_swift("refuses the options", names):
            super().__init__(list(flags))

    def _get_dataset(self) -> list[Any]:
        self._drawn = load_drawn(self.args)
        return [None if drawn is None else drawn.rows for drawn in self._drawn]

    def _encode_dataset(self, train_dataset: Any, val_dataset: Any, pre_process: bool = True) -> list[Any]:
        if self.args.truncation_strategy == "split":  # rows become tokens, which headers do not give
            return super()._encode_dataset(train_dataset, val_dataset, pre_process)
        self._save_val_dataset(val_dataset)
        named = zip(("train", "val"), self._drawn, strict=True)
        return [None if drawn is None else self._measured(name, drawn) for name, drawn in named]

    def _measured(self, name: str, drawn: DrawnRows) -> Any:
        """Measure rows, and return those that can be encoded with their lengths; None if there are none."""
        args = self.args
        encoder = SequencesEncoder(self.template)
        sources = with_all_lengths(drawn.sources, encoder, args, self._cache_dir, in_full=self._check_pixels)
        lengths: list[list[int]] = [[]] * len(drawn.rows)
        for source, places in zip(sources, drawn.places, strict=True):
            assert source.sizes is not None
            for place, of_row in zip(places.tolist(), lengths_of_sequences(source.sizes), strict=True):
                lengths[place] = of_row
        self.parts[name] = _part_of(sources, lengths)
        self.left_out += [{**line, "of": name} for source in sources for line in _left_out(source)]
        rows = _WithLengths()(
            drawn.rows.add_column(LENGTHS, lengths),
            num_proc=args.dataset_num_proc,
            load_from_cache_file=args.load_from_cache_file,
            strict=args.strict,
            batch_size=_BATCH_OF_MEDIA if args.model_meta.is_multimodal else _BATCH_OF_TEXTS,
        )
        if not len(rows) and name == "train":
            reasons = by_reason(dict(sorted(self.parts[name].left_out.items())))
            raise DataError(f"nothing would be exported: all {counted(len(lengths), 'row')} are left out ({reasons})")
        return rows if len(rows) else None


class _WithLengths(RowPreprocessor):
    """Gives rows their `lengths`, and leaves out rows without any, as ms-swift's own preprocessor does."""

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


def export(
    flags: Sequence[str],
    folder: Path,
    *,
    mode: str = "train",
    command: str = "sft",
    check_pixels: bool = False,
    cache_dir: str | None = None,
) -> dict[str, Any]:
    """Export the data that ms-swift's flags name into a folder. Returns the report."""
    start = time.perf_counter()
    given = [*(_OF_PRETRAINING if command == "pt" else ()), *of_export(flags)]
    own = ("--to_cached_dataset", "true", "--template_mode", mode, "--output_dir", str(folder), "--exist_ok", "true")
    pipeline = HeaderExport([*given, *own], check_pixels=check_pixels, cache_dir=cache_dir)
    with said_by_swift("cannot export the data"):
        pipeline.main()
    if pipeline.left_out:
        json_lines.append(folder / LEFT_OUT, pipeline.left_out, ensure_ascii=False)
    return {
        **{name: part.as_json() for name, part in pipeline.parts.items()},
        "template_mode": mode,
        "check_pixels": check_pixels,
        "seconds": round(time.perf_counter() - start, 2),
    }


def of_export(flags: Sequence[str]) -> list[str]:
    """Leave out the flags that only training has, so that a training file says what to export.

    >>> of_export(["--model", "m", "--learning_rate", "1e-4", "--packing", "true", "--max_length", "64"])
    ['--model', 'm', '--max_length', '64']
    """
    known = {spec.name for spec in fields(ExportArguments)} - set(_OF_TRAINING)
    return without_options(flags, {spec.name for spec in fields(SftArguments)} - known | set(_OF_TRAINING))
