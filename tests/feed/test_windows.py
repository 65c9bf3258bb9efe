"""Documents end to end through both kinds of feed: full packs, every token once and in order, however resumed."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from swift_vlpack import PackingDataset
from swift_vlpack.feed.epoch_report import data_report, left_out_by, left_out_rows
from swift_vlpack.feed.streamed import StreamedPackingDataset
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.source import RowSource
from swift_vlpack.rows.streams import StreamedRows
from swift_vlpack.runlog.counts import Counts
from tests.feed import test_parts
from tests.feed.test_parts import (
    START,
    Template,
    num_resumed_inside_of_rows,
    row_of,
    rows,
    told,
)
from tests.feeds import records_resumed_at_every_pack

CAPACITY = 30


def config(**options):
    return test_parts.config(**{"packing_strategy": "window", "packing_overflow": "keep", **options})


def in_order(data, template=None):
    """Rows that come in the order of their numbers."""
    source = RowSource(name="data", rows=data)
    return FusionCaptionDataset([source], template or Template(), shuffle=False)


def check(data, samples, left_out):
    """Every word and every patch of every row once, in the order of the row, or in what is left out with a reason."""
    for number, row in enumerate(data):
        whole = Template()
        whole.max_length = None
        sample = whole.encode(row)
        of_row = [one for one in samples if row_of(one[0]) == number]
        lost = [one for one in left_out if row_of(str(one.sample_id)) == number]
        tokens = [token for _, part, _ in of_row for token in part]
        assert len(tokens) + sum(one.num_tokens for one in lost) == sample["length"]
        words = [token for token in tokens if token >= 100]
        assert words == sorted(set(words)), "in their order, each once"
        patches = Counter(patch for _, _, pixels in of_row for patch in pixels)
        assert all(count == 1 for count in patches.values())
        assert all(part.count(test_parts.IMAGE) == len(pixels) for _, part, pixels in of_row), "images are whole"
        numbers = sorted(int(one[0].partition("/")[2] or 0) for one in of_row)
        assert numbers == list(range(len(of_row)))


def check_full(packs):
    """Every pack but the last, unless an image comes next that it had no room for."""
    for pack, following in pairwise(pack for pack in packs if pack):
        num_tokens = sum(sample["length"] for sample in pack)
        assert num_tokens <= CAPACITY
        if num_tokens < CAPACITY:
            first = following[0]["input_ids"]
            assert first[0] == START
            assert num_tokens + first.index(test_parts.END) + 1 > CAPACITY


@pytest.mark.parametrize("mode", ["plan", "buffer", "stream"])
def test_packs_are_full_and_hold_every_token_once(mode):
    """WIN-1 WIN-2 WIN-3"""
    data = rows(40)
    given = iter(data) if mode == "stream" else in_order(data)
    packs = PackingDataset(given, Template(), config(packing_mode="buffer" if mode == "buffer" else "auto"))
    made = [packs[number] for number in range(len(packs))] if mode == "plan" else list(packs)
    samples, left_out = told(made)
    if mode == "plan":
        assert left_out == []
        left_out = left_out_by(packs.epoch_plan, packs.dataset)
    check(data, samples, left_out)
    check_full(made)
    assert {one.reason for one in left_out} == {"image_over_length"}
    assert [row_of(name) for name, *_ in samples] == sorted(row_of(name) for name, *_ in samples)


def test_plan_is_what_the_stream_makes_of_the_same_order():
    """WIN-3"""
    data = rows(40, seed=2)
    planned = PackingDataset(in_order(data), Template(), config())
    buffered = StreamedPackingDataset(in_order(data), Template(), config())
    by_plan = [[str(key) for key in planned[number].record.sample_ids] for number in range(len(planned))]
    assert by_plan == [[str(key) for key in pack.record.sample_ids] for pack in buffered if len(pack)]
    assert any(key.endswith("/2") for keys in by_plan for key in keys)


def test_a_text_of_many_packs_is_nothing_but_full_ones():
    """WIN-1: by hand."""
    data = [{"messages": [{}], "runs": [20]}, {"messages": [{}], "runs": [75]}, {"messages": [{}], "runs": [5]}]
    packs = PackingDataset(in_order(data), Template(), config(mask_boundary_loss=False))
    made = [
        [(str(one["sample_id"]), one["input_ids"][0], one["length"]) for one in packs[n]] for n in range(len(packs))
    ]
    assert made == [
        [("data:0", 100, 20), ("data:1/0", 100, 10)],
        [("data:1/1", 110, 30)],
        [("data:1/2", 140, 30)],
        [("data:1/3", 170, 5), ("data:2", 100, 5)],
    ]
    labels = [sample["labels"][0] for n in range(len(packs)) for sample in packs[n]]
    assert labels == [100, 100, -100, -100, -100, 100], "nothing comes before the first token of a part"


def test_a_document_is_encoded_once_whatever_packs_it_goes_through(monkeypatch):
    """WIN-7: by a reader that comes along in order; one that begins in the middle gets the same."""
    data = [{"messages": [{}], "runs": [20]}, {"messages": [{}], "runs": [215]}, {"messages": [{}], "runs": [40]}]
    packs = PackingDataset(in_order(data), Template(), config())
    expected = [[(sample["input_ids"], sample["labels"]) for sample in packs[n]] for n in range(len(packs))]
    encoded = []
    encode = Template.encode
    monkeypatch.setattr(Template, "encode", lambda self, row, **more: encoded.append(row) or encode(self, row, **more))
    again = PackingDataset(in_order(data), Template(), config())
    len(again)
    encoded.clear()
    assert [[(sample["input_ids"], sample["labels"]) for sample in again[n]] for n in range(len(again))] == expected
    assert sorted(row["runs"] for row in encoded) == [[20], [40], [215]]
    encoded.clear()
    assert [(sample["input_ids"], sample["labels"]) for sample in again[4]] == expected[4]
    assert [row["runs"] for row in encoded] == [[215]]


class Drawing(Template):
    """A template that augments."""

    def encode(self, row, **more):
        return {**super().encode(row, **more), "channel": random.random()}


def test_parts_of_a_document_are_of_one_text_wherever_reading_begins():
    """WIN-4 WIN-7: where the template draws, too."""
    data = [{"messages": [{}], "runs": [10 + 13 * number]} for number in range(14)]

    def fresh():
        return PackingDataset(in_order(data, Drawing()), Drawing(), config())

    packs, drawn = fresh(), {}
    for number in range(len(packs)):
        samples = [(str(sample["sample_id"]), sample["channel"]) for sample in packs[number]]
        assert samples == [(str(sample["sample_id"]), sample["channel"]) for sample in fresh()[number]]
        for name, number_drawn in samples:
            drawn.setdefault(name.partition("/")[0], set()).add(number_drawn)
    assert len(drawn) == len(set.union(*drawn.values())) == 14


def test_planned_run_resumes_at_every_pack_on_other_ranks():
    """WIN-4: inside of documents, from the sizes and runs that the checkpoint has."""
    assert num_resumed_inside_of_rows(rows(14), config()) > 5


@pytest.mark.parametrize("form", ["sized", "stream"])
def test_stream_resumes_at_every_pack(form):
    """WIN-4: a document that is half trained goes on where it was."""
    data = rows(16, seed=3)

    def fresh():
        made = data if form == "sized" else StreamedRows(list(data), Template(), name="data")
        return StreamedPackingDataset(made, Template(), config(), seed=1)

    assert len(records_resumed_at_every_pack(fresh)) > 5


def test_account_closes_in_rows_and_parts():
    """WIN-5: an image that no pack has room for is counted, listed, and its document trained without it."""
    data = rows(40)
    packs = PackingDataset(in_order(data), Template(), config())
    report = data_report(packs.epoch_plan, packs.dataset)["cut"]
    counted, (samples, _) = Counts(packing_length=CAPACITY), told([packs[n] for n in range(len(packs))])
    for left_out in left_out_by(packs.epoch_plan, packs.dataset):
        left_out.count_in(counted)
    lengths = [sum(run if run > 0 else 2 - run for run in row["runs"]) for row in data]
    assert sum(len(tokens) for _, tokens, _ in samples) + counted.lost_tokens.total() == sum(lengths)
    assert report["num_parts"] + (40 - report["num_rows_cut"]) == report["num_samples"]
    account = report["rows"]["data"]
    assert account["num_read"] == 40 == account["num_packed"] + sum(account["num_dropped"].values())
    listed = list(left_out_rows(packs.epoch_plan, packs.dataset))
    assert {line["reason"] for line in listed} == {"image_over_length"} == set(report["lost_by_cutting"])
    assert report["lost_by_cutting"]["image_over_length"]["num_images"] == len(listed)


def test_row_that_is_longer_than_planned_is_left_out_in_all_its_parts():
    """WIN-5: also where nothing but its end is new, which no part but the last would show."""
    data = [{"messages": [{}], "runs": [20]}, {"messages": [{}], "runs": [50]}, {"messages": [{}], "runs": [5]}]
    packs = PackingDataset(in_order(data), Template(), config())
    data[1]["runs"] = [51]
    samples, left_out = told([packs[number] for number in range(len(packs))])
    assert [name for name, *_ in samples] == ["data:0", "data:2"]
    assert [(str(one.sample_id), one.reason) for one in left_out] == [
        (f"data:1/{part}", "longer_than_planned") for part in range(3)
    ]


def test_epochs_have_equally_many_packs_on_every_rank():
    """WIN-3: mixed anew, each with other windows."""
    packs = PackingDataset(rows(30), Template(), config(), num_epochs=3, num_ranks=2, seed=4)
    lengths, orders = set(), set()
    for epoch in range(3):
        packs.set_epoch(epoch)
        lengths.add(len(packs))
        orders.add(tuple(packs.epoch_plan.schedule.row[:5].tolist()))
        assert len(packs) % 2 == 0
    assert len(lengths) == 1
    assert len(orders) > 1
