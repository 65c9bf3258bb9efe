"""The list of rows that are in no pack, and the share of failures that stops a run."""

import logging
from pathlib import Path

import pytest

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import ConfigError
from swift_vlpack.feed.failures import FailedShare, check_measured
from swift_vlpack.rows.left_out import LeftOutRows
from swift_vlpack.rows.samples import LeftOut, SampleId, TooManyFailures
from swift_vlpack.rows.sizes import LengthIndex, RowSize
from swift_vlpack.rows.source import RowSource
from swift_vlpack.runlog.left_out import listed


def gone(row, reason="file_missing"):
    return LeftOut(SampleId("rows", row), reason, f"no such file: {row}.jpg", (f"{row}.jpg",))


def failures(start, stop):
    return [gone(row) for row in range(start, stop)]


def test_row_is_listed_once_for_an_epoch_also_after_a_resume(tmp_path):
    """DATA-16: with the file and line, the reason, the error, the epoch and the time."""
    data = tmp_path / "rows.jsonl"
    data.write_text("{}\n\n{}\n")  # the second row stands in line 3
    source = RowSource(name="rows", rows=[{}, {}], origin=str(data))
    path = tmp_path / "vlpack" / "left_out.jsonl"
    rows = LeftOutRows(path, [source])
    rows.add(0, [gone(1), gone(1)])
    path.write_bytes(path.read_bytes() + b'{"id": "rows:9", "reas')  # killed while it wrote
    again = LeftOutRows(path, [source])
    again.add(0, [gone(1)])
    again.add(1, [gone(1)])
    first, second = listed(path)
    assert {**first, "when": ""} == {
        "id": "rows:1",
        "where": f"{data}:3",
        "reason": "file_missing",
        "error": "no such file: 1.jpg",
        "files": ["1.jpg"],
        "epoch": 0,
        "when": "",
    }
    assert first["when"].endswith("+00:00")
    assert (second["id"], second["epoch"]) == ("rows:1", 1)


def test_list_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    """DATA-16"""
    (tmp_path / "vlpack").write_text("a file where the folder would be")
    rows = LeftOutRows(tmp_path / "vlpack" / "left_out.jsonl")
    for row in range(3):
        rows.add(0, [gone(row)])
    assert caplog.text.count("cannot be written") == 1


def test_share_of_the_last_rows_warns_once_and_stops(caplog):
    """DATA-17: of the last 1,000 rows, not of all; every failure counts, in a row or not."""
    share = FailedShare(0.2)

    def lose(start, stop):
        for row in range(start, stop):
            share.count(0, [gone(row)])
            share.check()
            share.count(1)

    share.count(5000)
    share.check()
    lose(0, 60)  # 6 % of the last 1,000 and 1.2 % of all
    assert caplog.text.count("51 of the last 1000 rows could not be read (file_missing 51)") == 1
    assert caplog.text.count("of the last") == 1
    with pytest.raises(TooManyFailures, match=r"201 of the last 1000 rows .*raise packing_max_failed_share"):
        lose(60, 2000)


@pytest.mark.parametrize(("num_read", "num_failed"), [(0, 99), (70, 29)])
def test_few_rows_say_nothing_until_an_epoch_ends(num_read, num_failed):
    """DATA-17"""
    share = FailedShare(0.2)
    share.count(num_read, failures(0, num_failed))
    share.check()
    with pytest.raises(TooManyFailures, match=f"{num_failed} of the last 99 rows"):
        share.check(20)
    share.count(1)
    with pytest.raises(TooManyFailures, match=f"{num_failed} of the last 100 rows"):
        share.check()


def test_rows_that_are_left_out_for_their_length_are_no_failures(caplog):
    """DATA-17"""
    share = FailedShare(0.0)
    reasons = ("over_max_length", "oversize", "over_cap", "underfilled", "longer_than_planned")
    share.count(10, [gone(row, reason) for row in range(200) for reason in reasons])
    share.check(1)
    assert caplog.text == ""


def test_any_share_can_be_allowed(caplog):
    """DATA-17 CONF-1"""
    share = FailedShare(1.0)
    share.count(0, failures(0, 1000))
    share.check()
    assert "1000 of the last 1000" in caplog.text
    with pytest.raises(ConfigError, match="packing_max_failed_share must be between 0 and 1, got 20"):
        PackingConfig(packing_length=8, packing_max_failed_share=20)


def measured_source(num_rows, num_failed, reason="file_missing"):
    sizes = [RowSize(0)] * num_failed + [RowSize(5)] * (num_rows - num_failed)
    index = LengthIndex.of(sizes, dict.fromkeys(range(num_failed), reason))
    return RowSource(name="rows", rows=[{}] * num_rows, sizes=index)


def test_rows_that_are_known_to_fail_stop_the_run_before_it_starts(caplog):
    """DATA-17"""
    with pytest.raises(TooManyFailures, match=r"60 of 200 rows cannot be read \(file_missing 60\)"):
        check_measured([measured_source(100, 60), measured_source(100, 0)], 0.2)
    check_measured([measured_source(200, 60, "over_max_length"), measured_source(90, 4)], 0.2)
    check_measured([measured_source(99, 60)], 0.2)
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        check_measured([measured_source(200, 20)], 0.2)
    assert "20 of 200 rows cannot be read" in caplog.text


def test_path_of_the_list_is_not_made_before_there_is_a_line(tmp_path):
    """DATA-16"""
    LeftOutRows(tmp_path / "vlpack" / "left_out.jsonl").add(0, [])
    assert not Path(tmp_path / "vlpack").exists()
