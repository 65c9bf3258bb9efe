"""Random numbers of packs: functions of seed, epoch and pack, which leave those of training alone."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from swift_vlpack.config import PackingConfig
from swift_vlpack.feed import reader
from swift_vlpack.feed.collate import batch_of
from swift_vlpack.host import pipeline
from swift_vlpack.host.loader import PackLoader
from tests.feeds import OneRank, planned_feed, resumed, streamed_feed

NUM_ROWS = 24


class Drawing:
    """A template that augments: it draws from all three random states."""

    packing = padding_free = False

    def encode(self, inputs, return_length=False):
        drawn = random.random(), float(np.random.random()), float(torch.rand(1))
        return {"input_ids": [1] * 30, "labels": [1] * 30, "length": 30, "drawn": (inputs["row"], *drawn)}


class Drawn:
    """Rows of a stream in an order that their reader draws from the random state of the process."""

    def __iter__(self):
        rows = list(range(NUM_ROWS))
        random.shuffle(rows)
        return ({"row": row} for row in rows)


def planned_packs(seed=3):
    rows = [{"row": row} for row in range(NUM_ROWS)]
    return planned_feed(rows, Drawing(), PackingConfig(packing_length=100), seed=seed, num_epochs=2)


def streamed_packs(workers=0, seed=3):
    config = PackingConfig(packing_length=100, packing_buffer=7, packing_drop_last=False)
    return streamed_feed(Drawn(), Drawing(), config, seed=seed, num_workers=workers)


def as_batch(packs):
    [pack] = packs
    return batch_of({"drawn": [sample["drawn"] for sample in pack]}, pack.record, {})


def drawn_by(feed, *, workers=0, persistent=False, epochs=(0, 1)):
    """What was drawn for the samples of each pack, from another random state of the process every time."""
    loader = feed.loader(
        0, PackLoader, ranks=OneRank, collate_fn=as_batch, num_workers=workers, persistent_workers=persistent,
        multiprocessing_context="fork" if workers else None,
    )  # fmt: skip
    seen = []
    for epoch in epochs:
        feed.begin(epoch)
        torch.rand(1)
        before = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
        seen += [(batch.record, batch["drawn"]) for batch in loader]
        after = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
        assert before[:2] == after[:2], "the loader drew from the random states of training"
        assert torch.equal(before[2], after[2]), "the loader drew from torch's random state"
    return seen


@pytest.mark.parametrize("make", [planned_packs, streamed_packs])
def test_row_that_is_shown_before_training_draws_from_no_state_of_training(make):
    """RAND-2: LoRA's weights are drawn after it, and only one rank shows a row."""
    feed, shown = make(), []
    args = SimpleNamespace(
        training_args=SimpleNamespace(gradient_accumulation_steps=1), model_info=SimpleNamespace(max_model_len=0)
    )
    template = SimpleNamespace(print_inputs=shown.append)
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    pipeline._show(SimpleNamespace(args=args, template=template, train_msg={}), feed)
    after = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    assert len(shown) == 1
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def numbers(seen):
    return [numbers for _, numbers in seen]


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """Two threads, however many cores there are."""
    monkeypatch.setattr(reader, "threads_per_worker", lambda: 2)


def test_packs_draw_the_same_with_any_workers_and_seed_and_epoch_decide():
    """RAND-1 RAND-2 RAND-3: also when a pack is encoded in threads."""
    expected = numbers(drawn_by(planned_packs()))
    for workers, persistent in ((1, True), (2, False), (2, True)):
        assert numbers(drawn_by(planned_packs(), workers=workers, persistent=persistent)) == expected
    drawn = {sample[1:] for pack in expected for sample in pack}
    assert len(drawn) == 2 * NUM_ROWS, "another epoch or another sample draws other numbers"
    assert not drawn & {sample[1:] for pack in numbers(drawn_by(planned_packs(seed=4))) for sample in pack}


@pytest.mark.parametrize(("workers", "stride"), [(0, 1), (2, 3)])
def test_resumed_packs_draw_what_they_would_have_drawn(workers, stride):
    """RAND-1: at every pack of an epoch."""
    of_epoch = drawn_by(planned_packs(), epochs=[1])
    for num_trained in range(0, len(of_epoch), stride):
        records = [record for record, _ in of_epoch[:num_trained]]
        again = resumed(planned_packs(), planned_packs(), records, epoch=1)
        assert numbers(drawn_by(again, workers=workers, epochs=[1])) == numbers(of_epoch)[num_trained:]


@pytest.mark.parametrize(("workers", "stride"), [(0, 1), (2, 3)])
def test_resumed_streams_draw_what_they_would_have_drawn(workers, stride):
    """RAND-4: rows come in the order in which they came, and are augmented as they were."""
    expected = drawn_by(streamed_packs(workers), workers=workers)
    assert len({sample[1:] for pack in numbers(expected) for sample in pack}) == 2 * NUM_ROWS
    of_epoch = [one for one in expected if one[0].epoch == 1]
    for num_trained in range(1, len(of_epoch), stride):
        records = [record for record, _ in of_epoch[:num_trained]]
        again = resumed(streamed_packs(workers), streamed_packs(workers), records, epoch=1)
        assert numbers(drawn_by(again, workers=workers, epochs=[1])) == numbers(of_epoch)[num_trained:]
