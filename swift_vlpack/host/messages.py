"""Send our log lines through ms-swift's logger, and print a mistake of the user as one line."""

from __future__ import annotations

import errno
import logging
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType

from swift_vlpack.errors import VLPackError
from swift_vlpack.pages.safe_text import visible

EXIT_USAGE = 2
_FORESEEN = (VLPackError, OSError, ValueError, ImportError)
"""Errors that may cause one of ours without a traceback being shown, because they are no bugs."""
_OF_INPUT = (ValueError, AssertionError, OSError)
_OF_LIBRARY = (KeyError, ImportError)
"""Errors that ms-swift, and the libraries that it calls, raise for an input that is wrong. Those of `_OF_LIBRARY` are
bugs if any code of the user has a part in them."""
_STAGES = (
    ("swift.arguments", "", "refuses the options"),
    ("swift.pipelines.train.sft", "_prepare_model_tokenizer", "cannot load the model"),
    ("swift.pipelines.train.tuner", "prepare_model", "cannot make the tuner"),
    ("swift.trainers", "__init__", "cannot make the trainer"),
    ("", "create_optimizer", "cannot make the optimizer"),
    ("transformers.trainer", "_determine_best_metric", "cannot choose the best checkpoint"),
)
"""Modules and functions ("" for any) in which ms-swift makes what an input names, before it trains."""
_WRITTEN = ("output_dir", "save_directory", "filename", "path")
"""Variables that hold what functions of ms-swift, transformers and safetensors write."""
_LIBRARIES = ("/site-packages/", "/dist-packages/", sysconfig.get_path("stdlib"), "<frozen")
"""Parts of the paths of code that is not the user's own."""
# Compare names of classes: each library that ms-swift downloads with has error classes of its own.
_NO_ANSWER = frozenset(
    (
        "ConnectionError",
        "TimeoutError",
        "Timeout",
        "gaierror",
        "TransportError",
        "MaxRetryError",
        "OfflineModeIsEnabled",
    )
)


class Refused(VLPackError):
    """ms-swift refuses an option or a file."""


@contextmanager
def said_by_swift(what: str, names: Sequence[str] = ()) -> Iterator[None]:
    """Turn an error with which ms-swift, or a library that it calls, refuses an input into `Refused`, one line.

    `names` are the models or data sets that may have been looked for on a hub.
    """
    try:
        yield
    except VLPackError:
        raise
    except Exception as error:
        is_refused = isinstance(error, _OF_LIBRARY) and _is_of_library([*_frames(error.__traceback__)])
        if not (isinstance(error, _OF_INPUT) or is_refused or is_of_network(error)):
            raise
        raise Refused(refusal(error, what, names)) from error


def refusal(error: BaseException, what: str, names: Sequence[str] = ()) -> str:
    """Return one line about an error of ms-swift. `what` continues "ms-swift ...", such as "refuses the options"."""
    if not is_of_network(error):
        return f"ms-swift {what}: {_said(error)}"
    hub = "ModelScope"
    if os.environ.get("USE_HF", "").lower() in ("1", "true"):
        endpoint = os.environ.get("HF_ENDPOINT")
        hub = f"Hugging Face ({endpoint})" if endpoint else "Hugging Face"
    remote = [name for name in names if not os.path.exists(name.rpartition("#")[0] or name)]
    wanted = ", ".join(remote) or "what was named"
    return (
        f"the hub cannot be reached: {wanted} is not a file or folder in {os.getcwd()}, so it was looked for on {hub}, "
        f"which did not answer: {one_line(error)} (check the name, the network, HTTPS_PROXY and HF_ENDPOINT, choose "
        "the other hub by --use_hf, or give a local folder or file)"
    )


def is_of_network(error: BaseException | None) -> bool:
    """Tell whether the error, or one that caused it, says that the network gave no answer."""
    if error is None:
        return False
    names = {base.__name__ for base in type(error).__mro__}
    return bool(names & _NO_ANSWER) or is_of_network(error.__cause__ or error.__context__)


class _ToSwift(logging.Handler):
    """Pass log lines to ms-swift's logger, as if it had written them."""

    def emit(self, record: logging.LogRecord) -> None:
        from swift.utils import get_logger

        said = visible(record.getMessage())  # the names of files are untrusted
        own = logging.makeLogRecord({**vars(record), "name": get_logger().name, "msg": said, "args": None})
        get_logger().handle(own)


_ROOMS_OF_ROWS = ("rows", "lengths", "feed", "attention", "proof", "pages")
"""Rooms whose log lines are about rows or tensors of one rank."""


def join_log() -> None:
    """Send the log lines of rooms that do not import ms-swift through ms-swift's logger, with its prefix and level.

    Idempotent. Lines that are equal on all ranks come from rank 0 only; a line about a row comes from the row's rank.
    """
    from swift.utils import get_logger

    ours = logging.getLogger("swift_vlpack")
    if any(isinstance(handler, _ToSwift) for handler in ours.handlers):
        return
    ours.addHandler(_ToSwift())
    # Our handler passes lines on. If the root logger got them too, each line would be printed twice.
    ours.propagate = False
    ours.setLevel(get_logger().level)
    # ms-swift's logger shows only errors of other ranks than 0, but a warning about a row has to come from its rank.
    for room in _ROOMS_OF_ROWS:
        logging.getLogger(f"swift_vlpack.{room}").setLevel(min(get_logger().level, logging.WARNING))


def quiet_mistakes() -> None:
    """Print one line for a mistake of the user (exit code 2) and none for an interrupt; a bug keeps its traceback."""
    before = sys.excepthook
    if getattr(before, "is_of_vlpack", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            return
        if (folder := _full_disk(error, trace)) is not None:
            error = Refused(f"the disk is full, {folder} cannot be written: {one_line(error)}")
        elif not isinstance(error, VLPackError) and (found := _stage(error, trace)) is not None:
            error = Refused(refusal(error, *found))
        if not isinstance(error, VLPackError) or _is_surprising(error):
            before(kind, error, trace)
            return
        # Print to `sys.__stderr__`: torch replaces `sys.stderr` while it calls this hook, and would lose the line.
        print(f"swift_vlpack: {one_line(error)}{_of_rank()}", file=sys.__stderr__, flush=True)
        sys.exit(EXIT_USAGE)

    hook.is_of_vlpack = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _stage(error: BaseException, trace: TracebackType | None) -> tuple[str, list[str]] | None:
    """Return what ms-swift could not do with its input, and the model and adapters that were given; None for a bug.

    Only an error that a library raises in one of `_STAGES` is about the input. An error in a plugin of the user, or in
    this package, is a bug.
    """
    what, names, inside = "", [], []
    for frame in _frames(trace):
        module, own = frame.f_globals.get("__name__", ""), frame.f_locals.get("self")
        what = what or next((s for of, name, s in _STAGES if module.startswith(of) and name in ("", _name(frame))), "")
        inside += [frame] if what else []
        if module.startswith(_STAGES[0][0]) and own is not None:
            adapters = getattr(own, "adapters", None) or ()
            names = [str(name) for name in (getattr(own, "model", None), *adapters) if name]
    is_of_input = isinstance(error, (*_OF_INPUT, *_OF_LIBRARY)) and _is_of_library(inside) if what else False
    return (what, names) if is_of_input or (what and is_of_network(error)) else None


def _full_disk(error: BaseException, trace: TracebackType | None) -> str | None:
    """Return the file or folder that was written when the disk was full; None for another error."""
    if getattr(error, "errno", None) != errno.ENOSPC and os.strerror(errno.ENOSPC) not in str(error):
        return None
    found = [frame.f_locals.get(name) for frame in _frames(trace) for name in _WRITTEN]
    return str(getattr(error, "filename", None) or next((one for one in reversed(found) if one), "what it wrote"))


def _is_of_library(frames: Sequence[FrameType]) -> bool:
    """Tell whether a library raised an error, and no code of the user is among these frames."""
    modules = [(frame.f_globals.get("__name__", ""), frame.f_code.co_filename) for frame in frames]
    return not modules[-1][0].startswith("swift_vlpack.") and all(
        module.startswith(("swift.", "swift_vlpack.")) or any(part in file for part in _LIBRARIES)
        for module, file in modules
    )


def _name(frame: FrameType) -> str:
    return frame.f_code.co_name


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _said(error: BaseException) -> str:
    """Return the text of an error as one line; with its kind and place, if the text alone says too little."""
    text = one_line(error)
    if text and not isinstance(error, KeyError):
        return text
    frame = [*_frames(error.__traceback__)][-1:]
    place = f" in {frame[0].f_globals.get('__name__')}.{_name(frame[0])}" if frame else ""
    return f"{type(error).__name__}{place}{text and ': ' + text}"


def one_line(error: BaseException) -> str:
    """Return the text of an error as one line, without the traceback that torch adds to errors of workers."""
    text = str(error)
    if "Original Traceback" in text:
        text = text.strip().splitlines()[-1].partition(": ")[2]
    return visible(" ".join(text.split()))


def _is_surprising(error: BaseException) -> bool:
    """Tell whether a cause of the error may be a bug, so that its traceback has to be shown."""
    cause = error.__cause__
    return cause is not None and (not isinstance(cause, _FORESEEN) or _is_surprising(cause))


def _of_rank() -> str:
    rank = os.environ.get("RANK")
    return "" if rank is None else f" (rank {rank})"
