"""Which kind a loss is, told from literal numbers; real losses are in tests/host/training/test_loss.py."""

from types import SimpleNamespace

import pytest
import torch

from swift_vlpack.data.lengths.sizes import num_supervised
from swift_vlpack.data.model.row_loss import Losses, MeanOfStep, num_targets, with_fewer_targets


@pytest.mark.parametrize(
    ("losses", "is_sum", "is_mean"),
    [
        (Losses(1.0, 2.0, 3.0, 1.5, 0.25), True, False),  # a sum over tokens by the tokens of the step
        (Losses(4.0, 8.0, 7.0, 7.0, 0.25), False, True),  # a mean over the tokens of its row
        (Losses(1.0, 2.0, 3.0, 3.0, 0.25), False, False),  # a sum that forgets the step
        (Losses(4.0, 8.0, 6.0, 6.0, 0.25), False, False),  # a mean over samples
    ],
)
def test_a_loss_is_known_by_two_samples_apart_and_together(losses, is_sum, is_mean):
    """LOSS-3"""
    assert (losses.is_sum(1e-6), losses.is_mean(1e-6)) == (is_sum, is_mean)


def test_a_mean_over_a_row_becomes_its_share_of_the_step():
    """LOSS-2: 3 of 12 tokens, but for an evaluation, which is not accumulated."""
    trainer = SimpleNamespace(is_evaluating=False)
    mean = MeanOfStep(lambda outputs, labels, **kwargs: torch.tensor(8.0), trainer)
    labels = torch.tensor([[5, -100, 6, 7, 8]])
    assert num_targets(labels) == 3
    assert mean(None, labels, num_items_in_batch=12) == 2.0
    assert mean(None, labels) == 8.0
    trainer.is_evaluating = True
    assert mean(None, labels, num_items_in_batch=12) == 8.0


def test_a_third_of_the_targets_stays():
    """LOSS-2"""
    sample = {"input_ids": [1] * 8, "labels": [-100, 1, 2, -100, 3, 4, 5, 6]}
    assert with_fewer_targets(sample)["labels"] == [-100, 1, 2, -100, -100, -100, -100, -100]
    assert (num_supervised(sample), num_supervised(with_fewer_targets(sample))) == (6, 2)
    assert num_supervised({"labels": [7, 8, -100]}) == 1, "nothing predicts the first token"
