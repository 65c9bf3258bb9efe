"""Sizes of videos, read from their containers."""

from types import SimpleNamespace

import pytest

from swift_vlpack.host.headers import pixel_free
from swift_vlpack.rows import patches
from swift_vlpack.rows.contents import size_of
from swift_vlpack.rows.source import RowSource
from tests.data_rows import text_row
from tests.host.lengths.support import warnings_of, with_lengths
from tests.images import photo
from tests.marks import quick_only
from tests.tiny import FAMILIES
from tests.videos import video

decord = pytest.importorskip("decord", reason="has no wheel for this platform")
SHAPES = [(30, 160, 120), (7, 64, 64), (120, 320, 240), (61, 98, 230), (5, 300, 40)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    return [video(folder / f"{number}.mp4", *shape) for number, shape in enumerate(SHAPES)]


def video_row(*paths, **more):
    return {**text_row("<video>" * len(paths) + "what happens?"), "videos": list(paths), **more}


@pytest.mark.parametrize("family", quick_only(("qwen2_5_vl",), FAMILIES))
def test_containers_give_the_length_that_encoding_gives(family, tiny, paths, tmp_path):
    """LEN-1 LEN-2: one video, several, beside an image, as a list of frames."""
    template = tiny(family).template
    quick = pixel_free(template)
    frames = [photo(tmp_path, str(number), 90, 60, seed=number) for number in range(5)]
    rows = [video_row(path) for path in paths]
    rows += [video_row(paths[0], paths[3]), {**video_row(paths[1]), "images": [frames[0]]}, video_row(frames)]
    for row in rows:
        assert size_of(quick.encode(row, return_length=True)) == size_of(template.encode(row, return_length=True))


def test_no_frame_but_the_first_is_decoded(tiny, paths, monkeypatch):
    """LEN-2"""
    asked = []
    monkeypatch.setattr(decord.VideoReader, "get_batch", lambda self, indices: asked.append(indices))
    encoded = pixel_free(tiny("qwen2_5_vl").template).encode(video_row(paths[2]), return_length=True)
    assert encoded["video_grid_thw"].tolist() == [[4, 20, 28]]
    assert not asked


def test_videos_of_a_source_are_measured_and_checked_both_ways(tiny, paths, tmp_path, monkeypatch):
    """LEN-3: and where a container says something else than the frames, the source is encoded in full."""
    template = tiny("qwen2_5_vl").template
    rows = [video_row(path) for path in paths]
    right = [template.encode(row, return_length=True)["length"] for row in rows]
    args = SimpleNamespace(dataset_num_proc=1, strict=False)
    source = RowSource(name="clips", rows=rows)
    assert with_lengths(source, template, args, str(tmp_path / "one")).sizes.lengths.tolist() == right
    said = warnings_of(monkeypatch)
    empty = patches.torch.empty
    monkeypatch.setattr(patches.torch, "empty", lambda shape, **options: empty((shape[0], 64, 64, 3), **options))
    assert with_lengths(source, template, args, str(tmp_path / "two")).sizes.lengths.tolist() == right
    assert "every row is encoded" in said[0]
