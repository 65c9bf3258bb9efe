"""A start over rows that were seen before computes no key, and one over other rows has the keys that these have."""

import json
import os
import random
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest

from swift_vlpack.lengths.cache import LengthCache
from swift_vlpack.lengths.cache_folder import lengths_path, remembered_in
from swift_vlpack.lengths.measured_sizes import LengthCaches, MeasuredSizes
from swift_vlpack.lengths.row_blocks import RowBlocks
from swift_vlpack.lengths.trust import Trust
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.samples import SampleError, SampleId
from swift_vlpack.rows.source import RowSource
from tests.data_rows import image_row, text_row
from tests.images import photo
from tests.lengths.test_measure import Start, start, texts, true_columns, unchecked
from tests.plain_template import HeaderTemplate, PlainTemplate
from tests.ranks_in_threads import on_ranks


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    unchecked(monkeypatch)
    monkeypatch.setattr("swift_vlpack.lengths.row_blocks.NUM_ROWS", 8)
    monkeypatch.setattr("swift_vlpack.lengths.known_keys.NUM_ROWS", 8)


@pytest.fixture
def computed(monkeypatch):
    """The rows whose keys are computed."""
    rows, row_key = [], LengthCache.row_key
    monkeypatch.setattr(LengthCache, "row_key", lambda cache, row: rows.append(row) or row_key(cache, row))
    return rows


@pytest.fixture
def taken(monkeypatch):
    """The keys with which each pass looked up its rows, and the stamps of their files."""
    found, look_up = [], MeasuredSizes.look_up
    monkeypatch.setattr(
        MeasuredSizes,
        "look_up",
        lambda sizes, **options: found.append((sizes.keys.copy(), sizes.stamps.copy())) or look_up(sizes, **options),
    )
    return found


def loaded(rows):
    return datasets.Dataset.from_list(rows)


def true_lengths(rows):
    def length(row):
        try:
            return RowEncoder(PlainTemplate()).sample(row, SampleId("data", 0))["length"]
        except SampleError:
            return 0

    return list(map(length, rows))


def test_second_start_computes_no_key_and_measures_no_row(tmp_path, computed):
    """LEN-23: whichever of the rows it has, in whichever order."""
    rows = loaded(texts(100))
    first = start(tmp_path).measured(rows)
    assert len(computed) == 100
    computed.clear()
    for order in (rows, rows.shuffle(seed=3), rows.shuffle(seed=4).select(range(60)), rows.select(range(8, 88))):
        again = start(tmp_path)
        assert again.measured(order).columns.tolist() == true_columns(list(order))
        assert again.by_header.encoded == []
    assert computed == []
    assert start(tmp_path).measured(list(rows)).columns.tolist() == first.columns.tolist()
    assert len(computed) == 100, "a list has no blocks"


def test_changed_row_and_appended_rows_cost_their_blocks(tmp_path, computed):
    """LEN-23"""
    rows = texts(100)
    start(tmp_path).measured(loaded(rows))
    computed.clear()
    rows[50] = text_row("another", "row of words")
    again = start(tmp_path)
    assert again.measured(loaded(rows)).columns.tolist() == true_columns(rows)
    assert [row["messages"][0]["content"] for row in computed] == [
        "another" if number == 50 else f"row {number}" for number in range(48, 56)
    ]
    assert len(again.by_header.encoded) == 1
    computed.clear()
    more = start(tmp_path)
    assert more.measured(loaded([*rows, *texts(4, 100)])).lengths.tolist() == true_columns([*rows, *texts(4, 100)])[0]
    assert len(computed) == 8, "the last block had four rows"
    assert len(more.by_header.encoded) == 4


def test_every_file_is_asked_for(tmp_path, computed):
    """LEN-7 LEN-23: edited, touched, linked elsewhere, gone, back; each costs its own row."""
    folder = tmp_path / "photos"
    folder.mkdir()
    files = [photo(folder, str(n), 28 * (n + 2), 56) for n in range(20)]
    rows = loaded([image_row([file], f"row {n}") for n, file in enumerate(files)])
    start(tmp_path).measured(rows)

    def after(change):
        computed.clear()
        change()
        again = start(tmp_path)
        assert again.measured(rows).lengths.tolist() == true_lengths(rows)
        return sorted(int(row["messages"][0]["content"].split()[-1]) for row in computed)

    def edit_in_place():
        state = os.stat(files[3])
        other = Path(photo(tmp_path, "other", 28, 28)).read_bytes()
        with open(files[3], "r+b") as file:
            file.write(other.ljust(state.st_size, b"\0"))
        os.utime(files[3], ns=(state.st_atime_ns, state.st_mtime_ns))

    def link():
        os.rename(files[4], tmp_path / "was.jpg")
        os.symlink(tmp_path / "other.jpg", files[4])

    assert after(lambda: None) == []
    assert after(edit_in_place) == [3]
    assert after(link) == [4]
    assert after(lambda: os.chmod(files[5], 0o600)) == [5]
    assert after(lambda: os.remove(files[6])) == [6]
    assert after(lambda: None) == []
    assert after(lambda: photo(folder, "6", 28, 140)) == [6]
    assert after(lambda: os.rename(folder, tmp_path / "elsewhere")) == list(range(20))


@pytest.mark.parametrize("case", range(25))
def test_keys_are_those_of_the_rows_whatever_changed(case, tmp_path, taken):
    """LEN-23: a law over edits of rows and files, orders, and cuts into chunks; two ranks at times."""
    rng = random.Random(f"known {case}")
    folder = tmp_path / "photos"
    folder.mkdir()
    files = [photo(folder, str(n), 28 * (n % 3 + 1), 28) for n in range(6)]

    def row():
        made = text_row(rng.choice("abc") * rng.randrange(4), rng.choice("xy"))
        return {**made, "images": rng.choices(files, k=rng.randrange(3)) or None, "n": rng.choice([None, 1, 2])}

    rows = [row() for _ in range(rng.randrange(1, 40))]
    for number in range(5):
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(rows))
            change = rng.choice(["row", "insert", "append", "touch", "remove", "delete"])
            if change == "row":
                rows[at] = row()
            elif change == "insert":
                rows.insert(at, row())
            elif change == "append":
                rows += [row() for _ in range(9)]
            elif change == "touch":
                photo(folder, str(at % 6), 28, 28 * rng.randrange(1, 4))
            elif change == "remove" and os.path.exists(files[at % 6]):
                os.remove(files[at % 6])
            elif len(rows) > 1:
                del rows[at]
        cut = rng.randrange(len(rows))
        made = datasets.concatenate_datasets([loaded(part) for part in (rows[:cut], rows[cut:]) if part])
        if rng.random() < 0.5:
            made = made.shuffle(seed=number).select(range(rng.randrange(1, len(rows) + 1)))
        num_ranks = rng.choice([1, 2])
        taken.clear()
        on_ranks(num_ranks, lambda comm, made=made: start(tmp_path).measured(made, comm))
        expected = [LengthCache(tmp_path / "rows.lengths", "context").row_key(row) for row in made]
        of_ranks = [[(one.key.tolist(), one.stamp) for one in expected[rank::num_ranks]] for rank in range(num_ranks)]
        found = [list(zip(keys.tolist(), stamps.tolist(), strict=True)) for keys, stamps in taken]
        assert sorted(map(json.dumps, found)) == sorted(map(json.dumps, of_ranks))


def test_digest_is_of_all_that_makes_a_row_and_its_key():
    """LEN-7 LEN-23: the same Arrow data under another system prompt, context or type, or with a column more."""
    rows = loaded(texts(10))
    text = datasets.Value("large_string")
    given = [
        (rows, None, "one"),
        (rows, "Be brief.", "one"),
        (rows, None, "two"),
        (rows.add_column("n", [1] * 10), None, "one"),
        (rows.add_column("m", [1] * 10), None, "one"),
        (rows.cast(datasets.Features({"messages": [{"content": text, "role": text}]})), None, "one"),
    ]
    sources = [(RowSource(name="data", rows=some, system=system), context) for some, system, context in given]
    made = {RowBlocks.of(*each).digests([0])[0] for each in sources}
    assert len(made) == len(given)


@pytest.mark.parametrize(
    "values",
    [
        [["ab", "c"], ["a", "bc"], ["abc", ""], ["abc", None]],
        [[["a"], ["b"]], [["a", "b"], []], [["a", "b"], None], [[], ["a", "b"]]],
        [[{"x": "a", "y": None}, None], [{"x": None, "y": "a"}, None], [{"x": "a", "y": None}, {"x": None, "y": None}]],
        [[1, 2], [2, 1], [1, None], [None, 1], [0, 0]],
        [[True, False], [False, True], [None, False], [None, None]],
        [[b"a", b""], [b"", b"a"], [b"\0", b""]],
    ],
)
def test_digests_of_different_rows_differ_and_chunks_do_not_count(values):
    """LEN-23"""
    kind = pa.array([one for some in values for one in some]).type

    def digest(chunks):
        rows = datasets.Dataset(pa.table({"a": pa.chunked_array([pa.array(chunk, kind) for chunk in chunks], kind)}))
        return RowBlocks.of(RowSource(name="data", rows=rows), "context").digests([0])[0]

    whole = [digest([some]) for some in values]
    assert len(set(whole)) == len(values)
    assert [digest([some[:1], some[1:]]) for some in values] == whole
    sliced = [pa.array([None, *some, None], kind).slice(1, len(some)) for some in values]
    assert [digest([one.slice(0, 1), one.slice(1)]) for one in sliced] == whole


@pytest.mark.parametrize("content", [b"", b"vlpack keys 1\n", b"vlpack keys 1\nPK\3\4 no more", b"something else"])
def test_damaged_file_costs_only_the_keys(content, tmp_path, computed):
    """LEN-9 LEN-23"""
    rows = loaded(texts(20))
    start(tmp_path).measured(rows)
    (file,) = tmp_path.glob("*.keys")
    whole = file.read_bytes()
    for damaged in (content, whole[:-30], whole[: len(whole) // 2]):
        file.write_bytes(damaged)
        computed.clear()
        again = start(tmp_path)
        again.measured(rows)
        assert (len(computed), again.by_header.encoded) == (20, [])
        assert file.read_bytes() == whole


def test_file_of_keys_is_listed_and_cleared_with_the_lengths(tmp_path):
    """LEN-23: a file of that name that begins otherwise is not ours."""
    path = lengths_path(tmp_path, "data", "context")
    caches = LengthCaches(cache=LengthCache(path, "context"), trust=Trust(tmp_path / "kinds.trust"))
    Start(caches, HeaderTemplate(), PlainTemplate()).measured(loaded(texts(20)))
    path.with_suffix(".1of2.keys").write_bytes(b"keys of a house")
    (group,) = remembered_in(tmp_path)
    assert [file.name for file in group.files] == [path.with_suffix(".0of1.keys").name, path.name]


def test_rows_that_a_transform_or_a_format_makes_are_in_no_block():
    """LEN-23: what they are does not follow from the Arrow data."""
    rows = loaded(texts(20))
    others = [
        rows.with_transform(lambda batch: batch),
        rows.with_format("numpy"),
        rows.with_format(columns=[]),
        list(rows),
    ]
    assert [RowBlocks.of(RowSource(name="data", rows=some), "context") for some in others] == [None] * len(others)


def test_few_rows_of_a_large_file_are_in_no_block(monkeypatch):
    """LEN-23: `#500` of a million rows does not read the million."""
    monkeypatch.setattr("swift_vlpack.lengths.row_blocks._LEAST_SHARE_USED", 1 / 4)
    rows = loaded(texts(1000)).shuffle(seed=1).select(range(20))
    blocks = RowBlocks.of(RowSource(name="data", rows=rows), "context")
    assert (blocks.block == -1).sum() > 10
    assert blocks.stops.sum() - blocks.starts.sum() < 80


def test_blocks_are_counted_from_the_first_row_of_the_file():
    """LEN-23: rows of another source before these, or held out for validation, move no block."""
    rows = loaded(texts(40))
    whole = RowBlocks.of(RowSource(name="data", rows=rows), "context").digests(range(5))
    behind = datasets.concatenate_datasets([loaded(texts(5, 900)), rows])
    source = RowSource(name="data", rows=behind.select(range(6, 45)), row_numbers=np.arange(1, 40))
    assert RowBlocks.of(source, "context").digests(range(5))[1:] == whole[1:]


def test_rows_of_equal_digest_have_equal_places():
    """LEN-23: a block that lacks its first row, which was held out, is equal to one that begins with the next."""
    without_first = RowSource(name="data", rows=loaded(texts(8)).select(range(1, 8)), row_numbers=np.arange(1, 8))
    one, other = (
        RowBlocks.of(source, "context") for source in (without_first, RowSource(name="data", rows=loaded(texts(7, 1))))
    )
    assert one.digests([0]) == other.digests([0])
    assert one.place.tolist() == other.place.tolist()


def test_ranks_whose_tables_are_in_another_order_take_no_digest_of_each_other(tmp_path, taken):
    """LEN-12 LEN-23: the rows are the same, shuffled by an index on one rank and rewritten on the other."""
    indexed = loaded(texts(64)).shuffle(seed=5)
    of_ranks = [indexed, indexed.flatten_indices()]
    for given in (of_ranks, [indexed, indexed]):
        taken.clear()
        on_ranks(2, lambda comm, given=given: start(tmp_path).measured(given[comm.rank], comm))
    keys = LengthCache(tmp_path / "rows.lengths", "context").keys(indexed).tolist()
    assert sorted(found.tolist() for found, _ in taken) == sorted([keys[0::2], keys[1::2]])
