"""Which kind a loss is, told from literal numbers; real losses are in tests/host/test_loss.py."""

import random
from copy import copy

import pytest
import torch

from swift_vlpack.feed.collate import batch_of
from swift_vlpack.feed.sequence_loss import (
    Losses,
    MeanOfStep,
    num_targets,
    weigh_samples,
    weight_of_samples,
    with_fewer_targets,
)
from swift_vlpack.plan.parts import Span
from swift_vlpack.rows.contents import NO_LABEL, num_supervised
from swift_vlpack.rows.cutting import cut_sample
from swift_vlpack.rows.samples import PackRecord, SampleId
from tests.attention.test_launches import Operations


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
    """LOSS-2: 3 of 12 tokens, but for an evaluation, which is not accumulated and says no number."""
    mean = MeanOfStep(lambda outputs, labels, **kwargs: torch.tensor(8.0))
    labels = torch.tensor([[5, -100, 6, 7, 8]])
    assert num_targets(labels) == 3
    assert mean(None, labels, num_items_in_batch=12) == 2.0
    assert mean(None, labels) == 8.0
    mean.num_items = 6
    assert mean(None, labels) == 4.0


def test_a_third_of_the_targets_stays():
    """LOSS-2"""
    sample = {"input_ids": [1] * 8, "labels": [-100, 1, 2, -100, 3, 4, 5, 6]}
    assert with_fewer_targets(sample)["labels"] == [-100, 1, 2, -100, -100, -100, -100, -100]
    assert (num_supervised(sample), num_supervised(with_fewer_targets(sample))) == (6, 2)
    assert num_supervised({"labels": [7, 8, -100]}) == 1, "nothing predicts the first token"


def batch(samples, scale):
    """A row of samples, given by their labels."""
    lengths = tuple(map(len, samples))
    row = {"labels": torch.tensor([[label for labels in samples for label in labels] or [NO_LABEL] * 3])}
    if scale is not None:
        row["loss_scale"] = torch.full(row["labels"].shape, scale)
    return batch_of(row, PackRecord(0, 0, tuple(SampleId("a", n) for n in lengths), lengths, 0), {})


@pytest.mark.parametrize("kind", ["sample", "sqrt"])
def test_weights_are_the_same_however_a_step_is_shared(kind):
    """LOSS-9: by rows of any sizes on any number of ranks, of samples without a target, in rows without a sample."""
    rng = random.Random(kind)
    for _ in range(40):
        num_targets = [rng.choice((0, 1, 4, 25)) for _ in range(rng.randint(1, 9))]
        weights = weight_of_samples(torch.tensor(num_targets), kind).tolist()
        wanted = [weight / max(1, num) * sum(num_targets) for weight, num in zip(weights, num_targets, strict=True)]
        scale, size = rng.choice((None, 0.5)), rng.randint(1, 4)
        samples = [[NO_LABEL] * rng.randint(1, 3) + [5] * num for num in num_targets]
        rows = [samples[at : at + size] for at in range(0, len(samples), size)]
        num_ranks = rng.randint(1, 3)
        ranks = [[batch(row, scale) for row in [*rows[rank::num_ranks], []]] for rank in range(num_ranks)]
        parts = [[] for _ in ranks]
        for mine, theirs in zip(parts, ranks, strict=True):  # what each rank would add to the sum over all
            weigh_samples(
                [copy(one) for one in theirs], kind, lambda numbers, mine=mine: mine.append(numbers) or numbers
            )
        total = sum(part for (part,) in parts)
        for rank, batches in enumerate(ranks):
            weigh_samples(batches, kind, lambda numbers, total=total: total)
            for row, made in zip(rows[rank::num_ranks], batches, strict=False):
                at = 0
                for labels in row:
                    own = made["loss_scale"][0, at : at + len(labels)]
                    number = next(n for n, one in enumerate(samples) if one is labels)
                    expected = wanted[number] / max(sum(weights), 1e-9) * (scale or 1.0)
                    assert torch.allclose(own, torch.full_like(own, expected))
                    at += len(labels)


def test_a_row_in_parts_weighs_once_for_each_part():
    """LOSS-9: its parts of six and of three targets weigh twice as much as a row of three in one piece."""
    row = {"input_ids": list(range(11)), "labels": [NO_LABEL, *[5] * 10]}
    parts = [cut_sample(row, span, [])["labels"] for span in (Span(0, 0, 7), Span(1, 7, 11))]
    labels = torch.tensor([[*parts[0], *parts[1], NO_LABEL, 5, 5, 5]])
    ids = (SampleId("a", 0, part=0), SampleId("a", 0, part=1), SampleId("a", 1))
    step = batch_of({"labels": labels}, PackRecord(0, 0, ids, (7, 4, 4), 0), {})
    weigh_samples([step], "sample", lambda numbers: numbers)
    # Twelve targets are shared out among three samples: four for each, by six targets or by three.
    of_targets = step["loss_scale"][labels != NO_LABEL]
    assert torch.allclose(of_targets, torch.tensor([4 / 6] * 6 + [4 / 3] * 6))


def test_operations_of_weights_do_not_depend_on_samples():
    """LOSS-9 ATTN-12"""
    counts = []
    for num in (30, 60):
        row = batch([[NO_LABEL, 5, 5]] * num, None)
        with Operations() as operations:
            weigh_samples([row], "sqrt", lambda numbers: numbers)
        counts.append(operations.found)
    assert counts[0] == counts[1]
