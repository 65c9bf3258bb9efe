"""The loader of packs over ms-swift's own, with workers that are forked."""

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset

from swift_vlpack.host.loader import PackLoader

NUM_OBJECTS = 300_000


class Collecting(Dataset):
    """Collects garbage in the process that reads it."""

    def __init__(self):
        self.objects = [[] for _ in range(NUM_OBJECTS)]  # of 72 bytes each

    def __len__(self):
        return 2

    def __getitem__(self, index):
        before = private_mb()
        gc.collect()
        return torch.tensor([private_mb() - before])


def private_mb():
    """What this process shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


@pytest.mark.parametrize("num_workers", [1, 2])
def test_full_collection_in_a_worker_copies_nothing_of_the_process_that_forked_it(num_workers):
    """RANKS-15: it would write to all that both share, 170 MB of a run; the forking process goes on to collect."""
    feed = SimpleNamespace(batches=iter)
    loader = PackLoader(Collecting(), feed=feed, batch_size=1, num_workers=num_workers, prefetch_factor=1)
    grown = []
    for batch in loader:
        grown.append(float(batch))
        assert gc.get_freeze_count() == 0
    assert len(grown) == 2
    assert max(grown) < 5
