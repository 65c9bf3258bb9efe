"""The registry of reasons: what is counted is in it; what is in it is given, documented, and keeps its number."""

import ast
from pathlib import Path

import pytest

from swift_vlpack.plan.parts import Part
from swift_vlpack.reasons import REASONS, Kind, Reason, warning_of_left_out
from swift_vlpack.runlog.counts import Counts
from tests.doc_tables import reason_row
from tests.parsed import nodes_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "swift_vlpack"
REGISTRY = PACKAGE / "reasons.py"
TAKES_A_REASON = {"LeftOut": 1, "Fault": 0, "SampleError": 1, "_with_files": 0, "_drop": 1, "dropped": 1}
"""Calls, and which of their arguments is the reason."""


def nodes_beside_the_registry():
    return [node for path in PACKAGE.rglob("*.py") if path != REGISTRY for node in nodes_of(path)]


CODES = {
    1: "encode_failed",
    2: "over_max_length",
    3: "file_missing",
    4: "file_is_folder",
    5: "file_empty",
    6: "image_unreadable",
    7: "image_too_large",
    8: "aspect_ratio",
    9: "images_malformed",
    10: "no_messages",
    11: "video_reader_missing",
    12: "video_unreadable",
    13: "file_unreadable",
    14: "file_timeout",
    15: "url_unreachable",
    16: "media_tokens",
}
GIVEN_BY = {
    Kind.PACKER: "let `why_alone` in swift_vlpack/plan/items.py return it",
    Kind.ENCODING: "in swift_vlpack/rows/faults.py, add an error's name to `_BY_ERROR` or a case to `fault_of`",
    Kind.CUT: "give it to a `Part` in swift_vlpack/plan/parts.py",
}
"""Where a reason of each kind is given."""
GIVEN_ANYWHERE = "where it is found, make a `LeftOut` of it"
PART_CODES = {1: "overflow", 2: "truncated", 3: "image_over_length", 4: "cannot_be_cut", 5: "too_short"}


def test_numbers_in_files_never_change():
    """STAT-7: files outlive versions, and a number that is given to another word makes them lie. New ones may come."""
    assert {code: REASONS[code] for code in CODES} == CODES
    assert REASONS[0] == ""
    for code, word in {0: None, **PART_CODES}.items():
        part = Part(0, 2, 9, reason=word and Reason(word))
        assert part.numbers[-1] == code
        assert Part.of_numbers(0, part.numbers) == part


def given_in(nodes):
    """The names of the reasons that code gives: `Reason.X`."""
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Reason"
    }


def test_every_reason_is_declared_whole_and_given():
    """STAT-7 DATA-17: for what is missing, the message says where to add it."""
    given = given_in(nodes_beside_the_registry())
    given_to_parts = given_in(nodes_of(PACKAGE / "plan" / "parts.py"))
    page = (ROOT / "docs" / "reasons.md").read_text()
    todo = [f"Reason.{name} is given and not declared" for name in sorted(given - {one.name for one in Reason})]
    for reason in Reason:
        wanted = {
            "needs a meaning": bool(reason.meaning),
            "has a code, so REASONS in swift_vlpack/reasons.py must have it": (
                (reason.kind is Kind.ENCODING) == (reason.value in REASONS)
            ),
            "is given to parts, so _REASONS in swift_vlpack/plan/parts.py must have it": (
                reason.kind is not Kind.CUT or reason.name in given_to_parts
            ),
            f"is given by nothing: {GIVEN_BY.get(reason.kind, GIVEN_ANYWHERE)}; or delete it": reason.name in given,
            "is not in docs/reasons.md: run `make docs-tables`": reason_row(reason) in page,
        }
        todo += [f"Reason.{reason.name} {what}" for what, is_there in wanted.items() if not is_there]
    assert not todo, "\n" + "\n".join(todo)


def test_no_reason_is_a_literal():
    """STAT-7: a word beside the registry would be the beginning of a second one."""
    found = []
    for node in nodes_beside_the_registry():
        if isinstance(node, ast.Constant) and node.value in set(Reason):
            found.append(node.value)
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            given = node.args[TAKES_A_REASON[name] :][:1] if name in TAKES_A_REASON else []
            given += [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
            found += [arg.value for arg in given if isinstance(arg, ast.Constant)]
    assert found == []


def test_a_word_that_is_not_registered_is_not_counted():
    """STAT-7"""
    stats = Counts(packing_length=8)
    with pytest.raises(ValueError, match="too_blue"):
        stats.dropped("a", "too_blue")
    assert stats.num_dropped == {}


def test_a_warning_has_the_remedy_of_every_reason():
    """STAT-5 STAT-7"""
    for reason in Reason:
        warning = warning_of_left_out({reason.value: 5}, num_of=10)
        assert (reason.remedy or "repair or remove the rows") in warning
