"""Shares of streams: who reads which rows."""

import pickle
from itertools import product

import datasets
import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from swift_vlpack.plan.shares import Share, share_of
from swift_vlpack.rows.streams import StreamedRows
from tests.data_rows import text_row, write_jsonl
from tests.plain_template import PlainTemplate


@pytest.fixture
def template():
    return PlainTemplate()


def texts(num_rows, tag="row"):
    return [text_row(f"{tag} {n}") for n in range(num_rows)]


def files(folder, *sizes):
    """A stream of `datasets` over files, one shard each."""
    paths = [write_jsonl(folder / f"{n}.jsonl", texts(size, f"file {n} row")) for n, size in enumerate(sizes)]
    return datasets.load_dataset("json", data_files=paths, split="train", streaming=True)


def questions(samples):
    return [sample["question"] for sample in samples]


def all_questions(*sizes):
    return sorted(f"file {n} row {row}" for n, size in enumerate(sizes) for row in range(size))


def shares(num_ranks, num_workers):
    return [share_of(r, num_ranks, w, num_workers) for r in range(num_ranks) for w in range(num_workers)]


def test_shares_are_disjoint_and_whole_and_spread_the_remainder_over_ranks():
    """STREAM-1"""
    for num_ranks, num_workers, num_rows in product((1, 2, 3), (1, 2, 4), range(14)):
        rows = [list(range(share.number, num_rows, share.num_shares)) for share in shares(num_ranks, num_workers)]
        assert sorted(row for some in rows for row in some) == list(range(num_rows))
        per_rank = [sum(map(len, rows[r * num_workers :][:num_workers])) for r in range(num_ranks)]
        assert max(per_rank) - min(per_rank) <= 1


@pytest.mark.parametrize("num_shares", [1, 2, 3])
def test_every_nth_row_where_there_are_too_few_shards(template, tmp_path, num_shares):
    """STREAM-2"""
    stream = StreamedRows(files(tmp_path, 11), template)
    assert stream.has_shards_for(num_shares) == (num_shares == 1)
    for number in range(num_shares):
        samples = list(stream.samples(0, Share(number, num_shares)))
        assert [sample["sample_id"].row for sample in samples] == list(range(number, 11, num_shares))
        assert questions(samples) == [f"file 0 row {row}" for row in range(number, 11, num_shares)]


def test_own_shards_where_there_are_enough(template, tmp_path):
    """STREAM-2: nobody reads another's file, and every row has a number of its own."""
    stream = StreamedRows(files(tmp_path, 4, 2, 3), template)
    samples = [list(stream.samples(0, Share(number, 3))) for number in range(3)]
    assert [questions(some)[0] for some in samples] == ["file 0 row 0", "file 1 row 0", "file 2 row 0"]
    assert list(map(len, samples)) == [4, 2, 3]
    everything = [sample for some in samples for sample in some]
    assert sorted(questions(everything)) == all_questions(4, 2, 3)
    assert len({sample["sample_id"] for sample in everything}) == 9


def test_shards_hear_of_the_epoch(template, tmp_path):
    """STREAM-2: a shuffled stream is shuffled anew inside every share."""
    stream = StreamedRows(files(tmp_path, 12, 12).shuffle(seed=3, buffer_size=6), template)
    orders = [[questions(stream.samples(epoch, Share(number, 2))) for number in range(2)] for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    for order in orders:
        assert sorted(order[0] + order[1]) == all_questions(12, 12)


class SplitsItself:
    """Rows that look which dataloader worker they are in, as webdataset-like pipelines do."""

    def __iter__(self):
        worker = get_worker_info()
        yield from texts(20)[worker.id if worker else 0 :: worker.num_workers if worker else 1]


class Reader(IterableDataset):
    """Reads one share in every worker."""

    def __init__(self, stream):
        self.stream = stream

    def __iter__(self):
        worker = get_worker_info()
        share = share_of(0, 1, worker.id, worker.num_workers)
        yield from (sample["sample_id"].row for sample in self.stream.samples(0, share))
        assert get_worker_info() is worker, "others see the worker again"


@pytest.mark.parametrize("kind", ["datasets", "own"])
def test_stream_that_splits_itself_among_workers_is_still_read_whole(template, tmp_path, kind):
    """STREAM-2"""
    rows = files(tmp_path, 20) if kind == "datasets" else SplitsItself()
    rows = list(DataLoader(Reader(StreamedRows(rows, template)), batch_size=None, num_workers=3))
    assert sorted(rows) == list(range(20))


def test_rows_before_the_start_are_read_past_but_for_those_wanted(template, monkeypatch):
    """STREAM-9"""
    asked, encode = [], template.encode
    monkeypatch.setattr(template, "encode", lambda row, **kw: asked.append(row) or encode(row, **kw))
    samples = list(StreamedRows(texts(20), template).samples(0, Share(1, 2), start=6, held={2, 5}))
    assert [sample["sample_id"].row for sample in samples] == [5, 11, 13, 15, 17, 19]
    assert len(asked) == 6


def test_stream_of_datasets_travels_to_a_spawned_worker(template, tmp_path):
    """STREAM-7"""
    rows = files(tmp_path, 3, 2).map(lambda row: {**row, "dataset": "tagged"})  # as ms-swift tags them
    stream = StreamedRows(rows.shuffle(seed=1, buffer_size=10), template)
    again = pickle.loads(pickle.dumps(stream))
    assert questions(again.samples(0, Share(1, 2))) == questions(stream.samples(0, Share(1, 2)))
