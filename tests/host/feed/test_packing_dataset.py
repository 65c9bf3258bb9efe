import copy
import logging
import pickle
from collections import Counter
from itertools import cycle
from pathlib import Path

import pytest
import torch

from swift_vlpack import PackingConfig
from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.feed import failures
from swift_vlpack.feed.collate import Collator
from swift_vlpack.feed.dataset import PackingDataset
from swift_vlpack.feed.epoch_report import left_out_by
from swift_vlpack.feed.planned import PlannedPackingDataset
from swift_vlpack.feed.streamed import StreamedPackingDataset
from swift_vlpack.plan.planner import plan
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.samples import Address, SampleId, TooManyFailures
from swift_vlpack.rows.sizes import LengthIndex, RowSize
from swift_vlpack.rows.source import RowSource
from tests.data_rows import image_row, mixed_rows, text_row
from tests.feeds import loader_over, planned_feed, streamed_feed
from tests.images import BROKEN, GOOD, REASON_OF, make, photo

FAMILY = "qwen2_5_vl"
FORMS = ("plan", "buffer")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """30 rows of 45 to 190 tokens, of text and of images."""
    return mixed_rows(tmp_path_factory.mktemp("rows"), 30, seed=1, largest=120)


def config(**options):
    return PackingConfig(
        **{
            "packing_length": 300,
            "packing_buffer": 8,
            "packing_drop_last": False,
            "packing_strategy": "best_fit",
            **options,
        }
    )


def texts(num_rows, num_words=10):
    return [text_row(f"number {n}", "word " * num_words) for n in range(num_rows)]


def packed(rows, template, form="plan", **options):
    if not isinstance(rows, FusionCaptionDataset):
        rows = FusionCaptionDataset([RowSource(name="data", rows=rows)], template, seed=5)
    return PackingDataset(rows, template, config(packing_mode=form, **options))


def packs_of(dataset):
    return [dataset[i] for i in range(len(dataset))] if isinstance(dataset, PlannedPackingDataset) else list(dataset)


def ids(packs):
    return [sample_id for pack in packs for sample_id in pack.record.sample_ids]


def left_out(packs, dataset=None):
    """Everything that is in no pack: left out at load, and left out by the plan."""
    some = [left for pack in packs for left in pack.record.left_out]
    return some + (
        left_out_by(dataset.epoch_plan, dataset.dataset) if isinstance(dataset, PlannedPackingDataset) else []
    )


def scheduled(dataset):
    """The rows of the epoch: of the plan, or, where packs are made as rows come, as the sources are mixed."""
    plan = getattr(dataset, "epoch_plan", None)
    schedule = dataset.dataset.mix.schedule(dataset.epoch) if plan is None else plan.schedule
    return Counter(dataset.dataset.sample_id(Address(*where)) for where in schedule)


def assert_conserved(dataset, packs):
    """Every scheduled row is in one pack or left out with a reason, exactly once."""
    assert Counter(ids(packs)) + Counter(left.sample_id for left in left_out(packs, dataset)) == scheduled(dataset)


def assert_records_are_true(packs, packing_length):
    for pack in packs:
        assert pack.record.sample_ids == tuple(sample["sample_id"] for sample in pack)
        assert pack.record.lengths == tuple(len(sample["input_ids"]) for sample in pack)
        assert pack.record.num_images == sum(len(sample.get("image_grid_thw", ())) for sample in pack)
        assert len(pack) <= 1 or sum(pack.record.lengths) <= packing_length


def counted(template, monkeypatch):
    """A list that grows with every row the template is asked to encode."""
    asked, encode = [], template.encode
    monkeypatch.setattr(template, "encode", lambda row, **kw: asked.append(row) or encode(row, **kw))
    return asked


# -- two forms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "mode", "form"),
    [
        (list, "auto", PlannedPackingDataset),
        (list, "plan", PlannedPackingDataset),
        (list, "buffer", StreamedPackingDataset),
        (iter, "auto", StreamedPackingDataset),
        (iter, "buffer", StreamedPackingDataset),
    ],
)
def test_form_follows_the_data_and_the_mode(template, data, mode, form):
    """DATA-5"""
    dataset = PackingDataset(data(texts(3)), template, config(packing_mode=mode))
    assert type(dataset) is form
    assert (template.packing, template.padding_free) == (True, True)
    packs = packs_of(dataset)
    assert all(isinstance(pack, list) and isinstance(pack[0], dict) for pack in packs)
    assert sorted(sample_id.row for sample_id in ids(packs)) == [0, 1, 2]


def test_plan_of_a_stream_is_refused_with_the_way_out(template):
    """DATA-5 CONF-11: the one thing in which `plan` differs from `auto`, which buffers a stream."""
    with pytest.raises(ConfigError, match="packing_mode=buffer"):
        PackingDataset(iter(texts(3)), template, config(packing_mode="plan"))


@pytest.mark.parametrize("form", FORMS)
def test_samples_of_a_pack_are_the_encoded_rows(template, rows, form):
    """DATA-1 DATA-5"""
    dataset = packed(rows, template, form)
    packs = packs_of(dataset)
    assert_conserved(dataset, packs)
    assert_records_are_true(packs, 300)
    for sample in (sample for pack in packs for sample in pack):
        expected = template.encode(rows[sample["sample_id"].row])
        assert sample["input_ids"] == expected["input_ids"]
        assert sample["labels"] == expected["labels"]
        for name in set(expected) & {"pixel_values", "image_grid_thw", "mm_token_type_ids"}:
            assert torch.equal(sample[name], expected[name])


def test_both_forms_pack_alike(template, rows):
    """DATA-5: one packer; the plan sees the lengths that the buffer finds."""
    planned, buffered = (packs_of(packed(rows, template, form)) for form in FORMS)
    assert len(planned) > 5
    assert [pack.record.sample_ids for pack in planned] == [pack.record.sample_ids for pack in buffered]


# -- plan -------------------------------------------------------------------------------------------------------------


def test_length_is_exact_and_all_packs_are_within_capacity(template, rows):
    """DATA-6 DATA-8"""
    for strategy in ("binpack", "greedy", "exact"):
        dataset = packed(rows, template, packing_strategy=strategy)
        packs = packs_of(dataset)
        assert len(dataset) == len(packs)
        assert [sum(pack.record.lengths) for pack in packs] == dataset.plan.num_tokens_per_pack.tolist()
        assert all(packs)
        assert_conserved(dataset, packs)
        assert_records_are_true(packs, 300)
        with pytest.raises(IndexError):
            dataset[len(dataset)]


def test_only_the_rows_of_the_pack_are_encoded(template, monkeypatch):
    """DATA-6"""
    rows = texts(30)
    data = FusionCaptionDataset([RowSource(name="data", rows=rows)], template)
    data.measure()
    asked = counted(template, monkeypatch)
    dataset = packed(data, template)
    dataset.set_epoch(1)
    assert len(dataset) > 3
    assert asked == [], "a plan is made of lengths"
    pack = dataset[2]
    assert asked == [rows[sample["sample_id"].row] for sample in pack]
    assert len(asked) == len(pack) > 1


def test_plan_measures_what_has_no_lengths_yet_once(template, rows, monkeypatch):
    """DATA-6"""
    asked = counted(template, monkeypatch)
    sizes = LengthIndex.of([RowSize(50)] * 4)
    sources = [RowSource(name="known", rows=texts(4), sizes=sizes), RowSource(name="new", rows=rows)]
    dataset = packed(FusionCaptionDataset(sources, template), template)
    for epoch in range(3):
        dataset.set_epoch(epoch)
        assert dataset.plan
    assert asked == rows


def test_all_epochs_have_equally_many_packs(template, rows):
    """DATA-6 DATA-4"""
    data = FusionCaptionDataset([RowSource(name="data", rows=rows, ratio=0.6)], template, seed=2)
    num_epochs = 6
    dataset = PlannedPackingDataset(data, template, config(), num_epochs=num_epochs)
    needed, orders = [], set()
    for epoch in range(num_epochs):
        dataset.set_epoch(epoch)
        packs = packs_of(dataset)
        assert len(packs) == len(dataset) == len(dataset.plan)
        assert all(packs), "an epoch that needs fewer packs splits some, it has no empty ones"
        assert_conserved(dataset, packs)
        needed.append(len(plan(dataset.epoch_plan.lengths, config(), seed=epoch, label=None)))
        orders.add(tuple(ids(packs)))
    assert len(set(needed)) > 1, "the epochs would differ, so this tests something"
    assert len(dataset) == max(needed)
    assert len(orders) == num_epochs, "packed anew"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_epoch_beyond_those_that_were_counted_gets_the_packs_it_needs(template, rows, num_ranks):
    """DATA-6: a run of many steps over few rows, or a trainer of one's own that counts no epochs."""
    data = FusionCaptionDataset([RowSource(name="data", rows=rows, ratio=0.6)], template, seed=2)
    dataset = PlannedPackingDataset(data, template, config(), num_ranks=num_ranks)
    counts = set()
    for epoch in range(6):
        dataset.set_epoch(epoch)
        packs = packs_of(dataset)
        assert len(packs) == len(dataset)
        assert len(packs) % num_ranks == 0
        assert_conserved(dataset, packs)
        counts.add(len(packs))
    assert len(counts) > 1


def sized(lengths, template, **options):
    """Rows of which only the lengths matter; 0 is one that cannot be trained."""
    failures = {row: "over_max_length" for row, length in enumerate(lengths) if not length}
    sizes = LengthIndex.of([RowSize(length) for length in lengths], failures)
    rows = [text_row(f"row {n}") for n in range(len(lengths))]
    return FusionCaptionDataset([RowSource(name="data", rows=rows, sizes=sizes, **options)], template, seed=1)


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        pytest.param([290, 0] * 17, {}, id="every other row cannot be trained"),
        pytest.param([290, 400] * 17, {"packing_allow_single_long": False}, id="every other row exceeds a pack"),
        pytest.param([*[290] * 120, 20, 20, 20, 20, 0], {"packing_drop_last": True}, id="with a remainder"),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("steps", [{"num_epochs": 12}, {"num_packs": 100}])
def test_no_epoch_has_too_few_samples_for_the_steps_of_the_others(template, lengths, options, num_ranks, steps):
    """PLAN-12 MIX-6: half of the rows are drawn anew each epoch; packs of one sample cannot be cut."""
    data = sized(lengths, template, ratio=0.5)
    dataset = PlannedPackingDataset(data, template, config(**options), num_ranks=num_ranks, **steps)
    num_trained = set()
    for epoch in range(40):
        dataset.set_epoch(epoch)
        assert len(dataset) >= dataset.num_packs
        assert len(dataset) % num_ranks == 0
        num_trained.add(len(dataset.plan.members) + dataset.plan.num_dropped.get("underfilled", 0))
        at = [row for pack in dataset.plan for _, row in dataset.epoch_plan.samples(pack)]
        assert all(0 < lengths[row] <= 300 for row in at)
        assert len(set(at)) == len(at)
    usable = sum(0 < length <= 300 for length in lengths)
    assert num_trained == {round(usable / 2)}, "as many samples in every epoch"


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_remainder_is_dropped_only_where_no_step_needs_it(template, num_ranks):
    """PLAN-11: of equally long epochs, those with fewer packs get theirs back before any pack is cut."""
    data = sized([150, 130, 90, 60, 40, 20, 10] * 40, template, ratio=0.7)
    options = {"packing_drop_last": True, "packing_min_fill_ratio": 0.9, "packing_strategy": "exact"}
    dataset = PlannedPackingDataset(data, template, config(**options), num_ranks=num_ranks, num_epochs=30)
    num_dropping = num_cutting = 0
    for epoch in range(30):
        dataset.set_epoch(epoch)
        made, aligned = dataset.epoch_plan.unshared, dataset.plan
        is_cut = len(aligned) - aligned.num_empty > len(made.with_remainder())
        assert not (len(aligned) > len(made) and aligned.num_dropped), "a pack was cut or empty, and a sample dropped"
        num_dropping += bool(aligned.num_dropped)
        num_cutting += is_cut
        everything = [*aligned.members.tolist(), *(n for some in aligned.dropped.values() for n in some.tolist())]
        assert sorted(everything) == list(range(len(dataset.epoch_plan.schedule)))
    assert num_dropping or num_ranks > 1
    assert num_cutting or num_ranks == 1


def test_nothing_to_pack_is_an_error_that_says_so(template, tmp_path):
    """DATA-6 DATA-7"""
    missing = [image_row([str(tmp_path / f"{n}.jpg")]) for n in range(3)]
    with pytest.raises(TooManyFailures, match=r"none of the 3 rows can be packed \(file_missing 3\); the first is"):
        packed(missing, template)
    with pytest.raises(DataError, match=r"no pack; nothing would be trained: 3 rows of 3 left out .oversize 3."):
        packed(texts(3, 300), template, packing_allow_single_long=False)


# -- rows that fail ---------------------------------------------------------------------------------------------------


@pytest.fixture
def odd(tmp_path):
    """Rows with every odd image; the first ones can be read."""
    paths = {**make(tmp_path / "good", GOOD), **make(tmp_path / "broken", BROKEN)}
    return [image_row([path], f"what is {name}?") for name, path in paths.items()]


@pytest.mark.parametrize("form", FORMS)
def test_readable_images_are_packed_and_the_others_left_out_with_a_reason(template, odd, form, caplog):
    """DATA-7"""
    with caplog.at_level(logging.WARNING, logger="swift_vlpack"):
        dataset = packed(odd, template, form)
        packs = packs_of(dataset)
    assert sorted(sample_id.row for sample_id in ids(packs)) == list(range(len(GOOD)))
    reasons = {left.sample_id.row: left.reason for left in left_out(packs, dataset)}
    assert reasons == {len(GOOD) + n: REASON_OF[kind] for n, kind in enumerate(BROKEN)}
    assert_conserved(dataset, packs)
    logged = [record.message for record in caplog.records if "data:" in record.message]
    for row in reasons:
        assert sum(message.startswith(f"data:{row}:") for message in logged) == 1, logged


def test_row_that_breaks_after_the_plan_is_left_out_and_not_replaced(template, tmp_path, caplog):
    """DATA-7: a pack shrinks, the number of packs does not; the others keep their place."""
    paths = [photo(tmp_path, str(n), 80, 60 + 20 * n, seed=n) for n in range(6)]
    dataset = packed([*[image_row([path]) for path in paths], *texts(4)], template)
    before = packs_of(dataset)
    Path(paths[1]).unlink()
    Path(paths[4]).write_bytes(Path(paths[4]).read_bytes()[:200])
    with caplog.at_level(logging.WARNING, logger="swift_vlpack"):
        after = packs_of(dataset)
    gone = {SampleId("data", 1): "file_missing", SampleId("data", 4): "image_unreadable"}
    assert dict(left[:2] for left in left_out(after)) == gone
    assert len(after) == len(before)
    for pack, planned in zip(after, before, strict=True):
        kept = tuple(sample_id for sample_id in planned.record.sample_ids if sample_id not in gone)
        assert pack.record.sample_ids == kept
    assert all(any(str(sample_id) in record.message for record in caplog.records) for sample_id in gone)


def test_pack_that_loses_all_its_rows_stays_as_an_empty_one(template, tmp_path):
    """DATA-7 DATA-10"""
    path = photo(tmp_path, "only", 100, 100)
    dataset = packed([image_row([path])], template)
    Path(path).unlink()
    (pack,) = packs_of(dataset)
    assert list(pack) == []
    assert pack.record.sample_ids == pack.record.lengths == ()
    [left] = pack.record.left_out
    assert left[:2] == (SampleId("data", 0), "file_missing")


def some_missing(tmp_path, pattern):
    """Rows of text, and where the pattern has an x, rows whose image is missing; in this order in one source."""
    return [image_row([str(tmp_path / "gone.jpg")]) if mark == "x" else text_row(f"row {mark}") for mark in pattern]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("pattern", "stops"), [("..xxx.xxx.", False), ("xxx", False), (".xxxx.", True), ("xxxx", True)]
)
def test_more_failures_in_succession_than_allowed_stop_the_run(template, tmp_path, form, pattern, stops, monkeypatch):
    """DATA-7"""
    monkeypatch.setattr(failures, "MAX_FAILED_IN_SUCCESSION", 3)
    rows = some_missing(tmp_path, pattern)
    sizes = LengthIndex.of([RowSize(30)] * len(rows))  # the files went after the length pass
    data = FusionCaptionDataset([RowSource(name="data", rows=rows, sizes=sizes)], template, shuffle=False)
    dataset = packed(data, template, form, packing_strategy="greedy")
    if stops:
        with pytest.raises(TooManyFailures, match=rf"4 rows in succession .*data:{pattern.rindex('x')}: file_missing"):
            packs_of(dataset)
    else:
        assert len(left_out(packs_of(dataset))) == pattern.count("x")


# -- true lengths -----------------------------------------------------------------------------------------------------


def test_wrong_lengths_never_make_a_pack_too_long_and_lose_nothing_unsaid(template, rows):
    """DATA-8"""
    true = [len(template.encode(row)["input_ids"]) for row in rows]
    for factors in ((0.3,), (0.5, 1.0, 2.0), (0.9, 1.1)):
        sizes = LengthIndex.of(
            RowSize(max(1, int(n * factor))) for n, factor in zip(true, cycle(factors), strict=False)
        )
        dataset = packed(FusionCaptionDataset([RowSource(name="data", rows=rows, sizes=sizes)], template), template)
        packs = packs_of(dataset)
        assert_records_are_true(packs, 300)
        assert_conserved(dataset, packs)
        assert {left.reason for left in left_out(packs)} == {"longer_than_planned"}


@pytest.mark.parametrize("form", FORMS)
def test_sample_over_the_capacity_is_whole_and_alone(template, form):
    """DATA-8"""
    rows = [*texts(4), text_row("long", "word " * 500)]
    packs = packs_of(packed(rows, template, form))
    (long,) = [pack for pack in packs if pack.record.single_long]
    assert long.record.sample_ids == (SampleId("data", 4),)
    assert long[0]["input_ids"] == template.encode(rows[4])["input_ids"]
    assert long.record.lengths[0] > 500


@pytest.mark.parametrize("form", FORMS)
def test_sample_over_the_capacity_is_skipped_when_asked(template, form, caplog):
    """DATA-8"""
    rows = [*texts(4), text_row("long", "word " * 500)]
    with caplog.at_level(logging.WARNING, logger="swift_vlpack"):
        dataset = packed(rows, template, form, packing_allow_single_long=False)
        packs = packs_of(dataset)
    assert [left[:2] for left in left_out(packs, dataset)] == [(SampleId("data", 4), "oversize")]
    assert "left out: data:4" in caplog.text, "the log names the row"
    assert_conserved(dataset, packs)


@pytest.mark.parametrize("form", FORMS)
def test_max_length_is_the_templates_own_rule(template, form):
    """DATA-8"""
    short = copy.copy(template)
    short.max_length = 60
    rows = [text_row("short"), text_row("long", "word " * 200)]
    packs = packs_of(dataset := packed(rows, short, form))
    assert [left[:2] for left in left_out(packs, dataset)] == [(SampleId("data", 1), "over_max_length")]
    for strategy in ("right", "left"):
        short.truncation_strategy = strategy
        samples = [sample for pack in packs_of(packed(rows, short, form)) for sample in pack]
        assert sorted(sample["length"] for sample in samples) == [len(template.encode(rows[0])["input_ids"]), 60]
        for sample in samples:
            expected = short.encode(rows[sample["sample_id"].row])
            assert (sample["input_ids"], sample["labels"]) == (expected["input_ids"], expected["labels"])


# -- the buffer's account ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strategy", ["binpack", "greedy", "exact"])
def test_what_is_packed_and_what_is_left_out_is_everything(template, rows, odd, form, strategy):
    """DATA-7 DATA-8 DATA-10"""
    mixed = [*rows[:12], *odd, text_row("long", "word " * 500)]
    for drop_last in (False, True):
        dataset = packed(mixed, template, form, packing_strategy=strategy, packing_drop_last=drop_last)
        for epoch in range(2 if form == "buffer" else 1):
            dataset.set_epoch(epoch)
            packs = packs_of(dataset)
            assert [pack.record.number for pack in packs] == list(range(len(packs)))
            assert {pack.record.epoch for pack in packs} == {epoch}
            assert_conserved(dataset, packs)
            assert_records_are_true(packs, 300)


def test_every_pack_tells_what_was_left_out_before_it_and_the_last_what_came_after(template, tmp_path):
    """DATA-7: failures after the last pack, and the underfilled remainder, have no pack of their own to travel in."""
    gone = image_row([str(tmp_path / "gone.jpg")])
    rows = [gone, *texts(1) * 53, gone]
    data = FusionCaptionDataset([RowSource(name="data", rows=rows)], template, shuffle=False)
    num_tokens = len(template.encode(rows[1])["input_ids"])
    dataset = packed(data, template, "buffer", packing_length=4 * num_tokens, packing_buffer=4, packing_drop_last=True)
    packs = packs_of(dataset)
    assert [len(pack) for pack in packs] == [4] * 13
    assert [left[:2] for left in packs[0].record.left_out] == [(SampleId("data", 0), "file_missing")]
    assert {left[1] for left in packs[-1].record.left_out} == {"underfilled", "file_missing"}
    assert SampleId("data", 54) in {left.sample_id for left in packs[-1].record.left_out}


def test_epoch_in_which_nothing_can_be_read_still_tells_it(template, tmp_path):
    """DATA-7 DATA-10"""
    dataset = packed(some_missing(tmp_path, "xx"), template, "buffer")
    (pack,) = packs_of(dataset)
    assert list(pack) == []
    assert_conserved(dataset, [pack])


def test_buffer_holds_no_more_than_its_window(template, monkeypatch):
    """DATA-5: a pack comes out before the rest of the data is read."""
    asked = counted(template, monkeypatch)
    dataset = packed(texts(100), template, "buffer", packing_buffer=8)
    next(iter(dataset))
    assert 8 <= len(asked) <= 30


# -- dataloaders ------------------------------------------------------------------------------------------------------


@pytest.fixture
def loader_of(template):
    """Make training loaders, and close them: left to the garbage collector, workers take five seconds to go."""
    made = []

    def loader_of(feed, num_workers, **options):
        options = {"persistent_workers": num_workers > 0, "collate_fn": Collator(template, for_model=False), **options}
        made.append(loader_over(feed, num_workers=num_workers, **options))
        return made[-1]

    yield loader_of
    for loader in made:
        if loader._iterator is not None and loader.num_workers:
            loader._iterator._shutdown_workers()


def read_epoch(loader, epoch):
    loader.set_epoch(epoch)
    return [row.record for row in loader]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_every_row_comes_exactly_once_an_epoch_with_any_number_of_workers(
    template, rows, odd, loader_of, form, num_workers
):
    """DATA-9 DATA-4: the workers live on and see the new epoch."""
    mixed = [*rows[:16], *odd]
    data = FusionCaptionDataset([RowSource(name="data", rows=mixed)], template, seed=3)
    options = {"num_epochs": 3} if form == "plan" else {"num_workers": num_workers}
    make = {"plan": planned_feed, "buffer": streamed_feed}[form]
    feed = make(data, template, config(packing_drop_last=form == "buffer"), **options)
    loader = loader_of(feed, num_workers)
    orders = []
    for epoch in (0, 1, 2, 0):
        records = read_epoch(loader, epoch)
        assert {record.epoch for record in records} == {epoch}
        gone = [left.sample_id for record in records for left in record.left_out]
        if form == "plan":
            assert len(records) == len(loader) == len(feed)
            gone += [left.sample_id for left in feed.begin(epoch).left_out]
        else:
            gone += [left.sample_id for left in feed.left_out_after()]
        order = [record.sample_ids for record in records]
        assert Counter([*(sample_id for pack in order for sample_id in pack), *gone]) == scheduled(feed)
        orders.append(order)
    assert orders[0] == orders[3]
    assert len({str(order) for order in orders}) == 3, "mixed and packed anew"


@pytest.mark.parametrize("form", FORMS)
def test_error_in_a_worker_reaches_the_training_process(template, tmp_path, loader_of, form, monkeypatch):
    """DATA-7 DATA-9"""
    monkeypatch.setattr(failures, "MAX_FAILED_IN_SUCCESSION", 3)
    data = FusionCaptionDataset(
        [RowSource(name="data", rows=some_missing(tmp_path, "xxxxxx"), sizes=LengthIndex.of([RowSize(30)] * 6))],
        template,
    )
    feed = {"plan": planned_feed, "buffer": streamed_feed}[form](data, template, config())
    with pytest.raises(TooManyFailures, match="4 rows in succession"):
        read_epoch(loader_of(feed, 1), 0)


@pytest.mark.parametrize("form", FORMS)
def test_pickled_packs_are_the_same_packs(template, rows, form):
    """DATA-9: how they reach a spawned worker."""
    dataset = packed(rows[:12], template, form)
    again = pickle.loads(pickle.dumps(dataset))
    assert type(again) is type(dataset)
    expected, packs = packs_of(dataset), packs_of(again)
    assert [pack.record for pack in packs] == [pack.record for pack in expected]
    travelled = pickle.loads(pickle.dumps(packs[0]))
    assert travelled.record == packs[0].record
    assert [sample["input_ids"] for sample in travelled] == [sample["input_ids"] for sample in expected[0]]
