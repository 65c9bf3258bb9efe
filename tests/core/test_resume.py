import json

import pytest

from swift_vlpack.core.errors import StateMismatch
from swift_vlpack.core.resume import differing_fields, seal, unseal


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
    for part in ("b (2, now 9)", "gone (3, now None)", "new (None, now 4)"):
        assert part in str(refused.value)
    assert " a (" not in str(refused.value)
    assert differing_fields({"a": None}, {}) == ["a"]


@pytest.mark.parametrize(
    ("envelope", "message"),
    [
        ({**seal("plan", {}, {}), "version": 99}, "format version 99; this package reads version 1"),
        (seal("packer", {}, {}), "a saved packer state, not a plan state"),
        ({"version": 1}, "not a saved plan state"),
        (["x"], "not a saved plan state"),
    ],
)
def test_foreign_envelope_is_refused(envelope, message):
    """STATE-2"""
    with pytest.raises(StateMismatch, match=message):
        unseal(envelope, "plan", {})
