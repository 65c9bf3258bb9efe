"""Rows of a stream, by number, and the lines of files that have them."""

import json

import pytest

from swift_vlpack.cli.stream_rows import local_files, places_of, row_number, rows_at
from swift_vlpack.cli.trained_run import TrainedRun, _place
from swift_vlpack.plan.shares import Share
from swift_vlpack.rows.streams import StreamedRows
from swift_vlpack.runlog.events import EventLog
from swift_vlpack.runlog.pack_log import PackLog, pack_file
from tests.data_rows import image_row, text_row, write_jsonl


class Rows:
    """A stream of which any number of readers can have shards of their own."""

    def __init__(self, rows, num_shards=1):
        self.rows, self.num_shards = rows, num_shards

    def __iter__(self):
        return iter(self.rows)

    def shard(self, num_shards, index):
        return Rows(self.rows[index::num_shards])


@pytest.mark.parametrize(("num_shares", "num_shards"), [(1, 1), (3, 1), (3, 3)])
def test_row_of_a_number_is_the_one_that_was_read_under_it(num_shares, num_shards):
    """SEE-5"""
    rows = [text_row(f"question {n}", f"answer {n}") for n in range(20)]
    stream = StreamedRows(Rows(rows, num_shards), template=None)
    numbers = {}
    for share in range(num_shares):
        for index, row in enumerate(stream.rows_of(0, Share(share, num_shares))):
            numbers[Share(share, num_shares).row(index)] = row
    assert len(numbers) == 20
    assert rows_at(stream, 0, {0, 7, 8, 19}, num_shares) == {number: numbers[number] for number in (0, 7, 8, 19)}
    assert rows_at(stream, 0, {3, 99}, num_shares) == {3: numbers[3]}


def test_line_is_named_where_one_line_alone_has_the_row(tmp_path):
    """SEE-5"""
    rows = [
        text_row("the same", "twice"),
        text_row('grüße\n"quoted"', "ja"),
        image_row(["a.jpg"], "what is it", "a dog"),
        image_row(["b.jpg"], "what is it", "a dog"),
        text_row("the same", "twice"),
    ]
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    write_jsonl(one, rows[:3])
    two.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[3:]), encoding="utf-8")
    files = local_files([f"{one}#100", str(two), "hub/name", str(tmp_path / "gone.jsonl")])
    assert files == [one, two]
    found = places_of(dict(enumerate([*rows, text_row("nowhere to be found " * 9, "no")])), files)
    assert found[0] == "row 1 of the stream: 'the same twice'"
    assert found[1] == f"{one}:2"
    assert found[2] == f"{one}:3"
    assert found[3] == f"{two}:1"
    assert found[4] == "row 5 of the stream: 'the same twice'"
    assert found[5].startswith("row 6 of the stream: 'nowhere to be found nowhere")
    assert found[5].endswith("...'")


def test_part_of_a_row_stands_where_its_row_does():
    """SEE-5"""
    assert [row_number(name) for name in ("stream:17", "stream:17/2")] == [17, 17]
    origins = {"a": "/data/a.txt"}
    places = [_place(name, origins) for name in ("a:3", "a:3/1", "a:loaded-3/1", "stream:3/1")]
    assert places == ["/data/a.txt row 4", "/data/a.txt row 4", "/data/a.txt loaded row 4", "row 4 of the stream"]


def test_packs_are_read_from_the_folder_that_trained_the_step(tmp_path):
    """SEE-5 SEE-3: a run that was resumed into another folder, after a step that both folders have."""
    first, second = tmp_path / "v0-a", tmp_path / "v1-b"
    for folder, steps in ((first, (1, 2, 3)), (second, (3, 4))):
        PackLog(pack_file(folder, 0)).append(
            [{"step": step, "epoch": 0, "pack": step, "ids": [f"{folder.name}:{step}"]} for step in steps]
        )
    facts = {"mode": "buffer", "num_ranks": 1, "num_workers": 0, "origins": {}}
    EventLog(first).append("start", 0, **facts)
    (first / "checkpoint-2").mkdir()
    EventLog(second).append("resume", 2, checkpoint=str(first / "checkpoint-2"), **facts)
    run = TrainedRun(second)
    assert run.recorded_steps() == (1, 4)
    assert [run.recorded_step(step)[0].ids for step in (1, 2, 3, 4)] == [["v0-a:1"], ["v0-a:2"], ["v1-b:3"], ["v1-b:4"]]
    assert run.recorded_step(5) == []
