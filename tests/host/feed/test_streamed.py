"""Buffer mode without a trainer: what a worker's state is, and that it has the same future."""

import json
import random
from collections import Counter

import pytest
from torch.utils.data import DataLoader

from swift_vlpack import PackingConfig
from swift_vlpack.errors import ConfigError, StateMismatch
from swift_vlpack.feed.streamed import ReaderProgress, StreamedPackingDataset
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.samples import SampleId
from swift_vlpack.rows.source import RowSource
from swift_vlpack.rows.streams import StreamedRows
from tests.data_rows import image_row, sentence, text_row
from tests.images import photo
from tests.marks import telling

FAMILY = "qwen2_5_vl"


def config(**options):
    return PackingConfig(
        **{
            "packing_length": 200,
            "packing_buffer": 6,
            "packing_strategy": "best_fit",
            **options,
        }
    )


def rows(num_rows, *, seed=0, broken=()):
    """Rows of 25 to 110 tokens; those with a number in `broken` cannot be encoded."""
    rng = random.Random(seed)
    good = [text_row(f"number {n}", sentence(rng, 2, 80)) for n in range(num_rows)]
    return [image_row(["/gone.jpg"]) if n in broken else row for n, row in enumerate(good)]


def buffered(template, data, form="sized", *, rank=0, num_ranks=1, **options):
    if form == "sized":
        dataset = FusionCaptionDataset([RowSource(name="data", rows=data)], template, seed=5)
    else:
        dataset = StreamedRows(data, template, name="data")
    return StreamedPackingDataset(dataset, template, config(**options), seed=2, rank=rank, num_ranks=num_ranks)


def records(dataset, num_workers=0):
    """One epoch through a plain dataloader."""
    loader = DataLoader(dataset, batch_size=None, num_workers=num_workers, collate_fn=None)
    return [pack.record for pack in loader]


def contents(records):
    return [
        (record.epoch, record.number, record.sample_ids, [left[:2] for left in record.left_out]) for record in records
    ]


def progress_after(records, num_workers):
    """Through JSON, as a checkpoint keeps it."""
    progress = ReaderProgress(num_workers)
    for record in records:
        progress.trained(record)
    return ReaderProgress.of(json.loads(json.dumps(progress.state())))


def everything(records):
    return Counter(
        sample_id
        for record in records
        for sample_id in (*record.sample_ids, *(out.sample_id for out in record.left_out))
    )


def test_ratios_by_tokens_are_refused_before_a_worker_starts(template):
    """MIX-8"""
    mixed = FusionCaptionDataset([RowSource(name="data", rows=rows(4))], template, ratio_by="tokens")
    with pytest.raises(ConfigError, match=r"packing_mode=buffer does not have; use packing_mode=plan"):
        StreamedPackingDataset(mixed, template, config())


@pytest.mark.parametrize("strategy", ["binpack", "greedy", "exact", "best_fit"])
@pytest.mark.parametrize("form", ["sized", "stream"])
def test_every_state_has_the_same_future(template, form, strategy):
    """STREAM-9 STREAM-8: from before the first pack to after the last, with failures, drops and an over-long row."""
    data = [*rows(34, broken=(0, 7, 8, 33)), text_row("long", "word " * 300), *rows(5, seed=1)]
    options = {"packing_strategy": strategy}
    whole = buffered(template, data, form, **options)
    whole.set_epoch(1)
    full = records(whole)
    assert len(full) > 8
    assert any(len(state["ready"]) > 1 for record in full for state in record.progress) or strategy in (
        "greedy",
        "exact",
    )
    for num_trained in range(len(full) + 1):
        again = buffered(template, data, form, **options)
        progress = progress_after(full[:num_trained], 0)
        progress.epoch = 1
        again.restore(progress)
        assert contents(records(again)) == contents(full[num_trained:]), f"after {num_trained} packs"


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("form", ["sized", "stream"])
def test_resumed_workers_go_on_with_the_next_pack(template, form, num_workers):
    """STREAM-9: also where a worker is at its end, or has not had its first turn."""
    data = rows(26, broken=(3, 4))
    full = records(buffered(template, data, form), num_workers)
    assert set(everything(full).values()) == {1}
    assert len(everything(full)) == 26
    for num_trained in (1, 2, len(full) // 2, len(full) - 1, len(full)):
        again = buffered(template, data, form)
        again.restore(progress_after(full[:num_trained], num_workers))
        assert contents(records(again, num_workers)) == contents(full[num_trained:]), f"after {num_trained} packs"


def test_next_epoch_after_a_restored_one_starts_at_its_beginning(template):
    """STREAM-9"""
    data = rows(20)
    whole = buffered(template, data)
    expected = []
    for epoch in (0, 1):
        whole.set_epoch(epoch)
        expected.append(records(whole))
    again = buffered(template, data)
    again.restore(progress_after(expected[0][:2], 0))
    assert contents(records(again)) == contents(expected[0][2:])
    again.set_epoch(1)
    assert contents(records(again)) == contents(expected[1])


def test_only_what_is_held_is_encoded_again(template, monkeypatch):
    """STREAM-9"""
    for form in ("sized", "stream"):
        data = rows(40)
        full = records(buffered(template, data, form))
        progress = progress_after(full[:4], 0)
        (state,) = progress.workers.values()
        asked, encode = [], template.encode
        with monkeypatch.context() as patch:
            patch.setattr(
                template, "encode", lambda row, asked=asked, encode=encode, **kw: asked.append(row) or encode(row, **kw)
            )
            again = buffered(template, data, form)
            again.restore(progress)
            records(again)
        trained = {sample_id for record in full[:4] for sample_id in record.sample_ids}
        assert len(asked) == 40 - len(trained)
        assert state["num_read"] > len(trained), "something is held"


def test_state_is_small_json_without_a_sample(template):
    """STREAM-8"""
    full = records(buffered(template, rows(40), packing_buffer=12))
    for record in full:
        (state,) = record.progress
        num_held = len(state["packer"]["state"]["held"]) + sum(map(len, state["ready"]))
        assert len(json.dumps(state)) < 1200 + 60 * num_held
        assert num_held <= 12 + 12


@pytest.mark.parametrize(
    ("persistent", "context"),
    [
        (True, "fork"),
        (False, "fork"),
        telling(True, "spawn"),
        telling(False, "forkserver"),
    ],
)
def test_workers_of_every_kind_see_every_epoch(template, persistent, context):
    """STREAM-7"""
    dataset = buffered(template, rows(9))
    loader = DataLoader(
        dataset, batch_size=None, num_workers=2, persistent_workers=persistent, multiprocessing_context=context
    )
    orders = []
    for epoch in (0, 1):
        dataset.set_epoch(epoch)
        packs = [pack.record for pack in loader]
        assert {record.epoch for record in packs} == {epoch}
        assert everything(packs) == {SampleId("data", n): 1 for n in range(9)}
        orders.append([record.sample_ids for record in packs])
    assert orders[0] != orders[1]


def test_held_row_that_cannot_be_read_any_more_is_left_out(template, tmp_path):
    """STREAM-9 DATA-7"""
    paths = [photo(tmp_path, f"{n}", 100, 100) for n in range(12)]
    data = [image_row([path]) for path in paths]
    dataset = buffered(template, data, "stream", packing_drop_last=False)
    first = records(dataset)[:1]
    (state,) = first[0].progress
    held = state["packer"]["state"]["held"][0][0]
    (tmp_path / f"{held}.jpg").unlink()
    dataset.restore(progress_after(first, 0))
    rest = records(dataset)
    [out] = [out for record in rest for out in record.left_out]
    assert out[:2] == (SampleId("data", held), "file_missing")
    assert everything([*first, *rest]) == {SampleId("data", n): 1 for n in range(12)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:3], "ends before it: the data has changed"),
        (
            lambda data: [text_row("another", "word " * 30)] * len(data),
            "tokens, but had .* data or template have changed",
        ),
    ],
)
def test_changed_data_is_refused(template, change, message):
    """STREAM-10"""
    data = rows(30)
    progress = progress_after(records(buffered(template, data, "stream"))[:2], 0)
    again = buffered(template, change(data), "stream")
    again.restore(progress)
    with pytest.raises(StateMismatch, match=message):
        records(again)


def test_rows_are_read_with_random_numbers_of_their_own(template):
    """RAND-2 STREAM-9: a data set that draws when it is read moves no draw of training, and draws the same again."""

    class Drawing(list):
        def __getitem__(self, at):
            return text_row(f"{random.random()}", "word " * 20)

    data = Drawing(rows(12))
    before = random.getstate()
    first, second = ([list(pack) for pack in buffered(template, data)] for _ in range(2))
    assert random.getstate() == before
    assert [one["input_ids"] for pack in first for one in pack] == [one["input_ids"] for pack in second for one in pack]
