"""Documents end to end, cut wherever a window is full, but never inside of an image: cases to check by hand, a law."""

import random
from itertools import pairwise

import pytest

from swift_vlpack import Packer, PackingConfig
from swift_vlpack.plan.parts import Cutting, Part, Run, Taken, window_parts


def image(length, patches=4):
    return Run(length, images=1, patches=patches, is_whole=True)


def random_row(rng):
    """Text and images; one image of twenty has room in no window of eight tokens."""
    return [
        image(rng.randint(1, 20)) if rng.random() < 0.3 else Run(rng.randint(1, 30)) for _ in range(rng.randint(1, 6))
    ]


def spans(parts):
    return [(part.start, part.stop, *([part.reason.value] if part.reason else [])) for part in parts]


def window(row, capacity, *taken, **more):
    whole = Run(sum(run.length for run in row), sum(run.images for run in row), sum(run.patches for run in row))
    return window_parts(row, Cutting(how="window", capacity=capacity, **more), whole, Taken(*taken))


@pytest.mark.parametrize(
    ("row", "taken", "expected"),
    [
        # It fits behind what is there.
        ([Run(8)], 0, []),
        ([Run(3)], 5, []),
        ([Run(3), image(2)], 3, []),
        # It goes on in the next window, and in the one after that.
        ([Run(4)], 5, [(0, 3), (3, 4)]),
        ([Run(20)], 5, [(0, 3), (3, 11), (11, 19), (19, 20)]),
        # A full window is none.
        ([Run(9)], 8, [(0, 8), (8, 9)]),
        ([Run(8)], 8, []),
        # An image that does not fit behind the text opens the next window, and the text that follows goes on there.
        ([Run(2), image(5), Run(4)], 4, [(0, 2), (2, 10), (10, 11)]),
        # It begins with the image: no token of it is in the open window, so it stays whole.
        ([image(5), Run(2)], 4, []),
        ([image(5), Run(9)], 4, [(0, 8), (8, 14)]),
        # One that no window has room for is left out; the window goes on behind it.
        ([Run(2), image(9), Run(3)], 1, [(0, 2), (11, 14), (2, 11, "image_over_length")]),
        ([Run(2), image(9), Run(7)], 1, [(0, 2), (11, 16), (16, 18), (2, 11, "image_over_length")]),
        ([image(9)], 3, [(0, 9, "image_over_length")]),
    ],
)
def test_windows_by_hand(row, taken, expected):
    """WIN-1 WIN-2: windows of eight tokens, and how many are taken."""
    parts = window(row, 8, taken)
    assert spans(parts) == expected
    assert [part.number for part in parts] == list(range(len(parts)))


def test_windows_end_at_caps_and_never_inside_of_what_nobody_knows():
    """WIN-2"""
    row = [image(2), image(2), Run(5)]
    assert spans(window(row, 20, 4, 1, 4, max_images=2)) == [(0, 2), (2, 9)]
    assert window(row, 20, 4, 0, 6, max_patches=9) == [], "its first image opens the next window, and all of it fits"
    assert [(part.images, part.patches) for part in window(row, 20, 4, 1, 4, max_images=2)] == [(1, 4), (1, 4)]
    cutting = Cutting(how="window", capacity=8)
    assert window_parts(None, cutting, Run(6, 1, 9), Taken(5)) == [], "in one piece, in the next window"
    assert spans(window_parts(None, cutting, Run(9, 1, 9), Taken(5))) == [(0, 9, "cannot_be_cut")]


@pytest.mark.parametrize("seed", range(30))
def test_a_stream_of_windows_keeps_every_token_in_order(seed):
    """WIN-1 WIN-2: what the packer makes of the parts are windows that are full wherever no image was in the way."""
    rng = random.Random(seed)
    config = PackingConfig(packing_length=rng.choice((8, 17, 40)), packing_strategy="window", packing_drop_last=False)
    cutting, packer = Cutting.of(config), Packer(config, label=None)
    rows, packs, lost = [random_row(rng) for _ in range(60)], [], 0
    for number, row in enumerate(rows):
        whole = Run(sum(run.length for run in row))
        parts = window_parts(row, cutting, whole, packer.taken) or [Part(0, 0, whole.length)]
        for part in sorted(parts, key=lambda part: part.start):
            if part.reason is None:
                packs += packer.push(((number, part.start, part.stop), part.length, part.images, part.patches))
            else:
                assert part.length > config.packing_length
                lost += part.length
    packs += packer.flush()
    trained = [span for pack in packs for span in pack.ids]
    assert trained == sorted(trained)
    assert sum(stop - start for _, start, stop in trained) + lost == sum(run.length for row in rows for run in row)
    for pack, following in pairwise(packs):
        assert pack.num_tokens <= config.packing_length
        if pack.num_tokens < config.packing_length:
            number, start, _ = following.ids[0]
            starts = [sum(run.length for run in rows[number][:at]) for at in range(len(rows[number]))]
            first = rows[number][starts.index(start)]
            assert first.is_whole, "it ended early before an image, which had no room"
            assert pack.num_tokens + first.length > config.packing_length
