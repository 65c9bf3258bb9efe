import json

import pytest

from swift_vlpack.envelope import differing_fields, opened, seal, signed, unseal
from swift_vlpack.errors import StateMismatch


def test_envelope_goes_through_json():
    """STATE-1"""
    sealed = json.loads(json.dumps(seal("packer", {"a": 1, "b": (1, 2)}, {"held": [1]})))
    assert unseal(sealed, "packer", {"a": 1, "b": (1, 2)}) == {"held": [1]}
    assert set(sealed) == {"version", "kind", "fingerprint", "state"}


def test_every_differing_field_is_named_with_both_values():
    """STATE-2"""
    sealed = seal("plan", {"a": 1, "b": 2, "gone": 3}, {})
    with pytest.raises(StateMismatch) as refused:
        unseal(sealed, "plan", {"a": 1, "b": 9, "new": 4})
    for part in ("b (2, now 9)", "gone (3, now absent)", "new (absent, now 4)"):
        assert part in str(refused.value)
    assert " a (" not in str(refused.value)
    assert differing_fields({"a": None}, {}) == ["a"]


@pytest.mark.parametrize(
    ("envelope", "message"),
    [
        ({**seal("plan", {}, {}), "version": 99}, "format version 99; this package reads version 3"),
        (seal("packer", {}, {}), "a saved packer state, not a plan state"),
        ({"version": 1}, "not a saved plan state"),
        ({**seal("plan", {}, {}), "version": 1}, "format version 1; this package reads version 3"),
        (["x"], "not a saved plan state"),
    ],
)
def test_foreign_envelope_is_refused(envelope, message):
    """STATE-2"""
    with pytest.raises(StateMismatch, match=message):
        unseal(envelope, "plan", {})


def test_signed_state_shows_every_change():
    """STATE-3: numbers that could be, but are not those that were written."""
    written = json.loads(json.dumps(signed(seal("plan", {"seed": 1, 3: "x"}, {"cuts": ((1, 2),), 10: 0, 9: 1}))))
    assert opened(written, "plan", is_signed=True)[1]["cuts"] == [[1, 2]]
    for part, value in (("fingerprint", {"seed": 2, "3": "x"}), ("state", {**written["state"], "cuts": [[1, 3]]})):
        with pytest.raises(StateMismatch, match="digest"):
            opened({**written, part: value}, "plan", is_signed=True)
    with pytest.raises(StateMismatch, match="digest"):
        opened({key: value for key, value in written.items() if key != "digest"}, "plan", is_signed=True)
