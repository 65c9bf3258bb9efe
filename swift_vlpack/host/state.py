"""`vlpack_state.json` in every checkpoint: where the run is in its data, and what that depends on.

It is the last file of a checkpoint to be written, whole or not at all, so a checkpoint that has it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from swift.utils import get_logger

from swift_vlpack.core.config import RESUME_DATA
from swift_vlpack.core.errors import ConfigError, StateMismatch, VLPackError
from swift_vlpack.core.resume import seal, unseal
from swift_vlpack.core.shuffle import permutation
from swift_vlpack.data.buffered import BufferedPackingDataset, Progress
from swift_vlpack.data.fusion import FusionCaptionDataset, RowSource
from swift_vlpack.data.planned import PlannedPackingDataset
from swift_vlpack.data.streams import StreamedRows

logger = get_logger()

FILE = "vlpack_state.json"
RANK_FILE = "vlpack_state_rank{}.json"
RESTART = "restart"
WAY_OUT = f"Resume with what the checkpoint was written with, or set {RESUME_DATA}={RESTART} to start the data anew"
NUM_STREAM_ROWS_READ = 16
NUM_ROWS_READ = 10_000
"""Rows of a source whose content goes into the digest of the data; the lengths of all rows have a digest too."""


class StateNotSaved(VLPackError):
    """A checkpoint has no account of its data; an earlier one has to be resumed from."""


def save_progress(checkpoint: Path, rank: int, global_step: int, progress: Progress) -> None:
    """Write where the workers of a rank stand, before the state that marks the checkpoint as complete."""
    facts = {"rank": rank, "global_step": global_step}
    _write_state(checkpoint / RANK_FILE.format(rank), seal("progress", facts, progress.state()))


def load_progress(checkpoint: Path, rank: int, global_step: int) -> Progress:
    """Where the workers of a rank stood when the checkpoint was written."""
    path = checkpoint / RANK_FILE.format(rank)
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return Progress.of(unseal(saved, "progress", {"rank": rank, "global_step": global_step}))
    except FileNotFoundError:
        problem = f"{checkpoint} has no {path.name}; every rank writes one, so collect them where nodes share no disk"
    except (OSError, ValueError) as error:
        problem = f"{path}: {error}"
    raise StateMismatch(f"{problem}. {WAY_OUT}")


def save_state(checkpoint: Path, kind: str, fingerprint: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Write the state of the data into a checkpoint that is otherwise complete."""
    _write_state(checkpoint / FILE, seal(kind, fingerprint, state))


def _write_state(path: Path, sealed: Mapping[str, Any]) -> None:
    try:
        write_json(path, sealed)
    except OSError as error:
        raise StateNotSaved(
            f"{path} cannot be written: {error}. This checkpoint cannot be resumed from; mend the output "
            "directory (is the disk full?) and resume from an earlier one"
        ) from error


def load_state(checkpoint: Path, kind: str, fingerprint: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state that was saved under this fingerprint; None where the data shall start anew."""
    if wants_restart(os.environ):
        logger.warning(f"{RESUME_DATA}={RESTART}: the data starts anew, at the first pack of epoch 0")
        return None
    path = checkpoint / FILE
    try:
        return unseal(json.loads(path.read_text(encoding="utf-8")), kind, fingerprint)
    except FileNotFoundError:
        problem = f"{checkpoint} has no {FILE}: it is incomplete, or was written without packing"
    except (OSError, ValueError) as error:
        problem = f"{path}: {error}"
    raise StateMismatch(f"{problem}. {WAY_OUT}")


def wants_restart(environ: Mapping[str, str]) -> bool:
    """Whether the data shall start anew although a checkpoint is resumed."""
    given = environ.get(RESUME_DATA, "")
    wish = given.strip().lower()  # as forgiving as options are
    if wish not in ("", RESTART):
        raise ConfigError(f"{RESUME_DATA} can only be {RESTART}, got {given!r}; without it the data goes on")
    return wish == RESTART


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write whole or not at all, also when the machine goes down."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def plan_fingerprint(packs: PlannedPackingDataset) -> dict[str, Any]:
    """Everything that the plans of all epochs follow from, large parts as digests."""
    sources = packs.dataset.sources
    return {
        "seed": packs.seed,
        **_data_fingerprint(packs.dataset),
        "lengths": _digest(*(source.sizes.columns.astype("<i8").tobytes() for source in sources)),
        **packs.config.pack_options(),
        "packing_balance": packs.config.packing_balance,
    }


def buffer_fingerprint(packs: BufferedPackingDataset, num_workers: int) -> dict[str, Any]:
    """Everything that the packs of every reader follow from. Of a stream, its beginning stands for the data."""
    data = packs.dataset
    return {
        "num_ranks": packs.num_ranks,
        "num_workers": num_workers,
        "seed": packs.seed,
        **(_stream_fingerprint(data) if isinstance(data, StreamedRows) else _data_fingerprint(data)),
        **packs.config.pack_options(),
    }


def _stream_fingerprint(stream: StreamedRows) -> dict[str, Any]:
    return {
        "num_shards": getattr(stream.rows, "num_shards", 1),
        "data": _digest(*map(_row, stream.first_rows(NUM_STREAM_ROWS_READ))),
    }


def _data_fingerprint(data: FusionCaptionDataset) -> dict[str, Any]:
    return {
        "shuffle": data.shuffle,
        "sources": {source.name: [len(source.rows), source.ratio, source.sample_limit] for source in data.sources},
        "data": _digest(*(part for source in data.sources for part in _content(source))),
    }


def _content(source: RowSource) -> list[bytes]:
    """What a source is made of: how it takes part, which rows of its file it has, and what is in them."""
    numbers = () if source.row_numbers is None else source.row_numbers
    facts = [source.name, source.system, source.max_pixels, source.seed]
    return [
        json.dumps(facts).encode(),
        np.asarray(numbers, dtype="<i8").tobytes(),
        *(_row(source.rows[index]) for index in permutation(len(source.rows), "content")[:NUM_ROWS_READ].tolist()),
    ]


def _row(row: Mapping[str, Any]) -> bytes:
    # ms-swift's tag for the file as it was named on the command line says nothing about what is in it.
    content = {key: value for key, value in row.items() if key != "dataset"}
    return json.dumps(content, sort_keys=True, default=_plain).encode()


def _plain(value: Any) -> str:
    return _digest(value) if isinstance(value, bytes) else type(value).__name__


def _digest(*parts: bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()[:16]
