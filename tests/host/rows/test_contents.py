"""Images and patches of real templates of many families, by header and in full; caps hold on each of them."""

from functools import cache

import pytest
from datasets import Dataset

from swift_vlpack import PackingConfig
from swift_vlpack.feed.dataset import PackingDataset
from swift_vlpack.host.headers import pixel_free
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.samples import SampleId
from swift_vlpack.rows.source import RowSource
from tests.data_rows import image_row, text_row
from tests.families import FAMILIES, load_template
from tests.host.lengths.support import ARGS, with_lengths
from tests.images import photo
from tests.marks import quick_only

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # of ms-swift's InternVL
SIZES = ((640, 480), (336, 336), (1500, 300))
IMAGES = [0, 1, 1, 1, 2]
PATCHES = {
    # rounded to pairs of patches: 46 x 34, 24 x 24, 108 x 22 of 14 pixels; 40 x 30, 20 x 20, 94 x 18 of 16
    "qwen2_vl": [0, 1564, 576, 2376, 2140],
    "qwen2_5_vl": [0, 1564, 576, 2376, 2140],
    "qwen3_vl": [0, 1200, 400, 1692, 1600],
    "glm4v": [0, 1564, 576, 2376, 2140],
    # 24 x 24 of one square of 336 pixels; in 1.6 of 5, 3 and 4 squares, and of twice 5, of which two fill up the second
    "llava1_5_hf": [0, 576, 576, 576, 1152],
    "llava1_6_mistral_hf": [0, 2880, 1728, 2304, 5760],
    # 32 x 32 of tiles of 448 pixels: 13, 1, 6, 14
    "internvl": [0, 13312, 1024, 6144, 14336],
    # 64 x 64 of one square of 896 pixels
    "gemma3_vision": [0, 4096, 4096, 4096, 8192],
}


@pytest.fixture(scope="module")
def template_of(tmp_path_factory, tiny):
    made = cache(lambda family: load_template(tmp_path_factory.mktemp(family), family))
    return lambda family: made(family) if family in FAMILIES else tiny(family).template


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    paths = [photo(folder, f"{width}x{height}", width, height) for width, height in SIZES]
    return [text_row(), *[image_row([path]) for path in paths], image_row(paths[:2])]


def sizes(template, rows):
    """Length, and what else there is, of every row."""
    samples = [RowEncoder(template).sample(row, SampleId("rows", n)) for n, row in enumerate(rows)]
    return [(sample["length"], sample["contents"]) for sample in samples]


@pytest.mark.parametrize("family", quick_only(PATCHES.keys() - {"qwen2_vl"}, PATCHES))
def test_images_and_patches_are_counted_in_every_family(template_of, rows, family):
    """DATA-18: from the pixels, and from headers alone, where the processor can do without pixels."""
    template = template_of(family)
    found = sizes(template, rows)
    assert [held.images for _, held in found] == IMAGES
    assert [held.patches for _, held in found] == PATCHES[family]
    if family != "gemma3_vision":  # makes arrays of its pixels, so that its rows are encoded in full
        assert sizes(pixel_free(template), rows) == found


@pytest.mark.parametrize("family", ["internvl", "gemma3_vision"])
def test_length_pass_remembers_what_rows_hold(template_of, rows, family, tmp_path):
    """DATA-18 LEN-1"""
    dataset = Dataset.from_list([{"images": [], **row} for row in rows])
    sizes = with_lengths(RowSource(name="rows", rows=dataset), template_of(family), ARGS, str(tmp_path)).sizes
    assert (sizes.images.tolist(), sizes.patches.tolist()) == (IMAGES, PATCHES[family])


@pytest.mark.parametrize("mode", ["plan", "buffer"])
@pytest.mark.parametrize(
    ("family", "cap", "num_samples"),
    [
        ("internvl", {"packing_max_images": 2}, [1, 2]),
        ("internvl", {"packing_max_patches": 2048}, [1, 2]),
        ("gemma3_vision", {"packing_max_images": 1}, [1, 1, 1]),
    ],
)
def test_caps_hold_in_a_family_without_grids(template_of, rows, family, cap, num_samples, mode):
    """DATA-18 PACK-3: three rows of one square image each, with room for the tokens of all."""
    template = template_of(family)
    options = {"packing_length": 8192, "packing_strategy": "exact", "packing_drop_last": False, **cap}
    source = RowSource(name="rows", rows=[rows[2]] * 3)
    packs = PackingDataset(
        FusionCaptionDataset([source], template), template, PackingConfig(packing_mode=mode, **options)
    )
    made = [packs[n] for n in range(len(packs))] if mode == "plan" else list(packs)
    template.packing = template.padding_free = False
    assert sorted(len(pack) for pack in made) == num_samples
    assert sorted(pack.record.num_images for pack in made) == num_samples
