"""Feeds: the epoch is a value that nobody else changes, and the next one is made ahead of time."""

import json
import pickle
import threading
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
from torch.utils.data import DataLoader

from swift_vlpack import PackingConfig, PackingDataset
from swift_vlpack.errors import PlanError, StateMismatch
from swift_vlpack.feed import epochs
from swift_vlpack.feed.saved_rows import from_bytes
from swift_vlpack.plan import steps
from swift_vlpack.rows.faults import Fault
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.sizes import LengthIndex, RowSize
from swift_vlpack.rows.source import RowSource
from swift_vlpack.rows.streams import StreamedRows
from tests.feeds import loader_over, planned_feed, resumed, streamed_feed

CONFIG = PackingConfig(packing_length=100, packing_strategy="best_fit", packing_drop_last=False)


class Template:
    """Rows that say how long they are."""

    packing = padding_free = False

    def encode(self, inputs, return_length=False):
        return {"input_ids": [1] * inputs["length"], "labels": [1] * inputs["length"], "length": inputs["length"]}


def rows(num_rows=60, seed=0):
    lengths = np.random.default_rng(seed).integers(5, 70, num_rows).tolist()
    return [{"messages": [{}], "length": length} for length in lengths]


def fused(num_rows=60, **options):
    some = rows(num_rows)
    sizes = LengthIndex.of([RowSize(row["length"]) for row in some])
    return FusionCaptionDataset([RowSource(name="data", rows=some, sizes=sizes, **options)], Template(), seed=3)


def fused_by_tokens(lengths_of_sources, ratios):
    sources = [
        RowSource(
            name=f"source{n}",
            rows=[{"messages": [{}], "length": length} for length in lengths],
            sizes=LengthIndex.of([RowSize(length) for length in lengths]),
            ratio=ratio,
        )
        for n, (lengths, ratio) in enumerate(zip(lengths_of_sources, ratios, strict=True))
    ]
    return FusionCaptionDataset(sources, Template(), seed=3, ratio_by="tokens")


def packs_of(dataset):
    return [[str(sample["sample_id"]) for sample in dataset[number]] for number in range(len(dataset))]


@pytest.mark.parametrize(
    ("context", "live_on"),
    [("fork", False), ("fork", True), pytest.param("spawn", False, marks=pytest.mark.slow), ("spawn", True)],
)
def test_plain_dataloader_goes_through_the_epochs(context, live_on):
    """DATA-4 OWN-6: also an epoch that was left; workers that live on get addresses."""
    packs = PackingDataset(fused(ratio=0.6), Template(), CONFIG, num_epochs=3)
    loader = DataLoader(
        packs, batch_size=None, collate_fn=None, num_workers=2, multiprocessing_context=context,
        persistent_workers=live_on, sampler=packs.sampler if live_on else None,
    )  # fmt: skip
    seen = []
    for epoch in (0, 1, 0, 2, 0):
        packs.set_epoch(epoch)
        expected = packs_of(packs)
        seen.append([[str(sample["sample_id"]) for sample in pack] for pack in loader])
        assert seen[-1] == expected
    assert seen[0] == seen[2] == seen[4]
    assert len({str(order) for order in seen}) == 3


def test_feed_packs_sampler_and_state_have_one_epoch():
    """DATA-4: also after a resume, and in a copy of the packs that a worker got before."""
    feed = planned_feed(fused(ratio=0.6), Template(), CONFIG, num_epochs=3)
    copy = pickle.loads(ForkingPickler.dumps(feed.packs))
    sampler = loader_over(feed, collate_fn=list).batch_sampler

    def epochs_now():
        return {feed.epoch, feed.packs.epoch, feed.epoch_plan.epoch, sampler.epoch, feed.state()["epoch"], copy.epoch}

    assert epochs_now() == {0}
    feed.begin(2)
    assert epochs_now() == {2}
    feed.restore({**feed.state(), "epoch": 1, "plan": feed.plan_of(1).digest()}, None)
    assert epochs_now() == {1}


def test_packs_of_every_epoch_have_the_shares_of_tokens_that_were_asked_for():
    """MIX-7 MIX-8 DATA-6: 2,000 tokens, of which three quarters come from the source that has a fifth of them; and a
    checkpoint says that tokens were counted."""
    data = fused_by_tokens([[20] * 20, [40] * 40], [3, 1])
    feed = planned_feed(data, Template(), CONFIG, num_epochs=3)
    for epoch in range(3):
        feed.begin(epoch)
        members = feed.epoch_plan.packs.members
        tokens = np.bincount(feed.epoch_plan.schedule.source[members], weights=feed.epoch_plan.lengths[members])
        assert tokens.tolist() == [1500, 500] or abs(tokens[0] - 1500) + abs(tokens[1] - 500) <= 20
        assert len(feed.epoch_plan) == len(feed)
    assert feed.fingerprint()["ratio_by"] == "tokens"
    assert planned_feed(fused(), Template(), CONFIG).fingerprint()["ratio_by"] == "rows"


def test_epochs_that_could_not_all_have_the_same_steps_are_refused_at_the_start():
    """MIX-8: by tokens an epoch may draw few long rows, another one many short ones, where no two share a pack."""
    data = fused_by_tokens([[52, 99] * 10, [60] * 10], [1, 9])
    with pytest.raises(PlanError, match=r"ratio_by: tokens one epoch has .* raise packing_length"):
        planned_feed(data, Template(), CONFIG, num_epochs=8)


def test_second_data_set_over_the_same_rows_changes_nothing_for_the_first():
    """DATA-4: an epoch is a value; nobody sets one from outside."""
    data = fused(ratio=0.6)
    first = PackingDataset(data, Template(), CONFIG, num_epochs=3)
    first.set_epoch(2)
    before = packs_of(first)
    second = PackingDataset(data, Template(), CONFIG, num_epochs=2)
    data.set_epoch(1)
    assert packs_of(first) == before
    assert packs_of(second) != before
    second.set_epoch(2)
    assert packs_of(second) == before


def test_nobody_can_change_an_epoch():
    """PLAN-13"""
    epoch = PackingDataset(fused(), Template(), CONFIG).epoch_plan
    for name in ("epoch", "packs", "cuts", "schedule"):
        with pytest.raises(AttributeError):
            setattr(epoch, name, None)


def test_digest_covers_the_order_that_saved_numbers_count_in(monkeypatch):
    """PLAN-13 RESUME-6: a version that balances among other windows of steps may not go on with saved numbers."""
    feed = planned_feed(fused(800), Template(), CONFIG, num_ranks=2)
    saved = {**feed.state(), "cuts": [[2, len(feed), 20]]}
    planned_feed(fused(800), Template(), CONFIG, num_ranks=2).restore(saved, None)
    monkeypatch.setattr(steps, "STEPS_MATCHED", 16)
    with pytest.raises(StateMismatch, match=r"now give another plan of epoch 0 .* has changed"):
        planned_feed(fused(800), Template(), CONFIG, num_ranks=2).restore(saved, None)


def with_words(lost):
    """Rows of which the first few cannot be read, with what was said of them."""
    some = rows(40)
    sizes = [RowSize(0 if at < lost else row["length"]) for at, row in enumerate(some)]
    faults = {at: Fault("file_missing", f"no such file: /photos/{at}.jpg") for at in range(lost)}
    index = LengthIndex.of(sizes, {at: fault.reason for at, fault in faults.items()}, faults)
    return FusionCaptionDataset([RowSource(name="data", rows=some, sizes=index)], Template(), seed=3)


@pytest.mark.parametrize(("lost_now", "is_planned_again"), [(2, False), (3, True)])
def test_resumed_run_plans_again_only_where_sizes_are_others_and_keeps_what_was_said_of_rows(
    monkeypatch, lost_now, is_planned_again
):
    """RESUME-1: a file that is gone since takes the sizes of then; where nothing is, the plan that is there will do."""
    then = planned_feed(with_words(2), Template(), CONFIG, num_epochs=3)
    now = planned_feed(with_words(lost_now), Template(), CONFIG, num_epochs=3)
    planned = []
    monkeypatch.setattr(epochs, "pack_epoch", noting(epochs.pack_epoch, planned))
    now.saved_rows.take_sizes(from_bytes(then.saved_rows.as_file()))
    now.restore(json.loads(json.dumps(then.state())), None)
    assert len(planned) == 3 * is_planned_again
    assert now.epoch_plan.digest() == then.epoch_plan.digest()
    assert sorted(one.detail for one in now.begin(0).left_out) == [f"no such file: /photos/{at}.jpg" for at in range(2)]


def noting(make, made):
    def noted(recipe, epoch, *name_of):
        made.append((epoch, threading.current_thread() is threading.main_thread()))
        return make(recipe, epoch, *name_of)

    return noted


def test_next_epoch_is_made_while_one_trains_and_is_the_same(monkeypatch):
    """PLAN-14"""
    expected = [packs_of_epoch(planned_feed(fused(ratio=0.6), Template(), CONFIG, num_epochs=3), n) for n in range(3)]
    feed = planned_feed(fused(ratio=0.6), Template(), CONFIG, num_epochs=3)
    made = []
    monkeypatch.setattr(epochs, "pack_epoch", noting(epochs.pack_epoch, made))
    assert [packs_of_epoch(feed, epoch) for epoch in range(3)] == expected
    assert made == [(1, False), (2, False)], "each once, none by the trainer, and none beyond the last"


def test_resume_uses_the_epoch_that_is_at_hand(monkeypatch):
    """PLAN-15: a run of one epoch plans it once."""
    planned = []
    monkeypatch.setattr(epochs, "pack_epoch", noting(epochs.pack_epoch, planned))
    feed = planned_feed(fused(200), Template(), CONFIG, num_ranks=2)
    feed.restore({**feed.state(), "cuts": [[2, len(feed), 8]]}, None)
    feed.begin(0)
    assert planned == [(0, True)]


def packs_of_epoch(feed, epoch):
    feed.begin(epoch)
    records = loaded(feed)
    feed.consumed(records)
    return [[str(sample_id) for sample_id in record.sample_ids] for record in records]


def loaded(feed):
    return [pack.record for [pack] in loader_over(feed, collate_fn=list)]


@pytest.mark.parametrize("kind", ["plan", "buffer", "stream"])
def test_samples_of_a_pack_are_encoded_again_from_its_record(kind):
    """ISO-22: in the process that trains, whichever reader had encoded them."""
    if kind == "plan":
        feed = planned_feed(fused(), Template(), CONFIG)
    else:
        feed = streamed_feed(fused() if kind == "buffer" else StreamedRows(rows(), Template()), Template(), CONFIG)
    feed.begin(0)
    packs = [pack for [pack] in loader_over(feed, collate_fn=list)] if kind == "plan" else list(feed.packs)
    for pack in packs:
        again = {one["sample_id"]: one for one in feed.samples_again(pack.record, rank=0, num_workers=0)}
        assert [again[one["sample_id"]]["input_ids"] for one in pack] == [one["input_ids"] for one in pack]
    assert len(packs) > 5


@pytest.mark.parametrize("kind", ["plan", "buffer"])
def test_packs_to_look_at_are_those_that_are_trained_and_change_nothing(kind):
    """SEE-1"""
    make = {"plan": lambda: planned_feed(fused(), Template(), CONFIG),
            "buffer": lambda: streamed_feed(StreamedRows(rows(), Template()), Template(), CONFIG)}[kind]  # fmt: skip
    feed, trained = make(), make()
    packs = [pack for [pack] in loader_over(trained, collate_fn=list)] if kind == "plan" else list(trained.packs)
    state = json.dumps([feed.state(), feed.rank_state()])
    numbers = [1, 4, 5]
    expected = [
        pack.record for at, pack in enumerate(packs) if (pack.record.number if kind == "plan" else at) in numbers
    ]
    assert [batch.record for batch in feed.batches_of(numbers, lambda batch: batch[0])] == expected
    assert list(feed.batches_of([], lambda batch: batch[0])) == []
    assert json.dumps([feed.state(), feed.rank_state()]) == state
    if kind == "buffer":
        assert list(feed.batches_of([999], lambda batch: batch[0])) == [], "there may be fewer than asked for"


def test_error_of_the_thread_reaches_the_trainer(monkeypatch):
    """PLAN-14"""

    def fails(recipe, epoch, name_of=None):
        raise MemoryError(f"epoch {epoch} is too much")

    feed = planned_feed(fused(), Template(), CONFIG, num_epochs=2)
    monkeypatch.setattr(epochs, "pack_epoch", fails)
    feed.consumed([None])
    with pytest.raises(MemoryError, match="epoch 1 is too much"):
        feed.begin(1)


def test_run_that_ends_does_not_wait_for_an_epoch_that_never_comes(monkeypatch):
    """PLAN-14"""
    feed = planned_feed(fused(), Template(), CONFIG, num_epochs=2)
    goes_on = threading.Event()
    monkeypatch.setattr(epochs, "pack_epoch", lambda *_: goes_on.wait(60))
    feed.consumed([None])
    (planner,) = [thread for thread in threading.enumerate() if thread.daemon and "fill" in thread.name]
    assert planner.is_alive()
    goes_on.set()
    planner.join(60)


class Rows:
    """As many as wanted, without having them."""

    def __init__(self, num_rows):
        self.num_rows = num_rows

    def __len__(self):
        return self.num_rows

    def __getitem__(self, index):
        return {"messages": [{}], "length": 50}


def test_spawned_worker_is_sent_neither_schedule_nor_sizes():
    """PLAN-14: what it gets by a feed does not grow with the rows, but for the rows themselves."""

    def num_bytes(num_rows):
        sizes = LengthIndex(np.tile([[50], [0], [0], [1]], num_rows), {})
        source = RowSource(name="data", rows=Rows(num_rows), sizes=sizes)
        data = FusionCaptionDataset([source], Template())
        loader = loader_over(planned_feed(data, Template(), CONFIG))
        return len(pickle.dumps(loader.dataset))

    assert num_bytes(50_000) - num_bytes(100) < 200


def test_resumed_epoch_goes_on_and_the_next_one_is_whole():
    """RESUME-2"""
    whole, trained = (planned_feed(fused(), Template(), CONFIG, num_epochs=2) for _ in range(2))
    expected = [packs_of_epoch(whole, epoch) for epoch in range(2)]
    feed = resumed(planned_feed(fused(), Template(), CONFIG, num_epochs=2), trained, [None] * 5)
    assert [packs_of_epoch(feed, epoch) for epoch in range(2)] == [expected[0][5:], expected[1]]


def test_state_of_a_feed_is_json():
    """RESUME-1"""
    feed = planned_feed(fused(), Template(), CONFIG)
    assert json.loads(json.dumps(feed.state()))["cuts"] == [[1, len(feed), 0]]
    assert feed.rank_state() is None
