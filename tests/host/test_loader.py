"""The loader of packs over ms-swift's own, with workers that are forked."""

import gc
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset

from swift_vlpack.host.launch import plugin_path
from swift_vlpack.host.loader import PackLoader
from tests.marks import telling

NUM_OBJECTS = 300_000
PROGRAM = """import gc
from swift.arguments import SftArguments
from swift.utils import import_external_file
import_external_file({plugin!r})
frozen = gc.get_freeze_count()
from swift_vlpack.host.garbage import shared_with_forks
with shared_with_forks():
    pass
print(frozen, gc.get_freeze_count(), gc.isenabled())
"""


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


@pytest.fixture
def nothing_passed_over():
    """As in a notebook; the suite lets collections pass over what is imported (`conftest.py`)."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_passed_over")
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


@pytest.mark.parametrize(("program", "passes_over"), [("swift/cli/sft.py", True), telling("notebook/cell.py", False)])
def test_collections_of_a_process_that_only_trains_pass_over_what_is_imported(program, passes_over, tmp_path):
    """TRAIN-28: from where the plugin is loaded; in a notebook a former model has to be collected."""
    file = tmp_path / program
    file.parent.mkdir(parents=True)
    file.write_text(PROGRAM.format(plugin=str(plugin_path())))
    environ = {**os.environ, "PYTHONPATH": str(Path(plugin_path()).parents[2])}
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, env=environ, check=True)
    num_passed_over, num_after_fork, is_enabled = done.stdout.splitlines()[-1].split()
    assert is_enabled == "True"
    assert num_passed_over == num_after_fork
    assert int(num_passed_over) > 100_000 if passes_over else num_passed_over == "0"
