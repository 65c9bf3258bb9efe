"""Images for the tests: photos of ordinary sizes, and every odd kind a folder of the wild has."""

from __future__ import annotations

import random
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


def _exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[274] = orientation
    return exif


def _frames(width: int, height: int, mode: str) -> dict[str, object]:
    return {"save_all": True, "append_images": [noise(width, height, seed, mode) for seed in (1, 2)], "duration": 50}


def _kind(suffix: str, mode: str = "RGB", **options: object) -> tuple[str, Callable[[Path, int, int], None]]:
    def write(path: Path, width: int, height: int) -> None:
        if mode == "I;16":
            image = Image.fromarray(np.full((height, width), 3000, np.uint16))
        else:
            image = noise(width, height, mode=mode)
        more = _frames(width, height, mode) if options.get("is_animated") else {}
        image.save(path, **{name: value for name, value in options.items() if name != "is_animated"}, **more)

    return suffix, write


KINDS = (
    *(_kind("jpg", mode) for mode in ("L", "RGB", "CMYK")),
    *(_kind("jpg", exif=_exif(orientation)) for orientation in range(1, 9)),
    _kind("jpg", progressive=True),
    _kind("jpg", quality=30, subsampling=2),
    *(_kind("png", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")),
    _kind("png", "P", transparency=0),
    _kind("png", exif=_exif(6)),
    _kind("png", is_animated=True),
    *(_kind("webp", mode) for mode in ("L", "RGB", "RGBA")),
    _kind("webp", lossless=True),
    _kind("webp", exif=_exif(8)),
    _kind("webp", is_animated=True),
    *(_kind("gif", mode) for mode in ("1", "L", "P", "RGB", "RGBA")),
    _kind("gif", "P", is_animated=True),
    *(_kind("bmp", mode) for mode in ("1", "L", "P", "RGB", "RGBA")),
    *(_kind("tiff", mode) for mode in ("1", "L", "P", "RGB", "RGBA", "CMYK", "I;16")),
    *(_kind("tiff", exif=_exif(orientation)) for orientation in (3, 6, 8)),
    _kind("tiff", compression="tiff_deflate"),
    _kind("tiff", is_animated=True),
    *(_kind("ppm", mode) for mode in ("L", "RGB")),
    _kind("tga"),
    _kind("jp2"),
    _kind("avif"),
)
"""Formats, modes and what files say of themselves; written in any size."""


def _size(rng: random.Random) -> tuple[int, int]:
    """From dots to 2,000 pixels a side, small ones more often; some as long as the templates take them, and longer."""
    kind = rng.random()
    if kind < 0.1:
        short = rng.randint(1, 10)
        width, height = min(2000, int(short * rng.uniform(20, 210))), short
        return (width, height) if rng.random() < 0.5 else (height, width)
    if kind < 0.2:
        return rng.choice((1, 2, 13, 14, 15, 27, 28, 29, 55, 56, 57)), rng.randint(1, 200)
    return tuple(round(2000 ** rng.random()) for _ in range(2))  # type: ignore[return-value]


def wild(folder: Path, num_images: int, seed: int = 0) -> list[str]:
    """Images of every kind above in sizes at random."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    paths = []
    for number in range(num_images):
        suffix, write = KINDS[number % len(KINDS)]
        paths.append(str(folder / f"{number}.{suffix}"))
        write(Path(paths[-1]), *_size(rng))
    return paths
