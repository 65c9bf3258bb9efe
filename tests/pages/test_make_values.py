"""Which images are those of a prefix, and which those of a branch."""

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


def test_prefix_shows_the_images_of_its_rows():
    """SHARE-83: also where no token tells which of them is where."""
    for ids in ([V, V, T, V, T, V, V, T], [V, V, T, V, T, T, T, T], [T, T, T, T, T, T, T, T]):
        assert names_of(IMAGES, ids, 7) == [["1", "2", "3"], []]
