"""Several processes, killed ones, and the memory they take."""

import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.multiprocessing as mp

from swift_vlpack.lengths import measure
from swift_vlpack.lengths.cache import LengthCache
from swift_vlpack.lengths.cache_folder import lengths_path
from swift_vlpack.lengths.rows_work import RowsWork
from tests.data_rows import image_row, text_row
from tests.host.lengths.support import ARGS, caches_of, dataset, source, texts, with_lengths
from tests.images import photo


def _slow_pass(template, rows, folder):
    """In a session of its own, so that whoever it leaves behind can be found."""
    os.setsid()
    real = RowsWork._measured

    def slow(self, positions):
        time.sleep(0.03)
        return real(self, positions)

    RowsWork._measured = slow
    measure._CHUNK_BY_HEADER = 4
    with_lengths(source(rows), template, SimpleNamespace(dataset_num_proc=2, strict=False), str(folder))
    os._exit(0)


def _members(session):
    """Living processes of a session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, own = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:4]
        except OSError:
            continue
        if int(own) == session and state != "Z":
            found.append(int(folder.name))
    return found


def killed_again_and_again(template, folder, num_kills, monkeypatch):
    """Start, kill -9 at a random moment, look at the file, and start again."""
    rows = dataset([*texts(500), *[image_row([photo(folder, str(n), 60 + n, 90)]) for n in range(20)]])
    with monkeypatch.context() as patch:
        caches = caches_of(patch)
        right = with_lengths(source(rows), template, ARGS, str(folder / "never killed")).sizes
    context = caches[0].context
    rng, sessions, num_known, num_part = random.Random(0), [], [0], 0
    start = time.monotonic()  # a run that nobody kills says how long one takes on this machine
    alone = mp.get_context("fork").Process(target=_slow_pass, args=(template, rows, folder / "alone"))
    alone.start()
    alone.join()
    seconds = time.monotonic() - start
    for number in range(num_kills):
        cached = folder / "killed" / str(len(num_known))
        process = mp.get_context("fork").Process(target=_slow_pass, args=(template, rows, cached))
        process.start()
        process.join(rng.uniform(0, seconds))
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        is_done = process.exitcode == 0
        sessions.append(process.pid)
        cache = LengthCache(lengths_path(cached, "rows", context), context)
        keys = cache.keys(rows)
        (is_known, sizes), (is_unchecked, unchecked) = (of.of(keys) for of in (cache.load(), cache.load_unchecked()))
        assert (sizes["length"][is_known] == right.lengths[is_known]).all(), f"kill {number} left a wrong size"
        assert (unchecked["length"][is_unchecked] == right.lengths[is_unchecked]).all()
        is_known |= is_unchecked
        assert is_known.sum() >= num_known[-1], f"kill {number} lost what was done"
        num_part += bool(0 < is_known.sum() < len(rows))
        num_known[-1] = int(is_known.sum())
        if is_done:
            assert is_known.all()
            num_known.append(0)  # a new file
    last = with_lengths(source(rows), template, ARGS, str(cached)).sizes
    assert last.columns.tolist() == right.columns.tolist()
    assert num_part > num_kills / 4, "hardly a run was hit in the middle"
    deadline = time.monotonic() + 10
    while (left := [pid for session in sessions for pid in _members(session)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == [], "processes are left behind"


@pytest.mark.slow
@pytest.mark.telling
def test_killed_runs_keep_what_they_did_and_are_never_wrong(template, tmp_path, monkeypatch):
    """LEN-8: 10 times."""
    killed_again_and_again(template, tmp_path, 10, monkeypatch)


class Numbered:
    """Rows that are made when they are asked for, so that memory is the pass's own."""

    def __init__(self, num_rows):
        self.num_rows = num_rows

    def __len__(self):
        return self.num_rows

    def __getitem__(self, index):
        return text_row(f"row {index}")


def _status(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def _peak(template, num_rows, folder, num_processes, answers):
    before = _status("VmRSS")
    args = SimpleNamespace(dataset_num_proc=num_processes, strict=False)
    sizes = with_lengths(source(Numbered(num_rows)), template, args, str(folder)).sizes
    answers.put((_status("VmHWM") - before, int((sizes.lengths > 0).sum())))


def peak_megabytes(template, num_rows, folder, num_processes=2):
    """Most memory that the length pass takes above what there was."""
    context = mp.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_peak, args=(template, num_rows, folder, num_processes, answers))
    process.start()
    peak, num_measured = answers.get()
    process.join()
    assert num_measured == num_rows
    return peak


@pytest.mark.slow
def test_one_million_rows_take_less_than_300_megabytes(template, tmp_path):
    """LEN-14: cold with the real template in 2 processes, then from the file."""
    cold = {num_rows: peak_megabytes(template, num_rows, tmp_path) for num_rows in (50_000, 1_000_000)}
    warm = peak_megabytes(template, 1_000_000, tmp_path)
    print(f"cold {cold}, warm {warm}")
    assert max(*cold.values(), warm) < 300
