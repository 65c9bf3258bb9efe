"""Packs as training would get them: encoded by its reader, collated by its collator, then made readable."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from swift.model import get_model_processor
from torch.utils.data import DataLoader

from swift_vlpack.feed.feed import Feed
from swift_vlpack.feed.planned import address_of
from swift_vlpack.feed.planned_feed import PlannedFeed
from swift_vlpack.host.loader import collator_of
from swift_vlpack.pages.shown_packs import Place, Reading, member_of, shown
from swift_vlpack.pages.values import Member, PackShown
from swift_vlpack.plan.epoch import EpochPlan
from swift_vlpack.rows.families import MediaTokens, placeholder_ids
from swift_vlpack.rows.samples import Address, Encoded, SampleId
from swift_vlpack.rows.source import RowSource, place

EVERY_ANSWER = "default"
"""ms-swift's loss_scale that trains every answer, whole."""


class PlannedPacks:
    """The packs of a planned run; each is encoded when it is asked for."""

    def __init__(self, run: Any, feed: PlannedFeed, *, with_thumbnails: bool = False) -> None:
        self.feed = feed
        self._template = with_shape(run.template)
        self._collator = collator_of(run.args, run.template, feed.seed)
        self._every_answer = [_every_answer(encoder.template) for encoder in feed.dataset.encoders]
        self._with_thumbnails = with_thumbnails

    def shown(self, plan: EpochPlan, number: int, where: Place) -> PackShown:
        """A pack of an epoch."""
        address = address_of(plan, number)
        batch = self._collator([self.feed.packs[address]])
        return shown(batch, where, self._reading(address.samples), self.feed.config.packing_length)

    def example(self, address: Address) -> Member:
        """A sample by itself."""
        sample = self.feed.dataset.encode(address)
        return member_of(sample["sample_id"], sample["input_ids"], sample["labels"], self._reading([address]))

    def where(self, sample_id: SampleId) -> str:
        """File and line of a sample."""
        return where_in(self.feed.dataset.sources, sample_id)

    def _reading(self, addresses: Iterable[Address]) -> Reading:
        samples = {self.feed.dataset.sample_id(one): one for one in addresses}
        return Reading(
            decode=decoder_of(self._template),
            placeholders=placeholders_of(self._template),
            row_of=lambda sample_id: self._row(samples[sample_id]),
            answer_of=lambda sample_id: self._answer(samples[sample_id]),
            where_of=self.where,
            with_thumbnails=self._with_thumbnails,
        )

    def _row(self, address: Address) -> Mapping[str, Any]:
        return self.feed.dataset.sources[address.source].row(address.row_index)

    def _answer(self, address: Address) -> Sequence[int] | None:
        row = dict(self._row(address))
        messages = row.get("messages") or ()
        row["messages"] = [{name: value for name, value in message.items() if name != "loss"} for message in messages]
        try:
            made = self._every_answer[address.source].encode(row)
        except Exception:  # whatever it is that training encodes and this does not, only the marks are lost
            return None
        labels: Sequence[int] | None = made.get("labels") if isinstance(made, dict) else None
        span = address.span
        return labels if span is None or labels is None else labels[span.start : span.stop]


class StreamedPacks:
    """The first packs of the first rank, whose readers are those of training."""

    def __init__(self, run: Any, feed: Feed) -> None:
        self.feed = feed
        self._run = run
        with_shape(run.template)
        self._reading = Reading(
            decode=decoder_of(run.template),
            placeholders=placeholders_of(run.template),
            row_of=lambda sample_id: None,
            answer_of=lambda sample_id: None,
            where_of=lambda sample_id: where_in(feed.sources, sample_id),
        )

    def shown(self, most: int) -> Iterator[PackShown]:
        """So many packs from the beginning."""
        args = self._run.args.training_args
        packs_of_rank: Any = self.feed.packs
        loader: Iterable[Any] = DataLoader(
            packs_of_rank,
            batch_size=1,
            collate_fn=collator_of(self._run.args, self._run.template, self.feed.seed),
            # One worker reads what no worker reads: the whole share of the rank.
            num_workers=args.dataloader_num_workers if args.dataloader_num_workers > 1 else 0,
        )
        packs = (batch for batch in loader if batch.record.sample_ids)
        for number, batch in enumerate(islice(packs, most)):
            place = Place(step=1 + number // args.gradient_accumulation_steps)
            yield shown(batch, place, self._reading, self.feed.config.packing_length)

    def example(self, sample: Encoded) -> Member:
        """A sample by itself."""
        return member_of(sample["sample_id"], sample["input_ids"], sample["labels"], self._reading)


def with_shape(template: Any) -> Any:
    """The template with a model that has no weights, which some ask how positions are counted.

    ms-swift would make one by itself, but by guessing the kind of model again, which it cannot for every folder.
    """
    if template.model_meta.is_multimodal and template.model is None and template.dummy_model is None:
        info = template.model_info
        # A model that cannot be made is no matter unless it is asked; then ms-swift says what is wrong.
        with suppress(Exception), torch.device("meta"):
            made = get_model_processor(info.model_dir, model_type=info.model_type, return_dummy_model=True)
            template.dummy_model = made[0]
    return template


def decoder_of(template: Any) -> Callable[[list[int]], str]:
    """Tokens as the template's tokenizer writes them, special ones too."""
    return lambda ids: str(template.tokenizer.decode(ids, skip_special_tokens=False))


def where_in(sources: Sequence[RowSource], sample_id: SampleId) -> str:
    """File and line of a sample; of a stream its place there."""
    origin = next((source.origin or source.name for source in sources if source.name == sample_id.source), None)
    if origin is None:
        return f"row {sample_id.row + 1} of the stream"
    return place(origin, sample_id.row, is_loaded=sample_id.is_loaded)


def placeholders_of(template: Any) -> frozenset[int]:
    """Tokens that stand for what the vision tower gives."""
    return frozenset((*placeholder_ids(template), *MediaTokens.of(template).placeholders.values()))


def _every_answer(template: Any) -> Any:
    """A template that trains every answer, so that what is masked of one can be told from a prompt."""
    own = copy.copy(template)
    own._loss_scale, own._loss_scale_cache = EVERY_ANSWER, {}
    return own
