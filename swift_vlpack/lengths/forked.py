"""Run tasks in forked processes, which inherit everything they need: only tasks and results are pickled.

torch's `DataLoader` does the work: it keeps the order, notices a worker that was killed, and ends workers with their
parent process.
"""

from __future__ import annotations

import pickle
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from swift_vlpack.errors import VLPackError

Work = Callable[[Any], Any]
_KILLED = (
    "a process of the length pass was killed, perhaps because memory ran out. The lengths measured so far are saved: "
    "start again, with a lower dataset_num_proc if it happens again"
)


def results(work: Work, tasks: deque[Any], num_processes: int) -> Iterator[Any]:
    """Yield the result of each task, in order. The caller may add tasks while it takes results.

    With `num_processes` below 2 the tasks run in this process.

    >>> list(results(lambda task: 2 * task, deque([1, 2, 3]), num_processes=1))
    [2, 4, 6]
    """
    if num_processes < 2:
        while tasks:
            yield work(tasks.popleft())
    while tasks:  # once more for tasks that were added after the last one was given away
        loader: DataLoader[Any] = DataLoader(
            _Tasks(work),  # type: ignore[arg-type]
            sampler=_taken(tasks),
            batch_size=None,
            collate_fn=_as_it_is,  # type: ignore[arg-type]
            num_workers=num_processes,
            multiprocessing_context="fork",
            generator=torch.Generator(),  # the seed of workers must not be drawn from the random numbers of training
        )
        yield from _unpacked(loader)


def _unpacked(loader: DataLoader[Any]) -> Iterator[Any]:
    answers = iter(loader)
    try:
        while (answer := next(answers, None)) is not None:
            if answer.error is not None:
                raise answer.error from answer.cause
            yield answer.value
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise VLPackError(_KILLED) from None  # the error would keep the iterator, and so the workers, alive
    finally:
        del answers  # ends the workers: whatever they still do is no longer needed


class _Answer(NamedTuple):
    """The result of a task, or the error that it raised with its cause, which pickle does not keep."""

    value: Any = None
    error: BaseException | None = None
    cause: BaseException | None = None


class _Tasks:
    """The tasks as a data set: the index of a result is its task."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __getitem__(self, task: Any) -> _Answer:
        try:
            return _Answer(self._work(task))
        except BaseException as error:
            cause = error.__cause__ if isinstance(error, VLPackError) else RuntimeError(traceback.format_exc())
            return _Answer(error=_picklable(error), cause=cause and _picklable(cause))


def _taken(tasks: deque[Any]) -> Iterator[Any]:
    while tasks:
        yield tasks.popleft()


def _as_it_is(answer: _Answer) -> _Answer:
    return answer


def _picklable(error: BaseException) -> BaseException:
    """Return the error or, if it cannot be pickled and read back, a `RuntimeError` with the same text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
