"""Batches on their way out of a worker: the same numbers, in memory that is written again only when it is free."""

import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from swift_vlpack.feed import transport
from swift_vlpack.feed.collate import batch_of
from swift_vlpack.feed.transport import AsBytes, Buffers, Written, anonymous_file
from tests.marks import telling
from tests.namespaces import why_no_namespace, with_shared_memory_of

NUM = 24
PREFETCH = 4
LARGE = 1 << 17  # floats: 512 kB


class Rows(Dataset):
    def __len__(self):
        return NUM

    def __getitem__(self, index):
        return index


def num_floats(index):
    return LARGE if index % 2 else 3 * LARGE


class Collate:
    """Makes batches in a worker as `WorkerCollator` does."""

    def __init__(self, **beside):
        self.buffers = Buffers()
        self.beside = beside

    def made(self, index):
        halves = torch.full((num_floats(index),), float(index)).chunk(2)
        tensors = {"pixel_values": torch.cat([torch.cat(halves)]), "input_ids": torch.arange(9)}
        return batch_of({**tensors, "buffer": len(self.buffers._buffers)}, "record", self.beside)

    def __call__(self, indices):
        [index] = indices
        return self.buffers.sent(4 * num_floats(index), partial(self.made, index))


def loader(collate_fn=None, context="fork", num_workers=1):
    return DataLoader(
        Rows(),
        collate_fn=collate_fn or Collate(),
        num_workers=num_workers,
        prefetch_factor=PREFETCH,
        multiprocessing_context=context,
    )


def check(index, batch):
    assert torch.equal(batch["pixel_values"], torch.full((num_floats(index),), float(index)))
    assert batch.record == "record"
    assert batch["input_ids"].tolist() == list(range(9))


def load_twice(context="fork"):
    for _ in range(2):
        for index, batch in enumerate(loader(context=context, num_workers=2)):
            check(index, batch)
        assert index == NUM - 1


def here(sent):
    """Bring a batch to "the trainer", which is this process."""
    return pickle.loads(pickle.dumps(sent))


@pytest.fixture
def buffer(monkeypatch):
    monkeypatch.setattr(transport, "MOST_INLINE_BYTES", 0)
    return Buffers().take(16 * LARGE)


# -- through a loader -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_batches_arrive_as_they_were_made(context):
    """RANKS-9: from forked and from spawned workers."""
    load_twice(context)


def test_worker_writes_where_the_trainer_is_done():
    """RANKS-9: as many buffers as batches are ahead, one that is written and one that is read; not one for each."""
    assert max(batch["buffer"] for batch in loader()) <= PREFETCH + 3 < NUM


def test_batches_that_the_trainer_keeps_are_not_written_again():
    """RANKS-9"""
    kept = list(loader())
    assert kept[-1]["buffer"] == NUM
    for index, batch in enumerate(kept):
        check(index, batch)


@pytest.fixture(scope="module")
def namespaces():
    if reason := why_no_namespace():
        pytest.skip(reason)


@pytest.mark.usefixtures("namespaces")
@pytest.mark.slow
@pytest.mark.telling
def test_batches_arrive_where_shared_memory_is_short():
    """RANKS-9: not one batch would fit."""
    done = with_shared_memory_of("512k", "-m", "tests.feed.test_transport")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "No space left" not in done.stderr


def test_batches_arrive_where_there_is_no_anonymous_memory(monkeypatch):
    """RANKS-9: as bytes."""
    monkeypatch.setattr(transport, "anonymous_file", lambda: os.open("/nowhere/at/all", os.O_RDONLY))
    assert isinstance(Buffers().sent(8, partial(Collate().made, 0)), AsBytes)
    load_twice()


def test_batch_that_cannot_be_sent_is_an_error_that_names_it():
    """RANKS-9: in the worker, with its traceback; a queue's thread would print it and the trainer wait."""
    with pytest.raises(TypeError, match=r"(?s)in DataLoader worker process 0.*cannot pickle '_thread.lock' object"):
        next(iter(loader(MakesALock())))


class MakesALock(Collate):
    def made(self, index):
        return batch_of(super().made(index), "record", {"lock": threading.Lock()})


# -- in one process ---------------------------------------------------------------------------------------------------


def test_buffer_is_free_when_the_last_tensor_is_gone(buffer):
    """RANKS-9"""
    with Written(buffer) as written:
        sent = written.sent({"a": torch.arange(4), "b": torch.arange(5)})
    assert not buffer.is_free
    batch = here(sent)
    a = batch.pop("a")
    del batch
    gc.collect()
    assert not buffer.is_free
    assert a.tolist() == [0, 1, 2, 3]
    del a
    assert buffer.is_free


UNREAD = """
import os, time, torch
from torch.utils.data import DataLoader
from swift_vlpack.feed.collate import WorkerCollator

class Texts(WorkerCollator):
    def __init__(self):
        pass
    def sequence(self, pack):
        return {"input_ids": torch.zeros(25_000, dtype=torch.int64)}  # inline, and more than a pipe holds

if __name__ == "__main__":
    loader = DataLoader([[n] for n in range(64)], collate_fn=Texts(), num_workers=2, prefetch_factor=4,
                        multiprocessing_context="CONTEXT")
    batches = iter(loader)
    next(batches)
    time.sleep(1)  # the pipe is full now
    print(*(worker.pid for worker in batches._workers), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("context", ["fork", *map(telling, ["spawn", "forkserver"])])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_process_that_reads_them(number, context, tmp_path):
    """RANKS-19: although the last batches that they made are read by no one."""
    (tmp_path / "unread.py").write_text(UNREAD.replace("CONTEXT", context))
    with subprocess.Popen([sys.executable, tmp_path / "unread.py"], stdout=subprocess.PIPE, text=True) as run:
        workers = [Path("/proc", pid) for pid in run.stdout.readline().split()]
        assert len(workers) == 2
        assert all(worker.exists() for worker in workers)
        run.send_signal(number)
    deadline = time.monotonic() + 20
    while any(worker.exists() for worker in workers):
        assert time.monotonic() < deadline, "a worker is left"
        time.sleep(0.1)


def test_small_batch_leaves_its_buffer_at_once():
    """RANKS-9: as a copy, which is quicker than to hand over the buffer."""
    buffers = Buffers()
    kept = [here(buffers.sent(0, partial(torch.full, (9,), number))) for number in range(3)]
    assert [tensor.tolist() for tensor in kept] == [[number] * 9 for number in range(3)]
    assert len(buffers._buffers) == 1
    kept[0].zero_()  # a trainer may write


def test_forked_process_that_drops_its_copy_frees_nothing(buffer):
    """RANKS-9: workers of evaluation, say, which are forked while the trainer reads a batch."""
    batch = here(Written(buffer).sent({"a": torch.arange(4)}))
    if not (child := os.fork()):
        del batch
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not buffer.is_free
    assert batch["a"].tolist() == [0, 1, 2, 3]


def test_large_tensors_are_joined_in_the_buffer_and_only_once(buffer):
    """RANKS-9: the same numbers as torch's, at the place from where they are read."""
    parts = [torch.randn(LARGE // 8, 8), torch.randn(LARGE // 8, 8)]
    with Written(buffer) as written:
        joined = torch.concat(parts)
        again = torch.cat([joined], dim=0)
        batch = here(written.sent({"pixels": again}))
    assert written._offset(joined) is not None
    assert again is joined
    assert torch.equal(batch["pixels"], torch.cat(parts))


@pytest.mark.parametrize(
    "parts",
    [
        [torch.ones(4), torch.ones(3)],
        [torch.ones(LARGE), torch.ones(LARGE, dtype=torch.float64)],
        [torch.ones(LARGE), torch.ones(LARGE, requires_grad=True)],
        [torch.ones(0), torch.ones(2, LARGE)],
    ],
    ids=["small", "of two types", "with gradient", "of other shapes"],
)
def test_other_joins_are_those_of_torch(buffer, parts):
    """RANKS-9"""
    expected = torch.cat(parts)
    with Written(buffer) as written:
        made = torch.cat(parts)
        across = torch.cat([torch.ones(2, LARGE), torch.zeros(2, LARGE)], dim=1)
        out = torch.cat([torch.ones(LARGE)] * 2, out=torch.empty(2 * LARGE))
    assert written._offset(made) is None
    assert made.dtype is expected.dtype
    assert made.requires_grad == expected.requires_grad
    assert torch.equal(made, expected)
    assert written._offset(across) is None
    assert across.sum() == 2 * LARGE
    assert written._offset(out) is None
    assert out.sum() == 2 * LARGE


def test_tensors_of_every_kind_arrive_with_their_numbers(buffer):
    """RANKS-9: also views, and a tensor that a batch has twice."""
    ends = torch.arange(5, dtype=torch.int32)
    grid = torch.randn(6, 4)
    batch = {
        "bf16": torch.randn(7).bfloat16(),
        "bool": torch.tensor([True, False]),
        "number": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "view": grid[2:],
        "turned": grid.T,
        "spread": torch.arange(3).expand(4, 3),
        "nested": [{"deep": (grid,)}],
        "weight": torch.nn.Parameter(torch.ones(2)),
        "words": ["a", None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
    }
    came = here(Written(buffer).sent(batch))
    assert list(came) == list(batch)
    assert came["cu_seq_lens_q"] is came["cu_seq_lens_k"]
    assert isinstance(came["weight"], torch.nn.Parameter)
    assert torch.equal(came["nested"][0]["deep"][0], grid)
    assert came["words"] == ["a", None]
    for name in batch.keys() - {"nested", "words"}:
        assert came[name].dtype is batch[name].dtype, name
        assert came[name].shape == batch[name].shape, name
        assert torch.equal(came[name], batch[name]), name
    came["bf16"].zero_()  # a trainer may write


def test_buffer_grows_and_is_chosen_by_its_size():
    """RANKS-9: what was joined in it before it grew stays."""
    buffers = Buffers()
    more = torch.randn(100 * LARGE)  # 50 MB, which nobody announced

    def make():
        return {"pixels": torch.cat([torch.ones(LARGE)] * 2), "more": more, "late": torch.ones(LARGE)}

    came = here(buffers.sent(8 * LARGE, make))
    assert torch.equal(came["more"], more)
    assert came["pixels"].sum() == 2 * LARGE
    assert came["late"].sum() == LARGE
    small = here(buffers.sent(0, lambda: torch.ones(2 * LARGE)))
    first, second = buffers._buffers
    assert first.num_bytes > second.num_bytes
    del came, small
    assert buffers.take(second.num_bytes) is second
    assert buffers.take(second.num_bytes + 1) is first
    assert buffers.take(2 * first.num_bytes) is first
    assert len(buffers._buffers) == 2


def test_anonymous_memory_without_pythons_own_function(monkeypatch):
    """RANKS-9: the Python of conda has none."""
    monkeypatch.delattr(os, "memfd_create")
    number = anonymous_file()
    os.ftruncate(number, 10)
    assert os.fstat(number).st_size == 10
    os.close(number)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    load_twice()
