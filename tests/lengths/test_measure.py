"""The length pass as one function, with one rank and with four, without ms-swift."""

import logging
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from swift_vlpack.comm import ALONE
from swift_vlpack.errors import DataError
from swift_vlpack.lengths import measure as measure_module
from swift_vlpack.lengths import trust
from swift_vlpack.lengths.cache import LengthCache
from swift_vlpack.lengths.length_file import AGREED, BY_HEADER, DIFFERS, SIZE
from swift_vlpack.lengths.measure import measure
from swift_vlpack.lengths.measured_sizes import MeasuredSizes
from swift_vlpack.lengths.rank_rows import RankRows
from swift_vlpack.lengths.rows_work import Encoders
from swift_vlpack.rows.contents import size_of
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.source import RowSource
from tests.data_rows import image_row, mixed_rows, text_row
from tests.images import photo
from tests.plain_template import HeaderTemplate, PlainTemplate
from tests.ranks_in_threads import OtherRankFailed, on_ranks

pytestmark = pytest.mark.usefixtures("never_again")


class Start(NamedTuple):
    """One start of one rank, and the templates that it encoded by."""

    cache: LengthCache
    by_header: HeaderTemplate
    in_full: PlainTemplate

    def measured(self, rows, comm=ALONE, **options):
        encoders = Encoders(by_header=RowEncoder(self.by_header), in_full=RowEncoder(self.in_full), **options)
        return measure(RowSource(name="data", rows=rows), self.cache, encoders, comm)


def start(folder, lies=None, **options):
    return Start(LengthCache(folder / "rows.lengths", "context"), HeaderTemplate(lies, **options), PlainTemplate())


def true_columns(rows):
    template = PlainTemplate()
    return np.array([size_of(template.encode(row)) for row in rows]).T.tolist()


def texts(num_rows, first=0):
    return [text_row(f"row {number}", "word " * (number % 7 + 1)) for number in range(first, first + num_rows)]


def unchecked(monkeypatch):
    """Encode no row both ways."""
    monkeypatch.setattr(trust, "NUM_ROWS_DRAWN", 0)
    monkeypatch.setattr(trust, "NUM_PER_KIND", 0)
    monkeypatch.setattr(measure_module, "extremes", lambda sizes: np.zeros(0, np.int64))


def proofs(folder, rows):
    cache = LengthCache(folder / "rows.lengths", "context")
    return cache.load().of(cache.keys(rows))[1]["proof"].tolist()


@pytest.mark.parametrize("num_processes", [1, 2])
def test_sizes_are_those_of_full_encoding_and_few_rows_take_it(num_processes, tmp_path):
    """LEN-1 LEN-3 LEN-6: the second start encodes nothing."""
    rows = [*mixed_rows(tmp_path / "rows", 40), *texts(400)]
    first, again = start(tmp_path), start(tmp_path)
    assert first.measured(rows, num_processes=num_processes).columns.tolist() == true_columns(rows)
    if num_processes == 1:
        assert len(first.by_header.encoded) >= len(rows) > 4 * len(first.in_full.encoded) > 0
    assert again.measured(rows).columns.tolist() == true_columns(rows)
    assert again.by_header.encoded == again.in_full.encoded == []


def test_four_ranks_give_what_one_gives_and_none_does_the_work_of_another(tmp_path, monkeypatch):
    """LEN-12: rows that do not divide, one of them bad; nothing is checked, so each row is encoded once."""
    unchecked(monkeypatch)
    rows = [*mixed_rows(tmp_path / "rows", 21), image_row([str(tmp_path / "gone.jpg")], "gone"), *texts(20)]
    alone = start(tmp_path).measured(rows)
    starts = [start(tmp_path / "four") for _ in range(4)]
    given = on_ranks(4, lambda comm: starts[comm.rank].measured(rows, comm))
    for sizes in given:
        assert sizes.columns.tolist() == alone.columns.tolist()
        assert sizes.failures == alone.failures == {21: "file_missing"}
        assert sizes.fault(21).files == (str(tmp_path / "gone.jpg"),)
    asked = [len(one.by_header.encoded) for one in starts]
    assert sum(asked) == len(rows)
    assert max(asked) - min(asked) <= 1
    warm = [start(tmp_path / "four") for _ in range(3)]  # another number of ranks finds what four remembered
    on_ranks(3, lambda comm: warm[comm.rank].measured(rows, comm))
    assert [question for one in warm for question in one.by_header.encoded] == ["<image>gone"], "it may be there now"


@pytest.mark.parametrize("found_by", ["kind", "extreme"])
def test_difference_on_one_rank_is_one_on_all(found_by, tmp_path, monkeypatch, caplog):
    """LEN-3 LEN-12: the lie is in a row of rank 3, which all encode in full then; one line of the log."""
    monkeypatch.setattr(trust, "NUM_ROWS_DRAWN", 0)
    if found_by == "kind":
        monkeypatch.setattr(measure_module, "extremes", lambda sizes: np.zeros(0, np.int64))
    rows = [image_row([photo(tmp_path, str(n), 140, 140 + 28 * (n % 3))], f"row {n}") for n in range(40)]
    rows[27] = image_row([photo(tmp_path, "odd", 900, 600)], "odd")
    lies = {(900, 600): (896, 560)}
    starts = [start(tmp_path / "cache", lies, has_kinds=found_by == "kind") for _ in range(4)]
    with caplog.at_level(logging.WARNING):
        given = on_ranks(4, lambda comm: starts[comm.rank].measured(rows, comm))
    for sizes in given:
        assert sizes.columns.tolist() == true_columns(rows)
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("source data: lengths are not taken from image headers, every row is encoded: data:27 has ")
    assert all(len(one.in_full.encoded) >= 10 for one in starts)
    assert DIFFERS in proofs(tmp_path / "cache", rows)
    later = start(tmp_path / "cache")
    rows += [image_row([photo(tmp_path, "new", 910, 600)], "new")]
    assert later.measured(rows).columns.tolist() == true_columns(rows)
    assert later.by_header.encoded == [], "it is not trusted at later starts, whatever it would say, nor for new rows"


def test_error_on_one_rank_stops_all(tmp_path):
    """LEN-12"""
    rows = [*texts(6), image_row([str(tmp_path / "gone.jpg")]), *texts(5, 6)]
    starts = [start(tmp_path / "cache") for _ in range(4)]
    given = on_ranks(4, lambda comm: starts[comm.rank].measured(rows, comm, is_strict=True))
    assert [type(error) for error in given] == [OtherRankFailed, OtherRankFailed, DataError, OtherRankFailed]
    assert all("data:6: file_missing: " in str(error) for error in given)


def test_rows_drawn_are_unknown_ones_and_always_the_same(tmp_path):
    """LEN-4"""
    rows = texts(50)
    start(tmp_path).measured(rows[:40])
    cache = start(tmp_path).cache

    def drawn(num_rows):
        sizes = MeasuredSizes(RankRows.of(RowSource(name="data", rows=rows), ALONE), cache)
        sizes.keys[:] = cache.keys(rows)
        sizes.look_up(is_strict=False)
        return sizes.drawn(num_rows).tolist()

    assert sorted(drawn(64)) == list(range(40, 50))
    assert drawn(4) == drawn(4) == drawn(64)[:4]


def test_after_a_difference_none_of_what_headers_said_before_is_believed(tmp_path):
    """LEN-5: sizes that an earlier start took from headers and never compared."""
    rows = texts(5)
    cache = start(tmp_path).cache
    wrong = np.zeros(5, SIZE)
    wrong["length"], wrong["proof"] = 999, BY_HEADER
    cache.append(cache.keys(rows), wrong)
    assert start(tmp_path).measured(rows).lengths.tolist() == [999] * 5, "nothing new, nothing to compare"
    rows += [image_row([photo(tmp_path, "odd", 300, 200)])]
    sizes = start(tmp_path, lies={(300, 200): (64, 64)}).measured(rows)
    assert sizes.columns.tolist() == true_columns(rows)


@pytest.fixture
def rows_and_lie(tmp_path):
    """Rows of one kind; the header of the one before the last is a lie of 5,000 tokens, which no draw would find."""
    plain, odd = photo(tmp_path, "plain", 60, 40), photo(tmp_path, "odd", 60, 41)
    rows = [image_row([plain], f"row {n}") for n in range(998)]
    return [*rows, image_row([odd], "odd"), image_row([plain], "last")], {(60, 41): (2000, 2000)}


def without_draw(monkeypatch):
    monkeypatch.setattr(trust, "NUM_ROWS_DRAWN", 1)


@pytest.mark.parametrize("num_rows", [0, 250, 500, 751])
def test_extremes_are_compared_after_a_kill_too(num_rows, rows_and_lie, tmp_path, monkeypatch):
    """LEN-3 LEN-8: a start that was killed has vouched for the kinds; undisturbed it is as it was."""
    without_draw(monkeypatch)
    rows, lies = rows_and_lie
    killed = start(tmp_path, lies, has_kinds=False)
    encode = killed.by_header.encode

    def until_killed(row, return_length=False):
        if len(killed.by_header.encoded) == num_rows:
            raise KeyboardInterrupt
        return encode(row, return_length)

    if num_rows:
        monkeypatch.setattr(killed.by_header, "encode", until_killed)
        with pytest.raises(KeyboardInterrupt):
            killed.measured(rows)
        proofs_saved = killed.cache.load().records["size"]["proof"].tolist()
        assert set(proofs_saved) <= {AGREED}, "nothing is saved before it was checked"
    assert start(tmp_path, lies, has_kinds=False).measured(rows).columns.tolist() == true_columns(rows)


def test_extremes_that_were_found_equal_are_not_compared_again(tmp_path):
    """LEN-4"""
    rows = mixed_rows(tmp_path / "rows", 60)
    start(tmp_path).measured(rows[:30])
    start(tmp_path).measured(rows)
    warm = start(tmp_path)
    warm.measured(rows)
    assert warm.by_header.encoded == warm.in_full.encoded == []


def swapped_by_hard_link(path, other):
    os.unlink(path)
    os.link(other, path)


def rewritten(path, other):
    Path(path).write_bytes(Path(other).read_bytes())


def only_its_mode(path, other):
    os.chmod(path, 0o600)


@pytest.mark.parametrize("change", [swapped_by_hard_link, rewritten, only_its_mode])
def test_changed_file_of_equal_size_and_time_has_its_header_read_again(change, tmp_path):
    """LEN-7: what changed and what did not; nothing else is measured again."""
    rows = [image_row([photo(tmp_path, f"{n}", 60 + n, 50)], f"row {n}") for n in range(30)]
    path, other = rows[7]["images"][0], photo(tmp_path, "other", 500, 300)
    num_bytes = max(os.path.getsize(path), os.path.getsize(other))
    for file in (path, other):
        Path(file).write_bytes(Path(file).read_bytes().ljust(num_bytes, b"\0"))
        os.utime(file, ns=(5, 5))
    start(tmp_path).measured(rows)
    change(path, other)
    os.utime(path, ns=(5, 5))
    again, warm = start(tmp_path), start(tmp_path)
    assert again.measured(rows).columns.tolist() == true_columns(rows)
    assert set(again.by_header.encoded) == {"<image>row 7"}
    warm.measured(rows)
    assert warm.by_header.encoded == warm.in_full.encoded == []


def test_columns_in_another_order_and_empty_ones_measure_nothing_again(tmp_path):
    """LEN-6 LEN-7: an appended row with a column of its own, another order of rows or of keys; tools keep theirs."""
    rows = texts(20)
    start(tmp_path).measured(rows)
    others = [{**dict(reversed(row.items())), "channel": None, "tools": None} for row in reversed(rows)]
    appended = {**text_row("appended"), "channel": "web"}
    again = start(tmp_path)
    again.measured([*others, appended])
    assert set(again.by_header.encoded) == {"appended"}
