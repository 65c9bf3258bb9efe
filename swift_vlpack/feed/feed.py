"""Define `Feed`, the interface between the data of a run and the trainer, the proof and the commands.

    begin(epoch) -> loader(...) -> consumed(records) ... state() -> checkpoint -> restore(state)

`PlannedFeed` (planned_feed.py) trains packs that are planned ahead of time, `StreamedFeed` (streamed_feed.py) trains
packs that are made as rows come. `build_feed` (host/pipeline.py) chooses one; the trainer never asks which one it has.

>>> from swift_vlpack import PackingConfig, PackingDataset
>>> from swift_vlpack.feed.planned_feed import PlannedFeed
>>> class Template:  # stands for one of ms-swift's
...     def encode(self, row, return_length=False):
...         return {"input_ids": row["ids"], "labels": row["ids"]}
>>> rows = [{"ids": [1] * num_tokens} for num_tokens in (5, 4, 7, 6, 3, 5)]
>>> packs = PackingDataset(rows, Template(), PackingConfig(packing_length=10, packing_strategy="exact"), num_epochs=2)
>>> sorted(sorted(sample["length"] for sample in packs[number]) for number in range(len(packs)))
[[3, 7], [4, 6], [5, 5]]
>>> feed = PlannedFeed(packs)
>>> feed.begin(0).left_out, feed.batches_left
([], 3)
>>> first = [packs[0].record, packs[1].record]
>>> feed.consumed(first)  # their optimizer step was taken
>>> feed.state()["cuts"]
(Cut(num_ranks=1, num_packs=3, num_consumed=2),)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from swift_vlpack.feed.agreement import Voting
from swift_vlpack.feed.collate import Batch
from swift_vlpack.feed.packs import Packs
from swift_vlpack.feed.saved_rows import RunRows
from swift_vlpack.plan.epoch import EpochPlan
from swift_vlpack.plan.same_steps import UnpackedStep
from swift_vlpack.rows.samples import Encoded, LeftOut, PackedSamples, PackRecord, SampleError
from swift_vlpack.rows.source import RowSource
from swift_vlpack.runlog.counts import Counts

Collate = Callable[[Sequence[PackedSamples]], Batch]
MakeLoader = Callable[..., Any]
"""A function that makes a dataloader. It also gets `feed`, and its loader yields `feed.batches(loaded batches)`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochStart:
    """Facts about an epoch that are known when it begins."""

    must_agree: Mapping[str, Any] = field(default_factory=dict)
    """Values that must be equal on all ranks, by name."""
    left_out: Sequence[LeftOut] = ()
    """Rows that are in no pack."""
    warning: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Numbers for the run log."""


class CannotReadAgain(Exception):
    """The samples of a pack cannot be encoded a second time. The message says why."""


class Feed(ABC):
    """The packs of one rank, epoch after epoch, and which of them were trained."""

    kind: ClassVar[str]
    """Name of the kind of feed. A saved state has this name, and only the same kind can restore it."""
    is_decoded_ahead = False
    """True if un-packed training, whose steps are kept, decodes all images before it draws."""

    def __init__(self, packs: Packs, *, unpacked_batch_size: int = 1) -> None:
        """Feed from these packs."""
        self.packs = packs
        self.config, self.seed, self.num_ranks = packs.config, packs.seed, packs.num_ranks
        self.settings: Mapping[str, Any] = {}
        """Settings by which rows are encoded, by dotted name: of the template, its tokenizer and its processor."""
        self.unpacked_batch_size = unpacked_batch_size
        """Samples in a batch without packing, with which the padding that packing saves is compared."""

    # -- data -------------------------------------------------------------------------------------------------------

    @property
    def dataset(self) -> Any:
        """Return the rows: a `FusionCaptionDataset` or `StreamedRows`."""
        return self.packs.dataset

    @property
    def sources(self) -> tuple[RowSource, ...]:
        """Return the sources of the rows; none of a stream."""
        return self.packs.sources

    @property
    def epoch(self) -> int:
        """Return the number of the epoch that was begun or resumed."""
        return self.packs.epoch

    @property
    def epoch_plan(self) -> EpochPlan | None:
        """Return the plan of the epoch that was begun or resumed; None if packs are made as rows come."""
        return self.packs.epoch_plan

    def plan_of(self, epoch: int) -> EpochPlan | None:
        """Plan an epoch, and leave the current one as it is; None if the feed plans nothing."""
        return None

    def preview(self, num_samples: int) -> Iterator[Encoded]:
        """Yield the first samples that will be trained, encoded when they are asked for; skip rows that fail."""
        return self.packs.preview(num_samples)

    @abstractmethod
    def batches_of(
        self, numbers: Sequence[int], collate: Collate, *, plan: EpochPlan | None = None, num_workers: int = 0
    ) -> Iterator[Batch]:
        """Read packs to look at, by their numbers in ascending order. Nothing counts as trained.

        Numbers are those of `plan`. Without a plan, streamed packs are read from the beginning, as `num_workers`
        workers of rank 0 make them; there may be fewer than asked for.
        """

    @abstractmethod
    def samples_again(self, record: PackRecord, *, rank: int, num_workers: int) -> Iterator[Encoded | SampleError]:
        """Encode the samples of a pack of this epoch a second time, in this process and with the same random draws.

        Yields them in any order. Raises `CannotReadAgain` if that is not possible.
        """

    @cached_property
    def saved_rows(self) -> RunRows:
        """Return the rows in the form that checkpoints save. Made on first use, because many commands need none."""
        return RunRows(self.sources)

    # -- epochs -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, epoch: int) -> EpochStart:
        """Begin an epoch. A resumed epoch continues after its last trained pack."""

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """Tell whether the epoch has no packs left to train."""

    @abstractmethod
    def batches_trained(self, accumulation: int) -> int:
        """Return how many batches of the epoch the trainer should count as trained, in whole optimizer steps."""

    @property
    @abstractmethod
    def batches_left(self) -> int | None:
        """Return how many batches each rank has left to train in the epoch; None if the feed cannot know."""

    # -- batches ----------------------------------------------------------------------------------------------------

    @property
    def kept_step(self) -> UnpackedStep | None:
        """Return the optimizer step whose samples are kept; None if the packs decide what a step trains."""
        return None

    def sequences_of_steps(self) -> Iterator[int]:
        """Yield the number of sequences that a rank trains in each step, if steps keep their samples; else nothing."""
        return iter(())

    @abstractmethod
    def loader(self, rank: int, make: MakeLoader, *, ranks: Callable[[], Voting], **options: Any) -> Any:
        """Make the dataloader of a rank, for all epochs. `ranks` makes the group for votes, if the feed needs votes."""

    def batches(self, loaded: Iterator[Batch]) -> Iterator[Batch]:
        """Turn the loaded batches into the batches to train."""
        return loaded

    def fill_up(self, num_missing: int) -> list[Batch]:
        """Return batches without loss to complete the last step of an epoch; none if the feed needs no filling."""
        return []

    @abstractmethod
    def consumed(self, records: Sequence[PackRecord]) -> None:
        """Count these packs as trained: their optimizer step was taken."""

    # -- the account of an epoch ------------------------------------------------------------------------------------

    def left_out_after(self) -> list[LeftOut]:
        """Return and forget the samples that were left out after the epoch's last pack, which no record can have."""
        return []

    @abstractmethod
    def count_rows(self, counted: Counts) -> None:
        """Count the rows of the epoch, and left-out rows that no pack's record has.

        The trainer calls it at the end of an epoch, with the counts of all ranks.
        """

    def end(self, counted: Counts) -> str | None:
        """Check the counts of an epoch that has ended. Returns a warning or None. Raises `DataError` without a pack."""
        return None

    # -- the state in a checkpoint ----------------------------------------------------------------------------------

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Return everything that determines the packs of all epochs, large parts as digests."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the progress that all ranks share, as JSON."""

    def rank_state(self) -> dict[str, Any] | None:
        """Return the progress of this rank alone, as JSON; None if `state` has everything."""
        return None

    @abstractmethod
    def restore(self, state: Mapping[str, Any], rank_state: Mapping[str, Any] | None) -> None:
        """Resume after the last pack that had been trained when the states were saved."""
