"""Work in forked processes: in order, with what cannot be pickled, and with no process left behind."""

import multiprocessing
import os
import signal
import threading
import time
from collections import deque

import pytest

from swift_vlpack.errors import DataError, VLPackError
from swift_vlpack.lengths import forked


def all_of(work, tasks, num_processes=2):
    return list(forked.results(work, deque(tasks), num_processes))


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_results_come_in_order_whatever_takes_longest(num_processes):
    """LEN-6: and none is lost where there are more or fewer tasks than processes."""

    def work(number):
        time.sleep(0.05 if number == 0 else 0)
        return number, os.getpid()

    for num_tasks in (0, 1, 2, 60):
        done = all_of(work, range(num_tasks), num_processes)
        assert [number for number, _ in done] == list(range(num_tasks))
        processes = {process for _, process in done}
        if num_processes == 1:
            assert processes <= {os.getpid()}
        elif num_tasks == 60:
            assert len(processes) == num_processes
            assert os.getpid() not in processes


@pytest.mark.parametrize("num_processes", [1, 2])
def test_whoever_takes_a_result_may_add_tasks(num_processes):
    """LEN-3: rows to compare are found while others are measured; also behind the last one."""
    tasks, seen = deque([8, 1]), []
    for value in forked.results(lambda number: number, tasks, num_processes):
        seen.append(value)
        if value > 1:
            tasks.appendleft(value // 2)
    assert sorted(seen) == [1, 1, 2, 4, 8]


def test_work_is_inherited_and_not_pickled():
    """LEN-6: a lock, a lambda, and what is large are there at once; each pass has its own."""
    lock, large = threading.Lock(), list(range(1000))

    def work(number):
        with lock:
            return large[number]

    one, other = (forked.results(function, deque([1, 2, 3]), 2) for function in (work, lambda number: -number))
    assert list(zip(one, other, strict=True)) == [(1, -1), (2, -2), (3, -3)]


class NeedsTwo(Exception):
    """Cannot be made anew of what pickle keeps."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(
    ("raised", "kind", "cause"),
    [
        (DataError("row 7: file_missing"), DataError, type(None)),
        (KeyError("bug"), KeyError, RuntimeError),
        (NeedsTwo("this", "that"), RuntimeError, RuntimeError),
    ],
)
def test_error_in_a_process_is_raised_here(raised, kind, cause):
    """LEN-11 LEN-12: one that nobody foresaw with the place where it was raised."""

    def work(number):
        if number == 5:
            raise raised
        return number

    done = forked.results(work, deque(range(100)), 2)
    assert [next(done) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(kind) as caught:
        list(done)
    assert str(raised) in str(caught.value)
    assert isinstance(caught.value.__cause__, cause)
    assert caught.value.__cause__ is None or "in work\n" in str(caught.value.__cause__)
    assert multiprocessing.active_children() == []


def test_cause_of_a_mistake_is_not_lost():
    """LEN-11: what is a bug below a mistake keeps its traceback."""

    def work(number):
        raise DataError("row 7: encode_failed") from KeyError("bug")

    with pytest.raises(DataError, match="row 7") as caught:
        all_of(work, [1])
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("at", [0, 20])
def test_process_that_is_killed_ends_the_pass_with_one_error(at):
    """LEN-8: also one that is killed while others have results to come."""

    def work(number):
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with pytest.raises(VLPackError, match=r"was killed.*lower dataset_num_proc"):
        all_of(work, range(50))
    assert multiprocessing.active_children() == []


def test_no_process_is_left_when_nobody_wants_the_rest():
    """LEN-8: a difference was found, and the others are in the middle of a row that takes for ever."""

    def work(number):
        time.sleep(600 if number else 0)
        return number

    done = forked.results(work, deque(range(10)), 3)
    assert next(done) == 0
    assert len(multiprocessing.active_children()) == 3
    done.close()
    assert multiprocessing.active_children() == []
