"""What `vlpack verify` found, for a reader."""

from __future__ import annotations

from typing import Any

from swift_vlpack.words import counted

NUM_SHOWN = 5
"""Rows of a source that are named; the JSON has all."""
_IN_WORDS = {
    "equal": "the lengths that packs are planned by are those of the full encoding",
    "fallback": "image headers are not used, every row was encoded to measure it",
    "differing": "rows differ from what packs are planned by",
    "as read": "nothing is planned, every row is measured as it is read",
}


def verify_text(report: dict[str, Any]) -> str:
    """The report as lines of a label and what is to be said."""
    lines = [
        ("model", f"{report['model']}, {report['dtype']} on {report['device']}"),
        ("attention", report["attention"]["chosen"]),
        ("isolation", report["isolation"]["said"]),
        *([("", in_training)] if (in_training := report["isolation"]["in_training"]) else []),
        *_about_lengths(report["lengths"]["sources"]),
        ("result", _result(report)),
    ]
    return "\n".join(f"{name:<12} {text}".rstrip() for name, text in lines)


def _about_lengths(sources: list[dict[str, Any]]) -> list[tuple[str, str]]:
    lines = []
    for source in sources:
        compared = f" ({counted(source['num_compared'], 'row')} of {source['num_rows']} compared)"
        said = f"{source['source']}: {source['check']}: {_IN_WORDS[source['check']]}"
        lines.append(said + (compared if source["num_compared"] else ""))
        if source["without_headers"]:
            lines.append(f"  because {source['without_headers']}")
        lines += _some(source["differing"], "differs", "differ")
        without = "cannot be encoded; training leaves out and counts"
        lines += _some(source["unreadable"], f"{without} it", f"{without} them")
    return [("lengths" if not at else "", line) for at, line in enumerate(lines)]


def _some(rows: list[str], one: str, many: str) -> list[str]:
    """The first ones, each with what was said of it."""
    shown = [f"  {row}" for row in rows[:NUM_SHOWN]]
    more = [f"  and {len(rows) - NUM_SHOWN} more"] if len(rows) > NUM_SHOWN else []
    return [f"  {counted(len(rows), f'row {one}', f'rows {many}')}:", *shown, *more] if rows else []


def _result(report: dict[str, Any]) -> str:
    if report["holds"]:
        return f"holds ({report['seconds']:.1f} s)"
    failed = [what for what in ("isolation", "lengths") if not report[what]["holds"]]
    return f"DOES NOT HOLD: {' and '.join(failed)}; do not train on these packs ({report['seconds']:.1f} s)"
