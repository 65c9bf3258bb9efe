"""Rows with videos: a video is never cut, and goes with its own part."""

import pytest
import torch

from swift_vlpack import PackingConfig
from swift_vlpack.host.headers import pixel_free
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.samples import SampleId
from tests.images import photo
from tests.videos import video

pytest.importorskip("decord", reason="has no wheel for this platform")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_video_is_whole_with_its_times_and_frames(family, tiny, tmp_path):
    """CUT-2 CUT-9: Qwen3-VL writes the time of every frame between its patches, which is one medium all the same."""
    template = tiny(family).template
    text = "look " * 450 + "<video>then <image>" + "look " * 300 + "<video>end"
    row = {
        "messages": [{"role": "assistant", "content": text}],
        "videos": [video(tmp_path / "a.mp4", 60, 112, 112), video(tmp_path / "b.mp4", 9, 64, 98)],
        "images": [photo(tmp_path, "c", 84, 112)],
    }
    own = RowEncoder.of(template, PackingConfig(packing_length=700, packing_overflow="split", packing_stride=5))
    sample, cutter = own.sample(row, SampleId("clips", 0)), own.cutter
    parts = cutter.parts(sample)
    assert parts == cutter.parts(pixel_free(own.template).encode(row, return_length=True))
    assert [part.reason for part in parts] == [None] * len(parts)
    assert len(parts) > 2
    made = [cutter.cut(sample, part.span) for part in parts]
    words = template.tokenizer
    for name in ("video_grid_thw", "image_grid_thw", "pixel_values", "pixel_values_videos"):
        assert torch.equal(torch.cat([one[name] for one in made if name in one]), sample[name]), name
    seconds = [second for one in made for second in one.get("second_per_grid_ts", [])]
    assert seconds == list(sample.get("second_per_grid_ts", []))
    starts = words.convert_tokens_to_ids("<|vision_start|>"), words.convert_tokens_to_ids("<|vision_end|>")
    for one, part in zip(made, parts, strict=True):
        pads = one["input_ids"].count(template.video_token_id)
        grids = one.get("video_grid_thw", torch.zeros(0, 3))
        assert pads == int(grids.prod(-1).sum()) // template.processor.image_processor.merge_size**2
        assert one["input_ids"].count(starts[0]) == one["input_ids"].count(starts[1])
        if family == "qwen3_vl":  # around every frame, and around all of them
            times = words.decode(one["input_ids"]).count("seconds>")
            assert one["input_ids"].count(starts[0]) == times + len(grids) + part.images
