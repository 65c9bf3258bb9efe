"""An epoch laid end to end, from sizes alone."""

import numpy as np
import pytest

from swift_vlpack import PackingConfig
from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.plan.length_files import plan_of_rows
from swift_vlpack.plan.parts import CutRows, Cutting, Part, Span
from swift_vlpack.plan.planner import plan
from swift_vlpack.plan.windows import can_be_in_windows, end_to_end, lost_part
from swift_vlpack.reasons import Reason

CANNOT = Reason.CANNOT_BE_CUT


def config(**options):
    options = {"packing_length": 10, "packing_strategy": "window", "packing_drop_last": False, **options}
    return PackingConfig(**options)


def test_supervised_tokens_of_a_row_are_those_of_its_parts():
    """WIN-3: of a text as if they were spread evenly, of images none."""
    runs = [Part(0, 0, 4, supervised=3), Part(1, 4, 9, 0, 1, 20), Part(2, 9, 30, supervised=21)]
    sizes = np.array([[7, 30], [0, 1], [0, 20], [6, 24]])
    made = end_to_end(sizes, lambda place: runs, config())
    assert made.sizes.T.tolist() == [
        [7, 0, 0, 6], [3, 0, 0, 2], [10, 1, 20, 1 + 4], [10, 0, 0, 10], [7, 0, 0, 7],
    ]  # fmt: skip
    assert made.spans.T.tolist() == [
        [0] * 5,
        [0, 0, 3, 0, 30],
        [1, 3, 13, 0, 30],
        [2, 13, 23, 0, 30],
        [3, 23, 30, 0, 30],
    ]
    assert made.at.tolist() == [0, 1, 1, 1, 1]


def test_rows_that_nobody_can_read_or_cut_stay_out():
    """WIN-2 WIN-5: unreadable, an image too large, and one that nobody can tell, which stays whole where it fits."""
    unknown = {1: [Part(0, 0, 9, 0, 1, 4, CANNOT, 9)], 3: [Part(0, 0, 12, 0, 1, 4, CANNOT, 9)]}
    sizes = np.array([[4, 9, 0, 12], [0, 1, 0, 1], [0, 4, 0, 4], [4, 9, 0, 9]])
    made = end_to_end(sizes, unknown.__getitem__, config())
    assert made.sizes[0].tolist() == [4, 9, 0, 0]
    assert made.spans[:, :3].max() == 0
    assert lost_part(unknown[3], Span(*made.spans[:, 3].tolist()), Cutting.of(config())).reason.value == "cannot_be_cut"
    usable = can_be_in_windows(sizes, CutRows.of(unknown), config())
    assert usable.tolist() == [True, True, False, False]


@pytest.mark.parametrize("cap", [{"packing_max_samples": 2}, {"packing_max_images": 1}, {"packing_max_patches": 5}])
def test_packs_are_those_of_the_pieces_in_order_under_caps(cap):
    """WIN-1: what was cut to fill a pack is in that pack."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 25, 60)
    images = (lengths < 9) & (rng.random(60) < 0.4)
    sizes = np.stack([lengths, images, 3 * images, lengths])
    runs = {int(row): [Part(0, 0, int(lengths[row]), 0, 1, 3)] for row in np.flatnonzero(images)}
    options = config(**cap)
    made = end_to_end(sizes, runs.__getitem__, options)
    packs = plan(made.sizes[0], options, images=made.sizes[1], patches=made.sizes[2])
    assert [piece for pack in packs for piece in pack] == list(range(len(made.at)))
    assert made.sizes[0].sum() == lengths.sum()
    for pack in packs:
        number, _, stop, _, row_length = made.spans[:, pack[-1]].tolist()
        is_full = made.sizes[0][pack].sum() == 10
        assert is_full or stop in (0, row_length), f"part {number} was cut where the pack was not full"


def test_lengths_of_a_file_are_planned_in_pieces():
    """WIN-3 CLI-8: and numbers that cannot be are refused as ever."""
    made, report = plan_of_rows([7, 30, 3], config())
    assert [[made.lengths[piece] for piece in pack] for pack in made] == [[7, 3], [10], [10], [7, 3]]
    assert (report["cut"]["num_rows_cut"], report["cut"]["num_parts"]) == (1, 4)
    whole, report = plan_of_rows([7, 30, 3], config(), images=[0, 1, 0])
    assert whole.lengths.tolist() == [7, 3]
    assert report["cut"]["lost_by_cutting"] == {"cannot_be_cut": {"num_parts": 1, "num_tokens": 30, "num_images": 1}}
    assert plan_of_rows([7, 3], config(packing_strategy="greedy"))[1] == {}
    with pytest.raises(DataError, match="item 1: length must be at least 1"):
        plan_of_rows([7, 0], config())


def test_cutting_twice_is_refused():
    """WIN-6"""
    with pytest.raises(ConfigError, match="packing_strategy=window cuts rows wherever a pack is full, so packing_over"):
        Cutting.of(config(packing_overflow="split"))
