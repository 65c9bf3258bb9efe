"""Encode rows with ms-swift's template, and mask the labels that this run does not train.

>>> class Letters:  # stands for a template of ms-swift
...     def encode(self, row, return_length=False):
...         tokens = [ord(letter) for letter in row["messages"][0]["content"]]
...         return {"input_ids": tokens, "labels": list(tokens)}
>>> encoder = RowEncoder.of(Letters(), PackingConfig(packing_length=64))
>>> sample = encoder.sample({"messages": [{"content": "cat"}]}, SampleId("captions", 17))
>>> str(sample["sample_id"]), sample["length"], sample["labels"]  # the first token of a sample is no target
('captions:17', 3, [-100, 97, 116])

The template belongs to ms-swift, so nothing of ours is stored on it. All code that reads rows gets a `RowEncoder`. It
holds what the options add to the template: the labels to mask, and the cutter of long rows (`cutting.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.plan.parts import Part
from swift_vlpack.rows.contents import NO_LABEL, OF_MEDIA, OWN, Contents, count_contents, refuse_unfilled
from swift_vlpack.rows.cutting import Divider, RowCutter, part_sizes
from swift_vlpack.rows.families import MediaTokens, patch_size_of
from swift_vlpack.rows.faults import ReadTimeout, check_openable, fault_of, is_lasting
from swift_vlpack.rows.media import is_encoded, media, with_plain_paths
from swift_vlpack.rows.samples import Encoded, SampleError, SampleId
from swift_vlpack.rows.source import Row, RowSource
from swift_vlpack.rows.watch import ReadStuck, restore_limit, watched
from swift_vlpack.words import counted

_OF_OURS = ("contents", "source", "sample_id")
_LISTS = ("input_ids", "labels", "loss_scale")


class Template(Protocol):
    """The parts of ms-swift's template that we use."""

    packing: bool
    padding_free: bool
    tokenizer: Any

    def encode(self, inputs: Any, return_length: bool = False) -> Any:
        """Return tokens, labels and tensors of one row."""

    def data_collator(self, batch: list[Any]) -> dict[str, Any]:
        """Return one batch of encoded rows."""


@dataclass(frozen=True)
class Targets:
    """Mask labels of a sample, in addition to those that the template masks. Shapes do not change."""

    mask_boundary_loss: bool = True
    """Mask the first token of a sample: in a sequence, it would be predicted from the sample before it."""
    untrained: int | None = None
    """Mask this token everywhere: EOS, unless EOS is trained."""

    @classmethod
    def of(cls, template: Any, config: PackingConfig) -> Targets:
        """Read the options; the template's tokenizer says which token EOS is."""
        eos = getattr(getattr(template, "tokenizer", None), "eos_token_id", None)
        if template is None and not config.train_on_eos:
            raise ConfigError("train_on_eos=false needs a template, whose tokenizer says which token EOS is")
        return cls(config.mask_boundary_loss, None if config.train_on_eos else eos)

    def labels(self, labels: Any) -> Any:
        """Return a copy of the labels, masked.

        >>> Targets(untrained=9).labels([5, -100, 6, 9, 9])
        [-100, -100, 6, -100, -100]
        """
        if isinstance(labels, torch.Tensor):
            made = labels.clone()
            if self.untrained is not None:
                made[made == self.untrained] = NO_LABEL
            if self.mask_boundary_loss:
                made[:1] = NO_LABEL
            return made
        kept = list(labels)
        if self.untrained is not None and self.untrained in kept:
            kept = [NO_LABEL if label == self.untrained else label for label in kept]
        if kept and self.mask_boundary_loss:
            kept[0] = NO_LABEL
        return kept


@dataclass(frozen=True, eq=False)
class RowEncoder:
    """Encode rows with one template, for the length pass, training and evaluation.

    `RowEncoder(template)` encodes as the template does; `RowEncoder.of` also applies the options of a run.
    """

    template: Any
    targets: Targets | None = None
    """Labels to mask; None keeps labels as the template makes them."""
    cutter: RowCutter | None = None
    """Cuts long rows; None if rows stay whole."""

    @classmethod
    def of(cls, template: Any, config: PackingConfig) -> RowEncoder:
        """Make the encoder of a run. The template stays as it is.

        If rows are cut, the encoder has a copy of the template without `max_length`. With it, ms-swift would refuse or
        truncate longer rows, but cutting needs all their tokens. Evaluation uses the original template.
        """
        targets, cutter = Targets.of(template, config), RowCutter.of(template, config)
        # Under `left` and `right` the user wants ms-swift to truncate first. Only packing_overflow=drop allows that.
        if cutter and template and getattr(template, "truncation_strategy", None) not in ("left", "right"):
            template = copy.copy(template)
            template.max_length = None
        return cls(template, targets, cutter)

    def using(self, template: Any) -> RowEncoder:
        """Return the same encoder with another template, such as one that reads headers instead of pixels."""
        return replace(self, template=template)

    def for_source(self, source: RowSource) -> RowEncoder:
        """Return the encoder for a source's rows: with the source's own pixel limit, if it has one."""
        if source.max_pixels is None:
            return self
        # A shallow copy is enough: it shares the processor, and only its pixel limit is another.
        template = copy.copy(self.template)
        template.max_pixels = source.max_pixels
        return self.using(template)

    @cached_property
    def _patch_size(self) -> tuple[int, int] | None:
        return patch_size_of(self.template)

    @cached_property
    def _tokens(self) -> MediaTokens:
        return MediaTokens.of(self.template)

    @property
    def divider(self) -> Divider | None:
        """Return what divides rows into parts; None if rows stay whole."""
        return self.cutter

    def part_sizes(self, row: Encoded) -> tuple[Part, ...]:
        """Return the parts of an encoded row with their sizes; none if it stays whole."""
        return part_sizes(row, self.cutter)

    def encode(self, row: Any, **options: Any) -> Any:
        """Encode a row as `template.encode` does, and mask its labels."""
        return self._masked(self.template.encode(with_plain_paths(row) if isinstance(row, Mapping) else row, **options))

    def _masked(self, made: Any) -> Any:
        if self.targets is not None and isinstance(made, dict) and made.get("labels") is not None:
            made["labels"] = self.targets.labels(made["labels"])
        return made

    def sample(self, row: Row, sample_id: SampleId, *, strict: bool = False, is_watched: bool = False) -> Encoded:
        """Encode a row and add its `length`, `contents`, `source` and `sample_id`.

        Args:
            row: The row, with its system prompt.
            sample_id: The name of the row.
            strict: Raise `DataError`, which ends the run, for a row that cannot be encoded.
            is_watched: The caller watches for reads that never end (`watch.py`); otherwise this row is watched here.

        Raises:
            SampleError: The row cannot be encoded; names the row and the reason.
            DataError: The same, with `strict`.
        """
        own = {name: row[name] for name in _OF_OURS if name in row} if is_encoded(row) else {}
        if self.template is None and not is_encoded(row):
            raise ConfigError(
                f"{sample_id} is no encoded sample, as it has no input_ids: give PackingDataset a template, which "
                "encodes it, or rows with input_ids"
            )
        try:
            sample = self._encoded(row) if is_watched else self._watched(row)
            if isinstance(sample, dict):
                refuse_unfilled(sample, self._tokens)
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
        sample["length"] = self._length(sample)
        sample["contents"] = self._contents(sample, row)
        sample["source"] = sample_id.source
        sample["sample_id"] = sample_id
        return {**sample, OWN: own} if own else sample

    def _length(self, sample: Encoded) -> int:
        return int(sample.get("length") or len(sample["input_ids"]))

    def _contents(self, sample: Encoded, row: Row) -> Contents:
        return count_contents(sample, row, patch_size=self._patch_size)

    def handed_through(self, row: Row) -> Encoded:
        """Return a copy of an encoded sample, as this template makes it. Raises `ValueError` if it is no sample."""
        sample, ids = dict(row), row["input_ids"]
        if getattr(ids, "ndim", 1) != 1 or not len(ids) or isinstance(ids[0], (list, tuple)):
            raise ValueError("input_ids is empty, or has a dimension for a batch: give the tokens of one sample")
        if (length := int(sample.setdefault("length", len(ids)))) != len(ids):
            raise ValueError(f"length is {length}, but input_ids has {counted(len(ids), 'token')}")
        for name in _LISTS:
            if sample.get(name) is not None and len(sample[name]) != len(ids):
                raise ValueError(f"{name} has the length {len(sample[name])}, but input_ids {len(ids)}")
        if self.template is not None:  # give it the form that ms-swift's collators join
            if sample.get("labels") is None:
                raise ValueError("labels are missing: give one for each token, -100 where nothing is predicted")
            mask = sample.pop("attention_mask", None)
            if mask is not None and not torch.as_tensor(mask).all():
                raise ValueError("attention_mask hides tokens: leave padding out of the sample")
            sample |= {name: sample[name].tolist() for name in _LISTS if hasattr(sample.get(name), "tolist")}
            for name in OF_MEDIA.intersection(sample):
                with suppress(TypeError, ValueError, RuntimeError):  # pictures of several sizes stay a list
                    sample[name] = torch.as_tensor(sample[name])
        masked: Encoded = self._masked(sample)
        return masked

    def _encoded(self, row: Row) -> Any:
        if is_encoded(row):
            return self.handed_through(row)
        # Rows of text are many, and name no file to check.
        if next(media(row), None) is None:
            return self._masked(self.template.encode(row, return_length=True))
        check_openable(row)
        return self.encode(row, return_length=True)

    def _watched(self, row: Row) -> Any:
        # Rows without media are many and read no file, so they need no thread.
        if next(media(row), None) is None:
            return self._encoded(row)
        with suppress(ReadStuck):
            return watched(lambda: self._encoded(row))
        # Once more, because a mount that is gone for a minute is no reason to lose a row.
        try:
            made = watched(lambda: self._encoded(row))
        except ReadStuck as error:
            raise ReadTimeout(str(error)) from None
        restore_limit()
        return made


def sample_or_error(encode: Callable[..., Encoded], *args: Any) -> Encoded | SampleError:
    """Return the sample that `encode` makes, or the `SampleError` that it raises."""
    try:
        return encode(*args)
    except SampleError as error:
        return error
