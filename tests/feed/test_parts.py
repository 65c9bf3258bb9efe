"""Rows longer than a pack, through both kinds of feed: every token and image once, whoever reads, however resumed."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from swift_vlpack import PackingConfig, PackingDataset
from swift_vlpack.errors import DataError, PlanError
from swift_vlpack.feed.epoch_report import count_rows, data_report, left_out_by, left_out_rows
from swift_vlpack.feed.planned import address_of
from swift_vlpack.feed.reader import PackReader
from swift_vlpack.feed.saved_rows import from_bytes
from swift_vlpack.feed.streamed import StreamedPackingDataset
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.source import RowSource
from swift_vlpack.rows.streams import StreamedRows
from swift_vlpack.runlog.account import account_json, law_in_words
from swift_vlpack.runlog.counts import Counts
from tests.feeds import planned_feed, records_resumed_at_every_pack, resumed, streamed_feed

IMAGE, START, END = 9, 7, 8


class Words:
    """Ids of the words around an image."""

    def convert_tokens_to_ids(self, text):
        return {"<|vision_start|>": START, "<|vision_end|>": END}.get(text)

    def convert_ids_to_tokens(self, token):
        return {START: "<|vision_start|>", END: "<|vision_end|>"}.get(token)


class Template:
    """A row is a list of runs: words, as many as a number says, or an image of so many patches, as a negative one.

    Words are numbered through all of a row, from 100 on, and patches through all of it too.
    """

    packing = padding_free = False
    max_length = 50
    image_token_id = IMAGE
    tokenizer = Words()
    processor = SimpleNamespace(image_processor=SimpleNamespace(merge_size=1))

    def encode(self, inputs, return_length=False):
        tokens, grids = [], []
        for run in inputs["runs"]:
            if run > 0:
                tokens += range(100 + len(tokens), 100 + len(tokens) + run)
            else:
                grids.append((1, 1, -run))
                tokens += [START, *[IMAGE] * -run, END]
        labels = [token if token >= 100 else -100 for token in tokens]
        if self.max_length is not None and len(tokens) > self.max_length:
            raise ValueError(f"Current length of row({len(tokens)}) is larger than the max_length({self.max_length})")
        made = {"input_ids": tokens, "labels": labels, "length": len(tokens)}
        if grids:
            made["image_grid_thw"] = torch.tensor(grids)
            made["pixel_values"] = torch.arange(sum(grid[2] for grid in grids), dtype=torch.float32)[:, None]
        return made


def rows(num_rows=12, seed=0):
    draw = random.Random(seed)
    return [
        {"messages": [{}], "runs": [draw.choice([-1, 1]) * draw.randint(1, 40) for _ in range(draw.choice([1, 2, 9]))]}
        for _ in range(num_rows)
    ]


def config(**options):
    return PackingConfig(
        **{
            "packing_length": 30,
            "packing_strategy": "best_fit",
            "packing_buffer": 8,
            "packing_overflow": "split",
            "packing_drop_last": False,
            **options,
        }
    )


def told(packs):
    """Samples as (id, tokens, patches) of packs, and what was left out."""
    samples = []
    for sample in (sample for pack in packs for sample in pack):
        patches = sample.get("pixel_values", torch.zeros(0)).flatten().tolist()
        samples.append((str(sample["sample_id"]), tuple(sample["input_ids"]), tuple(patches)))
    return samples, [left_out for pack in packs for left_out in pack.record.left_out]


def row_of(name):
    return int(name.partition(":")[2].partition("/")[0])


def check_conserved(data, samples, left_out, capacity=30):
    """Every word and every patch of every row once, in what was trained or in what is said to be left out."""
    for number, row in enumerate(data):
        whole = Template()
        whole.max_length = None
        sample = whole.encode(row)
        of_row = [one for one in samples if row_of(one[0]) == number]
        words = Counter(token for _, tokens, _ in of_row for token in tokens if token >= 100)
        patches = Counter(patch for _, _, pixels in of_row for patch in pixels)
        lost = [one for one in left_out if row_of(str(one.sample_id)) == number]
        assert sum(len(tokens) for _, tokens, _ in of_row) + sum(one.num_tokens for one in lost) == sample["length"]
        assert all(count == 1 for count in (*words.values(), *patches.values()))
        assert all(len(tokens) <= capacity for _, tokens, _ in of_row)
        # An image is as its tokens say, whole: as many placeholders as patches in every part.
        assert all(tokens.count(IMAGE) == len(pixels) for _, tokens, pixels in of_row)
        numbers = [one[0].partition("/")[2] for one in of_row] + [str(one.sample_id.part) for one in lost]
        if sample["length"] > capacity:
            assert sorted(map(int, numbers)) == list(range(len(numbers)))
        else:
            assert numbers == [""]


@pytest.mark.parametrize("mode", ["plan", "buffer", "stream"])
def test_every_token_and_image_once_in_every_mode(mode):
    """CUT-1 CUT-12: one cut, whether packs are planned or made as rows come; a template's max_length is no limit of
    rows that are cut."""
    data = rows(40)
    options = config(packing_mode="buffer" if mode == "buffer" else "auto")
    packs = PackingDataset(iter(data) if mode == "stream" else data, Template(), options)
    if mode == "plan":
        made = [packs[number] for number in range(len(packs))]
        samples, at_load = told(made)
        left_out = left_out_by(packs.epoch_plan, packs.dataset)
        assert at_load == []
    else:
        samples, left_out = told(list(packs))
    check_conserved(data, samples, left_out)
    assert {one.reason for one in left_out} == {"image_over_length"}
    assert any("/" in name for name, *_ in samples)


def test_plan_is_what_the_stream_makes_of_the_same_order():
    """CUT-12: the same packs of the same parts, but for where the remainder goes."""
    data = rows(40)
    options = config(packing_strategy="greedy")
    source = FusionCaptionDataset([RowSource(name="data", rows=data)], Template(), shuffle=False)
    planned = PackingDataset(source, Template(), options)
    again = FusionCaptionDataset([RowSource(name="data", rows=data)], Template(), shuffle=False)
    buffered = StreamedPackingDataset(again, Template(), options)
    by_plan = [[str(key) for key in planned[number].record.sample_ids] for number in range(len(planned))]
    by_stream = [[str(key) for key in pack.record.sample_ids] for pack in buffered if len(pack)]
    assert by_plan == by_stream


def test_planned_run_resumes_at_every_pack_on_other_ranks():
    """CUT-11: also between two parts of a row, from the sizes and parts that the checkpoint has."""
    assert num_resumed_inside_of_rows(rows(14), config()) > 3


def num_resumed_inside_of_rows(data, options):
    """How often a row was half trained, of resumes at every pack on two ranks, each of which trains the rest."""
    whole = planned_feed(data, Template(), options)
    packs = packs_left(whole)
    assert from_bytes(whole.saved_rows.as_file())[0].sizes.cut == whole.dataset.sources[0].sizes.cut
    num_inside = 0
    for step in range(len(packs)):
        trained = planned_feed(data, Template(), options)
        fresh = planned_feed(data, Template(), options, num_ranks=2)
        rest = keys(packs_left(resumed(fresh, trained, [pack.record for pack in packs[:step]])))
        done = keys(packs[:step])
        assert sorted([*done, *rest]) == sorted(keys(packs)), step
        num_inside += bool({row_of(key) for key in done} & {row_of(key) for key in rest})
    return num_inside


def packs_left(feed):
    """What all ranks train from where the epoch stands."""
    reader, plan = PackReader(feed.dataset, feed.config, feed.seed, len(feed)), feed.epoch_plan
    return [reader[address_of(plan, number)] for rank in range(feed.num_ranks) for number in plan.numbers_left(rank)]


def keys(packs):
    return [str(key) for pack in packs for key in pack.record.sample_ids]


@pytest.mark.parametrize("form", ["sized", "stream"])
def test_stream_resumes_at_every_pack(form):
    """CUT-11: what is held are parts; their rows are read and cut again, and no part is trained twice."""
    data, options = rows(16, seed=3), config(packing_buffer=6)

    def fresh():
        made = data if form == "sized" else StreamedRows(list(data), Template(), name="data")
        return StreamedPackingDataset(made, Template(), options, seed=1)

    expected = [record.sample_ids for record in records_resumed_at_every_pack(fresh)]
    in_between = 0
    for step in range(1, len(expected)):
        behind = {key[:2] for ids in expected[:step] for key in ids}
        in_between += any(key[:2] in behind for ids in expected[step:] for key in ids)
    assert in_between > 2


@pytest.mark.parametrize("how", ["split", "truncate", "drop"])
def test_account_closes_in_rows_and_in_parts(how):
    """CUT-13: a row is counted by its part 0, which is trained if any of it is; what was lost is counted in tokens."""
    data = rows(40)
    packs = PackingDataset(data, Template(), config(packing_overflow=how))
    report = data_report(packs.epoch_plan, packs.dataset)["cut"]
    rows_account = report["rows"].get("data") or {"num_read": 40, "num_packed": 40, "num_dropped": {}, "num_held": 0}
    assert rows_account["num_read"] == 40 == rows_account["num_packed"] + sum(rows_account["num_dropped"].values())
    lengths = [sum(run if run > 0 else 2 - run for run in row["runs"]) for row in data]
    assert report["num_rows_cut"] == sum(length > 30 for length in lengths)
    counted = Counts(packing_length=30)
    samples, _ = told([packs[number] for number in range(len(packs))])
    for left_out in left_out_by(packs.epoch_plan, packs.dataset):
        left_out.count_in(counted)
    assert sum(map(len, (tokens for _, tokens, _ in samples))) + counted.lost_tokens.total() == sum(lengths)
    num_images = sum(run < 0 for row in data for run in row["runs"])
    starts = sum(tokens.count(START) for _, tokens, _ in samples)
    assert starts + counted.lost_images.total() == num_images
    listed = list(left_out_rows(packs.epoch_plan, packs.dataset))
    assert {line["reason"] for line in listed} == set(report["lost_by_cutting"])
    assert sum(lost["num_parts"] for lost in report["lost_by_cutting"].values()) == len(listed)
    expected = {"split": {"image_over_length"}, "truncate": {"truncated", "image_over_length"}, "drop": {"overflow"}}
    assert set(report["lost_by_cutting"]) <= expected[how]


def test_counts_go_through_a_checkpoint_and_add_up():
    """CUT-13 STAT-6"""
    one, other = Counts(packing_length=10), Counts(packing_length=10)
    one.read("a", 4, num_further=2)
    one.packed([("a", 5), ("a", 4)], further=["a"])
    other.dropped("a", "image_over_length", is_further=True, num_tokens=20, num_images=1)
    other.packed([("a", 5)])
    one.merge(Counts.from_state(other.state()))
    again = Counts.from_state(one.state())
    assert again == one
    assert again.is_closed
    report = account_json(again)
    assert report["rows"]["a"] == {"num_read": 2, "num_packed": 2, "num_held": 0, "num_dropped": {}}
    assert report["lost_by_cutting"] == {"image_over_length": {"num_parts": 1, "num_tokens": 20, "num_images": 1}}
    assert law_in_words(again).endswith("in rows: 2 read = 2 packed + 0 left out + 0 not reached")
    again.dropped("a", "overflow")
    again.further["a"].num_packed += 1
    assert not again.is_closed
    assert "do not add up" in law_in_words(again)
    plain = Counts(packing_length=10)
    plain.packed([("a", 5)])
    assert set(plain.state()) == set(Counts(packing_length=10).state()), "a state without parts is what it was"
    assert not set(plain.state()) & {"further", "lost_tokens", "lost_images"}


def test_row_that_is_cut_otherwise_when_it_is_loaded_is_left_out_and_known_next_time(caplog):
    """CUT-9: the true length decides, part by part."""
    data = rows(10)
    packs = PackingDataset(data, Template(), config())
    at = next(n for n, row in enumerate(data) if len(row["runs"]) > 1 and sum(map(abs, row["runs"])) > 90)
    data[at]["runs"] = [data[at]["runs"][0], 1, *data[at]["runs"][1:]]
    samples, left_out = told([packs[number] for number in range(len(packs))])
    assert {one.reason for one in left_out} == {"longer_than_planned"}
    assert {row_of(str(one.sample_id)) for one in left_out} == {at}
    assert "is now cut elsewhere" in left_out[0].detail
    assert all(len(tokens) <= 30 for _, tokens, _ in samples)


@pytest.mark.parametrize("mode", ["plan", "buffer"])
def test_row_whose_tensors_are_not_what_its_tokens_say_is_counted(mode):
    """CUT-6: found when it is cut, part by part; the run goes on."""

    class Short(Template):
        def encode(self, inputs, return_length=False):
            made = super().encode(inputs, return_length)
            if "pixel_values" in made:
                made["pixel_values"] = made["pixel_values"][1:]
            return made

    data = [{"messages": [{}], "runs": [40, -5, 40]}, {"messages": [{}], "runs": [12]}]
    packs = PackingDataset(data, Short(), config(packing_mode="auto" if mode == "plan" else "buffer"))
    samples, left_out = told([packs[number] for number in range(len(packs))] if mode == "plan" else list(packs))
    assert [str(one.sample_id) for one in left_out if one.reason == "cannot_be_cut"] == ["data:0/1"]
    assert {name for name, *_ in samples} >= {"data:0/0", "data:0/2", "data:1"}


def test_sizes_without_parts_are_refused_where_rows_are_to_be_cut():
    """CUT-12: or long rows would stay whole without a word."""
    data = FusionCaptionDataset([RowSource(name="data", rows=rows(5))], Template())
    data.measure()
    with pytest.raises(DataError, match="was measured for rows that stay whole"):
        PackingDataset(data, Template(), config())


def test_ratios_are_of_rows_and_epochs_too_unlike_are_refused():
    """CUT-14"""
    few = [{"messages": [{}], "runs": [900]}, *({"messages": [{}], "runs": [25]} for _ in range(9))]
    source = FusionCaptionDataset([RowSource(name="data", rows=few, ratio=0.5)], Template(), seed=1)
    packs = PackingDataset(source, Template(), config(), num_epochs=1)
    assert packs.epoch_plan.num_rows == 5
    with pytest.raises(PlanError, match=r"ratios below 1 of rows that are cut one epoch has .* samples.*a ratio of 1"):
        PackingDataset(source, Template(), config(), num_epochs=6)


def test_row_that_breaks_before_it_is_loaded_is_left_out_part_by_part():
    """CUT-13: one row of the account, whatever packs its parts are in."""
    data = [{"messages": [{}], "runs": [20]}, {"messages": [{}], "runs": [75]}, {"messages": [{}], "runs": [5]}]
    packs = PackingDataset(data, Template(), config())
    data[1]["runs"] = None
    counted = Counts(packing_length=30)
    named = []
    for pack in (packs[number] for number in range(len(packs))):
        count_pack(counted, pack.record)
        named += [str(left_out.sample_id) for left_out in pack.record.left_out]
    count_rows(counted, packs.epoch_plan, packs.dataset)
    assert sorted(named) == [f"data:1/{part}" for part in range(len(named))]
    assert len(named) >= 3
    assert counted.is_closed
    account = account_json(counted)["rows"]["data"]
    assert account == {"num_read": 3, "num_packed": 2, "num_held": 0, "num_dropped": {"encode_failed": 1}}


def count_pack(counted, record):
    samples = [(key.source, length) for key, length in zip(record.sample_ids, record.lengths, strict=True)]
    if samples:
        counted.packed(samples, further=[key.source for key in record.sample_ids if key.is_further_part])
    for left_out in record.left_out:
        left_out.count_in(counted)


def test_streamed_feed_counts_parts_and_rows():
    """CUT-13: nobody knows of a row before it is read."""
    data = rows(20)
    feed = streamed_feed(data, Template(), config())
    counted = Counts(packing_length=30)
    for pack in feed.packs:
        count_pack(counted, pack.record)
    feed.count_rows(counted)
    assert counted.is_closed
    assert counted.rows["data"].num_read == 20
    assert counted.num_read > 20
