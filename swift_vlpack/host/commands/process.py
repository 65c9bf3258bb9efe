"""The process of `vlpack plan` for a training run: stopped, it leaves nothing behind, and says nothing of it.

`python -m swift_vlpack.host.commands.process FILE_NUMBER json|text FAILURES NUM_RANKS sft|pt [options
of the command]`. Heavy imports stay inside, so that it is ready for signals in a moment.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType


def main() -> int:
    """Plan; stopped by a signal, end with the code by which a shell says so."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        from swift_vlpack.host.commands.plan import main as plan

        return plan()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _stop(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # and not at once, so that folders of the moment are removed


if __name__ == "__main__":
    sys.exit(main())
