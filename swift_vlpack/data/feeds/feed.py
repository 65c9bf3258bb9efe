"""The feed: all that a trainer asks of its data, whatever the mode.

    begin(epoch) -> loader(...) -> consumed(records) ... state() -> checkpoint -> restore(state)

`PlannedFeed` and `StreamedFeed` are the two there are; the trainer knows neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from swift_vlpack.core.account.telemetry import Telemetry
from swift_vlpack.core.config import PackingConfig
from swift_vlpack.data.feeds.agreement import Voting
from swift_vlpack.data.feeds.run_rows import RunRows
from swift_vlpack.data.model.collate import Batch
from swift_vlpack.data.rows.samples import LeftOut, PackRecord

MakeLoader = Callable[..., Any]
"""A dataloader's class, which also takes `feed` and hands every batch through `feed.batches`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochStart:
    """What is known of an epoch when it begins."""

    must_agree: Mapping[str, Any] = field(default_factory=dict)
    """That all ranks must have alike."""
    left_out: Sequence[LeftOut] = ()
    """Rows that are in no pack."""
    warning: str | None = None


def count_left_out(counted: Telemetry, left_out: LeftOut) -> None:
    """Count a sample that is in no pack, and what was in it where it is a part that cutting left out."""
    key = left_out.sample_id
    counted.dropped(key.source, left_out.reason, is_further=key.is_further_part)
    counted.lost(left_out.reason, num_tokens=left_out.num_tokens, num_images=left_out.num_images)


class Feed(Protocol):
    """The packs of one rank, epoch after epoch."""

    kind: str
    """Of its saved states."""
    leads_back: bool
    """Whether packs that were trained can be computed again, so that no record of them is needed."""
    config: PackingConfig
    dataset: Any
    """Where the rows are: a `FusionCaptionDataset` or `StreamedRows`."""
    seed: int
    num_ranks: int
    unpacked_batch_size: int
    """Samples of a padded batch that packing is compared with."""
    objective: dict[str, Any]
    """What the run trains, as far as rows and packing options do not say it; checkpoints keep it."""
    rows: RunRows
    """The rows as checkpoints remember them."""

    @property
    def epoch(self) -> int:
        """The epoch that was begun or resumed."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left of it."""

    def fingerprint(self) -> dict[str, Any]:
        """Everything that the packs of all epochs follow from, large parts as digests."""

    def begin(self, epoch: int) -> EpochStart:
        """Come to an epoch; the one that was resumed goes on where it was."""

    def batches_behind(self, accumulation: int) -> int:
        """Batches of the epoch that a trainer of whole steps shall believe to have trained."""

    @property
    def batches_left(self) -> int | None:
        """Batches that each rank trains on in the epoch; None where nobody knows."""

    def loader(self, rank: int, make: MakeLoader, *, ranks: Callable[[], Voting], **options: Any) -> Any:
        """The loader of a rank, for all epochs; `ranks` makes those that have to keep in step, where they have to."""

    def batches(self, loaded: Iterator[Batch]) -> Iterator[Batch]:
        """The batches to train on, out of those that were loaded."""

    def fill_up(self, num_missing: int) -> list[Batch]:
        """Rows without loss that complete the last step of an epoch, where one may be incomplete."""

    def consumed(self, records: Sequence[PackRecord]) -> None:
        """These packs have been trained: their optimizer step was taken."""

    def left_out_behind(self) -> list[LeftOut]:
        """What was left out behind the last pack of the epoch, once."""

    def count_rows(self, counted: Telemetry) -> None:
        """Add, at the end of an epoch and once for all ranks, the rows that it had, and what no pack could tell."""

    def end(self, counted: Telemetry) -> str | None:
        """Judge the account of an epoch that has ended: a warning, or an error where nothing could be packed."""

    def state(self) -> dict[str, Any]:
        """Where all ranks are, as JSON."""

    def rank_state(self) -> dict[str, Any] | None:
        """Where this rank is beside that, as JSON; None where all ranks are at the same place."""

    def restore(self, state: Mapping[str, Any], rank_state: Mapping[str, Any] | None) -> None:
        """Go on behind the last pack that was trained when the states were saved."""
