"""A template without ms-swift: a word is a token, an image as many as it has squares of 28 pixels."""

from __future__ import annotations

import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

PATCH, SQUARE = 14, 28


class PlainTemplate:
    """Decodes images, as a full encoding does."""

    def __init__(self) -> None:
        self.packing = self.padding_free = False
        self.encoded: list[str] = []
        """The questions of the rows that were encoded, in this process."""

    def encode(self, row: Any, return_length: bool = False) -> dict[str, Any]:
        """Tokens of the messages, the answers with labels, and those of the images in front of them."""
        self.encoded.append(row["messages"][0]["content"])
        images = [self._image(image) for image in row.get("images") or ()]
        sizes = [(max(1, round(h / SQUARE)), max(1, round(w / SQUARE))) for w, h in (image.size for image in images)]
        input_ids = [1] * sum(height * width for height, width in sizes)
        labels = [-100] * len(input_ids)
        for message in row["messages"]:
            ids = [2 + zlib.crc32(word.encode()) % 30_000 for word in message["content"].split()]
            input_ids += ids
            labels += ids if message["role"] == "assistant" else [-100] * len(ids)
        encoded = {"input_ids": input_ids, "labels": labels, "length": len(input_ids)}
        if images:
            encoded["image_grid_thw"] = torch.tensor([(1, 2 * height, 2 * width) for height, width in sizes])
        return {**encoded, "question": row["messages"][0]["content"], **self._of_images(images)}

    def data_collator(self, batch: list[Any]) -> dict[str, Any]:
        """Nothing here is collated."""
        raise NotImplementedError

    def _image(self, image: Any) -> Image.Image:
        content = image["bytes"] if isinstance(image, dict) else Path(image).read_bytes()
        opened = Image.open(BytesIO(content))
        opened.load()
        return opened

    def _of_images(self, images: list[Image.Image]) -> dict[str, Any]:
        pixels = [torch.from_numpy(np.asarray(image.convert("RGB"), dtype=np.float32)).flatten() for image in images]
        return {"pixel_values": torch.cat(pixels)} if pixels else {}


class HeaderTemplate(PlainTemplate):
    """Reads headers only, and takes images of some sizes for others."""

    def __init__(self, lies: dict[tuple[int, int], tuple[int, int]] | None = None, *, has_kinds: bool = True) -> None:
        """Without `has_kinds` all images are of one kind."""
        super().__init__()
        self._has_kinds = has_kinds
        self._lies = lies or {}

    def _image(self, image: Any) -> Any:
        opened = Image.open(image)
        with opened:
            num_bits = (opened.width * opened.height).bit_length()
            kind = f"{opened.format} {opened.mode} 2^{num_bits}" if self._has_kinds else "image"
            return _Header(self._lies.get(opened.size, opened.size), kind)

    def _of_images(self, images: list[Any]) -> dict[str, Any]:
        pixels = sum(image.size[0] * image.size[1] for image in images)
        return {"header_kinds": tuple(image.kind for image in images), "header_pixels": pixels}


class _Header:
    def __init__(self, size: tuple[int, int], kind: str) -> None:
        self.size, self.kind = size, kind
