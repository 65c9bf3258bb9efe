"""Plan the epochs of a run, all with the same number of packs, each while the epoch before trains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import Any

from numpy.typing import NDArray
from tqdm import tqdm

from swift_vlpack.errors import PlanError
from swift_vlpack.plan.cuts import Cut
from swift_vlpack.plan.epoch import (
    EpochPlan,
    NameOfRow,
    PackedEpoch,
    Recipe,
    draw_epoch,
    of_drawn,
    pack_epoch,
    plan_epoch,
)
from swift_vlpack.plan.packs import Plan

NUM_ROWS_SHOWN = 500_000
"""Number of rows from which planning takes long enough for a progress bar."""
NUM_EPOCHS_LOOKED_AT = 8
"""Most epochs that are planned ahead to find the longest, if steps bound the run. Later epochs may never come, and one
that needs more packs simply has more."""
MOST_BYTES_KEPT = 1 << 27
"""Most bytes of packs to keep from planning ahead: 30 epochs of a million samples."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The bound of a run: a number of epochs, or, if steps bound it, the packs that these steps take."""

    num_epochs: int = 1
    num_packs: int | None = None
    """Packs that all ranks train in the whole run; None if epochs bound it."""

    def needs(self, epoch: int, most_packs: int) -> bool:
        """Tell whether to plan this epoch ahead: the run may reach it if no epoch before has more than `most_packs`."""
        if self.num_packs is None:
            return epoch < max(1, self.num_epochs)
        return epoch == 0 or (epoch < NUM_EPOCHS_LOOKED_AT and epoch * most_packs < self.num_packs)

    def has(self, epoch: int) -> bool:
        """Tell whether the run has this epoch. True if steps bound the run: its last epoch is not known."""
        return self.num_packs is not None or epoch < self.num_epochs


ONE_EPOCH = Extent()


class Epochs:
    """Plan each epoch of a run once, and the next epoch in a thread while one trains.

    A thread and not a process plans ahead: the trainer reads its arrays without a copy, it spends much of its time in
    numpy, outside of Python's lock, and a process would have to import or inherit everything first.
    """

    def __init__(self, recipe: Recipe, extent: Extent = ONE_EPOCH, name_of: NameOfRow | None = None) -> None:
        """Pack the epochs of the run ahead, so that all of them get as many packs as the one that needs most."""
        self.recipe = recipe
        self.extent = extent
        self._name_of = name_of
        self._kept = KeptPacks(recipe)
        # Hold two whole epochs: the one that was asked for last, and the next.
        self._present: PackedEpoch | None = None
        self._ahead: tuple[int, Future[PackedEpoch]] | None = None
        num_rows = sum(sizes.shape[1] for sizes in recipe.sizes)
        with tqdm(
            desc="Planning epochs", dynamic_ncols=True, disable=num_rows * extent.num_epochs < NUM_ROWS_SHOWN
        ) as bar:
            self.num_packs = self._least_packs(bar.update)
            """Packs of an epoch, over all ranks. An epoch that is resumed, or needs more packs, has another number."""

    def plan(self, epoch: int, cuts: Sequence[Cut] = ()) -> EpochPlan:
        """Plan an epoch, or wait for the thread that is planning it. Raises the errors of that thread."""
        return plan_epoch(self.recipe, epoch, cuts, least_packs=self.num_packs, packed=self.packed(epoch))

    def packed(self, epoch: int) -> PackedEpoch:
        """Return the packs of an epoch before they are shared among ranks."""
        if self._present is None or self._present.epoch != epoch:
            if self._ahead is not None and self._ahead[0] == epoch:
                self._present = self._ahead[1].result()
                self._ahead = None
            else:
                self._present = self._made(epoch)
        return self._present

    def make_ahead(self, epoch: int) -> None:
        """Start a thread that packs an epoch which will be asked for later, if the run has it."""
        if not self.extent.has(epoch) or (self._ahead is not None and self._ahead[0] == epoch):
            return
        future: Future[PackedEpoch] = Future()
        self._ahead = epoch, future
        # Make it a daemon thread: a run that ends meanwhile must not wait for an epoch that it does not train.
        threading.Thread(target=_fill, args=(future, self._made, epoch), daemon=True).start()

    def _made(self, epoch: int) -> PackedEpoch:
        """Return an epoch from its kept packs; if it has none, pack it."""
        return self._kept.epoch(epoch) or pack_epoch(self.recipe, epoch, self._name_of)

    def _least_packs(self, looked: Callable[[], Any]) -> int:
        """Pack the epochs of the run, and return the packs that the longest one needs."""
        epoch = most_packs = 0
        num_ranks, num_samples = self.recipe.num_ranks, []
        extent = ONE_EPOCH if self.recipe.step is not None else self.extent  # epochs that keep steps have equally many
        while extent.needs(epoch, most_packs):
            packed = self._look_at(epoch)
            looked()
            # Round up, because every rank trains equally many packs.
            most_packs = max(most_packs, -(-len(packed.packs) // num_ranks) * num_ranks)
            num_samples.append(len(packed.packs.with_remainder().members))
            epoch += 1
        if self.recipe.step is None:
            _check_steps(most_packs, min(num_samples), num_ranks, self.recipe)
        return most_packs

    def _look_at(self, epoch: int) -> PackedEpoch:
        packed = pack_epoch(self.recipe, epoch, self._name_of if epoch == 0 else None)
        if epoch == 0:  # training begins with epoch 0, unless it resumes
            self._present = packed
        self._kept.keep(packed)
        return packed

    def __getstate__(self) -> dict[str, object]:
        """Leave out the epochs, because spawned workers plan nothing."""
        return {**self.__dict__, "_ahead": None, "_present": None, "_kept": KeptPacks(self.recipe)}


class KeptPacks:
    """Keep the packs of epochs without their rows, which are drawn again: 4 bytes a sample in place of 40."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._kept: dict[int, dict[str, Any]] = {}  # epoch -> the fields of its packs
        self._num_bytes = 0

    def keep(self, packed: PackedEpoch) -> None:
        """Keep an epoch, unless all kept epochs would take too much memory. It is planned again then."""
        packs = packed.packs
        arrays: list[NDArray[Any]] = [packs.members, packs.offsets, *packs.dropped.values()]
        self._num_bytes += (num_bytes := sum(array.nbytes for array in arrays))
        if self._num_bytes > MOST_BYTES_KEPT:
            self._num_bytes -= num_bytes
            return
        self._kept[packed.epoch] = {
            field.name: getattr(packs, field.name) for field in fields(packs) if field.name not in _OF_ROWS
        }

    def epoch(self, epoch: int) -> PackedEpoch | None:
        """Return an epoch as it was packed; None if it is not kept."""
        kept = self._kept.get(epoch)
        if kept is None:
            return None
        drawn = draw_epoch(self._recipe, epoch)
        packs = Plan(**kept, **dict(zip(_OF_ROWS, (*drawn.sizes[:-1], drawn.shared), strict=True)))
        return PackedEpoch(**of_drawn(drawn), packs=packs, step=self._recipe.step)


_OF_ROWS = ("lengths", "images", "patches", "shared")
"""The fields of a `Plan` that have a number for each row, and are drawn again."""


def _check_steps(num_packs: int, fewest_samples: int, num_ranks: int, recipe: Recipe) -> None:
    """Raise `PlanError` if an epoch has too few samples for the steps of the longest one.

    Epochs differ in samples only if ratios count tokens, or if rows are cut in a source with a ratio below 1.
    """
    if fewest_samples >= num_packs // num_ranks:
        return
    why, way_out = "ratio_by: tokens", "use ratio_by: rows"
    if any(cut is not None and len(cut) for cut in recipe.cut):
        why, way_out = "ratios below 1 of rows that are cut", "give sources whose rows are cut a ratio of 1"
    raise PlanError(
        f"with {why} one epoch has {fewest_samples} samples, another {num_packs} packs, but all need the same number "
        f"of steps; raise packing_length, so that samples share packs, or {way_out}"
    )


def _fill(future: Future[PackedEpoch], made: Callable[[int], PackedEpoch], epoch: int) -> None:
    try:
        future.set_result(made(epoch))
    # Catch exits and interrupts too, or the trainer would wait for the result forever.
    except BaseException as error:
        future.set_exception(error)
