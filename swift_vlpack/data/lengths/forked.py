"""Work in processes that are forked, so that nothing of what it needs has to be pickled."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from swift_vlpack.core.errors import VLPackError

_NUM_AHEAD = 4  # tasks a process has waiting
_SECONDS_BETWEEN_LOOKS = 2.0


def done(work: Callable[[Any], Any], tasks: deque[Any], num_processes: int) -> Iterator[Any]:
    """What becomes of each task, in order; whoever takes it may add further tasks meanwhile."""
    if num_processes < 2:
        while tasks:
            yield work(tasks.popleft())
    else:
        yield from _in_processes(work, tasks, num_processes)


def _in_processes(work: Callable[[Any], Any], tasks: deque[Any], num_processes: int) -> Iterator[Any]:
    """Fork: rows, template and what is known are there at once."""
    global _work
    _work = work
    executor = ProcessPoolExecutor(
        num_processes, multiprocessing.get_context("fork"), initializer=_start, initargs=(os.getpid(),)
    )
    waiting: deque[Future[Any]] = deque()
    try:
        while tasks or waiting:
            while tasks and len(waiting) <= _NUM_AHEAD * num_processes:
                waiting.append(executor.submit(_do, tasks.popleft()))
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise VLPackError(
            "a process of the length pass was killed, perhaps for want of memory. What was measured is remembered: "
            "start again, with a lower dataset_num_proc if it happens again"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)
        _work = None


_work: Callable[[Any], Any] | None = None  # of this process, inherited by those it forks


def _do(task: Any) -> Any:
    assert _work is not None
    return _work(task)


def _start(parent: int) -> None:
    """One thread a process; and an end when the process that forked this one has been killed."""
    torch.set_num_threads(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
