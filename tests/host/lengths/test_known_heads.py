"""What rows begin with is remembered: a later start reads no row, and finds what a first start would find."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from swift_vlpack.host import headers, length_pass
from swift_vlpack.lengths.cache_folder import remembered_in, shared_files
from swift_vlpack.lengths.known_heads import SUFFIX, KnownHeads
from swift_vlpack.lengths.prefixes import SharingLimits, SourceToShare, with_prefixes
from swift_vlpack.lengths.rows_work import Encoders
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.prefixes import HeadReader
from tests.data_rows import image_row, text_row
from tests.host.lengths.support import ARGS, FAMILY, dataset, source
from tests.images import photo
from tests.ranks_in_threads import on_ranks

LIMITS = SharingLimits(packing_length=2048, least_system_tokens=16)


@pytest.fixture
def template(tiny):
    return tiny(FAMILY).template


@pytest.fixture
def rows(tmp_path):
    """Six questions about two images, one row that asks first, one whose image is missing, and texts."""
    paths = [photo(tmp_path, name, 100, 140, seed=n) for n, name in enumerate("ab")]
    made = [image_row([path], f"question {n}?", "yes") for path in paths for n in range(3)]
    made += [{**text_row("what?<image>"), "images": paths[:1]}, image_row([str(tmp_path / "later.jpg")])]
    return [*made, *(text_row(str(n), "an answer") for n in range(3))]


@pytest.fixture
def start(template, tmp_path, monkeypatch):
    """What a start finds (keys, lengths, rows alone), and how many heads of rows it reads."""
    read, head = [], HeadReader.head
    monkeypatch.setattr(HeadReader, "head", lambda self, row: read.append(row) or head(self, row))

    def made(rows, cache="cache", **options):
        read.clear()
        given = rows if isinstance(rows, list) and options.pop("is_list", False) else dataset(rows)
        (found,) = length_pass.with_all_lengths(
            [source(given, **options)], RowEncoder(template), ARGS, str(tmp_path / cache), sharing=LIMITS
        )
        prefixes = found.prefixes
        return (prefixes.key.tolist(), prefixes.length.tolist(), prefixes.alone), len(read)

    return made


def test_second_start_reads_no_row_but_those_that_may_have_changed(start, rows, tmp_path):
    """SHARE-48"""
    cold, num_read = start(rows)
    assert num_read == len(rows)
    assert sum(map(bool, cold[0])) == 6
    assert start(rows) == (cold, 1), "of the missing image"
    assert start(rows, is_list=True)[1] == len(rows), "rows that are no Arrow data cannot be compared"
    (of_source,) = remembered_in(tmp_path / "cache")
    assert {*of_source.files, *shared_files(tmp_path / "cache")} == {*(tmp_path / "cache").iterdir()}
    assert any(path.suffix == SUFFIX for path in of_source.files)


def test_second_start_knows_what_rows_with_several_images_begin_with(start, tmp_path):
    """SHARE-13, SHARE-48: also a row with an image after its first answer."""
    a, b, c = (photo(tmp_path, name, 84, 112, seed=n) for n, name in enumerate("abc"))
    later = {"messages": [*image_row([a])["messages"], *image_row([c])["messages"]], "images": [a, c]}
    rows = [image_row([a, b], "one?"), image_row([a, c], "two?"), later, image_row([b, a, c]), text_row()]
    cold, num_read = start(rows)
    assert num_read == len(rows)
    assert [bool(key) for key in cold[0]] == [True, True, True, False, False]
    assert start(rows) == (cold, 0)


def replaced_by_other_bytes(rows, folder):
    photo(folder, "a", 300, 200, seed=7)


def replaced_by_the_other_image(rows, folder):
    Path(rows[3]["images"][0]).write_bytes(Path(rows[0]["images"][0]).read_bytes())


def gone(rows, folder):
    Path(rows[0]["images"][0]).unlink()


def come(rows, folder):
    Path(rows[7]["images"][0]).write_bytes(Path(rows[0]["images"][0]).read_bytes())


def edited(rows, folder):
    rows[1] = image_row(rows[4]["images"], "another?")


def in_another_order(rows, folder):
    rows.reverse()


def one_row_more(rows, folder):
    rows.append(image_row(rows[0]["images"], "one more?"))


@pytest.mark.parametrize(
    "change",
    [replaced_by_other_bytes, replaced_by_the_other_image, gone, come, edited, in_another_order, one_row_more],
)
def test_what_changed_is_noticed(change, start, rows, tmp_path):
    """SHARE-48: a later start finds what a first one finds."""
    before, _ = start(rows)
    change(rows, tmp_path)
    after, _ = start(rows)
    assert after == start(rows, "another cache")[0]
    assert after != before


def test_settings_of_the_source_and_where_files_are_looked_for_count(start, rows, tmp_path, monkeypatch):
    """SHARE-48"""
    start(rows)
    for options in ({"system": "Be brief."}, {"max_pixels": 20000}):
        assert start(rows, **options) == start(rows, json.dumps(options), **options)
    monkeypatch.setenv("ROOT_IMAGE_DIR", str(tmp_path))
    start(rows, "root")
    assert start(rows, "root")[1] == len(rows), "a file may appear where it is looked for first"


@pytest.mark.parametrize("content", [b"", b"vlpack heads 1\n", b"vlpack heads 1\nPK", b"another file"])
def test_damaged_file_is_as_none(content, start, rows, tmp_path):
    """SHARE-48"""
    cold, _ = start(rows)
    (path,) = (tmp_path / "cache").glob(f"*{SUFFIX}")
    path.write_bytes(content)
    assert start(rows) == (cold, len(rows))
    assert start(rows) == (cold, 1)


def test_rows_with_images_inside_are_read_again(start, tmp_path):
    """SHARE-48: to digest them takes as long."""
    path = photo(tmp_path, "inside", 300, 300)
    content = base64.b64encode(Path(path).read_bytes()).decode()
    rows = [{**image_row([path], f"{n}?"), "images": [content]} for n in range(2)]
    cold, _ = start(rows)
    assert all(cold[0])
    assert start(rows) == (cold, 2)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ranks_load_what_one_rank_saved(num_ranks, template, rows, tmp_path, monkeypatch):
    """SHARE-48"""
    (measured,) = length_pass.with_all_lengths([source(dataset(rows))], RowEncoder(template), ARGS, str(tmp_path / "l"))
    path = tmp_path / "heads" / "rows-0123456789ab.lengths"
    path.parent.mkdir()

    def found(comm):
        encoders = Encoders(by_header=RowEncoder(headers.pixel_free(template)), in_full=RowEncoder(template))
        (made,) = with_prefixes([SourceToShare(measured, encoders, path)], LIMITS, comm)
        return made.prefixes.key.tolist(), made.prefixes.length.tolist(), made.prefixes.alone

    (cold,) = on_ranks(1, found)
    assert on_ranks(num_ranks, found) == [cold] * num_ranks
    monkeypatch.setattr(HeadReader, "head", lambda self, row: pytest.fail("read"))
    monkeypatch.setattr(KnownHeads, "missing", lambda self, heads: np.zeros(0, np.int64))
    assert on_ranks(num_ranks, found) == [cold] * num_ranks
