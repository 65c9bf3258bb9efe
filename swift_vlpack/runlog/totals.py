"""What a run has trained, in all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swift_vlpack.errors import StateMismatch
from swift_vlpack.runlog.files import Checkpoint
from swift_vlpack.runlog.legs import Leg
from swift_vlpack.runlog.step_counts import share
from swift_vlpack.runlog.telemetry import Telemetry


@dataclass(slots=True)
class Totals:
    """Counts over all ranks; None is what nothing says."""

    num_steps: int | None = None
    num_packs: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_images: int = 0
    num_single_long: int = 0
    num_padding: int = 0
    num_pack_tokens: int = 0
    room: int = 0
    """Tokens that the packs which count for the fill could hold."""
    num_vision_tokens: int | None = None
    num_tokens_unpacked: int | None = None
    seconds: float = 0.0
    sources: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Samples and tokens."""

    def add_source(self, name: str, num_samples: int, num_tokens: int) -> None:
        """Add what was trained of a source."""
        before = self.sources.get(name, (0, 0))
        self.sources[name] = before[0] + num_samples, before[1] + num_tokens

    def as_json(self) -> dict[str, Any]:
        """With what follows from the counts."""
        vision = self.num_vision_tokens
        return {
            "num_steps": self.num_steps,
            "num_packs": self.num_packs,
            "num_samples": self.num_samples,
            "num_tokens": self.num_tokens,
            "num_images": self.num_images,
            "num_padding": self.num_padding,
            "num_vision_tokens": vision,
            "vision_share": None if vision is None else round(share(vision, self.num_tokens), 4),
            "fill_mean": round(share(self.num_pack_tokens, self.room), 4),
            "samples_per_pack": round(share(self.num_samples, self.num_packs), 2),
            "num_single_long": self.num_single_long,
            "seconds": round(self.seconds, 1) or None,
            "tokens_per_second": round(self.num_tokens / self.seconds, 1) if self.seconds else None,
            "samples_per_second": round(self.num_samples / self.seconds, 3) if self.seconds else None,
        }


_OF_EPOCHS = ("num_packs", "num_samples", "num_tokens", "num_images", "num_single_long", "num_padding")
_OF_STEPS = (
    *(*_OF_EPOCHS, "num_pack_tokens"),
    *("num_steps", "num_vision_tokens", "seconds"),
)


def of_legs(legs: Sequence[Leg], epoch: int | None = None) -> Totals:
    """The sum of the notes that count, of an epoch or of all."""
    totals = Totals(num_steps=0, num_vision_tokens=0)
    num_tokens_unpacked = 0
    for leg in legs:
        for event in (one for one in leg.steps if epoch in (None, one["epoch"])):
            for name in _OF_STEPS:
                setattr(totals, name, getattr(totals, name) + event[name])
            num_tokens_unpacked += leg.num_tokens_unpacked(event)
            totals.room += (event["num_packs"] - event["num_single_long"]) * leg.facts["packing_length"]
            for name, counts in event["sources"].items():
                totals.add_source(name, counts["num_samples"], counts["num_tokens"])
    totals.num_tokens_unpacked = num_tokens_unpacked
    return totals


def of_epochs(reports: Mapping[int, Mapping[str, Any]], checkpoints: Sequence[Checkpoint]) -> Totals:
    """The sum of the epoch reports, and of the newest checkpoint's counts where its epoch has none."""
    newest = [one.state for one in checkpoints if one.state is not None and one.state["epoch"] not in reports][-1:]
    totals = Totals()
    for counted in (*reports.values(), *map(as_counted, newest)):
        for name in _OF_EPOCHS:
            setattr(totals, name, getattr(totals, name) + counted.get(name, 0))
        # Reports have the mean; per pack it is as good as the tokens.
        num_filled = counted["num_packs"] - counted["num_single_long"]
        totals.room += num_filled
        totals.num_pack_tokens += counted["fill_mean"] * num_filled
        for name, source in counted["sources"].items():
            totals.add_source(name, source["num_packed"], source["num_tokens"])
    return totals


def as_counted(state: Mapping[str, Any] | None) -> dict[str, Any]:
    """The counts of a checkpoint's state, as an epoch report has them; what is to come is not read yet."""
    assert state is not None
    try:
        counts = Telemetry.from_state(state["counted"])
    except StateMismatch:  # of another version
        counts = Telemetry(packing_length=1)
    counts.read_what_came()
    return counts.as_json(epoch=state["epoch"])
