"""Epochs and steps of a resumed run: literal cases, and a trainer that is only arithmetic."""

import math

import pytest

from swift_vlpack.plan.resume_schedule import Bounds, ResumeSchedule, batches_trained, num_steps

NAMES = ("epoch", "global_step", "batches_trained", "batches_left", "accumulation")


@pytest.mark.parametrize(
    ("rest", "computed", "options", "expected"),
    [
        # 3 epochs of 10 steps; 14 were taken, 4 of epoch 1; as many ranks as before: the bounds stay.
        ((1, 14, 8, 12, 2), (3, 30), (10, 3), (3, 30)),
        # At the very beginning of epoch 2.
        ((2, 20, 0, 20, 2), (3, 30), (10, 3), (3, 30)),
        # Half as many ranks: an epoch has 20 steps now; 12 are left of this one, and 20 of the last.
        ((1, 14, 8, 12, 1), (3, 60), (20, 3), (3, 46)),
        # Half an epoch more was asked for: 15 steps in all, of which 4 were taken.
        ((0, 4, 4, 6, 1), (2, 15), (10, 1.5), (2, 15)),
        # All is done.
        ((3, 30, 0, 20, 2), (3, 30), (10, 3), (3, 30)),
        # Steps were given: they bound all runs together, in as many epochs as it takes.
        ((1, 14, 4, 6, 1), (9, 37), (10, 3), (4, 37)),
        ((1, 14, 4, 6, 1), (2, 14), (10, 3), (1, 14)),
        # Of a stream nobody knows how many are left.
        ((2, 5, 3, None, 1), (99, 8), (8, 3), (99, 8)),
        ((2, 8, 3, None, 1), (99, 8), (8, 3), (2, 8)),
    ],
)
def test_bounds_of_a_resumed_run(rest, computed, options, expected):
    """RESUME-5"""
    steps_per_epoch, num_train_epochs = options
    are_steps_given = computed[1] in (37, 14, 8)
    bounds = ResumeSchedule(**dict(zip(NAMES, rest, strict=True))).bounds(
        Bounds(*computed),
        steps_per_epoch=steps_per_epoch,
        num_train_epochs=num_train_epochs,
        are_steps_given=are_steps_given,
    )
    assert bounds == expected


def steps_taken(rest, bounds, steps_per_epoch):
    """What Hugging Face's loop does within these bounds."""
    step, num_left = rest.global_step, rest.steps_of_epoch - rest.steps_trained
    for epoch in range(rest.epoch, bounds.num_epochs):
        for _ in range(num_left if epoch == rest.epoch else steps_per_epoch):
            if step >= bounds.max_steps:
                return step
            step += 1
    return step


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulation", [1, 2, 5])
def test_everything_that_is_left_is_trained_whatever_ranks_go_on(num_ranks, accumulation):
    """RESUME-4 RESUME-5: epochs of 24 packs, stopped anywhere by 2 ranks with an accumulation of 3."""
    num_packs, num_epochs, steps_before = 24, 3, num_steps(12, 3)
    batches_per_epoch = num_packs // num_ranks
    steps_per_epoch = num_steps(batches_per_epoch, accumulation)
    for global_step in range(1, num_epochs * steps_before):
        epoch, steps_of_epoch = divmod(global_step, steps_before)
        consumed = steps_of_epoch * 6
        rest = ResumeSchedule(
            epoch=epoch,
            global_step=global_step,
            batches_trained=batches_trained(consumed, num_ranks=num_ranks, accumulation=accumulation),
            batches_left=math.ceil((num_packs - consumed) / num_ranks),
            accumulation=accumulation,
        )
        computed = Bounds(num_epochs, num_epochs * steps_per_epoch)
        bounds = rest.bounds(
            computed, steps_per_epoch=steps_per_epoch, num_train_epochs=num_epochs, are_steps_given=False
        )
        left = rest.steps_of_epoch - rest.steps_trained + (num_epochs - epoch - 1) * steps_per_epoch
        assert steps_taken(rest, bounds, steps_per_epoch) == global_step + left
        assert bounds.num_epochs == num_epochs
