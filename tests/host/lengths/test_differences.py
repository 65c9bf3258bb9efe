"""Headers that lie or say nothing: rows are compared, and one difference is enough."""

import logging

import pytest

from swift_vlpack.host import headers
from swift_vlpack.host.headers import HeaderImage, NoPixels
from swift_vlpack.lengths import trust
from tests.data_rows import image_row, text_row
from tests.host.lengths.support import (
    ARGS,
    FAMILY,
    dataset,
    outcome,
    source,
    unchecked,
    variant,
    warnings_of,
    with_lengths,
)
from tests.images import REASON_OF, photo

BROKEN_BEHIND_ITS_HEADER = {"truncated.jpg", "broken.png"}


def test_sizes_equal_the_encoded_ones_row_by_row_and_failures_have_their_reason(template, images, caplog):
    """LEN-1 LEN-3 LEN-11"""
    rows = dataset([image_row([path]) for path in images.values()])
    with caplog.at_level(logging.WARNING, logger="swift_vlpack"):
        sizes = with_lengths(source(rows, "odd"), template, ARGS).sizes
    for index, (name, path) in enumerate(images.items()):
        full = outcome(template, rows[index])
        if name in BROKEN_BEHIND_ITS_HEADER:
            assert sizes.lengths[index] > 0, "found out when it is loaded"
        elif isinstance(full, str):
            assert sizes.lengths[index] == 0
            assert sizes.failures[index] == REASON_OF[name]
            (line,) = [record.message for record in caplog.records if record.message.startswith(f"odd:{index}:")]
            assert REASON_OF[name] in line
            assert path in line
        else:
            assert tuple(sizes.columns[:, index]) == tuple(full), name
    assert "odd: 5 of 17 rows cannot be encoded: " in caplog.text


@pytest.mark.parametrize("where", ["drawn", "extremes"])
def test_one_difference_sends_the_source_through_the_full_encoding(where, template, images, monkeypatch, tmp_path):
    """LEN-3 LEN-5: headers that lie."""
    rows = dataset([text_row(), image_row([images["photo.jpg"]]), image_row([images["wide.jpg"]])])
    right = [outcome(template, row).length for row in rows]
    said = warnings_of(monkeypatch)
    if where == "extremes":
        monkeypatch.setattr(trust, "NUM_ROWS_DRAWN", 0)
    monkeypatch.setattr(headers, "_header_of", lambda image, load_images: HeaderImage((64, 64)))
    sizes = with_lengths(source(rows), template, ARGS, str(tmp_path)).sizes
    assert sizes.lengths.tolist() == right
    (line,) = said
    assert "every row is encoded" in line
    number = 1 if "rows:1 " in line else 2
    assert f"rows:{number} has {right[number]} tokens, 1 image, " in line
    assert "from its header " in line
    assert line.count(" 1 image, ") == 2
    assert line.endswith(sizes.without_headers)


def test_row_whose_header_says_nothing_is_encoded_in_full(template, tmp_path, monkeypatch):
    """LEN-5: one that was not compared."""
    odd, real = photo(tmp_path, "odd", 100, 90), headers._header_of

    def failing(image, load_images):
        if "odd" in str(image):
            raise NoPixels("as a template of another family would")
        return real(image, load_images)

    monkeypatch.setattr(headers, "_header_of", failing)
    unchecked(monkeypatch)
    rows = dataset([image_row([odd]), text_row()])
    sizes = with_lengths(source(rows), template, ARGS, str(tmp_path)).sizes
    assert sizes.failures == {}
    assert sizes.lengths.tolist() == [outcome(template, row).length for row in rows]


def test_limit_that_only_the_full_length_exceeds_is_a_difference(tiny, tmp_path, monkeypatch):
    """LEN-3: not taken for broken pixels."""
    template = variant(tiny, FAMILY, max_length=60)
    monkeypatch.setattr(headers, "_header_of", lambda image, load_images: HeaderImage((64, 64)))
    said = warnings_of(monkeypatch)
    sizes = with_lengths(
        source(dataset([image_row([photo(tmp_path, "a", 400, 300)])])), template, ARGS, str(tmp_path)
    ).sizes
    assert sizes.failures == {0: "over_max_length"}
    assert "rows:0 has over_max_length, from its header " in said[0]


def test_header_that_cannot_be_had_for_a_moment_is_no_difference(template, tmp_path, monkeypatch):
    """LEN-3 LEN-10: it would be remembered for ever."""
    path, real, tries = photo(tmp_path, "photo", 100, 90), headers._header_of, []

    def flickering(image, load_images):
        tries.append(image)
        if len(tries) <= 3:  # as often as ms-swift tries
            raise OSError(5, "Input/output error")
        return real(image, load_images)

    rows = dataset([image_row([path])])
    monkeypatch.setattr(headers, "_header_of", flickering)
    said = warnings_of(monkeypatch)
    sizes = with_lengths(source(rows), template, ARGS, str(tmp_path)).sizes
    assert len(tries) > 3, "it was not asked for again"
    assert sizes.lengths.tolist() == [outcome(template, rows[0]).length]
    assert said == []
