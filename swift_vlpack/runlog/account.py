"""Write the account of an epoch: as one line for the log, and as JSON for `vlpack/epoch_N.json`.

>>> counts = Counts(packing_length=10)
>>> counts.read("captions", 3)
>>> counts.packed([("captions", 6), ("captions", 4)])
>>> counts.dropped("captions", "oversize")
>>> print(account_line(counts, epoch=0))
epoch 0: 1 pack, 2 samples, 10 tokens, fill 100.0% (p5 100, p50 100, p95 100), 0 single-long (0.0%), 1 of 3 left out \
(33.3%): oversize 1; counts add up: 3 read = 2 packed + 1 left out + 0 not reached

Samples that are still held at the end of an epoch are called "not reached": training stopped before their packs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift_vlpack.runlog.counts import Counts, SourceCounts, share
from swift_vlpack.words import by_reason, counted

_PERCENTILES = (5, 50, 95)


def account_line(counts: Counts, **labels: Any) -> str:
    """Return one line for the log, after labels such as the epoch."""
    where = " ".join(f"{name} {value}" for name, value in labels.items())
    percentiles = ", ".join(f"p{p} {counts.fill_percentile(p)}" for p in _PERCENTILES)
    num_dropped = counts.num_dropped.total()
    padding = f"{counts.num_padding} of padding, " if counts.num_padding else ""
    return (
        f"{where}: {counted(counts.num_packs, 'pack')}, {counted(counts.num_packed, 'sample')}, "
        f"{counted(counts.num_tokens, 'token')}, {padding}fill {100 * counts.fill_mean:.1f}% ({percentiles}), "
        f"{counts.num_single_long} single-long ({_per_cent(counts.num_single_long, counts.num_read)}%), "
        f"{num_dropped} of {counts.num_read} left out ({_per_cent(num_dropped, counts.num_read)}%)"
        + (f": {by_reason(dict(sorted(counts.num_dropped.items())))}" if num_dropped else "")
        + (f"; {shared_in_words(counts)}" if counts.tells_of_sharing else "")
        + f"; {law_in_words(counts)}"
    )


def account_json(counts: Counts, **labels: Any) -> dict[str, Any]:
    """Return every count of an epoch under its full name, after labels such as the epoch."""
    num_dropped = counts.num_dropped
    return {
        **labels,
        "num_packs": counts.num_packs,
        "num_samples": counts.num_packed,
        "num_tokens": counts.num_tokens,
        "num_images": counts.num_images,
        "num_padding": counts.num_padding,
        "fill_mean": round(counts.fill_mean, 4),
        **{f"fill_p{p}": counts.fill_percentile(p) for p in _PERCENTILES},
        "fill_histogram": {str(fill): num_packs for fill, num_packs in enumerate(counts.fill_histogram) if num_packs},
        "num_single_long": counts.num_single_long,
        "single_long_per_cent": _per_cent(counts.num_single_long, counts.num_read),
        "num_dropped": dict(sorted(num_dropped.items())),
        "dropped_per_cent": _per_cent(num_dropped.total(), counts.num_read),
        "num_read": counts.num_read,
        "num_held": counts.num_held,
        "is_closed": counts.is_closed,
        "account": law_in_words(counts),
        "sources": {name: source.as_json() for name, source in sorted(counts.sources.items())},
        **(_cut_rows(counts) if counts.further or counts.lost_tokens else {}),
        **({"shared": shared_json(counts)} if counts.tells_of_sharing else {}),
    }


def shared_json(counts: Counts) -> dict[str, Any]:
    """Return the counts of prefixes that samples shared: num_packed = num_in_units + num_alone."""
    names = ("num_units", "num_in_units", "num_alone", "num_apart", "num_shared_tokens", "num_tokens_alone")
    return {name: getattr(counts, name) for name in names}


def shared_in_words(counts: Counts) -> str:
    """Write which samples shared a prefix, and the tokens that this saved.

    >>> counts = Counts(packing_length=100)
    >>> counts.packed([("vqa", 40), ("vqa", 5), ("chat", 9)])
    >>> counts.shared((0, 30, 0))
    >>> print(shared_in_words(counts))
    shared: 3 samples = 2 in 1 unit + 1 alone, 54 of 84 tokens computed
    """
    units = f"{counts.num_in_units} in {counted(counts.num_units, 'unit')} + {counts.num_alone} alone"
    apart = f", {counts.num_apart} of them planned to share" if counts.num_apart else ""
    tokens = f"{counts.num_tokens} of {counts.num_tokens_alone} tokens computed"
    return f"shared: {counted(counts.num_packed, 'sample')} = {units}{apart}, {tokens}"


def law_in_words(counts: Counts) -> str:
    """Write read = packed + left out + not reached with its numbers, in samples; also in rows, if rows were cut."""
    # Check each source: if one has more packed and left out than read, that is a bug, and a sum could hide it.
    adds_up = all(source.num_held >= 0 for source in (*counts.sources.values(), *counts.rows.values()))
    return (
        f"counts {'add' if adds_up else 'do not add'} up: {_law_of(counts.sources)}"
        f"{f'; in rows: {_law_of(counts.rows)}' if counts.further else ''}"
    )


def _law_of(sources: Mapping[str, SourceCounts]) -> str:
    num_read, num_packed, num_held = (
        sum(getattr(source, name) for source in sources.values()) for name in ("num_read", "num_packed", "num_held")
    )
    num_left_out = num_read - num_packed - num_held
    return f"{num_read} read = {num_packed} packed + {num_left_out} left out + {num_held} not reached"


def _cut_rows(counts: Counts) -> dict[str, Any]:
    rows = {name: source.as_json() for name, source in sorted(counts.rows.items())}
    for source in rows.values():
        del source["num_tokens"]  # `sources` has the same number: the tokens of all parts
    lost = {
        reason: {
            "num_parts": counts.num_dropped[reason],
            "num_tokens": num_tokens,
            "num_images": counts.lost_images[reason],
        }
        for reason, num_tokens in sorted(counts.lost_tokens.items())
    }
    return {"rows": rows, "lost_by_cutting": lost}


def _per_cent(part: int, whole: int) -> float:
    return round(100 * share(part, whole), 1)
