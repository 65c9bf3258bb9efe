"""Images for the tests: photos of ordinary sizes, and every odd kind a folder of the wild has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image


def noise(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """A picture of coarse noise, which compresses and scales like a photo."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 255, (max(1, height // 8), max(1, width // 8), 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height)).convert(mode)


def photo(folder: Path, name: str, width: int = 320, height: int = 240, seed: int = 0) -> str:
    """A JPEG on disk."""
    path = folder / f"{name}.jpg"
    noise(width, height, seed).save(path, quality=85)
    return str(path)


def _rotated(path: Path) -> None:
    image = noise(300, 200)
    exif = image.getexif()
    exif[274] = 6  # orientation: rotate by 90 degrees
    image.save(path, exif=exif)


def _truncated(path: Path) -> None:
    noise(300, 200).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _broken_png(path: Path) -> None:
    noise(300, 200).save(path)
    data = bytearray(path.read_bytes())
    data[60:200] = bytes(140)  # behind the header
    path.write_bytes(bytes(data))


GOOD: dict[str, Callable[[Path], object]] = {
    "photo.jpg": lambda path: noise(320, 240).save(path),
    "grayscale.png": lambda path: noise(200, 120, mode="L").save(path),
    "palette.png": lambda path: noise(200, 120, mode="P").save(path),
    "cmyk.jpg": lambda path: noise(200, 120, mode="CMYK").save(path),
    "alpha.png": lambda path: noise(200, 120, mode="RGBA").save(path),
    "rotated.jpg": _rotated,
    "dot.png": lambda path: noise(1, 1).save(path),
    "wide.jpg": lambda path: noise(1800, 20).save(path),
    "webp.webp": lambda path: noise(150, 90).save(path),
    "animated.gif": lambda path: noise(64, 64).save(path, save_all=True, append_images=[noise(64, 64, 1)]),
}
BROKEN: dict[str, Callable[[Path], object]] = {
    "truncated.jpg": _truncated,
    "broken.png": _broken_png,
    "text.jpg": lambda path: path.write_text("this is no image"),
    "empty.jpg": lambda path: path.write_bytes(b""),
    "folder.jpg": lambda path: path.mkdir(),
    "aspect.png": lambda path: noise(3000, 4).save(path),  # over 200:1, which Qwen refuses
    "missing.jpg": lambda path: None,
}


REASON_OF = {
    "truncated.jpg": "image_unreadable",
    "broken.png": "image_unreadable",
    "text.jpg": "image_unreadable",
    "empty.jpg": "file_empty",
    "folder.jpg": "file_is_folder",
    "aspect.png": "aspect_ratio",
    "missing.jpg": "file_missing",
}
"""The counted reason of each broken kind."""


def make(folder: Path, kinds: dict[str, Callable[[Path], object]]) -> dict[str, str]:
    """Write one image of each kind; kind to path."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in kinds.items():
        write(folder / name)
    return {name: str(folder / name) for name in kinds}
