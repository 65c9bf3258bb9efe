"""Plan the epochs of a run, all with the same number of packs; the next one is planned while one trains."""

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
"""Rows from which on planning takes long enough for a progress bar."""
NUM_EPOCHS_LOOKED_AT = 8
"""Epochs whose length is looked at if the run is bounded by steps: more would be a guess about epochs that may never
come, and a later epoch that needs more packs simply has more."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bound a run: by a number of epochs, or, if it is bounded by steps, by the packs that these steps take."""

    num_epochs: int = 1
    num_packs: int | None = None
    """Packs that all ranks train in the whole run; None if epochs bound it."""

    def needs(self, epoch: int, most_packs: int) -> bool:
        """Return whether to look at this epoch: the run may reach it if no epoch before has more than `most_packs`."""
        if self.num_packs is None:
            return epoch < max(1, self.num_epochs)
        return epoch == 0 or (epoch < NUM_EPOCHS_LOOKED_AT and epoch * most_packs < self.num_packs)

    def has(self, epoch: int) -> bool:
        """Return whether the run has this epoch. True if steps bound it, because then nobody knows yet."""
        return self.num_packs is not None or epoch < self.num_epochs


ONE_EPOCH = Extent()


class Epochs:
    """Plan each epoch of a run when it is asked for, and the next one ahead of time, in a thread.

    A thread and not a process: its arrays are read by the trainer without a copy, it spends much of the time in numpy,
    outside of Python's lock, and a process would have to import or inherit everything first.
    """

    def __init__(self, recipe: Recipe, extent: Extent = ONE_EPOCH, name_of: NameOfRow | None = None) -> None:
        """Look at the epochs of the run, so that all of them get as many packs as the one that needs most."""
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
                if epoch == 0:  # kept, because training begins with it and a large plan takes long
                    self._ahead = 0, _done(packed)
                # Rounded up, because every rank trains equally many packs.
                self.num_packs = max(self.num_packs, -(-len(packed.packs) // recipe.num_ranks) * recipe.num_ranks)
                fewest_samples = min(fewest_samples, len(packed.packs.with_remainder().members))
                epoch += 1
                bar.update()
        _check_steps(self.num_packs, fewest_samples, recipe)

    def plan(self, epoch: int, cuts: Sequence[Cut] = ()) -> EpochPlan:
        """Plan an epoch, or wait for the thread that plans it already; an error of that thread is raised here."""
        return plan_epoch(self.recipe, epoch, cuts, least_packs=self.num_packs, packed=self.packed(epoch))

    def packed(self, epoch: int) -> PackedEpoch:
        """Pack an epoch: the packs before ranks share them."""
        number, ahead = self._ahead or (None, None)
        if ahead is None or number != epoch:
            return pack_epoch(self.recipe, epoch, self._name_of)
        # Forget the future, which would keep the arrays of an epoch that has ended.
        self._ahead = None
        return ahead.result()

    def make_ahead(self, epoch: int) -> None:
        """Begin to pack an epoch that will be asked for, if the run has it."""
        if not self.extent.has(epoch) or (self._ahead is not None and self._ahead[0] == epoch):
            return
        future: Future[PackedEpoch] = Future()
        self._ahead = epoch, future
        # A daemon: a run that ends meanwhile does not wait for an epoch that never comes.
        threading.Thread(target=_fill, args=(future, self.recipe, epoch, self._name_of), daemon=True).start()

    def __getstate__(self) -> dict[str, object]:
        """Leave out the epoch that is planned ahead: spawned workers plan nothing."""
        return {**self.__dict__, "_ahead": None}


def _check_steps(num_packs: int, fewest_samples: int, recipe: Recipe) -> None:
    """Raise `PlanError` if an epoch has too few samples for the steps of the longest one.

    Epochs differ in samples only if ratios count tokens, or if a source of which a part is drawn has rows that are cut.
    """
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
    # Exits and interrupts too, or the trainer would wait for the result for ever.
    except BaseException as error:
        future.set_exception(error)


def _done(packed: PackedEpoch) -> Future[PackedEpoch]:
    future: Future[PackedEpoch] = Future()
    future.set_result(packed)
    return future
