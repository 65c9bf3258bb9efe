from dataclasses import replace

import numpy as np

from swift_vlpack.feed import saved_rows
from swift_vlpack.feed.saved_rows import changes, from_bytes, row_digests, saved_source, to_bytes, with_sizes
from swift_vlpack.rows.shared import SharedPrefixes
from swift_vlpack.rows.sizes import LengthIndex, RowSize
from swift_vlpack.rows.source import RowSource
from tests.data_rows import text_row

NUM_ROWS = 40


def source(sizes=None, failures=None, **options):
    sizes = [RowSize(100 + n, 1, 60, 20) for n in range(NUM_ROWS)] if sizes is None else sizes
    rows = [{**text_row(f"row {n}"), "images": [f"/photos/{n}.jpg"]} for n in range(len(sizes))]
    options = {"name": "photos", "rows": rows, "sizes": LengthIndex.of(sizes, failures), **options}
    return RowSource(origin="/data/photos.jsonl", **options)


def without(rows, reason="file_missing"):
    sizes = [RowSize(0) if n in rows else RowSize(100 + n, 1, 60, 20) for n in range(NUM_ROWS)]
    return source(sizes, dict.fromkeys(rows, reason))


def saved(made):
    [facts] = from_bytes(to_bytes([saved_source(made, row_digests(made))]))
    return facts


def compared(then, now):
    return changes([saved(then)], [now], [row_digests(now)])


def test_rows_go_through_a_file():
    """RESUME-1"""
    sources = [without([3, 5], "image_unreadable"), replace(source(), name="ünï"), source(sizes=[])]
    facts = from_bytes(to_bytes([saved_source(made, row_digests(made)) for made in sources]))
    assert [fact.name for fact in facts] == ["photos", "ünï", "photos"]
    for fact, made in zip(facts, sources, strict=True):
        assert np.array_equal(fact.sizes.columns, made.sizes.columns)
        assert fact.sizes.failures == made.sizes.failures
        assert np.array_equal(fact.contents, row_digests(made))
    again = with_sizes([source()], [saved(without([3]))])
    assert again[0].sizes.lengths[3] == 0


def test_prefixes_go_through_a_file_and_are_those_of_the_saved_run():
    """SHARE-10: a file that is gone would share with no other, and the plan would be another one."""
    key, length = np.arange(NUM_ROWS, dtype=np.uint64) // 4 + 2**63, np.full(NUM_ROWS, 30, dtype=np.int32)
    then = source(prefixes=SharedPrefixes(key, length))
    facts = saved(then)
    assert np.array_equal(facts.prefixes.key, key)
    assert np.array_equal(facts.prefixes.length, length)
    now = source(prefixes=SharedPrefixes(np.where(key == key[5], 0, key).astype(np.uint64), length))
    [again] = with_sizes([now], [facts])
    assert np.array_equal(again.prefixes.key, key)
    assert with_sizes([then], [facts])[0] is then
    assert saved(source()).prefixes is None


def test_nothing_changed_is_nothing():
    """RESUME-10"""
    assert compared(without([3]), without([3])) == saved_rows.Changes()


def test_files_that_go_and_come_back_are_told_from_other_rows():
    """RESUME-10 RESUME-11"""
    told = compared(without([1]), without([20, 21, 22, 23, 24]))
    assert not told.texts
    assert not told.sizes
    where = "photos:1 (/data/photos.jsonl row 2, files: /photos/1.jpg)"
    assert str(told.back) == f"{where} has 101 tokens (1 images, 60 patches), but had file_missing in the saved run"
    assert told.gone.num_rows == 5
    assert "photos:22" in str(told.gone)
    assert str(told.gone).endswith("; and 2 more")
    told = compared(source(), without([7], "over_max_length"))
    assert not told.gone, "max_length was lowered, no file is gone"
    assert "photos:7 " in str(told.sizes)
    told = compared(source(), source([RowSize(100 + n, 1, 64 if n == 9 else 60, 20) for n in range(NUM_ROWS)]))
    assert "photos:9 " in str(told.sizes)
    assert told.sizes.num_rows == 1


def test_other_rows_are_named():
    """RESUME-11"""
    other = source()
    other.rows[17] = {**other.rows[17], **text_row("another")}
    assert str(compared(source(), other).texts).startswith("photos:17 (/data/photos.jsonl row 18, ")
    fewer = replace(source(), rows=source().rows[:-1], sizes=None)
    assert (
        "photos has 39 rows, but 40 were saved; they differ from row 40 of the saved run, which is missing, on"
        in str(compared(source(), fewer).texts)
    )
    order = np.random.default_rng(0).permutation(39)
    shuffled = replace(fewer, rows=[fewer.rows[at] for at in order], row_numbers=order)
    assert "differ from row 40 of the saved run, which is missing, on" in str(compared(source(), shuffled).texts)
    packed_as_they_come = replace(source(), sizes=None)
    assert compared(packed_as_they_come, packed_as_they_come) == saved_rows.Changes()


def test_only_some_rows_of_many_are_read(monkeypatch):
    """RESUME-11: the others have their sizes."""
    monkeypatch.setattr(saved_rows, "NUM_ROWS_WITH_DIGEST", 10)
    facts = saved(source())
    assert len(facts.contents) == 10
    read = saved_rows.rows_with_digest(NUM_ROWS)
    assert len(set(read.tolist())) == 10
    other = source()
    other.rows[read[4]] = text_row("another")
    assert f"photos:{read[4]} " in str(changes([facts], [other], [row_digests(other)]).texts)
