"""Items that are alone in their pack: packer, plan and report mean the same by it."""

import numpy as np
import pytest

from swift_vlpack import Packer, PackingConfig, plan
from swift_vlpack.plan.items import is_single_long, must_be_alone, why_alone
from swift_vlpack.runlog.counts import Counts
from tests.contract import run

LENGTHS, IMAGES, PATCHES = [99, 100, 101, 40, 40, 40], [0, 0, 0, 2, 3, 0], [0, 0, 0, 50, 0, 51]


def config(**options):
    return PackingConfig(
        **{
            "packing_length": 100,
            "packing_strategy": "exact",
            "packing_drop_last": False,
            "packing_max_images": 2,
            "packing_max_patches": 50,
            **options,
        }
    )


@pytest.mark.parametrize(
    ("caps", "long", "alone", "reasons"),
    [
        (
            {},
            [False, False, True, False, True, True],
            [False, True, True, False, True, True],
            [None, "oversize", "oversize", None, "over_cap", "over_cap"],
        ),
        (
            {"packing_max_images": None, "packing_max_patches": None},
            [False, False, True, False, False, False],
            [False, True, True, False, False, False],
            [None, "oversize", "oversize", None, None, None],
        ),
    ],
)
def test_what_is_too_large_is_the_same_for_one_item_and_for_columns(caps, long, alone, reasons):
    """PACK-6: at a capacity of 100 tokens, 2 images and 50 patches; without caps by length alone."""
    options, items = config(**caps), list(zip(LENGTHS, IMAGES, PATCHES, strict=True))
    columns = [np.array(column) for column in (LENGTHS, IMAGES, PATCHES)]
    assert is_single_long(*columns, options).tolist() == long == [is_single_long(*item, options) for item in items]
    assert must_be_alone(*columns, options).tolist() == alone == [must_be_alone(*item, options) for item in items]
    assert [why_alone(*item, options) for item in items] == reasons


def test_over_cap_single_counts_alike_in_packer_plan_and_report():
    """PACK-6 STAT-3: 60 and 40 fill a pack; 40 with three images is alone, and no sign of bad packing."""
    lengths, images = [60, 40, 40], [0, 0, 3]
    made = plan(lengths, config(packing_max_patches=None), images=images)
    packs = run(Packer(config(packing_max_patches=None)), [("a", 60, 0), ("b", 40, 0), ("c", 40, 3)])
    stats = Counts(packing_length=100)
    for pack in packs:
        stats.packed([("a", item.length) for item in pack.items], single_long=pack.single_long)
    assert sorted(made) == [[0, 1], [2]]
    assert (int(made.is_single_long.sum()), stats.num_single_long) == (1, 1)
    assert (made.mean_fill, stats.fill_mean) == (1.0, 1.0), "it was 0.7 in the report"
