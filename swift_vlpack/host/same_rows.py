"""Check that all ranks have the same files of images, videos and sounds, and the same validation rows."""

from __future__ import annotations

from itertools import islice
from typing import Any

from swift_vlpack.comm import Comm
from swift_vlpack.feed.saved_rows import digest_of, rows_read
from swift_vlpack.host.ranks import RanksDiffer, refuse_differences
from swift_vlpack.rows.media import is_name, names_of_files, real_file
from swift_vlpack.rows.source import Row, RowSource, row_bytes

NUM_ROWS_OF_STREAM = 16
NUM_ROWS_NAMED = 3


def check_same_files(source: RowSource, comm: Comm) -> None:
    """Stop on every rank, naming rows, if a file that a row names is missing on some ranks only, or differs in size.

    Looks at 10,000 rows at most, and compares only sizes: reading every image is the cost that packing avoids.
    """
    if comm.num_ranks == 1:
        return
    indices = rows_read(len(source.rows)).tolist()
    mine = {index: _sizes_of_files(source.rows[index]) for index in indices}
    digest = digest_of(repr(mine).encode())
    if len({*comm.results_of_all(lambda: digest)}) == 1:
        return
    everyone = comm.results_of_all(lambda: mine)
    differing = [index for index in indices if any(theirs.get(index) != everyone[0][index] for theirs in everyone)]
    named = {index: f"{source.sample_id(index)} ({source.where(index)})" for index in differing[:NUM_ROWS_NAMED]}
    refuse_differences(
        f"files of source {source.name!r}, which {len(differing)} rows name",
        [{named[index]: _said(theirs.get(index, {})) for index in named} for theirs in everyone],
    )
    # Ranks differ even if the few rows that are named happen to be equal.
    raise RanksDiffer(f"the ranks do not have the same files of source {source.name!r}. Give all ranks the same files")


def check_same_validation(rows: Any, comm: Comm) -> None:
    """Stop on every rank unless all have the same validation rows; comparing plans does not cover them."""
    if comm.num_ranks == 1:
        return
    refuse_differences("validation rows", comm.results_of_all(lambda: _validation(rows)))
    if hasattr(rows, "__len__"):
        check_same_files(RowSource(name="validation", rows=rows), comm)


def _validation(rows: Any) -> dict[str, Any]:
    if rows is None:
        return {"rows": 0}
    if hasattr(rows, "__len__"):
        seen = [rows[index] for index in rows_read(len(rows)).tolist()]
        return {"rows": len(rows), "content": digest_of(*map(row_bytes, seen))}
    return {"rows": "a stream", "content": digest_of(*map(row_bytes, islice(iter(rows), NUM_ROWS_OF_STREAM)))}


def _sizes_of_files(row: Row) -> dict[str, int | None]:
    """Return the size in bytes of every file that a row names, by name; None for a missing file."""
    files = {name: real_file(name) for name in names_of_files(row) if is_name(name)}
    return {name: None if file is None else file.state.st_size for name, file in files.items()}


def _said(sizes: dict[str, int | None]) -> str:
    return ", ".join(
        f"{name} {'is missing' if size is None else f'has {size:,} bytes'}" for name, size in sizes.items()
    )
