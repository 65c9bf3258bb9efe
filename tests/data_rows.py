"""Rows in ms-swift's form, and files of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.images import photo

WORDS = (
    *("the", "a", "small", "large", "red", "blue", "house", "tree", "car", "person"),
    *("walks", "runs", "near", "street", "photo", "shows", "sky"),
)


def text_row(question: str = "hello there", answer: str = "hi, how are you") -> dict[str, Any]:
    """A row without an image."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def image_row(images: list[str], question: str = "what is this?", answer: str = "a picture of noise") -> dict[str, Any]:
    """A row with images."""
    return {**text_row("<image>" * len(images) + question, answer), "images": images}


def sentence(rng: random.Random, fewest: int, most: int) -> str:
    """Words at random."""
    return " ".join(rng.choices(WORDS, k=rng.randint(fewest, most)))


def mixed_rows(folder: Path, num_rows: int, *, seed: int = 0, largest: int = 300) -> list[dict[str, Any]]:
    """Text, one image, two images; captions and longer answers."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    rows = []
    for number in range(num_rows):
        images = [
            photo(folder, f"{seed}_{number}_{n}", rng.randint(60, largest), rng.randint(60, largest), seed=n)
            for n in range(rng.choice((0, 1, 1, 1, 2)))
        ]
        row = image_row(images, sentence(rng, 3, 20), sentence(rng, 5, 90))
        rows.append(row if images else text_row(sentence(rng, 3, 20), sentence(rng, 5, 90)))
    return rows


def mixed_and_wordy_data(folder: Path) -> str:
    """Write 28 rows: with and without images, and with more words than the proof's own short samples have."""
    wordy = [text_row(f"question {number}", "answer " * 60) for number in range(8)]
    return write_jsonl(folder / "train.jsonl", mixed_rows(folder, 20, largest=160) + wordy)


def rows_about_images(folder: Path, num_images: int, rows_an_image: int, *, seed: int) -> list[list[dict[str, Any]]]:
    """Questions about photographs: a list for each of them."""
    rng = random.Random(seed)
    found = []
    for number in range(num_images):
        image = photo(folder, str(number), rng.randint(90, 240), rng.randint(90, 240), seed=number)
        found.append([image_row([image], sentence(rng, 2, 9), sentence(rng, 1, 12)) for _ in range(rows_an_image)])
    return found


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
