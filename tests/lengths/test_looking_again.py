"""Remembered rows are looked at again at each start, and what a killed start took from headers is checked first."""

import logging
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from swift_vlpack.lengths import measure as pass_of_lengths
from swift_vlpack.lengths import trust
from swift_vlpack.lengths.cache import LengthCache
from swift_vlpack.lengths.length_file import AGREED
from swift_vlpack.lengths.measured_sizes import MeasuredSizes
from tests.data_rows import image_row, text_row
from tests.images import photo
from tests.lengths.test_measure import start, texts, true_columns, unchecked
from tests.plain_template import PlainTemplate
from tests.ranks_in_threads import on_ranks

CHANGED = "remembered lengths are wrong"


def pictures(folder, num_rows, width=60, name="picture"):
    """One file stands for all."""
    path = photo(folder, name, width, 40)
    return [image_row([path], f"{name} {n}") for n in range(num_rows)]


def said_by(caplog):
    return [record.getMessage() for record in caplog.records]


class Longer(PlainTemplate):
    """Adds words to some rows, as code would that reads them from a file."""

    def __init__(self, is_one, num_words=9):
        super().__init__()
        self._is_one, self._num_words = is_one, num_words

    def encode(self, row, return_length=False):
        if self._is_one(row):
            asked, *others = row["messages"]
            row = {**row, "messages": [{**asked, "content": asked["content"] + " word" * self._num_words}, *others]}
        return super().encode(row, return_length)


def changed(folder, is_one, **options):
    """A start whose full encoding and headers agree, and differ from earlier starts."""
    made, template = start(folder), Longer(is_one, **options)
    header = made.by_header.encode

    def by_header(row, return_length=False):
        of_header, full = header(row, return_length), template.encode(row, return_length)
        return {**of_header, **{name: full[name] for name in ("input_ids", "labels", "length")}}

    made.by_header.encode = by_header
    return made._replace(in_full=template)


def test_longest_largest_and_some_of_each_kind_are_measured_again(tmp_path):
    """LEN-24: other ones at each start; none that names a URL, none that cannot be encoded."""
    rows = [*texts(900), *pictures(tmp_path, 100)]
    rows[17] = text_row("longest", "word " * 300)
    rows[950] = image_row([photo(tmp_path, "largest", 400, 300)], "largest")
    rows[951] = image_row([photo(tmp_path, "smallest", 28, 28)], "smallest")
    rows[5] = image_row([str(tmp_path / "gone.jpg")], "gone")
    rows[6] = {**text_row("longer, behind a URL", "word " * 999), "videos": ["http://127.0.0.1:1/a.mp4"]}
    start(tmp_path).measured(rows)
    seen = []
    for _ in range(6):
        again = start(tmp_path)
        assert again.measured(rows).num_remembered == len(rows) - 1
        full, header = (
            [question.removeprefix("<image>") for question in one.encoded if "gone" not in question]
            for one in (again.in_full, again.by_header)
        )
        asked = {*full, *header}
        assert len(full) + len(header) == len(asked) in (8, 9)
        assert {"longest", "largest", "smallest"} <= asked
        assert sum("row " in question for question in full) >= 2
        assert sum("picture" in question for question in header) >= 2
        assert {question for question in full if not question.startswith("row ")} == {"longest", "smallest"}
        seen.append(frozenset(asked))
    assert len({*seen}) == 6, "the same rows at every start"


def test_source_of_few_rows_is_looked_at_as_a_whole(tmp_path):
    """LEN-24"""
    rows = [*texts(3), *pictures(tmp_path, 2)]
    start(tmp_path).measured(rows)
    again = start(tmp_path)
    again.measured(rows)
    assert len(again.in_full.encoded) + len(again.by_header.encoded) == 5
    start(tmp_path / "empty").measured([])


@pytest.mark.parametrize("num_processes", [1, 2])
def test_one_row_that_differs_drops_all_of_the_source(num_processes, tmp_path, caplog):
    """LEN-24: with the row and both sizes; on disk as well, so that a kill brings nothing of it back."""
    rows = [*texts(40), *pictures(tmp_path, 20)]
    start(tmp_path).measured(rows)
    known = dict(zip(map(str, rows), start(tmp_path).measured(rows).lengths.tolist(), strict=True))
    with caplog.at_level(logging.WARNING):
        sizes = changed(tmp_path, lambda row: True).measured(rows, num_processes=num_processes)
    assert sizes.num_remembered == 0
    assert sizes.lengths.tolist() == [known[str(row)] + 9 for row in rows]
    (line,) = said_by(caplog)
    assert line.startswith(f"source data: {CHANGED}, so all of its rows are measured again: data:")
    assert ", remembered are " in line
    caplog.clear()
    assert changed(tmp_path, lambda row: True).measured(rows).num_remembered == len(rows)
    assert caplog.text == ""


def test_difference_that_one_rank_sees_is_one_on_all(tmp_path, caplog):
    """LEN-24 LEN-12: the row belongs to rank 2; one line of the log."""
    rows = texts(40)
    rows[22] = text_row("longest", "word " * 300)
    firsts = [start(tmp_path) for _ in range(4)]
    on_ranks(4, lambda comm: firsts[comm.rank].measured(rows, comm))
    starts = [changed(tmp_path, lambda row: row["messages"][0]["content"].startswith("longest")) for _ in range(4)]
    with caplog.at_level(logging.WARNING):
        given = on_ranks(4, lambda comm: starts[comm.rank].measured(rows, comm))
    for sizes in given:
        assert sizes.num_remembered == 0
        assert sizes.lengths[22] == true_columns(rows)[0][22] + 9
    assert len(said_by(caplog)) == 1


def test_change_that_only_media_rows_show_is_seen_at_the_first_start(tmp_path, caplog):
    """LEN-24: in data of which 95 % are texts, and longer ones."""
    rows = [*(text_row(f"row {n}", "word " * (60 + n % 9)) for n in range(1900)), *pictures(tmp_path, 100)]
    start(tmp_path).measured(rows)
    with caplog.at_level(logging.WARNING):
        sizes = changed(tmp_path, lambda row: bool(row.get("images"))).measured(rows)
    assert CHANGED in caplog.text
    assert sizes.lengths[1900:].tolist() == [true_columns(rows)[0][1900] + 9] * 100


def test_source_that_is_encoded_in_full_is_looked_at_too_and_says_so_always(tmp_path, caplog):
    """LEN-24 LEN-5"""
    rows, lies = pictures(tmp_path, 30), {(60, 40): (600, 400)}
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            caplog.clear()
            sizes = start(tmp_path, lies).measured(rows)
            assert sizes.columns.tolist() == true_columns(rows)
            assert sizes.num_remembered == (30 if number else 0)
            (line,) = said_by(caplog)
            assert "every row is encoded" in line
        caplog.clear()
        longer = changed(tmp_path, lambda row: True)
        assert longer.measured(rows).lengths.tolist() == [true_columns(rows)[0][0] + 9] * 30
    assert CHANGED in said_by(caplog)[0]


def test_difference_that_headers_pass_by_is_seen_and_headers_are_left(tmp_path, caplog):
    """LEN-24: the header says what it said; only the full encoding is another. The row that showed it is compared."""
    rows = texts(300)
    start(tmp_path).measured(rows)
    later = start(tmp_path)._replace(in_full=Longer(lambda row: True))
    with caplog.at_level(logging.WARNING):
        sizes = later.measured(rows)
    assert sizes.lengths.tolist() == [length + 9 for length in true_columns(rows)[0]]
    assert [part in line for part, line in zip((CHANGED, "every row is encoded"), said_by(caplog), strict=True)] == [
        True, True,
    ]  # fmt: skip


def test_lie_that_no_check_found_is_found_by_looking_again_once(tmp_path, monkeypatch, caplog):
    """LEN-24: the row that differs is compared, so the source is not measured anew at each start."""
    rows = [*texts(100), *pictures(tmp_path, 1)]
    lies = {(60, 40): (600, 400)}
    with monkeypatch.context() as patch:
        unchecked(patch)
        assert start(tmp_path, lies).measured(rows).lengths[100] > true_columns(rows)[0][100]
        with caplog.at_level(logging.WARNING):
            sizes = start(tmp_path, lies).measured(rows)
    assert sizes.columns.tolist() == true_columns(rows)
    assert "every row is encoded" in said_by(caplog)[-1]
    assert start(tmp_path, lies).measured(rows).num_remembered == 101


def test_template_that_draws_is_not_measured_anew_at_each_start(tmp_path, caplog):
    """LEN-24: a row of which each encoding has another size tells of no change."""
    rows, counter = texts(20), iter(range(10**6))

    class Draws(PlainTemplate):
        def encode(self, row, return_length=False):
            encoded = super().encode(row, return_length)
            more = [1] * next(counter)
            return {**encoded, "input_ids": encoded["input_ids"] + more, "length": encoded["length"] + len(more)}

    def drawing():
        return start(tmp_path)._replace(in_full=Draws(), by_header=Draws())

    drawing().measured(rows)
    with caplog.at_level(logging.WARNING):
        assert drawing().measured(rows).num_remembered == len(rows)
    assert CHANGED not in caplog.text


def test_row_that_cannot_be_encoded_for_its_pixels_tells_of_no_change(tmp_path, caplog):
    """LEN-24: broken pixels after a good header, as before."""
    path = Path(photo(tmp_path, "broken", 300, 200))
    path.write_bytes(path.read_bytes()[:3000])
    rows = [*texts(5), image_row([str(path)])]
    start(tmp_path).measured(rows)
    with caplog.at_level(logging.WARNING):
        assert start(tmp_path).measured(rows, is_strict=True).num_remembered == 6
    assert caplog.text == ""


def test_url_is_asked_for_at_no_start_that_remembers_it(tmp_path):
    """LEN-24"""
    rows = [{**row, "images": [f"http://127.0.0.1:1/{n}.jpg"]} for n, row in enumerate(texts(9))]
    cache = start(tmp_path).cache
    sizes = np.zeros(9, cache.load().records["size"].dtype)
    sizes["length"], sizes["proof"] = 50, AGREED
    cache.append(cache.keys(rows), sizes)
    again = start(tmp_path)
    assert again.measured(rows).lengths.tolist() == [50] * 9
    assert again.in_full.encoded == again.by_header.encoded == []


# -- unchecked sizes --------------------------------------------------------------------------------------------------


def num_saved(folder):
    cache = LengthCache(folder / "rows.lengths", "context")
    return len(cache.load()), len(cache.load_unchecked())


def killed_pass(folder, rows, num_rows, **options):
    """A pass in a process of its own, killed -9 when so many rows were measured by their headers."""
    if (pid := os.fork()) == 0:
        mine = start(folder, **options)
        encode = mine.by_header.encode

        def until_killed(row, return_length=False):
            if len({*mine.by_header.encoded}) >= num_rows:
                os.kill(os.getpid(), signal.SIGKILL)
            return encode(row, return_length)

        mine.by_header.encode = until_killed
        mine.measured(rows)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)


@pytest.mark.usefixtures("never_again")
def test_killed_pass_keeps_what_it_measured(tmp_path):
    """LEN-8: of 1,000 rows, the next start measures those that are missing, and compares some of the others."""
    rows = [*texts(700), *pictures(tmp_path, 300)]
    killed_pass(tmp_path, rows, 800)
    num_checked, num_unchecked = num_saved(tmp_path)
    assert num_checked + num_unchecked > 700
    assert num_checked < 80
    again = start(tmp_path)
    sizes = again.measured(rows)
    assert sizes.columns.tolist() == true_columns(rows)
    assert sizes.num_remembered > 700
    assert len(again.by_header.encoded) < 300 + 2 * 64
    checked = LengthCache(tmp_path / "rows.lengths", "context")
    assert checked.load().of(checked.keys(rows))[0].all()
    assert not (tmp_path / "rows.unchecked").exists()
    warm = start(tmp_path)
    warm.measured(rows)
    assert warm.by_header.encoded == warm.in_full.encoded == []


@pytest.fixture
def killed_before_it_believed(monkeypatch):
    """A start that measures all rows by their headers, compares none, and ends."""

    def measured(rows, folder, lies=None):
        with monkeypatch.context() as patch:
            unchecked(patch)
            patch.setattr(MeasuredSizes, "believe_headers", lambda sizes: exec("raise KeyboardInterrupt"))
            with pytest.raises(KeyboardInterrupt):
                start(folder, lies).measured(rows)
        assert num_saved(folder) == (0, len(rows))

    return measured


@pytest.mark.usefixtures("never_again")
@pytest.mark.parametrize("where", ["drawn", "extreme"])
def test_unchecked_sizes_are_compared_before_they_are_believed(
    where, tmp_path, monkeypatch, caplog, killed_before_it_believed
):
    """LEN-8 LEN-3: headers lie, and the killed start did not compare one of them."""
    rows, lies = [*texts(200), *pictures(tmp_path, 100)], {(60, 40): (600, 400)}
    killed_before_it_believed(rows, tmp_path, lies)
    if where == "drawn":
        monkeypatch.setattr(pass_of_lengths, "extremes", lambda sizes: np.zeros(0, np.int64))
    else:
        monkeypatch.setattr(trust, "NUM_ROWS_DRAWN", 0)
    later = start(tmp_path, lies)
    with caplog.at_level(logging.WARNING):
        assert later.measured(rows).columns.tolist() == true_columns(rows)
    assert "every row is encoded" in caplog.text
    assert num_saved(tmp_path) == (len(LengthCache(tmp_path / "rows.lengths", "context").load()), 0)


def test_unchecked_sizes_are_looked_at_again_too(tmp_path, caplog, killed_before_it_believed):
    """LEN-24: what they depend on was changed after the kill."""
    rows = texts(200)
    killed_before_it_believed(rows, tmp_path)
    with caplog.at_level(logging.WARNING):
        sizes = changed(tmp_path, lambda row: True).measured(rows)
    assert sizes.lengths.tolist() == [length + 9 for length in true_columns(rows)[0]]
    assert CHANGED in caplog.text


def test_rows_whose_comparison_was_not_done_are_measured_again(tmp_path):
    """LEN-8: the chunk in which a kind came up first is saved when its rows were compared, and not before."""
    rows = [*texts(256), *pictures(tmp_path, 1, 300, "odd"), *texts(255, 256)]
    lies = {(300, 40): (2000, 2000)}
    ending = start(tmp_path, lies)
    encode = ending.in_full.encode

    def killed(row, return_length=False):
        if "odd" in row["messages"][0]["content"]:
            raise KeyboardInterrupt
        return encode(row, return_length)

    ending.in_full.encode = killed
    with pytest.raises(KeyboardInterrupt):
        ending.measured(rows)
    cache = LengthCache(tmp_path / "rows.lengths", "context")
    is_unchecked, _ = cache.load_unchecked().of(cache.keys(rows))
    assert is_unchecked[:256].sum() > 200
    assert not is_unchecked[256:].any()
    assert start(tmp_path, lies).measured(rows).columns.tolist() == true_columns(rows)


def test_cost_of_saving_does_not_grow_with_the_rows(tmp_path):
    """LEN-14: no list of a million tuples."""
    import tracemalloc

    rows = texts(2)
    sizes = MeasuredSizes(_Many(200_000), LengthCache(tmp_path / "rows.lengths", "context"))
    sizes.keys["low"] = np.arange(1, 200_001)
    sizes._state[:] = 1
    tracemalloc.start()
    sizes.believe_headers()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40e6
    assert len(LengthCache(tmp_path / "rows.lengths", "context").load()) == 200_000
    assert rows


class _Many:
    def __init__(self, num_rows):
        self._num_rows = num_rows

    def __len__(self):
        return self._num_rows
