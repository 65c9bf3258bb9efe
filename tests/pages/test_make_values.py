"""Which images are those of a prefix, and which those of a branch."""

import pytest

from swift_vlpack.pages.make_values import SampleLookup, SampleTokens, member_of, prefix_of
from swift_vlpack.rows.samples import SampleId

V, T = 9, 1
IMAGES = {"images": ["https://a.b/1.jpg", "https://a.b/2.jpg", "https://a.b/3.jpg"]}


def names_of(row, ids, num_shared):
    """Names of the images of the prefix, and of the branch."""
    lookup = SampleLookup(
        decode=str, placeholders=frozenset({V}), row_of=lambda key: row, answer_of=lambda key: None,
        where_of=str,
    )  # fmt: skip
    sample = SampleTokens(SampleId("rows", 0), ids, [-100] * len(ids), num_shared)
    shown = prefix_of(sample, lookup, start=0, positions={}), member_of(sample, lookup)
    return [[picture.name[-5:-4] for picture in one.pictures] for one in shown]


@pytest.mark.parametrize(
    ("ids", "num_shared", "expected"),
    [
        ([V, V, T, V, T, V, V, T], 3, ["1", "23"]),
        ([V, V, T, V, T, V, V, T], 5, ["12", "3"]),
        ([V, V, T, V, T, V, V, T], 7, ["123", ""]),
        ([V, V, T, V, T, T], 3, ["", ""]),  # two runs for three images: not known
        ([V, V, T, V, T, T], 5, ["123", ""]),
        ([T, T, T], 2, ["123", ""]),
    ],
)
def test_each_image_is_shown_where_its_tokens_are(ids, num_shared, expected):
    """SHARE-83"""
    assert names_of(IMAGES, ids, num_shared) == [[*one] for one in expected]


def test_images_beside_videos_are_shown_where_it_is_known():
    """SHARE-83: columns list images first, whatever the text has first."""
    mixed = {"images": ["https://a.b/1.jpg"], "videos": ["https://a.b/2.mp4"]}
    assert names_of(mixed, [V, T, V, T], 2) == [[], []]
    assert names_of(mixed, [V, T, V, T], 3) == [["1", "2"], []]
