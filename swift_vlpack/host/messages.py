"""What a user sees of this package in a training run: lines in ms-swift's log, and one line for a mistake."""

from __future__ import annotations

import logging
import os
import sys
from types import TracebackType

from swift_vlpack.core.errors import VLPackError

EXIT_USAGE = 2
_FORESEEN = (VLPackError, OSError, ValueError, ImportError)
"""Causes of our errors that are no bug of ours."""


class _ToSwift(logging.Handler):
    """Hands lines on to ms-swift's logger, as its own."""

    def emit(self, record: logging.LogRecord) -> None:
        from swift.utils import get_logger

        own = logging.makeLogRecord({**vars(record), "name": get_logger().name})
        get_logger().handle(own)


def join_log() -> None:
    """Give the lines of the layers that do not know ms-swift its prefix, file and level. Twice is as once.

    What every rank would say alike is said where ms-swift speaks, on the first; about a row its own rank speaks.
    """
    from swift.utils import get_logger

    ours = logging.getLogger("swift_vlpack")
    if any(isinstance(handler, _ToSwift) for handler in ours.handlers):
        return
    ours.addHandler(_ToSwift())
    # Our handler hands them on; through the root logger each line would come twice.
    ours.propagate = False
    ours.setLevel(get_logger().level)
    # Other ranks than the first log errors only; of a row its own rank has to be heard.
    logging.getLogger("swift_vlpack.data").setLevel(min(get_logger().level, logging.WARNING))


def quiet_mistakes() -> None:
    """End a mistake of the user in one line and exit code 2, an interrupt in no line; a bug keeps its traceback."""
    before = sys.excepthook
    if getattr(before, "is_of_vlpack", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            return
        if not isinstance(error, VLPackError) or _is_surprising(error):
            before(kind, error, trace)
            return
        # torch puts its own text for sys.stderr while it calls this, and would lose the line when we leave.
        print(f"swift_vlpack: {one_line(error)}{_of_rank()}", file=sys.__stderr__, flush=True)
        sys.exit(EXIT_USAGE)

    hook.is_of_vlpack = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def one_line(error: BaseException) -> str:
    """The error without the traceback that torch puts into the text of one that comes from a worker."""
    text = str(error)
    if "Original Traceback" in text:
        text = text.strip().splitlines()[-1].partition(": ")[2]
    return " ".join(text.split())


def _is_surprising(error: BaseException) -> bool:
    """Whether something below it may be a bug."""
    cause = error.__cause__
    return cause is not None and (not isinstance(cause, _FORESEEN) or _is_surprising(cause))


def _of_rank() -> str:
    rank = os.environ.get("RANK")
    return "" if rank is None else f" (rank {rank})"
