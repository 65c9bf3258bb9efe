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
from dataclasses import dataclass
from typing import Any

from swift_vlpack.errors import StateMismatch

VERSION = 3
"""Format of saved states. Version 2 had digests of whole files, and options of ms-swift in the fingerprint."""


@dataclass(frozen=True, slots=True)
class Whole:
    """Shape of a whole number that is at least `least`."""

    least: int = 0


@dataclass(frozen=True, slots=True)
class Named:
    """Shape of an object with any keys, whose values all have the shape `values`."""

    values: Any


def seal(kind: str, fingerprint: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Wrap a JSON state with its kind, the format version, and `fingerprint`, the facts that the state depends on."""
    return {"version": VERSION, "kind": kind, "fingerprint": dict(fingerprint), "state": dict(state)}


def signed(envelope: Mapping[str, Any]) -> dict[str, Any]:
    """Add a digest of the content, so that a later change of the saved file is found."""
    return {**envelope, "digest": _digest(envelope)}


def unseal(envelope: Any, kind: str, fingerprint: Mapping[str, Any], *, shape: Any = None) -> dict[str, Any]:
    """Return the state inside. Raises `StateMismatch`, which names what differs in kind, fingerprint or shape."""
    saved, state = opened(envelope, kind, shape=shape)
    check_fingerprint(kind, saved, fingerprint)
    return state


def opened(
    envelope: Any, kind: str, *, shape: Any = None, is_signed: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (fingerprint, state), after a check of version, kind, `shape` (see `check_shape`) and digest."""
    if not isinstance(envelope, Mapping) or not {"version", "kind", "fingerprint", "state"} <= set(envelope):
        raise StateMismatch(f"this is not a saved {kind} state: it has no version, kind, fingerprint and state")
    # Check the version first: a state of another version may have another shape, and must not be called damaged.
    if envelope["version"] != VERSION:
        raise StateMismatch(
            f"the saved {kind} state has format version {envelope['version']}; this package reads version {VERSION}"
        )
    if envelope["kind"] != kind:
        raise StateMismatch(f"this is a saved {envelope['kind']} state, not a {kind} state")
    check_shape(envelope["fingerprint"], Named(None), "fingerprint")
    check_shape(envelope["state"], Named(None) if shape is None else shape, "state")
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


def check_shape(value: Any, shape: Any, where: str) -> None:
    """Raise `StateMismatch`, which names the first field that does not have its shape.

    Shapes: `Whole`, `str`, `bool`; None allows anything; [shape] is a list of any length; (shape, shape) is a list of
    exactly two; {key: shape} is an object that has these keys, and may have others; `Named` allows any keys.

    >>> check_shape({"cuts": [[2, 8, -1]]}, {"cuts": [(Whole(1), Whole(), Whole())]}, "state")
    Traceback (most recent call last):
        ...
    swift_vlpack.errors.StateMismatch: damaged: state.cuts[0][2] cannot be -1
    """
    if not _is_like(value, shape):
        raise StateMismatch(f"damaged: {where} cannot be {_short(value)}")
    if isinstance(shape, dict):
        for name, inner in shape.items():
            if name not in value:
                raise StateMismatch(f"damaged: {where}.{name} is missing")
            check_shape(value[name], inner, f"{where}.{name}")
    elif isinstance(shape, Named):
        for name, inside in value.items():
            check_shape(inside, shape.values, f"{where}.{name}")
    elif isinstance(shape, (list, tuple)):
        inner_shapes = shape * len(value) if isinstance(shape, list) else shape
        for number, (inside, inner) in enumerate(zip(value, inner_shapes, strict=True)):
            check_shape(inside, inner, f"{where}[{number}]")


def _is_like(value: Any, shape: Any) -> bool:
    """Tell whether a value has the shape, without a look at what is inside of the value."""
    if shape is None:
        return True
    if isinstance(shape, Whole):
        # In Python a bool is an int, but JSON's `true` is no count.
        return isinstance(value, int) and not isinstance(value, bool) and value >= shape.least
    if isinstance(shape, (dict, Named)):
        return isinstance(value, Mapping)
    if isinstance(shape, tuple):
        return isinstance(value, (list, tuple)) and len(value) == len(shape)
    return isinstance(value, (list, tuple) if isinstance(shape, list) else shape)


# A unique object, because None may be saved, and a missing field is not the same as None.
_ABSENT = object()


def _digest(envelope: Mapping[str, Any]) -> str:
    content = {key: value for key, value in envelope.items() if key != "digest"}
    # Convert through JSON, so that tuples and number keys in memory have the digest that a file would have.
    stored = json.dumps(json.loads(json.dumps(content)), sort_keys=True)
    return hashlib.sha256(stored.encode()).hexdigest()[:16]


def _short(value: Any) -> str:
    said = repr(value)
    return said if len(said) <= 80 else f"{said[:77]}..."


def shown_value(values: Mapping[str, Any], name: str) -> str:
    """Return a value for an error; a missing name is shown as `absent`, which differs from None."""
    return repr(values[name]) if name in values else "absent"


def differing_fields(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return the names whose values differ as JSON, or that only one side has."""
    names = sorted({*saved, *current})
    return [name for name in names if _stored(saved.get(name, _ABSENT)) != _stored(current.get(name, _ABSENT))]


def _stored(value: Any) -> Any:
    return json.dumps(value, sort_keys=True, default=repr)
