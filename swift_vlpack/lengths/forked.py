"""Do tasks in processes that are forked with everything they need, so that only tasks and results are pickled.

The pools of the standard library do not fit: `multiprocessing.Pool` waits for ever for a worker that was killed, and
`ProcessPoolExecutor` cannot end busy workers at once before Python 3.14, as a pass that finds a difference has to.
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
"""Tasks that wait in a process besides the one it works on, so that it is never idle; few, so that all end together."""
_SECONDS_BETWEEN_LOOKS = 2.0  # of a worker, at whether the process that forked it still lives

Work = Callable[[Any], Any]


def results(work: Work, tasks: deque[Any], num_processes: int) -> Iterator[Any]:
    """Yield the result of each task, in order. The caller may add tasks while it takes results.

    Fewer than two processes means this process.

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
    """The cause of the error, which pickle forgets; for an unexpected error, its traceback."""

    def get(self) -> Any:
        if self.error is not None:
            raise self.error from self.cause
        return self.value


class _Worker:
    """A process, and the numbers of the tasks it was given; it does them in order."""

    def __init__(self, work: Work) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, its_end = context.Pipe()
        self.process: ForkProcess = context.Process(target=_serve, args=(work, its_end, os.getpid()))
        self.process.start()
        # Closed here, so that the pipe ends when the worker dies: while this process holds the end open, it would not.
        its_end.close()
        self.numbers: deque[int] = deque()

    def give(self, number: int, task: Any) -> None:
        self.numbers.append(number)
        try:
            self.pipe.send(task)
        except OSError as error:  # the process is gone
            raise _killed() from error

    def take(self) -> tuple[int, _Answer]:
        try:
            answer: _Answer = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise _killed() from error
        return self.numbers.popleft(), answer


class _Crew:
    """Processes that share tasks; each is given the next one as soon as it has room."""

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
            # Errors wait for their turn, too, so that the results before them are not lost.
            yield waiting.pop(num_yielded).get()
            num_yielded += 1

    def _give(self, tasks: deque[Any], number: int, num_open: int) -> int:
        """Give out tasks, numbered from `number` on. Returns how many.

        At most so many are open that results do not pile up behind one slow task.
        """
        most = 2 * (1 + _NUM_AHEAD) * len(self._workers) - num_open
        start = number
        while tasks and number - start < most:
            # To the least busy one: tasks take from milliseconds to seconds, so that with turns some would be idle.
            worker = min(self._workers, key=lambda worker: len(worker.numbers))
            if len(worker.numbers) > _NUM_AHEAD:
                break
            worker.give(number, tasks.popleft())
            number += 1
        return number - start

    def _take(self) -> list[tuple[int, _Answer]]:
        """Wait for at least one result."""
        busy = [worker for worker in self._workers if worker.numbers]
        # Wait for the sentinels, too: workers forked later hold a pipe open, so that it does not end with its process.
        ready = wait([end for worker in busy for end in (worker.pipe, worker.process.sentinel)])
        taken = []
        for worker in busy:
            if worker.pipe in ready:
                taken.append(worker.take())
            # A dead process may have sent results before; they are taken first.
            elif worker.process.sentinel in ready and not worker.pipe.poll():
                raise _killed()
        return taken


@contextmanager
def _crew(work: Work, num_processes: int) -> Iterator[_Crew]:
    """Start processes, and kill them at the end whatever they do: nobody needs the results of an interrupted pass."""
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
        "a process of the length pass was killed, perhaps for want of memory. What was measured is remembered: "
        "start again, with a lower dataset_num_proc if it happens again"
    )


# -- in a worker process ----------------------------------------------------------------------------------------------


def _serve(work: Work, pipe: Connection, parent: int) -> None:
    """Do tasks one after the other, until this process is killed or the one that forked it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent process, which kills this one
    # The processes share the cores already; more threads in each would only compete for them.
    torch.set_num_threads(1)
    # A daemon, because it waits for an end that may never come.
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
    """Return the error; if it cannot be pickled and read back, one with the same text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    # `sys.exit` would only end this thread.
    os._exit(1)
