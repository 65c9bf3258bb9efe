"""What samples hold, for the tensors that ms-swift's templates make; shapes as read in their `_encode`."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from swift_vlpack.rows.contents import Contents, contents_of, count_contents, media_spans, num_images_of
from swift_vlpack.rows.families import MediaTokens, patch_size_of
from swift_vlpack.rows.media import media

ONE, TWO = {"images": ["a.jpg"]}, {"images": ["a.jpg", "b.jpg"]}


@pytest.mark.parametrize(
    ("family", "sample", "row", "expected"),
    [
        ("text", {}, {}, Contents(0, 0, 0.0)),
        ("a text model leaves images alone", {}, ONE, Contents(0, 0, 0.0)),
        ("qwen", {"image_grid_thw": torch.tensor([[1, 4, 6], [1, 2, 2]])}, TWO, Contents(2, 28, 1.5)),
        ("qwen by header", {"image_grid_thw": np.array([[1, 4, 6]])}, ONE, Contents(1, 24, 1.5)),
        ("qwen video", {"video_grid_thw": torch.tensor([[3, 4, 8]])}, {"videos": ["a.mp4"]}, Contents(0, 96, 2.0)),
        ("kimi", {"image_grid_hws": torch.tensor([[4, 6]]), "pixel_values": torch.zeros(24, 3, 14, 14)}, ONE,
         Contents(1, 24, 1.5)),
        ("ovis 2.5", {"grid_thws": torch.tensor([[1, 4, 4], [1, 2, 2]])}, TWO, Contents(2, 20, 0.0)),
        ("ernie", {"grid_thw": torch.tensor([[1, 4, 4]]), "images": torch.zeros(16, 588)}, ONE, Contents(1, 16, 0.0)),
        ("minicpm-v", {"tgt_sizes": [torch.tensor([[2, 3], [4, 5]])], "pixel_values": [[torch.zeros(3, 14, 84)]]}, ONE,
         Contents(1, 26, 0.0)),
        ("minicpm-v text", {"tgt_sizes": [torch.tensor([])], "pixel_values": [[]]}, {}, Contents(0, 0, 0.0)),
        ("internvl", {"pixel_values": torch.zeros(3, 3, 28, 28)}, TWO, Contents(2, 12, 0.0)),
        ("internvl by header", {"pixel_values": torch.zeros(3, 3, 28, 28, device="meta")}, ONE, Contents(1, 12, 0.0)),
        ("idefics 3", {"pixel_values": torch.zeros(1, 5, 3, 28, 28)}, ONE, Contents(1, 20, 0.0)),
        ("llama 3.2", {"pixel_values": torch.zeros(1, 2, 4, 3, 28, 28)}, TWO, Contents(2, 32, 0.0)),
        ("pixtral", {"pixel_values": [torch.zeros(3, 28, 42)], "image_sizes": torch.tensor([[28, 42]])}, ONE,
         Contents(1, 6, 1.5)),
        ("llava video", {"pixel_values_videos": torch.zeros(1, 4, 3, 28, 28)}, {"videos": ["a.mp4"]},
         Contents(0, 16, 0.0)),
        ("deepseek ocr", {"images": [(torch.zeros(2, 3, 28, 28), torch.zeros(1, 3, 56, 56))]}, ONE,
         Contents(1, 24, 0.0)),
        ("deepseek vl2", {"output": SimpleNamespace(images=torch.zeros(3, 3, 28, 28))}, TWO, Contents(2, 12, 0.0)),
        ("phi 4", {"input_image_embeds": torch.zeros(1, 3, 3, 28, 28)}, ONE, Contents(1, 12, 0.0)),
        ("gemma 4, flat and filled up", {"pixel_values": torch.zeros(3, 7, 768)}, TWO, Contents(2, 21, 0.0)),
        ("pictures in a list", {"pixel_values": [torch.zeros(3, 28, 768)]}, ONE, Contents(1, 108, 0.0)),
    ],
)  # fmt: skip
def test_every_form_of_vision_is_counted(family, sample, row, expected):
    """DATA-18"""
    assert count_contents(sample, row) == expected


def test_patches_are_of_the_size_in_the_config():
    """DATA-18"""
    sample = {"pixel_values": torch.zeros(1, 3, 448, 448)}
    for size, expected in ((14, (14, 14)), ([28, 14], (28, 14)), ((2, 16, 16), (16, 16))):
        template = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(patch_size=size)))
        assert patch_size_of(template) == expected
        height, width = expected
        assert count_contents(sample, ONE, patch_size=expected).patches == (448 // height) * (448 // width)
    assert patch_size_of(SimpleNamespace()) is None
    assert patch_size_of(SimpleNamespace(config=SimpleNamespace(vision_config={"patch_size": 16}))) == (16, 16)


def test_what_was_noted_goes_before_what_tensors_say():
    """DATA-18"""
    sample = {"pixel_values": torch.zeros(1, 3, 28, 28), "contents": Contents(2, 8, 1.0)}
    assert contents_of(sample) == Contents(2, 8, 1.0)
    del sample["contents"]
    assert contents_of(sample).patches == 4


def test_images_of_a_row_in_every_form(tmp_path):
    """DATA-18"""
    there = tmp_path / "a.jpg"
    there.write_bytes(b"x")
    tags = {"messages": [{"role": "user", "content": f"<img>{there}</img> and <img>gone.jpg</img>"}]}
    assert num_images_of({"images": "a.jpg"}) == 1
    assert num_images_of({"images": [{"bytes": b"x", "path": None}, {"path": "b.jpg"}]}) == 2
    assert num_images_of(tags) == 1
    assert num_images_of({**tags, **TWO}) == 2
    content = [{"type": "image", "image": "a.jpg"}, {"type": "image_url", "image_url": {"url": "http://x/b.jpg"}}]
    assert num_images_of({"messages": [{"role": "user", "content": content}]}) == 2
    assert num_images_of({"videos": ["a.mp4"], "audios": ["b.wav"]}) == 0
    empty = {"images": [], "videos": [], "messages": [{"role": "user", "content": [{"type": "image", "image": []}]}]}
    assert num_images_of(empty) == 0
    assert [one.kind for one in media({**empty, "videos": ["a.mp4"]})] == ["video"]


@pytest.mark.parametrize("name", ["pixel_values", "pixel_values_videos", "images", "image_grid_hws", "input_features"])
def test_media_of_tensors_that_do_not_divide_are_not_known(name):
    """CUT-6: and a text has none, which is known."""
    text = {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "length": 3}
    assert media_spans(text, MediaTokens()) == []
    assert media_spans({**text, name: torch.zeros(1, 3, 28, 28)}, MediaTokens()) is None
