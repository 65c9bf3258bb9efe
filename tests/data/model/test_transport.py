"""Batches on their way out of a worker, with little shared memory; the mount is in a namespace of its own."""

import os
import subprocess
import sys

import pytest

from tests.e2e.ranks import ROOT, why_no_namespace, with_shared_memory_of

LOADER = """
import logging, sys
import torch
from torch.utils.data import DataLoader
from swift_vlpack.data.model import transport
from swift_vlpack.data.model.collate import batch_of

logging.basicConfig(level=logging.INFO)
NUM = 24

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return NUM
    def __getitem__(self, index):
        return index

def collate(indices):
    [index] = indices
    size = 40_000 if index % 2 else 300_000  # 0.16 and 1.2 MB
    batch = batch_of({"pixel_values": torch.full((size,), float(index)), "input_ids": torch.arange(9)}, "record", {})
    return transport.carried(batch) if sys.argv[1] == "carried" else batch

loader = DataLoader(Rows(), batch_size=1, collate_fn=collate, num_workers=2, prefetch_factor=4,
                    multiprocessing_context=sys.argv[2])
seen = []
for _ in range(2):
    for index, batch in enumerate(loader):
        assert float(batch["pixel_values"].sum()) == index * (40_000 if index % 2 else 300_000)
        assert batch.record == "record" and batch["input_ids"].tolist() == list(range(9))
        seen.append(index)
print("batches", len(seen), "free", transport.free_shared_memory())
"""


@pytest.fixture(scope="module")
def namespaces():
    if reason := why_no_namespace():
        pytest.skip(reason)


@pytest.mark.usefixtures("namespaces")
def test_batches_arrive_where_shared_memory_is_short():
    """RANKS-9: one batch fits, all that are fetched ahead do not."""
    done = with_shared_memory_of("2m", "-c", LOADER, "carried", "fork")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "batches 48" in done.stdout
    assert done.stderr.count("MB free and a batch takes 1.2 MB") == 1
    assert "--shm-size" in done.stderr
    assert "No space left" not in done.stderr


def test_batches_go_through_shared_memory_where_there_is_enough():
    """RANKS-9: nothing changes, and nothing stays there."""
    done = subprocess.run(
        [sys.executable, "-c", LOADER, "carried", "fork"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "batches 48" in done.stdout
    assert "MB free" not in done.stderr


def test_batch_that_cannot_be_sent_is_an_error_that_names_it():
    """RANKS-9: in the worker, with its traceback; a queue's thread would print it and the trainer wait."""
    code = LOADER.replace('"record", {}', '"record", {"lock": __import__("threading").Lock()}')
    done = subprocess.run(
        [sys.executable, "-c", code, "carried", "fork"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "in DataLoader worker process 0" in done.stderr
    assert "cannot pickle '_thread.lock' object" in done.stderr
