"""A versioned envelope around every saved state: what it belongs to is checked before it is read.

>>> sealed = seal("packer", {"packing_length": 8192}, {"held": []})
>>> unseal(sealed, "packer", {"packing_length": 4096})
Traceback (most recent call last):
    ...
swift_vlpack.core.errors.StateMismatch: the saved packer state was written with another packing_length (8192, now 4096)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from swift_vlpack.core.errors import StateMismatch

VERSION = 1


def seal(kind: str, fingerprint: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Wrap a JSON state with its kind, the version of the format, and the facts that it depends on."""
    return {"version": VERSION, "kind": kind, "fingerprint": dict(fingerprint), "state": dict(state)}


def unseal(envelope: Any, kind: str, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state inside, or raise an error that names everything about it that differs."""
    if not isinstance(envelope, Mapping) or not {"version", "kind", "fingerprint", "state"} <= set(envelope):
        raise StateMismatch(f"this is not a saved {kind} state: it has no version, kind, fingerprint and state")
    if envelope["version"] != VERSION:
        raise StateMismatch(
            f"the saved {kind} state has format version {envelope['version']}; this package reads version {VERSION}"
        )
    if envelope["kind"] != kind:
        raise StateMismatch(f"this is a saved {envelope['kind']} state, not a {kind} state")
    if differing := differing_fields(envelope["fingerprint"], fingerprint):
        saved = envelope["fingerprint"]
        named = ", ".join(f"{name} ({saved.get(name)!r}, now {fingerprint.get(name)!r})" for name in differing)
        raise StateMismatch(f"the saved {kind} state was written with another {named}")
    return dict(envelope["state"])


def differing_fields(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Names whose values differ, or that only one side has; values count as JSON would store them."""
    absent = object()
    names = sorted({*saved, *current})
    return [name for name in names if _stored(saved.get(name, absent)) != _stored(current.get(name, absent))]


def _stored(value: Any) -> Any:
    return json.dumps(value, sort_keys=True, default=repr)
