"""Which rows are compared with what is planned, and what is said of a source."""

import numpy as np
import pytest

from swift_vlpack.lengths.audit import checked_lengths
from swift_vlpack.rows.contents import size_of
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.sizes import NUM_ROWS_OF_A_KIND, LengthIndex, RowSize, rows_to_compare
from swift_vlpack.rows.source import RowSource
from swift_vlpack.rows.streams import StreamedRows
from tests.data_rows import image_row, mixed_rows, text_row, write_jsonl
from tests.plain_template import PlainTemplate


@pytest.fixture
def rows(tmp_path):
    return [*mixed_rows(tmp_path, 8, largest=120), *(text_row("what?", "word " * n) for n in range(1, 8))]


def planned(rows, **changes):
    """The true sizes of rows, but for those that are changed, by row."""
    template = PlainTemplate()
    sizes = [changes.pop(f"row_{at}", None) or size_of(template.encode(row)) for at, row in enumerate(rows)]
    return LengthIndex.of(sizes)


def checked(rows, sizes, **of_source):
    (found,) = checked_lengths(
        FusionCaptionDataset([RowSource(name="rows", rows=rows, sizes=sizes, **of_source)], PlainTemplate())
    )
    return found


def test_source_whose_sizes_are_true_is_equal(rows):
    """CLI-17"""
    found = checked(rows, planned(rows))
    assert (found.check, found.num_rows, found.num_compared, found.differing) == ("equal", 15, 15, ())


def test_source_without_headers_is_right_and_says_why(rows):
    """CLI-17"""
    sizes = planned(rows)
    found = checked(rows, LengthIndex(sizes.columns, {}, without_headers="rows:3 has 9 tokens, from its header 8"))
    assert (found.check, found.without_headers) == ("fallback", "rows:3 has 9 tokens, from its header 8")


@pytest.mark.parametrize("column", RowSize._fields)
def test_one_wrong_number_of_one_row_is_named_by_file_and_line(column, rows, tmp_path):
    """CLI-17: tokens, images, patches and targets decide about packs and steps."""
    true = planned(rows)
    wrong = RowSize(*true.columns[:, 9].tolist())
    wrong = wrong._replace(**{column: getattr(wrong, column) + 1})
    file = write_jsonl(tmp_path / "rows.jsonl", rows * 8)
    found = checked(rows, planned(rows, row_9=wrong), origin=file, row_numbers=range(100, 115))
    assert found.check == "differing"
    (line,) = found.differing
    there = true.columns[RowSize._fields.index(column), 9]
    assert line == f"{file}:110: {column} {there} where {there + 1} were planned"


def test_row_that_cannot_be_encoded_any_more_is_no_difference(rows, tmp_path):
    """CLI-17: training leaves it out and counts it."""
    sizes = planned([*rows, text_row()])
    found = checked([*rows, image_row([str(tmp_path / "gone.jpg")])], sizes)
    assert (found.check, found.num_compared) == ("equal", 15)
    (line,) = found.unreadable
    assert "gone.jpg" in line


def test_rows_without_a_plan_are_measured_as_they_are_read(rows):
    """CLI-17"""
    assert checked(rows, None).check == "as read"
    (stream,) = checked_lengths(StreamedRows(iter(rows), PlainTemplate()))
    assert stream.check == "as read"


def test_compared_are_the_ends_and_some_of_every_kind():
    """CLI-17: of 4,000 rows 16 of each kind, with the shortest and longest; none without a length."""
    kinds = [(0, 0), (1, 40), (3, 120), (0, 200)]  # text, one image, several, video
    sizes = [RowSize(10 + at, *kinds[at % 4]) for at in range(4000)]
    sizes[17] = RowSize(0)
    chosen = rows_to_compare(LengthIndex.of(sizes), "rows")
    assert chosen == rows_to_compare(LengthIndex.of(sizes), "rows"), "the same every time"
    assert chosen != rows_to_compare(LengthIndex.of(sizes), "other rows")
    assert 17 not in chosen
    of_kind = np.bincount([at % 4 for at in chosen], minlength=4)
    assert all(NUM_ROWS_OF_A_KIND <= number <= NUM_ROWS_OF_A_KIND + 6 for number in of_kind)
    assert {0, 1, 2, 3, 3996, 3997, 3998, 3999} <= set(chosen)
