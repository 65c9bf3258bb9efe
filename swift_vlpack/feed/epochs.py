"""Plan the epochs of a run, all with the same number of packs, each while the epoch before trains.

A start packs every epoch to find the longest, and keeps the first. The others are packed once more when they train: a
plan is a function of its recipe, so it is the same, and nothing has to be kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from swift_vlpack.errors import PlanError
from swift_vlpack.plan.cuts import Cut
from swift_vlpack.plan.epoch import EpochPlan, NameOfRow, PackedEpoch, Recipe, pack_epoch, plan_epoch

NUM_ROWS_SHOWN = 500_000
"""Number of rows from which planning takes long enough for a progress bar."""
NUM_EPOCHS_LOOKED_AT = 8
"""Most epochs that are planned ahead to find the longest, if steps bound the run. Later epochs may never come, and one
that needs more packs simply has more."""


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
    """Plan the epoch that trains, and the next one in a thread meanwhile.

    A thread and not a process plans ahead: the trainer reads its arrays without a copy, it spends much of its time in
    numpy, outside of Python's lock, and a process would have to import or inherit everything first.
    """

    def __init__(
        self,
        recipe: Recipe,
        extent: Extent = ONE_EPOCH,
        name_of: NameOfRow | None = None,
        recipe_of: Callable[[int], Recipe] | None = None,
    ) -> None:
        """Pack the epochs of the run ahead, so that all of them get as many packs as the one that needs most.

        `recipe_of` returns the recipe of any epoch, for data whose rows are others in every epoch.
        """
        self.recipe = recipe
        self.extent = extent
        self._changes = recipe_of is not None
        self._recipe_of = recipe_of or (lambda epoch: recipe)
        self.digests: list[str] = []
        """Digests of the packs of the epochs that were packed ahead."""
        # Hold two whole epochs: the one that was asked for last, and the next.
        self._present: PackedEpoch | None = None
        self._ahead: tuple[int, Future[PackedEpoch]] | None = None
        num_rows = sum(sizes.shape[1] for sizes in recipe.sizes)
        with tqdm(
            desc="Planning epochs", dynamic_ncols=True, disable=num_rows * extent.num_epochs < NUM_ROWS_SHOWN
        ) as bar:
            self.num_packs = self._least_packs(bar.update, name_of)
            """Packs of an epoch, over all ranks. An epoch that is resumed, or needs more packs, has another number."""

    def plan(self, epoch: int, cuts: Sequence[Cut] = ()) -> EpochPlan:
        """Plan an epoch, or wait for the thread that is planning it. Raises the errors of that thread."""
        # An epoch of other rows that was not planned ahead may have too few for as many packs.
        least_packs = 0 if self._changes and not self.extent.has(epoch) else self.num_packs
        return plan_epoch(self.recipe, epoch, cuts, least_packs=least_packs, packed=self.packed(epoch))

    def packed(self, epoch: int) -> PackedEpoch:
        """Return the packs of an epoch before they are shared among ranks."""
        if self._present is None or self._present.epoch != epoch:
            if self._ahead is not None and self._ahead[0] == epoch:
                self._present = self._ahead[1].result()
                self._ahead = None
            else:
                self._present = pack_epoch(self._recipe_of(epoch), epoch)
        return self._present

    def make_ahead(self, epoch: int) -> None:
        """Start a thread that packs an epoch which will be asked for later, if the run has it."""
        if self._changes or not self.extent.has(epoch) or (self._ahead is not None and self._ahead[0] == epoch):
            return
        future: Future[PackedEpoch] = Future()
        self._ahead = epoch, future
        # Make it a daemon thread: a run that ends meanwhile must not wait for an epoch that it does not train.
        threading.Thread(target=_fill, args=(future, self.recipe, epoch), daemon=True).start()

    def _least_packs(self, looked: Callable[[], Any], name_of: NameOfRow | None) -> int:
        """Pack the epochs of the run, and return the packs that the longest one needs. Logs samples of the first."""
        epoch = most_packs = 0
        num_ranks, num_samples = self.recipe.num_ranks, []
        extent = ONE_EPOCH if self.recipe.step is not None else self.extent  # epochs that keep steps have equally many
        while extent.needs(epoch, most_packs):
            packed = pack_epoch(self._recipe_of(epoch), epoch, name_of if epoch == 0 else None)
            self.digests.append(packed.packs.digest())
            if epoch == 0:  # training begins with epoch 0, unless it resumes
                self._present = packed
            looked()
            # Round up, because every rank trains equally many packs.
            most_packs = max(most_packs, -(-len(packed.packs) // num_ranks) * num_ranks)
            num_samples.append(len(packed.packs.with_remainder().members))
            epoch += 1
        if self.recipe.step is None:
            _check_steps(most_packs, min(num_samples), num_ranks, self.recipe, changes=self._changes)
        return most_packs


def _check_steps(num_packs: int, fewest_samples: int, num_ranks: int, recipe: Recipe, *, changes: bool) -> None:
    """Raise `PlanError` if an epoch has too few samples for the steps of the longest one.

    Epochs differ in samples only if ratios count tokens, if rows are cut in a source with a ratio below 1, or if the
    data set has other rows in every epoch.
    """
    if fewest_samples >= num_packs // num_ranks:
        return
    why, way_out = "ratio_by: tokens", "use ratio_by: rows"
    if any(cut is not None and len(cut) for cut in recipe.cut):
        why, way_out = "ratios below 1 of rows that are cut", "give sources whose rows are cut a ratio of 1"
    if changes:
        why, way_out = "a data set that changes", "leave num_epochs out, and set the steps of the run"
    raise PlanError(
        f"with {why} one epoch has {fewest_samples} samples, another {num_packs} packs, but all need the same number "
        f"of steps; raise packing_length, so that samples share packs, or {way_out}"
    )


def _fill(future: Future[PackedEpoch], recipe: Recipe, epoch: int) -> None:
    try:
        future.set_result(pack_epoch(recipe, epoch))
    # Catch exits and interrupts too, or the trainer would wait for the result forever.
    except BaseException as error:
        future.set_exception(error)
