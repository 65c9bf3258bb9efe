"""What steps trained, and what padding would have cost."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from swift_vlpack.runlog.step_counts import StepCounts, padded, summed


class Id(NamedTuple):
    source: str
    row: int


@dataclass
class Pack:
    sample_ids: tuple[Id, ...]
    lengths: tuple[int, ...]
    num_images: int = 0
    num_vision_tokens: int = 0
    num_padding: int = 0
    single_long: bool = False


def ids(*sources):
    return tuple(Id(source, number) for number, source in enumerate(sources))


FIRST = Pack(ids("a", "a", "b"), (30, 50, 20), num_images=2, num_vision_tokens=40)
SECOND = Pack(ids("b"), (120,), single_long=True)
EMPTY = Pack((), ())


def test_padded_batches_are_as_wide_as_their_longest():
    """REPORT-3: batches of two in the order of training, the last one may be smaller."""
    assert padded([30, 50, 20, 120], 2) == 2 * 50 + 2 * 120
    assert padded([30, 50, 20], 2) == 2 * 50 + 20
    assert padded([30, 50, 20], 1) == 100, "a batch of one has no padding"
    assert padded([], 4) == padded([], 1) == 0


def test_step_counts_its_packs_and_what_they_would_be_unpacked():
    """REPORT-2 REPORT-3: a row without a sample is no pack; single-long ones do not count for the fill."""
    step = StepCounts.of_step([FIRST, EMPTY, SECOND], batch_size=2)
    assert (step.num_steps, step.num_packs, step.num_samples, step.num_tokens) == (1, 2, 4, 220)
    assert (step.num_images, step.num_vision_tokens, step.num_single_long, step.num_pack_tokens) == (2, 40, 1, 100)
    assert step.sources == {"a": [2, 80], "b": [2, 140]}
    assert step.num_tokens_unpacked == padded([30, 50, 20, 120], 2)
    assert step.num_padding_saved == step.num_tokens_unpacked - 220


def test_nothing_is_saved_where_batches_of_one_were_asked_for():
    """REPORT-3: they have no padding, however unlike the samples of a pack are."""
    step = StepCounts.of_step([FIRST, EMPTY, SECOND], batch_size=1)
    assert (step.num_tokens_unpacked, step.num_padding_saved) == (220, 0)


def test_padding_of_packs_is_not_saved():
    """REPORT-3: rows of a fixed shape have some of their own; beside batches of one that is more, not less."""
    packs = [replace(FIRST, num_padding=28)]
    step = StepCounts.of_step(packs, batch_size=3)
    assert (step.num_padding, step.num_tokens_unpacked, step.num_padding_saved) == (28, 150, 150 - 100 - 28)
    assert StepCounts.of_step(packs, batch_size=1).num_padding_saved == -28


def test_steps_of_ranks_add_up_and_say_how_they_were_matched():
    """REPORT-2: the slowest rank of each step, and not the slowest of all steps."""
    ranks = [StepCounts(), StepCounts()]
    for packs in ([[FIRST], [SECOND]], [[SECOND], [FIRST]], [[EMPTY], [FIRST]]):
        for rank, of_rank in zip(ranks, packs, strict=True):
            rank.merge(StepCounts.of_step(of_rank, 1))
    total = summed(ranks)
    assert total["num_steps"] == 3
    assert total["num_tokens"] == 2 * 220 + 100
    assert total["num_tokens_slowest"] == 120 + 120 + 100
    assert total["sources"] == {
        "a": {"num_samples": 6, "num_tokens": 240},
        "b": {"num_samples": 5, "num_tokens": 300},
    }
