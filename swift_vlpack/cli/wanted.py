"""What `vlpack inspect` is asked for, and what there is to show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from swift_vlpack.pages.shown_choice import Wish
from swift_vlpack.pages.values import Member, PackShown, StepShown


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """As the command line says it."""

    wish: Wish = field(default_factory=Wish)
    epoch: int | None = None
    step: int | None = None
    loss_spikes: int | None = None
    examples: int | None = None
    folder: Path | None = None
    """The output directory of a run that was trained."""
    html: Path | None = None
    html_mb: float = 20.0

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Wanted:
        """From the settings of the command, which are JSON."""
        wish = Wish(**{spec.name: settings[spec.name] for spec in fields(Wish) if spec.name in settings})
        given = {spec.name: settings[spec.name] for spec in fields(cls) if spec.name in settings}
        paths = {name: Path(given[name]) for name in ("folder", "html") if given.get(name) is not None}
        return cls(**{**given, **paths, "wish": wish})

    @property
    def is_of_steps(self) -> bool:
        """Whether it is about optimizer steps."""
        return self.step is not None or self.loss_spikes is not None


@dataclass(kw_only=True)
class Found:
    """What there is to show."""

    overview: Mapping[str, Any] | None = None
    steps: Sequence[StepShown] = ()
    packs: Iterable[PackShown] = ()
    num_packs: int | None = None
    """How many `packs` there are; None where nobody knows before they are read."""
    examples: Iterable[Member] = ()
