"""Small videos for the tests."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np


def video(path: Path, num_frames: int, width: int, height: int, rate: int = 25) -> str:
    """Noise that moves, as MPEG-4."""
    rng = np.random.default_rng(num_frames)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for _ in range(num_frames):
            pixels = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return str(path)
