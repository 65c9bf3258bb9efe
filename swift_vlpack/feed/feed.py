"""Define the feed: the interface through which a trainer reads its data, in every mode.

    begin(epoch) -> loader(...) -> consumed(records) ... state() -> checkpoint -> restore(state)

`PlannedFeed` and `StreamedFeed` implement it; the trainer does not know which of the two it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from swift_vlpack.config import PackingConfig
from swift_vlpack.feed.agreement import Voting
from swift_vlpack.feed.collate import Batch
from swift_vlpack.feed.run_rows import RunRows
from swift_vlpack.rows.samples import LeftOut, PackRecord
from swift_vlpack.runlog.counts import Counts

MakeLoader = Callable[..., Any]
"""Makes a dataloader. Also takes `feed`, and passes every batch through `feed.batches`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochStart:
    """Facts about an epoch that are known when it begins."""

    must_agree: Mapping[str, Any] = field(default_factory=dict)
    """Values that must be equal on all ranks, by name."""
    left_out: Sequence[LeftOut] = ()
    """Rows that are in no pack."""
    warning: str | None = None


class Feed(Protocol):
    """The packs of one rank, epoch after epoch."""

    kind: str
    """Name of the kind of feed; a saved state carries it and can only be restored by the same kind."""
    leads_back: bool
    """True if the packs of past steps can be computed again, so that no log of them has to be written."""
    config: PackingConfig
    dataset: Any
    """Source of the rows: a `FusionCaptionDataset` or `StreamedRows`."""
    seed: int
    num_ranks: int
    unpacked_batch_size: int
    """Samples in a batch without packing; the padding that packing saved is counted against such batches."""
    objective: dict[str, Any]
    """Settings of the training objective that are neither rows nor packing options; part of the fingerprint."""
    rows: RunRows
    """The rows in the form that checkpoints save."""

    @property
    def epoch(self) -> int:
        """Return the number of the epoch that was begun or resumed."""

    @property
    def is_finished(self) -> bool:
        """Return whether the epoch has no packs left to train on."""

    def fingerprint(self) -> dict[str, Any]:
        """Return everything that determines the packs of all epochs, large parts as digests."""

    def begin(self, epoch: int) -> EpochStart:
        """Begin an epoch; an epoch that was resumed continues where it was."""

    def batches_behind(self, accumulation: int) -> int:
        """Return how many batches of the epoch the trainer should count as trained, in whole optimizer steps."""

    @property
    def batches_left(self) -> int | None:
        """Return how many batches each rank has to train on in the epoch; None if the feed cannot know."""

    def loader(self, rank: int, make: MakeLoader, *, ranks: Callable[[], Voting], **options: Any) -> Any:
        """Make the dataloader of a rank, for all epochs. `ranks` makes the group that votes, if ranks have to."""

    def batches(self, loaded: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches to train on, from the loaded ones."""

    def fill_up(self, num_missing: int) -> list[Batch]:
        """Return batches without loss to complete the last step of an epoch; none if the feed needs no filling."""

    def consumed(self, records: Sequence[PackRecord]) -> None:
        """Note that these packs were trained: their optimizer step was taken."""

    def left_out_behind(self) -> list[LeftOut]:
        """Return samples left out after the epoch's last pack, and forget them: no pack's record can carry them."""

    def count_rows(self, counted: Counts) -> None:
        """Count the rows of the epoch, and those left out that no pack reports.

        Called at the end of an epoch, once for all ranks.
        """

    def end(self, counted: Counts) -> str | None:
        """Check the counts of an epoch that has ended. Returns a warning; raises `DataError` if nothing was packed."""

    def state(self) -> dict[str, Any]:
        """Return the progress that all ranks share, as JSON."""

    def rank_state(self) -> dict[str, Any] | None:
        """Return the progress of this rank alone, as JSON; None if `state` says it all."""

    def restore(self, state: Mapping[str, Any], rank_state: Mapping[str, Any] | None) -> None:
        """Resume after the last pack that was trained when the states were saved."""
