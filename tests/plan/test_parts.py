"""Where rows that are longer than a pack are cut: cases to check by hand, and laws."""

import random

import pytest

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import ConfigError
from swift_vlpack.plan.parts import Cutting, Run, parts_of
from swift_vlpack.reasons import Reason


def split(capacity, **more):
    return Cutting(how="split", capacity=capacity, **more)


def image(length, patches=4):
    return Run(length, images=1, patches=patches, is_whole=True)


def spans(parts):
    """(start, stop) of each, with the tokens that are repeated, and why it is left out, where it is so."""
    return [(*part[1 : 4 if part.num_repeated else 3], *([part.reason.value] if part.reason else [])) for part in parts]


@pytest.mark.parametrize(
    ("row", "cutting", "expected"),
    [
        # Not longer than a pack: no part, the row is a sample.
        ([Run(8)], split(8), []),
        ([Run(9)], split(8), [(0, 8), (8, 9)]),
        ([Run(20)], split(8), [(0, 8), (8, 16), (16, 20)]),
        # The image fits behind the text exactly.
        ([Run(3), image(5), Run(2)], split(8), [(0, 8), (8, 10)]),
        # It does not by one token: the part ends before it, shorter than a pack.
        ([Run(4), image(5), Run(2)], split(8), [(0, 4), (4, 11)]),
        # Two images side by side; between them a cut is as good as anywhere.
        ([image(5), image(5), Run(1)], split(8), [(0, 5), (5, 11)]),
        # An image as large as a pack is a part; what follows goes on in the next.
        ([Run(2), image(8), Run(3)], split(8), [(0, 2), (2, 10), (10, 13)]),
        # One that is larger is left out, with nothing around it; part numbers go to what is trained first.
        ([Run(2), image(9), Run(3)], split(8), [(0, 2), (11, 14), (2, 11, "image_over_length")]),
        ([image(9), Run(3)], split(8), [(9, 12), (0, 9, "image_over_length")]),
        ([image(9)], split(8), [(0, 9, "image_over_length")]),
        # Context: two tokens of the part before, so that there is room for six new ones.
        ([Run(20)], split(8, stride=2), [(0, 8), (6, 14, 2), (12, 20, 2)]),
        # Context never reaches into an image: behind it there is one token of text only.
        ([image(7), Run(4)], split(8, stride=2), [(0, 8), (7, 11, 1)]),
        # None at all right behind an image.
        ([image(8), Run(4)], split(8, stride=2), [(0, 8), (8, 12)]),
        # Before an image there is as much of it as leaves room for the image.
        ([Run(6), image(7), Run(1)], split(8, stride=3), [(0, 6), (5, 13, 1), (13, 14)]),
        ([Run(6), image(8)], split(8, stride=3), [(0, 6), (6, 14)]),
        # Parts that are too short are left out, the last one or one between images.
        ([Run(18)], split(8, min_len=3), [(0, 8), (8, 16), (16, 18, "too_short")]),
        ([Run(2), image(8), Run(3)], split(8, min_len=3), [(2, 10), (10, 13), (0, 2, "too_short")]),
        # A cap on images or patches ends a part as the capacity does.
        ([image(2), image(2), image(2), Run(5)], split(10, max_images=2), [(0, 4), (4, 11)]),
        ([image(2, 6), image(2, 6), Run(7)], split(10, max_patches=10), [(0, 2), (2, 11)]),
    ],
)
def test_split_by_hand(row, cutting, expected):
    """CUT-1, CUT-2, CUT-3, CUT-4"""
    parts = parts_of(row, cutting)
    assert spans(parts) == expected
    assert [part.number for part in parts] == list(range(len(parts)))


@pytest.mark.parametrize(
    ("row", "how", "expected"),
    [
        ([Run(20)], "truncate", [(0, 8), (8, 20, "truncated")]),
        # Never inside of an image: what is behind its start is lost.
        ([Run(4), image(5), Run(2)], "truncate", [(0, 4), (4, 11, "truncated")]),
        ([image(9), Run(3)], "truncate", [(0, 12, "image_over_length")]),
        ([Run(20)], "drop", [(0, 20, "overflow")]),
        ([Run(8)], "drop", []),
    ],
)
def test_truncate_and_drop_by_hand(row, how, expected):
    """CUT-5: what is lost is a part too, so that its tokens and images are counted."""
    parts = parts_of(row, Cutting(how=how, capacity=8))
    assert spans(parts) == expected
    assert sum(part.images for part in parts) == sum(run.images for run in row) * bool(parts)


def test_a_row_whose_images_nobody_can_tell_is_left_out_whole():
    """CUT-6"""
    assert spans(parts_of(None, split(8), 20)) == [(0, 20, "cannot_be_cut")]
    assert parts_of(None, split(8), 8) == []


def test_every_token_and_image_is_in_exactly_one_part():
    """CUT-1, CUT-2, CUT-3: over 500 seeded rows."""
    draw = random.Random(7)
    for _ in range(500):
        capacity, stride = draw.randint(2, 40), draw.choice([0, 0, 1, 3, 9])
        row = [image(draw.randint(1, 30)) if draw.random() < 0.4 else Run(draw.randint(1, 60)) for _ in range(9)]
        cutting = split(capacity, stride=min(stride, capacity - 1), min_len=draw.choice([1, min(4, capacity)]))
        cutting = draw.choice([cutting, split(capacity, max_images=2)])
        parts = parts_of(row, cutting)
        num_tokens = sum(run.length for run in row)
        if num_tokens <= capacity:
            assert parts == []
            continue
        new = sorted((part.start + part.num_repeated, part.stop) for part in parts)
        assert [start for start, _ in new] == [0, *(stop for _, stop in new[:-1])]
        assert new[-1][1] == num_tokens
        assert sum(part.images for part in parts) == sum(run.images for run in row)
        assert all(part.length <= capacity for part in parts if part.reason is not Reason.IMAGE_OVER_LENGTH)
        at, media = 0, []
        for run in row:
            media += [(at, at + run.length)] * run.is_whole
            at += run.length
        for part in parts:
            inside = [(a, b) for a, b in media if a < part.stop and b > part.start]
            assert all(part.start + part.num_repeated <= a and b <= part.stop for a, b in inside)
            assert part.images == len(inside)
            if cutting.max_images:
                assert part.images <= cutting.max_images
        reasons = [part.reason is not None for part in parts]
        assert reasons == sorted(reasons), "what is trained has the first numbers"


def test_options_that_cannot_be_or_would_do_nothing_are_refused():
    """CUT-7"""
    with pytest.raises(ConfigError, match="packing_overflow must be one of keep, split, truncate, drop"):
        PackingConfig(packing_length=8, packing_overflow="cut")
    with pytest.raises(ConfigError, match="packing_stride=2 has no effect under packing_overflow=truncate"):
        Cutting.of(PackingConfig(packing_length=8, packing_overflow="truncate", packing_stride=2))
    with pytest.raises(ConfigError, match="packing_min_len=2 has no effect under packing_overflow=keep"):
        Cutting.of(PackingConfig(packing_length=8, packing_min_len=2))
    with pytest.raises(ConfigError, match="packing_stride must be at least 0"):
        PackingConfig(packing_length=8, packing_overflow="split", packing_stride=-1)
    with pytest.raises(ConfigError, match="packing_stride=8 leaves no room"):
        Cutting.of(PackingConfig(packing_length=8, packing_overflow="split", packing_stride=8))
    with pytest.raises(
        ConfigError, match="packing_min_len=9 is more than packing_length=8, so every part would be left out"
    ):
        Cutting.of(PackingConfig(packing_length=8, packing_overflow="split", packing_min_len=9))
    assert Cutting.of(PackingConfig(packing_length=8, packing_overflow="split", packing_min_len=8)).min_len == 8
    assert Cutting.of(PackingConfig(packing_length=8)) is None
