"""Compare what the package decides with what the package of the pinned commit decided.

A pin is one value in one JSON file of this folder, by name. A pin that is there is never written again: with
`PIN_ABSENT=1` only names that no file has yet are added.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
RELATIVE, ELSEWHERE = 1e-6, 1e-3
"""Losses and gradients may differ by so much: libraries add up in another order where memory is aligned otherwise. With
another torch, or on another kind of processor, they choose other kernels, too."""


def read(file: str) -> dict[str, Any]:
    """Everything in a file of this folder; nothing of a file that is not there yet."""
    path = FOLDER / f"{file}.json"
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content


@cache
def tolerance() -> float:
    """How far floats may be from those that are pinned, relative to them."""
    return RELATIVE if read("machine") == machine() else ELSEWHERE


def machine() -> dict[str, str]:
    """What decides which kernels add up."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    versions = {name: version(name) for name in ("torch", "transformers", "ms-swift", "pillow")}
    return {**versions, "machine": platform.machine(), "avx512": str("avx512f" in flags)}


def check(file: str, name: str, value: Any) -> None:
    """Fail where `value` is not what is pinned: exactly, but for floats, which may differ by `tolerance()`."""
    pinned, value = read(file), json.loads(json.dumps(value))
    if name not in pinned:
        assert os.environ.get("PIN_ABSENT"), f"{name!r} is not pinned in {file}.json"
        pinned[name] = value
        lines = (f"{json.dumps(key)}: {json.dumps(pinned[key])}" for key in sorted(pinned))
        (FOLDER / f"{file}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
        pytest.fail(f"{name!r} was pinned in {file}.json just now")
    assert differences(pinned[name], value) == []


def check_keys(name: str, keys: Iterable[str]) -> None:
    """Fail where a key of a command's JSON is missing that callers may read; new keys may be added."""
    assert set(read("keys_of_commands")[name]) - set(keys) == set()


def differences(pinned: Any, now: Any, where: str = "") -> list[str]:
    """Say where two JSON values differ, the first few places."""
    if isinstance(pinned, dict) and isinstance(now, dict):
        keys = sorted({*pinned, *now})
        found = [differences(pinned.get(key, "absent"), now.get(key, "absent"), f"{where}/{key}") for key in keys]
    elif isinstance(pinned, list) and isinstance(now, list) and len(pinned) == len(now):
        found = [differences(a, b, f"{where}/{n}") for n, (a, b) in enumerate(zip(pinned, now, strict=True))]
    elif is_number(pinned) and is_number(now) and float in (type(pinned), type(now)):
        return [] if now == pytest.approx(pinned, rel=tolerance(), abs=1e-9) else [f"{where}: {pinned}, now {now}"]
    else:
        return [] if pinned == now and type(pinned) is type(now) else [f"{where}: {pinned!r}, now {now!r}"]
    return [one for some in found for one in some][:8]


def is_number(value: Any) -> bool:
    """Tell a number from a truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def digest(value: Any) -> str:
    """16 hexadecimal digits of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def keep(folder: Path, files: dict[str, Any]) -> None:
    """Write files of JSON into a folder, once: a folder that is there is left alone."""
    if folder.exists() or not os.environ.get("PIN_ABSENT"):
        return
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content) + "\n")
