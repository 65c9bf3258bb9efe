"""The epochs of a run: all of equal length, the next one made while one trains."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from tqdm import tqdm

from swift_vlpack.errors import PlanError
from swift_vlpack.plan.cuts import Cut
from swift_vlpack.plan.epoch import EpochPlan, NameOfRow, PackedEpoch, Recipe, pack_epoch, plan_epoch

NUM_ROWS_SHOWN = 500_000
"""Planning more rows than that takes long enough for a progress bar."""
NUM_EPOCHS_LOOKED_AT = 8
"""Epochs that are planned ahead to know their length where not epochs but steps are given: more would be a guess about
epochs that may never come, and a later one that needs more packs simply has more."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How long a run is: so many epochs, or, where steps are given instead, as many as so many packs take."""

    num_epochs: int = 1
    num_packs: int | None = None
    """Of all ranks together."""

    def needs(self, epoch: int, most_packs: int) -> bool:
        """Whether the length of this epoch matters, where those before it have so many packs at most."""
        if self.num_packs is None:
            return epoch < max(1, self.num_epochs)
        return epoch == 0 or (epoch < NUM_EPOCHS_LOOKED_AT and epoch * most_packs < self.num_packs)

    def has(self, epoch: int) -> bool:
        """Whether there is such an epoch, as far as that is known."""
        return self.num_packs is not None or epoch < self.num_epochs


ONE_EPOCH = Extent()


class Epochs:
    """Every epoch of a run on demand, and the next one ahead of time, in a thread.

    A thread and not a process: what it computes is arrays that the trainer reads at once, much of the time is spent
    in numpy, outside of Python's lock, and a process would have to import or inherit everything for it.
    """

    def __init__(self, recipe: Recipe, extent: Extent = ONE_EPOCH, name_of: NameOfRow | None = None) -> None:
        """Looks at the epochs of the run, so that all of them get as many packs as the one that needs most."""
        self.recipe = recipe
        self.extent = extent
        self._name_of = name_of
        self._ahead: tuple[int, Future[PackedEpoch]] | None = None
        self.num_packs = 0
        """Packs of every epoch, unless it is resumed or needs more; over all ranks."""
        num_rows = sum(sizes.shape[1] for sizes in recipe.sizes)
        epoch, fewest_samples = 0, sys.maxsize
        with tqdm(
            desc="Planning epochs", dynamic_ncols=True, disable=num_rows * extent.num_epochs < NUM_ROWS_SHOWN
        ) as bar:
            while extent.needs(epoch, self.num_packs):
                packed = pack_epoch(recipe, epoch, name_of if epoch == 0 else None)
                if epoch == 0:  # a large plan is not made twice
                    self._ahead = 0, _done(packed)
                self.num_packs = max(self.num_packs, -(-len(packed.packs) // recipe.num_ranks) * recipe.num_ranks)
                fewest_samples = min(fewest_samples, len(packed.packs.with_remainder().members))
                epoch += 1
                bar.update()
        _check_steps(self.num_packs, fewest_samples, recipe)

    def plan(self, epoch: int, cuts: Sequence[Cut] = ()) -> EpochPlan:
        """An epoch; waits for it where it is being made. An error of the thread that makes it is raised here."""
        return plan_epoch(self.recipe, epoch, cuts, least_packs=self.num_packs, packed=self.packed(epoch))

    def packed(self, epoch: int) -> PackedEpoch:
        """The packs of an epoch before ranks share them."""
        number, ahead = self._ahead or (None, None)
        if ahead is None or number != epoch:
            return pack_epoch(self.recipe, epoch, self._name_of)
        # Each future is asked for once; kept, it would hold the arrays of an epoch that has ended.
        self._ahead = None
        return ahead.result()

    def make_ahead(self, epoch: int) -> None:
        """Begin with an epoch that will be asked for, if the run has it."""
        if not self.extent.has(epoch) or (self._ahead is not None and self._ahead[0] == epoch):
            return
        future: Future[PackedEpoch] = Future()
        self._ahead = epoch, future
        # A daemon: a run that ends meanwhile does not wait for an epoch that never comes.
        threading.Thread(target=_fill, args=(future, self.recipe, epoch, self._name_of), daemon=True).start()

    def __getstate__(self) -> dict[str, object]:
        """For spawned workers, which plan nothing: what is made ahead stays at home."""
        return {**self.__dict__, "_ahead": None}


def _check_steps(num_packs: int, fewest_samples: int, recipe: Recipe) -> None:
    """Only where ratios count tokens or rows are cut: else all epochs have equally many samples."""
    if fewest_samples >= num_packs // recipe.num_ranks:
        return
    why, way_out = "ratio_by: tokens", "use ratio_by: rows"
    if any(cut is not None and len(cut) for cut in recipe.cut):
        why, way_out = "ratios below 1 of rows that are cut", "give sources whose rows are cut a ratio of 1"
    raise PlanError(
        f"with {why} one epoch has {fewest_samples} samples, another {num_packs} packs, but all need the same number "
        f"of steps; raise packing_length, so that samples share packs, or {way_out}"
    )


def _fill(future: Future[PackedEpoch], recipe: Recipe, epoch: int, name_of: NameOfRow | None) -> None:
    try:
        future.set_result(pack_epoch(recipe, epoch, name_of))
    # Exits and interrupts too: whoever waits for the result would wait for ever.
    except BaseException as error:
        future.set_exception(error)


def _done(packed: PackedEpoch) -> Future[PackedEpoch]:
    future: Future[PackedEpoch] = Future()
    future.set_result(packed)
    return future
