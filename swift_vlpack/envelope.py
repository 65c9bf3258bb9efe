"""Wrap every saved state in an envelope that says what the state belongs to, and check that before it is used.

>>> sealed = seal("packer", {"packing_length": 8192}, {"held": []})
>>> unseal(sealed, "packer", {"packing_length": 4096})
Traceback (most recent call last):
    ...
swift_vlpack.errors.StateMismatch: the saved packer state was written with another packing_length (8192, now 4096)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from swift_vlpack.errors import StateMismatch

VERSION = 3
"""Format of saved states. Version 2 had digests of whole files, and options of ms-swift in the fingerprint."""


def seal(kind: str, fingerprint: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Wrap a JSON state with its kind, the format version, and `fingerprint`, the facts that the state depends on."""
    return {"version": VERSION, "kind": kind, "fingerprint": dict(fingerprint), "state": dict(state)}


def signed(envelope: Mapping[str, Any]) -> dict[str, Any]:
    """Add a digest of the content, so that a later change of the saved file is found."""
    return {**envelope, "digest": _digest(envelope)}


def unseal(envelope: Any, kind: str, fingerprint: Mapping[str, Any], *, is_signed: bool = False) -> dict[str, Any]:
    """Return the state inside. Raises `StateMismatch`, which names what differs in kind or fingerprint."""
    saved, state = opened(envelope, kind, is_signed=is_signed)
    check_fingerprint(kind, saved, fingerprint)
    return state


def opened(envelope: Any, kind: str, *, is_signed: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (fingerprint, state), after a check of version, kind and digest. A state inside of another has no digest.

    The digest is the only check of the content: with it, the state is what a run wrote.
    """
    if not isinstance(envelope, Mapping) or not {"version", "kind", "fingerprint", "state"} <= set(envelope):
        raise StateMismatch(f"this is not a saved {kind} state: it has no version, kind, fingerprint and state")
    # Check the version first: a state of another version may have another digest, and must not be called damaged.
    if envelope["version"] != VERSION:
        raise StateMismatch(
            f"the saved {kind} state has format version {envelope['version']}; this package reads version {VERSION}"
        )
    if envelope["kind"] != kind:
        raise StateMismatch(f"this is a saved {envelope['kind']} state, not a {kind} state")
    if is_signed and envelope.get("digest") != _digest(envelope):
        raise StateMismatch(f"damaged: the digest of the saved {kind} state does not match its content")
    return dict(envelope["fingerprint"]), dict(envelope["state"])


def check_fingerprint(
    kind: str, saved: Mapping[str, Any], current: Mapping[str, Any], explained: Mapping[str, str] | None = None
) -> None:
    """Raise `StateMismatch` if fields differ. It names all of them, with both values or the words in `explained`."""
    names = differing_fields(saved, current)
    both = {name: f"{shown_value(saved, name)}, now {shown_value(current, name)}" for name in names}
    if both:
        said = {**both, **{name: words for name, words in (explained or {}).items() if name in both}}
        named = ", ".join(f"{name} ({words})" for name, words in said.items())
        raise StateMismatch(f"the saved {kind} state was written with another {named}")


# A unique object, because None may be saved, and a missing field is not the same as None.
_ABSENT = object()


def _digest(envelope: Mapping[str, Any]) -> str:
    content = {key: value for key, value in envelope.items() if key != "digest"}
    # Convert through JSON, so that tuples and number keys in memory have the digest that a file would have.
    stored = json.dumps(json.loads(json.dumps(content)), sort_keys=True)
    return hashlib.sha256(stored.encode()).hexdigest()[:16]


def shown_value(values: Mapping[str, Any], name: str) -> str:
    """Return a value for an error; a missing name is shown as `absent`, which differs from None."""
    return repr(values[name]) if name in values else "absent"


def differing_fields(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return the names whose values differ as JSON, or that only one side has."""
    names = sorted({*saved, *current})
    return [name for name in names if _stored(saved.get(name, _ABSENT)) != _stored(current.get(name, _ABSENT))]


def _stored(value: Any) -> Any:
    return json.dumps(value, sort_keys=True, default=repr)
