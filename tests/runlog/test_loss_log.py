"""The losses of a log, the steps they are means of, and their jumps."""

import math

from swift_vlpack.runlog.loss_log import Loss, loss_at, losses_of, spikes


def log(*both):
    return [{"loss": loss, "global_step/max_steps": f"{step}/99"} for step, loss in both]


def test_a_loss_is_the_mean_since_the_line_before_or_the_resume():
    """SEE-9"""
    lines = [*log((1, 3.0), (5, 2.0), (10, 1.0)), {"eval_loss": 9.0, "global_step/max_steps": "10/99"}, {"loss": "x"}]
    # Killed behind step 10 with a checkpoint of step 8, then at 15 with one of 12.
    lines += log((10, 1.5), (15, 1.2))
    found = losses_of(lines, resumed_at=[8, 12])
    assert found == [Loss(1, 1, 3.0), Loss(2, 5, 2.0), Loss(9, 10, 1.5), Loss(13, 15, 1.2)]
    assert loss_at(found, 4) == Loss(2, 5, 2.0)
    assert loss_at(found, 16) is None
    assert losses_of([]) == []


def test_spikes_are_the_largest_jumps_upwards_and_no_number_is_the_largest():
    """SEE-9"""
    found = losses_of(log((1, 2.0), (2, 2.5), (3, 2.4), (4, 7.0), (5, math.nan), (6, 1.0), (7, 1.1)))
    assert [(one.loss.last, round(one.before.value, 1)) for one in spikes(found, 3)] == [(5, 7.0), (4, 2.4), (2, 2.0)]
    assert spikes(losses_of(log((1, 2.0), (2, 1.0))), 3) == []
