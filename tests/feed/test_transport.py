"""Batches on their way out of a worker, with little shared memory; the mount is in a namespace of its own."""

import logging
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from swift_vlpack.feed import collate as transport
from swift_vlpack.feed.collate import batch_of
from tests.namespaces import why_no_namespace, with_shared_memory_of

NUM = 24


class Rows(Dataset):
    def __len__(self):
        return NUM

    def __getitem__(self, index):
        return index


def num_floats(index):
    return 40_000 if index % 2 else 300_000  # 0.16 and 1.2 MB


def collate(indices, **beside):
    [index] = indices
    pixels = torch.full((num_floats(index),), float(index))
    return transport.carried(batch_of({"pixel_values": pixels, "input_ids": torch.arange(9)}, "record", beside))


def loader(collate_fn=collate):
    return DataLoader(
        Rows(), batch_size=1, collate_fn=collate_fn, num_workers=2, prefetch_factor=4, multiprocessing_context="fork"
    )


def load_twice():
    for _ in range(2):
        num_batches = 0
        for index, batch in enumerate(loader()):
            assert float(batch["pixel_values"].sum()) == index * num_floats(index)
            assert batch.record == "record"
            assert batch["input_ids"].tolist() == list(range(9))
            num_batches += 1
        assert num_batches == NUM


@pytest.fixture(scope="module")
def namespaces():
    if reason := why_no_namespace():
        pytest.skip(reason)


@pytest.mark.usefixtures("namespaces")
@pytest.mark.slow
@pytest.mark.telling
def test_batches_arrive_where_shared_memory_is_short():
    """RANKS-9: one batch fits, all that are fetched ahead do not."""
    done = with_shared_memory_of("2m", "-m", "tests.feed.test_transport")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("MB free and a batch takes 1.2 MB") == 1
    assert "--shm-size" in done.stderr
    assert "No space left" not in done.stderr


def test_batches_go_through_shared_memory_where_there_is_enough(caplog):
    """RANKS-9: nothing changes, and nothing stays there."""
    free = transport.free_shared_memory()
    load_twice()
    assert "MB free" not in caplog.text
    assert transport.free_shared_memory() >= free - 1_000_000, "of 36 MB that went through"


def test_batch_that_cannot_be_sent_is_an_error_that_names_it():
    """RANKS-9: in the worker, with its traceback; a queue's thread would print it and the trainer wait."""
    with pytest.raises(TypeError, match=r"(?s)in DataLoader worker process 0.*cannot pickle '_thread.lock' object"):
        next(iter(loader(lambda indices: collate(indices, lock=threading.Lock()))))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    load_twice()
