"""Compare what the package decides with what the package of the pinned commit decided.

A pin is one value in one JSON file of this folder, by name. A pin that is there is never written again: with
`VLPACK_PIN_ABSENT=1` only names that no file has yet are added.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
RELATIVE = 1e-6
"""Losses and gradients may differ by so much: libraries add up in another order where memory is aligned otherwise."""


def read(file: str) -> dict[str, Any]:
    """Everything in a file of this folder; nothing of a file that is not there yet."""
    path = FOLDER / f"{file}.json"
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content


def check(file: str, name: str, value: Any) -> None:
    """Fail where `value` is not what is pinned: exactly, but for floats, which may differ by `RELATIVE`."""
    pinned, value = read(file), json.loads(json.dumps(value))
    if name not in pinned:
        assert os.environ.get("VLPACK_PIN_ABSENT"), f"{name!r} is not pinned in {file}.json"
        pinned[name] = value
        lines = (f"{json.dumps(key)}: {json.dumps(pinned[key])}" for key in sorted(pinned))
        (FOLDER / f"{file}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
        pytest.fail(f"{name!r} was pinned in {file}.json just now")
    assert differences(pinned[name], value) == []


def differences(pinned: Any, now: Any, where: str = "") -> list[str]:
    """Say where two JSON values differ, the first few places."""
    if isinstance(pinned, dict) and isinstance(now, dict):
        keys = sorted({*pinned, *now})
        found = [differences(pinned.get(key, "absent"), now.get(key, "absent"), f"{where}/{key}") for key in keys]
    elif isinstance(pinned, list) and isinstance(now, list) and len(pinned) == len(now):
        found = [differences(a, b, f"{where}/{n}") for n, (a, b) in enumerate(zip(pinned, now, strict=True))]
    elif is_number(pinned) and is_number(now) and float in (type(pinned), type(now)):
        return [] if now == pytest.approx(pinned, rel=RELATIVE, abs=1e-12) else [f"{where}: {pinned}, now {now}"]
    else:
        return [] if pinned == now and type(pinned) is type(now) else [f"{where}: {pinned!r}, now {now!r}"]
    return [one for some in found for one in some][:8]


def is_number(value: Any) -> bool:
    """Tell a number from a truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def digest(value: Any) -> str:
    """16 hexadecimal digits of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
