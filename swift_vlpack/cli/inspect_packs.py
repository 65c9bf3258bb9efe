"""Choose packs of a run, read them as training does, and make them readable.

`packs_of_sample` finds the packs that have a row, `PackViewer` shows packs. They come from the run's own feed and
collator, so the tensors are those that training gets.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.cli.trained_steps import place_of
from swift_vlpack.errors import ConfigError
from swift_vlpack.feed.epoch_report import left_out_by
from swift_vlpack.feed.feed import Feed
from swift_vlpack.feed.planned import address_of
from swift_vlpack.host.loader import collator_of
from swift_vlpack.host.run import Run, with_model_shape
from swift_vlpack.pages.make_values import Place, SampleLookup, pack_shown
from swift_vlpack.pages.values import PackShown
from swift_vlpack.plan.epoch import EpochPlan
from swift_vlpack.rows.families import MediaTokens, placeholder_ids
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.samples import Address
from swift_vlpack.words import counted

EVERY_ANSWER = "default"
"""ms-swift's loss_scale that trains every answer, whole."""


def packs_of_sample(plan: EpochPlan, dataset: FusionCaptionDataset, name: str) -> list[int]:
    """Return the packs that hold the row `source:row`. Raises `ConfigError` if no pack of the epoch holds it."""
    positions = _positions_of(plan, dataset, name)
    places = np.flatnonzero(np.isin(plan.packs.members, positions))
    packs: list[int] = np.unique(np.searchsorted(plan.packs.offsets, places, side="right") - 1).tolist()
    if packs:
        return packs
    left_out = [one for one in left_out_by(plan, dataset) if str(one.sample_id) == name]
    reasons = "; ".join(f"{one.reason}{f': {one.detail}' if one.detail else ''}" for one in left_out)
    raise ConfigError(f"--sample {name}: in no pack of epoch {plan.epoch}: {reasons or 'the epoch did not draw it'}")


def _positions_of(plan: EpochPlan, dataset: FusionCaptionDataset, name: str) -> NDArray[np.intp]:
    """Return the positions of a row, or of its parts, in the schedule of the epoch."""
    source, _, _ = name.rpartition(":")
    names = [one.name for one in dataset.sources]
    if source not in names:
        raise ConfigError(
            f"--sample {name}: no source is called {source or name!r}; there are {', '.join(names)}, and a sample is "
            f"named as {names[0]}:0"
        )
    number = names.index(source)
    rows = range(len(dataset.sources[number].rows))
    # A row is named by its number in the file, and the loader may have shuffled the rows.
    index = next((at for at in rows if str(dataset.sample_id(Address(number, at))) == name), None)
    if index is None:
        raise ConfigError(
            f"--sample {name}: {source} has {counted(len(rows), 'row')} to train on, and none of this number; those "
            "held out for validation or deleted by the loader are not among them"
        )
    return np.flatnonzero((plan.schedule.source == number) & (plan.schedule.row == index))


class PackViewer:
    """Show packs of a run. Each is read and encoded only when it is shown."""

    def __init__(self, run: Run, feed: Feed, *, with_thumbnails: bool = False) -> None:
        self.feed = feed
        self._args = run.args
        self._template = with_model_shape(run.template)
        self._with_thumbnails = with_thumbnails
        self._answering = cache(lambda source: _training_every_answer(feed.dataset.encoders[source].template))

    def packs(
        self, numbers: Sequence[int], place_of: Callable[[int], Place], plan: EpochPlan | None = None
    ) -> Iterator[PackShown]:
        """Show packs of a plan by number. Without a plan, count the packs that rank 0 makes from the beginning."""
        collator = collator_of(self._args, self._template, self.feed.seed)
        num_workers = self._args.training_args.dataloader_num_workers
        batches = self.feed.batches_of(numbers, collator, plan=plan, num_workers=num_workers)
        for number, batch in zip(numbers, batches, strict=False):  # there may be fewer than asked for
            lookup = self._lookup(() if plan is None else address_of(plan, number).samples)
            yield pack_shown(batch, place_of(number), lookup, self.feed.config.packing_length)

    @cached_property
    def _origins(self) -> dict[str, str]:
        return {source.name: source.origin or source.name for source in self.feed.sources}

    def _lookup(self, addresses: Iterable[Address]) -> SampleLookup:
        """Make a lookup. Only samples at these addresses have a row and an answer: a stream cannot be read again."""
        at = {self.feed.dataset.sample_id(address): address for address in addresses}
        return SampleLookup(
            decode=lambda ids: str(self._template.tokenizer.decode(ids, skip_special_tokens=False)),
            placeholders=self._placeholders,
            row_of=lambda sample_id: self._row(at[sample_id]) if sample_id in at else None,
            answer_of=lambda sample_id: self._answer(at[sample_id]) if sample_id in at else None,
            where_of=lambda sample_id: place_of(str(sample_id), self._origins),
            with_thumbnails=self._with_thumbnails,
        )

    @cached_property
    def _placeholders(self) -> frozenset[int]:
        """Return the ids of the tokens that the vision tower's features replace."""
        template = self._template
        return frozenset((*placeholder_ids(template), *MediaTokens.of(template).placeholders.values()))

    def _row(self, address: Address) -> Mapping[str, Any]:
        return self.feed.sources[address.source].row(address.row_index)

    def _answer(self, address: Address) -> Sequence[int] | None:
        """Return the labels that a sample would have if every answer of its row were trained; None if unknown."""
        row = dict(self._row(address))
        messages = row.get("messages") or ()
        row["messages"] = [{name: value for name, value in message.items() if name != "loss"} for message in messages]
        try:
            made = self._answering(address.source).encode(row)
        except Exception:  # without these labels, masked tokens are shown as prompt; the rest is unaffected
            return None
        labels: Sequence[int] | None = made.get("labels") if isinstance(made, dict) else None
        span = address.span
        return labels if span is None or labels is None else labels[span.start : span.stop]


def _training_every_answer(template: Any) -> Any:
    """Copy a template and let the copy train every answer, so that masked answers can be told from prompts."""
    own = copy.copy(template)
    own._loss_scale, own._loss_scale_cache = EVERY_ANSWER, {}
    return own
