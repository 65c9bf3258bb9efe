"""Tables of the documentation that follow from code; `make docs-tables` writes them, a test compares them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from swift_vlpack.cli.command import shown
from swift_vlpack.config import PackingConfig, kind_of
from swift_vlpack.reasons import Kind, Reason
from swift_vlpack.rows.faults import RETRIED

DOCS = Path(__file__).parent.parent / "docs"
_DEFAULTS = {"packing_length": "`max_length`", "packing": "`true` for `vlpack`, `false` for `swift`"}


def options_table() -> str:
    """Every packing option: what it takes, its default, what it does."""
    rows = [
        f"| `{spec.name}` | {spec.metadata['help'].replace('|', chr(92) + '|')} "
        f"| {_kind(spec.name)} | {_DEFAULTS.get(spec.name) or f'`{shown(spec.default)}`'} |"
        for spec in fields(PackingConfig)
    ]
    return "\n".join(["| option | what it does | takes | default |", "|---|---|---|---|", *rows])


def _kind(name: str) -> str:
    kind = kind_of(name)
    if kind.startswith("{"):
        return ", ".join(f"`{choice}`" for choice in kind.strip("{}").split(","))
    return {"INT": "whole number", "FLOAT": "number", "PATH": "text"}[kind]


def reason_row(reason: Reason) -> str:
    """One reason, as docs/reasons.md shows it."""
    return (
        f"| `{reason}` | {reason.kind.value} | {reason.meaning} | {_retried(reason)} | "
        f"{reason.remedy or 'repair or remove the row'} |"
    )


def _retried(reason: Reason) -> str:
    if reason.kind is not Kind.ENCODING:
        return "-"
    return "at every start" if reason in RETRIED else "when something changes"


def reasons_table() -> str:
    """Every reason why a row is in no pack, in the order of its declaration."""
    head = ["| reason | when | what happened | tried again | what to do about many |", "|---|---|---|---|---|"]
    return "\n".join([*head, *map(reason_row, Reason)])


TABLES = {"options.md": {"options": options_table}, "reasons.md": {"reasons": reasons_table}}


def with_tables(page: str) -> str:
    """The page with its tables as they follow from the code now."""
    text = (DOCS / page).read_text()
    for name, make in TABLES[page].items():
        before, begin, rest = text.partition(f"<!-- table: {name} -->\n\n")
        _, end, after = rest.partition("\n\n<!-- end -->")
        assert end, f"{page} has no place for the table {name}"
        text = before + begin + make() + end + after
    return text


if __name__ == "__main__":
    for page in TABLES:
        (DOCS / page).write_text(with_tables(page))
