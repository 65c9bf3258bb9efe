"""The registry of reasons: what is counted is in it, and what is in it is counted, documented, and keeps its number."""

import ast
import json
import pickle
import re
from pathlib import Path

import pytest

from swift_vlpack.reasons import REASONS, Kind, Reason, about, is_failure
from swift_vlpack.remedies import warning_of_left_out
from swift_vlpack.runlog.counts import Counts
from tests.parsed import nodes_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "swift_vlpack"
REGISTRY = PACKAGE / "reasons.py"
TAKES_A_REASON = {"LeftOut": 1, "Fault": 0, "SampleError": 1, "_with_files": 0, "_drop": 1, "dropped": 1}
"""Calls, and which of their arguments is the reason."""


def nodes_beside_the_registry():
    return [node for path in PACKAGE.rglob("*.py") if path != REGISTRY for node in nodes_of(path)]


def test_numbers_in_files_of_lengths_never_change():
    """STAT-7: files of lengths outlive versions; a number that is given to another word makes them lie."""
    assert dict(enumerate(REASONS)) == {
        0: "",
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
    }
    assert all(about(word).code == code for code, word in enumerate(REASONS) if word)


def test_every_reason_is_given_somewhere():
    """STAT-7"""
    used = {
        node.attr
        for node in nodes_beside_the_registry()
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Reason"
    }
    assert used == {reason.name for reason in Reason}


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


def test_a_reason_is_its_word_wherever_it_is_written():
    """STAT-7"""
    for reason in Reason:
        assert f"{reason}" == "%s" % reason == str(reason) == reason.value  # noqa: UP031 - the way of logging
        assert json.loads(json.dumps({reason: reason})) == {reason.value: reason.value}
        assert {reason: 1}[reason.value] == 1
        assert pickle.loads(pickle.dumps(reason)) is reason


def test_failures_are_what_an_encoding_finds_but_for_the_length():
    """DATA-17 STAT-7"""
    failures = {word for word in REASONS if word} - {"over_max_length"}
    assert {reason.value for reason in Reason if is_failure(reason)} == failures
    kinds = {reason.value: reason.about.kind for reason in Reason if reason not in REASONS}
    assert kinds == {
        "oversize": Kind.PACKER,
        "over_cap": Kind.PACKER,
        "underfilled": Kind.PACKER,
        **dict.fromkeys(("overflow", "truncated", "image_over_length", "cannot_be_cut"), Kind.CUT),
        "longer_than_planned": Kind.LOAD,
        "deleted_by_loader": Kind.LOADER,
        **dict.fromkeys(("too_short", "too_long", "empty_document"), Kind.DOCUMENT),
        "incomplete_batch": Kind.BATCH,
    }


def test_a_warning_has_the_remedy_of_every_reason():
    """STAT-5 STAT-7"""
    for reason in Reason:
        warning = warning_of_left_out({reason.value: 5}, num_of=10)
        assert (reason.about.remedy or "mend or remove the rows") in warning


def test_documentation_is_the_registry():
    """STAT-7"""
    rows = [
        f"| `{reason}` | {reason.about.kind.value} | {reason.about.meaning} | {reason.about.again or '-'} | "
        f"{reason.about.remedy or 'mend or remove the row'} |"
        for reason in Reason
    ]
    table = re.findall(r"^\| `.*\|$", (ROOT / "docs" / "reasons.md").read_text(), flags=re.M)
    assert table == rows
