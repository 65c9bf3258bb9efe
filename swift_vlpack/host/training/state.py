"""`vlpack_state.json` in every checkpoint: where the run is in its data, and what that depends on.

`vlpack_rows.npz` beside it has the sizes of all rows as they were planned, and digests of what is in them. The state
is the last file of a checkpoint to be written, whole or not at all, so a checkpoint that has it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from swift.utils import get_logger, is_master

from swift_vlpack.core.account import telemetry
from swift_vlpack.core.config import RESUME_DATA
from swift_vlpack.core.envelope import Whole, check_fingerprint, opened, seal, signed
from swift_vlpack.core.epoch.cuts import CUTS
from swift_vlpack.core.errors import ConfigError, StateMismatch, VLPackError
from swift_vlpack.core.files import write_json, write_whole
from swift_vlpack.data.feeds.buffered import BufferedPackingDataset, Progress
from swift_vlpack.data.feeds.planned import PlannedPackingDataset
from swift_vlpack.data.rows.fusion import FusionCaptionDataset, RowSource
from swift_vlpack.data.rows.row_digest import row_bytes
from swift_vlpack.data.rows.saved_rows import (
    NUM_PLANNED_COLUMNS,
    Changes,
    SourceFacts,
    changes,
    facts_of,
    from_bytes,
    row_digests,
    to_bytes,
    with_sizes,
)
from swift_vlpack.data.rows.streams import StreamedRows

logger = get_logger()

FILE = "vlpack_state.json"
RANK_FILE = "vlpack_state_rank{}.json"
ROWS_FILE = "vlpack_rows.npz"
RESTART = "restart"
WAY_OUT = f"Resume with what the checkpoint was written with, or set {RESUME_DATA}={RESTART} to start the data anew"
NUM_STREAM_ROWS_READ = 16
PLAN, BUFFER = "plan", "buffer"
"""Kinds of the state."""
_STATE = {"epoch": Whole(), "counted": telemetry.STATE, "rows": str}
STATES = {PLAN: {**_STATE, "cuts": CUTS, "plan": str}, BUFFER: _STATE}
"""What the states look like."""


class StateNotSaved(VLPackError):
    """A checkpoint has no account of its data; an earlier one has to be resumed from."""


class Rows:
    """The rows of a run as its checkpoints remember them; none of a stream."""

    def __init__(self, dataset: Any) -> None:
        self.sources: Sequence[RowSource] = getattr(dataset, "sources", ())
        self.contents = [row_digests(source) for source in self.sources]
        self._written: bytes | None = None

    def as_file(self) -> bytes:
        """The same for every checkpoint of the run, so made once."""
        if self._written is None:
            self._written = to_bytes([facts_of(*both) for both in zip(self.sources, self.contents, strict=True)])
        return self._written

    def compared(self, saved: Sequence[SourceFacts]) -> Changes | None:
        """What became of the rows; None where the sources are other ones."""
        if [facts.name for facts in saved] != [source.name for source in self.sources]:
            return None
        return sum((changes(*each) for each in zip(saved, self.sources, self.contents, strict=True)), Changes())

    def take_sizes(self, saved: Sequence[SourceFacts]) -> None:
        """Go on with the sizes of the saved run."""
        self.sources, self._written = with_sizes(self.sources, saved), None


def save_progress(checkpoint: Path, rank: int, global_step: int, progress: Progress) -> None:
    """Write where the workers of a rank stand, before the state that marks the checkpoint as complete."""
    facts = {"rank": rank, "global_step": global_step}
    _write_state(checkpoint / RANK_FILE.format(rank), seal("progress", facts, progress.state()))


def load_progress(checkpoint: Path, rank: int, global_step: int) -> Progress:
    """Where the workers of a rank stood when the checkpoint was written."""
    path = checkpoint / RANK_FILE.format(rank)
    with _refused(path, "every rank writes one, so collect them where nodes share no disk"):
        facts, state = opened(json.loads(path.read_text(encoding="utf-8")), "progress", is_signed=True)
        check_fingerprint("progress", facts, {"rank": rank, "global_step": global_step})
        return Progress.of(state)


def save_state(
    checkpoint: Path, kind: str, fingerprint: Mapping[str, Any], state: Mapping[str, Any], rows: Rows | None = None
) -> None:
    """Write the state of the data into a checkpoint that is otherwise complete."""
    content = b"" if rows is None else rows.as_file()
    if rows is not None:
        with _named(checkpoint / ROWS_FILE):
            write_whole(checkpoint / ROWS_FILE, content)
    _write_state(checkpoint / FILE, seal(kind, fingerprint, {**state, "rows": _digest(content)}))


def _write_state(path: Path, sealed: Mapping[str, Any]) -> None:
    with _named(path):
        write_json(path, signed(sealed))


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Say of a file that cannot be written what that means."""
    try:
        yield
    except OSError as error:
        raise StateNotSaved(
            f"{path} cannot be written: {error}. This checkpoint cannot be resumed from; mend the output "
            "directory (is the disk full?) and resume from an earlier one"
        ) from error


@contextmanager
def _refused(path: Path, why_missing: str) -> Iterator[None]:
    """Make one error of all that can be wrong with a saved file, which names it and the way out."""
    try:
        yield
    except FileNotFoundError:
        problem = f"{path.parent} has no {path.name}: {why_missing}"
    except (OSError, ValueError, RecursionError) as error:
        problem = f"{path}: {error}"
    else:
        return
    raise StateMismatch(f"{problem}. {WAY_OUT}")


def load_state(
    checkpoint: Path, kind: str, fingerprint: Mapping[str, Any], rows: Rows | None = None
) -> dict[str, Any] | None:
    """The state that was saved under this fingerprint; None where the data shall start anew.

    A plan goes on with the sizes that it was made of, which `rows` then have: a file that is gone since is left out
    when it is loaded, one that came back stays out.
    """
    if wants_restart(os.environ):
        logger.warning(f"{RESUME_DATA}={RESTART}: the data starts anew, at the first pack of epoch 0")
        return None
    path = checkpoint / FILE
    with _refused(path, "it is incomplete, or was written without packing"):
        envelope = json.loads(path.read_text(encoding="utf-8"))
        facts, state = opened(envelope, kind, shape=STATES.get(kind), is_signed=True)
    saved = _load_rows(checkpoint / ROWS_FILE, state["rows"]) if rows else []
    changed = rows.compared(saved) if rows else None
    is_planned_alike = changed is not None and not changed.texts and not changed.sizes and kind == PLAN
    current = {**fingerprint, "lengths": facts.get("lengths")} if is_planned_alike else fingerprint
    words = {} if changed is None else {"data": changed.texts, "lengths": changed.sizes}
    with _refused(path, ""):
        check_fingerprint(kind, facts, current, {name: str(said) for name, said in words.items() if said})
    if rows is not None and changed is not None and is_planned_alike:
        _tell(changed)
        rows.take_sizes(saved)
    return state


def _load_rows(path: Path, digest: str) -> list[SourceFacts]:
    with _refused(path, "every checkpoint has one, so copy it with the rest"):
        content = path.read_bytes()
        if _digest(content) != digest:
            raise StateMismatch("damaged: it is not the file that was written with the state beside it")
        return from_bytes(content)


def _tell(changed: Changes) -> None:
    if changed.gone and is_master():
        logger.warning(
            f"{changed.gone.num_rows} rows that were planned cannot be read any more; their packs go on without them: "
            f"{changed.gone}"
        )
    if changed.back and is_master():
        logger.warning(
            f"{changed.back.num_rows} rows that could not be read stay out until the next run: {changed.back}"
        )


def wants_restart(environ: Mapping[str, str]) -> bool:
    """Whether the data shall start anew although a checkpoint is resumed."""
    given = environ.get(RESUME_DATA, "")
    wish = given.strip().lower()  # as forgiving as options are
    if wish not in ("", RESTART):
        raise ConfigError(f"{RESUME_DATA} can only be {RESTART}, got {given!r}; without it the data goes on")
    return wish == RESTART


def plan_fingerprint(packs: PlannedPackingDataset, rows: Rows) -> dict[str, Any]:
    """Everything that the plans of all epochs follow from, large parts as digests."""
    columns = (source.sizes.columns for source in rows.sources if source.sizes is not None)
    return {
        "seed": packs.seed,
        **_data_fingerprint(packs.dataset, rows),
        "lengths": _digest(*(column[:NUM_PLANNED_COLUMNS].astype("<i8").tobytes() for column in columns)),
        **packs.config.pack_options(),
        "packing_balance": packs.config.packing_balance,
    }


def buffer_fingerprint(packs: BufferedPackingDataset, num_workers: int, rows: Rows) -> dict[str, Any]:
    """Everything that the packs of every reader follow from. Of a stream, its beginning stands for the data."""
    data = packs.dataset
    return {
        "num_ranks": packs.num_ranks,
        "num_workers": num_workers,
        "seed": packs.seed,
        **(_stream_fingerprint(data) if isinstance(data, StreamedRows) else _data_fingerprint(data, rows)),
        **packs.config.pack_options(),
    }


def _stream_fingerprint(stream: StreamedRows) -> dict[str, Any]:
    return {
        "num_shards": getattr(stream.rows, "num_shards", 1),
        "data": _digest(*map(row_bytes, stream.first_rows(NUM_STREAM_ROWS_READ))),
    }


def _data_fingerprint(data: FusionCaptionDataset, rows: Rows) -> dict[str, Any]:
    contents = zip(data.sources, rows.contents, strict=True)
    return {
        "shuffle": data.shuffle,
        "sources": {source.name: [len(source.rows), source.ratio, source.sample_limit] for source in data.sources},
        "data": _digest(*(part for source, digests in contents for part in _content(source, digests))),
    }


def _content(source: RowSource, digests: NDArray[np.uint64]) -> list[bytes]:
    """What a source is made of: how it takes part, which rows of its file it has, and what is in them."""
    numbers = () if source.row_numbers is None else source.row_numbers
    facts = [source.name, source.system, source.max_pixels, source.seed]
    return [json.dumps(facts).encode(), np.asarray(numbers, dtype="<i8").tobytes(), digests.astype("<u8").tobytes()]


def _digest(*parts: bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()[:16]
