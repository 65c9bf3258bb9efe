"""Run tasks in forked processes, which inherit everything they need: only tasks and results are pickled.

The pools of the standard library do not fit: `multiprocessing.Pool` waits forever for a worker that was killed. And
before Python 3.14, `ProcessPoolExecutor` cannot kill busy workers, as a length pass must when it finds a difference.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple

import torch

from swift_vlpack.errors import VLPackError

_NUM_AHEAD = 2
"""Tasks that wait in a process besides the one it works on: enough that it is never idle, few enough that all processes
end at about the same time."""
_SECONDS_BETWEEN_LOOKS = 2.0  # how often a worker checks that its parent process is alive

Work = Callable[[Any], Any]


def results(work: Work, tasks: deque[Any], num_processes: int) -> Iterator[Any]:
    """Yield the result of each task, in order. The caller may add tasks while it takes results.

    With `num_processes` below 2 the tasks run in this process.

    >>> list(results(lambda task: 2 * task, deque([1, 2, 3]), num_processes=1))
    [2, 4, 6]
    """
    if num_processes < 2:
        while tasks:
            yield work(tasks.popleft())
    else:
        with _crew(work, num_processes) as crew:
            yield from crew.results(tasks)


class _Answer(NamedTuple):
    """The result of a task, or the error that it raised."""

    value: Any = None
    error: BaseException | None = None
    cause: BaseException | None = None
    """The cause of the error, which pickle does not keep; for an unexpected error, its traceback."""

    def get(self) -> Any:
        if self.error is not None:
            raise self.error from self.cause
        return self.value


class _Worker:
    """A worker process, and the numbers of its open tasks, which it does in order."""

    def __init__(self, work: Work) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, its_end = context.Pipe()
        self.process: ForkProcess = context.Process(target=_serve, args=(work, its_end, os.getpid()))
        self.process.start()
        # Close the worker's end in this process: otherwise the pipe would not end when the worker dies.
        its_end.close()
        self.numbers: deque[int] = deque()

    def give(self, number: int, task: Any) -> None:
        self.numbers.append(number)
        try:
            self.pipe.send(task)
        except OSError as error:  # the worker is gone
            raise _killed() from error

    def take(self) -> tuple[int, _Answer]:
        try:
            answer: _Answer = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise _killed() from error
        return self.numbers.popleft(), answer


class _Crew:
    """Worker processes that share tasks. A worker gets the next task as soon as it has room."""

    def __init__(self, workers: list[_Worker]) -> None:
        self._workers = workers

    def results(self, tasks: deque[Any]) -> Iterator[Any]:
        waiting: dict[int, _Answer] = {}
        num_given = num_yielded = 0
        while True:
            num_given += self._give(tasks, num_given, num_given - num_yielded)
            if num_yielded == num_given:
                return
            while num_yielded not in waiting:
                waiting.update(self._take())
                num_given += self._give(tasks, num_given, num_given - num_yielded)
            # Raise an error only when it is its turn, so that the results before it are not lost.
            yield waiting.pop(num_yielded).get()
            num_yielded += 1

    def _give(self, tasks: deque[Any], number: int, num_open: int) -> int:
        """Give tasks to workers. The first task gets `number`. Returns the number of tasks given.

        The number of open tasks is limited, so that results do not pile up while they wait for a slow task.
        """
        most = 2 * (1 + _NUM_AHEAD) * len(self._workers) - num_open
        start = number
        while tasks and number - start < most:
            # Choose the least busy worker: tasks take milliseconds to seconds, so with turns some would be idle.
            worker = min(self._workers, key=lambda worker: len(worker.numbers))
            if len(worker.numbers) > _NUM_AHEAD:
                break
            worker.give(number, tasks.popleft())
            number += 1
        return number - start

    def _take(self) -> list[tuple[int, _Answer]]:
        """Wait for at least one result."""
        busy = [worker for worker in self._workers if worker.numbers]
        # Wait for the processes, too: workers forked later hold the pipe open, so it does not end with its worker.
        ready = wait([end for worker in busy for end in (worker.pipe, worker.process.sentinel)])
        taken = []
        for worker in busy:
            if worker.pipe in ready:
                taken.append(worker.take())
            # A dead worker may have sent results before; take these first.
            elif worker.process.sentinel in ready and not worker.pipe.poll():
                raise _killed()
        return taken


@contextmanager
def _crew(work: Work, num_processes: int) -> Iterator[_Crew]:
    """Start workers, and kill them when the block ends: whatever they still do is no longer needed."""
    workers: list[_Worker] = []
    try:
        workers.extend(_Worker(work) for _ in range(num_processes))
        yield _Crew(workers)
    finally:
        # Kill all before waiting for any, so that they end together and not one after the other.
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()
            worker.process.close()
            worker.pipe.close()


def _killed() -> VLPackError:
    return VLPackError(
        "a process of the length pass was killed, perhaps because memory ran out. The lengths measured so far are "
        "saved: start again, with a lower dataset_num_proc if it happens again"
    )


# -- in a worker process ----------------------------------------------------------------------------------------------


def _serve(work: Work, pipe: Connection, parent: int) -> None:
    """Do tasks one by one until this process is killed or its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent process, which kills this one
    # The worker processes share the cores already; more threads in each would only compete for them.
    torch.set_num_threads(1)
    # Make it a daemon thread, which does not keep this process alive: it runs as long as the parent does.
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    while True:
        task = pipe.recv()
        try:
            answer = _Answer(work(task))
        except BaseException as error:
            cause = error.__cause__ if isinstance(error, VLPackError) else RuntimeError(traceback.format_exc())
            answer = _Answer(error=_picklable(error), cause=cause and _picklable(cause))
        pipe.send(answer)


def _picklable(error: BaseException) -> BaseException:
    """Return the error or, if it cannot be pickled and read back, a `RuntimeError` with the same text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _end_with(parent: int) -> None:
    """End this process once its parent is gone."""
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    # `sys.exit` would only end this thread.
    os._exit(1)
