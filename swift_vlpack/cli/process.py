"""The process of a command about a training run: stopped, it leaves nothing behind, and says nothing of it.

`python -m swift_vlpack.cli.process NAME SETTINGS sft|pt [options of the command]` runs `main` of the module
of that name here; SETTINGS, JSON, are those of the command, the file number of its report among them. Heavy imports
stay inside, so that it is ready for signals in a moment.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import warnings
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from swift_vlpack.errors import VLPackError

EXIT_USAGE = 2
PACKAGE = Path(__file__).parents[1]

QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


def main() -> int:
    """Run the command; stopped by a signal, end with the code by which a shell says so."""
    signal.signal(signal.SIGTERM, _stop)
    if json.loads(sys.argv[2]).get("is_quiet"):
        quiet()
    return run(*sys.argv[1:])


def quiet() -> None:
    """Hide warnings of ms-swift and its libraries, so that the answer stands out; errors and our own lines stay.

    Call this before any of them is imported.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")
    logging.getLogger("swift").addFilter(_is_ours_or_grave)


def _is_ours_or_grave(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or Path(record.pathname).is_relative_to(PACKAGE)


def run(name: str, settings: str, command: str, *options: str) -> int:
    """Run the command; a mistake of the user is one line on stderr and exit code 2."""
    try:
        return int(_module(name).main(json.loads(settings), command, options))
    except VLPackError as error:
        print(f"vlpack {name}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _module(name: str) -> Any:
    return import_module(f"swift_vlpack.cli.{name}_run")


def _stop(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # and not at once, so that folders of the moment are removed


if __name__ == "__main__":
    sys.exit(main())
