"""Save how far a run has trained its data, and load that state to resume.

    vlpack_state.json         fingerprint (data, options) and progress of all ranks, in a signed envelope
    vlpack_state_rankN.json   states of the dataloader workers of a rank; only of streamed packs
    vlpack_rows.npz           sizes of all rows as they were planned, and digests of their content

`vlpack_state.json` is written last, whole or not at all, so a checkpoint that has it is complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swift.utils import get_logger, is_master
from transformers.trainer import TRAINER_STATE_NAME

from swift_vlpack.config import RESTART, RESUME_DATA
from swift_vlpack.envelope import check_fingerprint, differing_fields, opened, seal, shown_value, signed, unseal
from swift_vlpack.errors import ConfigError, StateMismatch, VLPackError
from swift_vlpack.feed.saved_rows import Changes, RunRows, SavedSource, digest_of, from_bytes
from swift_vlpack.files import write_json, write_whole
from swift_vlpack.runlog.folder import ROWS, STATE
from swift_vlpack.words import counted

logger = get_logger()

FILE = STATE
RANK_FILE = "vlpack_state_rank{}.json"
ROWS_FILE = ROWS
WAY_OUT = f"Resume with what the checkpoint was written with, or set {RESUME_DATA}={RESTART} to start the data anew"
ENCODING = (
    *("tokenizer.", "processor.", "chat_templates", "config."),
    *("meta.prefix", "meta.prompt", "meta.chat_sep", "meta.suffix", "meta.system_prefix"),
)
"""Beginnings of settings that a resume refuses to change: they decide what rows become and how the model computes."""
SETS_ENCODING = ("packages.transformers", "packages.tokenizers", "packages.ms-swift")
SAVED_SETTINGS = (*ENCODING, "packages.", "code", "variables.")


class StateNotSaved(VLPackError):
    """The state of a checkpoint could not be written, so the run can only resume from an earlier checkpoint."""


def save_rank_state(checkpoint: Path, rank: int, global_step: int, state: Mapping[str, Any]) -> None:
    """Write the progress of a rank. `save_state` comes later and marks the checkpoint as complete."""
    fingerprint = {"rank": rank, "global_step": global_step}
    _write_state(checkpoint / RANK_FILE.format(rank), seal("progress", fingerprint, state))


def load_rank_state(checkpoint: Path, rank: int, global_step: int) -> dict[str, Any]:
    """Read the progress that a rank had when the checkpoint was written."""
    path = checkpoint / RANK_FILE.format(rank)
    with refused(path, "every rank writes one, so collect them where nodes share no disk"):
        fingerprint = {"rank": rank, "global_step": global_step}
        return unseal(json.loads(path.read_text(encoding="utf-8")), "progress", fingerprint, is_signed=True)


def save_state(
    checkpoint: Path, kind: str, fingerprint: Mapping[str, Any], state: Mapping[str, Any], rows: RunRows | None = None
) -> None:
    """Write the feed's state into a checkpoint whose other files are all written."""
    content = b"" if rows is None else rows.as_file()
    # Write the rows first: the state has their digest, and marks that everything else is there.
    if rows is not None:
        with _named(checkpoint / ROWS_FILE):
            write_whole(checkpoint / ROWS_FILE, content)
    _write_state(checkpoint / FILE, seal(kind, fingerprint, {**state, "rows": digest_of(content)}))


def _write_state(path: Path, sealed: Mapping[str, Any]) -> None:
    with _named(path):
        write_json(path, signed(sealed))


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn an `OSError` of writing into `StateNotSaved`, which names the file and says what to do."""
    try:
        yield
    except OSError as error:
        raise StateNotSaved(
            f"{path} cannot be written: {error}. This checkpoint cannot be resumed from; repair the output "
            "directory (is the disk full?) and resume from an earlier one"
        ) from error


@contextmanager
def refused(path: Path, why_missing: str = "") -> Iterator[None]:
    """Turn any error of reading or checking a file into `StateMismatch`, which names the file and the way out."""
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
    checkpoint: Path, kind: str, fingerprint: Mapping[str, Any], rows: RunRows | None = None
) -> dict[str, Any] | None:
    """Read the state of a checkpoint; None if the user wants the data to start anew.

    Raises `StateMismatch` if the fingerprints differ. A planned run keeps its plan: `rows` take over the saved sizes.
    So a row whose file has gone since is left out when it is loaded, and a row whose file came back stays out.
    """
    if wants_restart(os.environ):
        logger.warning(f"{RESUME_DATA}={RESTART}: the data starts anew, at the first pack of epoch 0")
        return None
    path = checkpoint / FILE
    then, state = read_state(checkpoint, kind)
    saved = load_rows(checkpoint, state) if rows else []
    changed = rows.compared(saved) if rows else None
    # If only sizes changed, and missing or returned files explain all of these, resume with the saved sizes.
    takes_sizes = "lengths" in fingerprint and changed is not None and not changed.texts and not changed.sizes
    current = {**fingerprint, "lengths": then.get("lengths")} if takes_sizes else fingerprint
    words = {} if changed is None else {"data": changed.texts, "lengths": changed.sizes}
    with refused(path):
        check_fingerprint(kind, then, current, {name: str(said) for name, said in words.items() if said})
    if rows is not None and changed is not None and takes_sizes:
        _warn_of_files(changed)
        rows.take_sizes(saved)
    return state


def read_state(checkpoint: Path, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read (fingerprint, state) as they were saved, without comparing them with the run."""
    saved = read_envelope(checkpoint, kind)
    return saved["fingerprint"], saved["state"]


def read_envelope(checkpoint: Path, kind: str | None = None) -> dict[str, Any]:
    """Return digest, kind, fingerprint and state from `vlpack_state.json`; without `kind`, of any kind of feed."""
    path = checkpoint / FILE
    with refused(path, "it is incomplete, or was written without packing"):
        envelope = json.loads(path.read_text(encoding="utf-8"))
        if kind is None:
            kind = str(envelope.get("kind")) if isinstance(envelope, dict) else "packing"
        fingerprint, state = opened(envelope, kind, is_signed=True)
        return {"digest": envelope["digest"], "kind": kind, "fingerprint": fingerprint, "state": state}


def read_trainer_state(checkpoint: Path) -> dict[str, Any]:
    """Return the trainer's own state; empty if the checkpoint has none."""
    path = checkpoint / TRAINER_STATE_NAME
    try:
        state = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return {**state, **({"global_step": int(state["global_step"])} if state else {})}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateMismatch(
            f"{path}: damaged: {type(error).__name__}: {error}. Resume from an earlier checkpoint"
        ) from error


def check_settings(
    checkpoint: Path, saved: Mapping[str, Any], now: Mapping[str, Any], *, model: str | None = None
) -> None:
    """Refuse another tokenizer, processor, chat template or model config than the saved one. Warn of other changes.

    Code, packages and variables may change. A package that sets such values may set others in another version, so then
    these are only warned of, too; and so may saving, where the checkpoint itself is the folder `model`.
    """
    then = saved.get("settings") or now  # states of before have none
    both = {*then} & {*now}  # a version may know more names than another
    changed = {
        name: f"{name} ({shown_value(then, name)}, now {shown_value(now, name)})"
        for name in differing_fields(then, now)
        if name in both or not name.startswith(ENCODING)
    }
    refused = [said for name, said in changed.items() if name.startswith(ENCODING)]
    is_copy = model is not None and Path(model).resolve() == checkpoint.resolve()
    if refused and not is_copy and not {*changed} & {*SETS_ENCODING}:
        raise StateMismatch(f"{checkpoint / FILE} was written with another {', '.join(refused)}. {WAY_OUT}")
    if changed and is_master():
        logger.warning(f"{checkpoint} was written with another {', '.join(changed.values())}; the run goes on")


def load_rows(checkpoint: Path, state: Mapping[str, Any]) -> list[SavedSource]:
    """Read the rows as they were planned. `state` is the state of the same checkpoint, which has their digest."""
    path, digest = checkpoint / ROWS_FILE, state["rows"]
    with refused(path, "every checkpoint has one, so copy it with the rest"):
        content = path.read_bytes()
        if digest_of(content) != digest:
            raise StateMismatch(f"damaged: it is not the file that was written together with {FILE}")
        return from_bytes(content)


def _warn_of_files(changed: Changes) -> None:
    """Warn of rows whose files have gone or come back since the checkpoint was written."""
    if changed.gone and is_master():
        logger.warning(
            f"{counted(changed.gone.num_rows, 'planned row')} cannot be read any more; the packs go on without: "
            f"{changed.gone}"
        )
    if changed.back and is_master():
        logger.warning(
            f"readable again, but out until the next run: {counted(changed.back.num_rows, 'row')}: {changed.back}"
        )


def wants_restart(environ: Mapping[str, str]) -> bool:
    """Tell whether the user wants the data to start anew although training resumes (`VLPACK_RESUME_DATA`)."""
    given = environ.get(RESUME_DATA, "")
    wish = given.strip().lower()  # options ignore case and spaces, too
    if wish not in ("", RESTART):
        raise ConfigError(f"{RESUME_DATA} can only be {RESTART}, got {given!r}; without it the data resumes")
    return wish == RESTART
