"""Work in processes that are forked with it, so that nothing of what it needs has to be pickled."""

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
"""Tasks that a process has besides the one it is at, so that it never waits; few, so that all end at once."""
_SECONDS_BETWEEN_LOOKS = 2.0

Work = Callable[[Any], Any]


class _Answer(NamedTuple):
    """What became of a task in another process."""

    value: Any = None
    error: BaseException | None = None
    cause: BaseException | None = None
    """Of the error: pickle forgets it; of one that nobody foresaw, where it was raised."""


def done(work: Work, tasks: deque[Any], num_processes: int) -> Iterator[Any]:
    """What becomes of each task, in order; whoever takes it may add further tasks meanwhile."""
    if num_processes < 2:
        while tasks:
            yield work(tasks.popleft())
    else:
        with _crew(work, num_processes) as crew:
            yield from crew.done(tasks)


class _Worker:
    """One process, and the tasks it has: it does them in order."""

    def __init__(self, work: Work) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, its_end = context.Pipe()
        self.process: ForkProcess = context.Process(target=_serve, args=(work, its_end, os.getpid()))
        self.process.start()
        # Closed here, so that the pipe ends when the process does, and not only with this one.
        its_end.close()
        self.numbers: deque[int] = deque()

    def give(self, number: int, task: Any) -> None:
        self.numbers.append(number)
        try:
            self.pipe.send(task)
        except OSError as error:  # nobody is there to read it
            raise _killed() from error

    def take(self) -> tuple[int, Any]:
        try:
            answer: _Answer = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise _killed() from error
        if answer.error is not None:
            raise answer.error from answer.cause
        return self.numbers.popleft(), answer.value


class _Crew:
    """Processes that share tasks; each is given the next one as soon as it has room."""

    def __init__(self, workers: list[_Worker]) -> None:
        self._workers = workers

    def done(self, tasks: deque[Any]) -> Iterator[Any]:
        results: dict[int, Any] = {}
        num_given = num_yielded = 0
        while True:
            num_given += self._given(tasks, num_given, num_given - num_yielded)
            if num_yielded == num_given:
                return
            while num_yielded not in results:
                results.update(self._taken())
                num_given += self._given(tasks, num_given, num_given - num_yielded)
            yield results.pop(num_yielded)
            num_yielded += 1

    def _given(self, tasks: deque[Any], number: int, num_open: int) -> int:
        """Give out tasks, numbered from `number` on; how many. One slow task does not let results pile up."""
        most = 2 * (1 + _NUM_AHEAD) * len(self._workers) - num_open
        start = number
        while tasks and number - start < most:
            # The least busy one: tasks take from milliseconds to seconds, so that taking turns would let some wait.
            worker = min(self._workers, key=lambda worker: len(worker.numbers))
            if len(worker.numbers) > _NUM_AHEAD:
                break
            worker.give(number, tasks.popleft())
            number += 1
        return number - start

    def _taken(self) -> list[tuple[int, Any]]:
        """At least one result. A process that is gone is found by its sentinel: others have its pipe open too."""
        busy = [worker for worker in self._workers if worker.numbers]
        ready = wait([end for worker in busy for end in (worker.pipe, worker.process.sentinel)])
        taken = []
        for worker in busy:
            if worker.pipe in ready:
                taken.append(worker.take())
            # What it sent before it died is still to be had.
            elif worker.process.sentinel in ready and not worker.pipe.poll():
                raise _killed()
        return taken


@contextmanager
def _crew(work: Work, num_processes: int) -> Iterator[_Crew]:
    """Processes that end with this, whatever they are at: of an interrupted pass nobody wants the results."""
    workers: list[_Worker] = []
    try:
        workers.extend(_Worker(work) for _ in range(num_processes))
        yield _Crew(workers)
    finally:
        # All are told before any is waited for, so that they end at once and not one after the other.
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


# -- in a process of its own ------------------------------------------------------------------------------------------


def _serve(work: Work, pipe: Connection, parent: int) -> None:
    """One thread a process; and an end when the process that forked this one has been killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that forked this one, which ends it
    # The processes share the cores already; threads of each would take the others' time.
    torch.set_num_threads(1)
    # A daemon: it waits for an end that may never come.
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    while True:
        task = pipe.recv()
        try:
            answer = _Answer(work(task))
        except BaseException as error:
            foreseen = error.__cause__ if isinstance(error, VLPackError) else RuntimeError(traceback.format_exc())
            answer = _Answer(error=_that_travels(error), cause=foreseen and _that_travels(foreseen))
        pipe.send(answer)


def _that_travels(error: BaseException) -> BaseException:
    """The error, or, where it cannot be pickled and made anew, one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    # Not `sys.exit`, which would only end this thread.
    os._exit(1)
