"""Sounds to feed models that listen, written with what Python has."""

from __future__ import annotations

import array
import random
import wave
from pathlib import Path

RATE = 16000


def sound(folder: Path, name: str, seconds: float, seed: int = 0, rate: int = RATE) -> str:
    """A WAV file of noise that swells and fades; its path."""
    rng = random.Random(seed)
    num_frames = int(seconds * rate)
    loudness = [rng.uniform(500, 20000) for _ in range(8)]
    samples = array.array("h", (int(rng.uniform(-1, 1) * loudness[at * 8 // num_frames]) for at in range(num_frames)))
    path = folder / f"{name}.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return str(path)
