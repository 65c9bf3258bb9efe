"""Which images are those of a prefix, and which those of a branch."""

from swift_vlpack.pages.make_values import SampleLookup, segments_of
from swift_vlpack.pages.values import SequenceTensors
from swift_vlpack.rows.samples import SampleId

V, T = 9, 1
IMAGES = {"images": ["https://a.b/1.jpg", "https://a.b/2.jpg", "https://a.b/3.jpg"]}


def test_prefix_shows_the_images_of_its_rows():
    """SHARE-83: also where no token tells which of them is where."""
    lookup = SampleLookup(
        decode=str, placeholders=frozenset({V}), row_of=lambda key: IMAGES, answer_of=lambda key: None, where_of=str
    )
    for ids in ([V, V, T, V, T, V, V, T], [V, V, T, V, T, T, T, T], [T, T, T, T, T, T, T, T]):
        tensors = SequenceTensors(input_ids=ids, labels=[-100] * 8, position_ids=[], cu_seqlens=[0, 7, 8])
        shown = segments_of(SampleId("rows", 0), [slice(0, 7), slice(7, 8)], tensors, {}, lookup)
        names = [[picture.name[-5:-4] for picture in one.pictures] for one in shown]
        assert names == [["1", "2", "3"], []]
