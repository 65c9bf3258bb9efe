"""The files of a checkpoint, recorded by some ranks and compared by others."""

import builtins
import json
import os
from pathlib import Path

import pytest
import torch

from swift_vlpack.comm import ALONE
from swift_vlpack.host.checkpoint_files import BYTES_OF_END, damages, recorded
from swift_vlpack.host.state import FILE, ROWS_FILE
from tests.ranks_in_threads import on_ranks


def written(folder, **content):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in content.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def checkpoint(tmp_path):
    folder = written(tmp_path / "checkpoint", weights="w" * 1000, optimizer="o" * 300)
    written(folder / "shards", one="1" * 10)
    (folder / "shards" / ".metadata").write_text("needed by torch, although it is hidden")
    (folder / ".state.json.partial").write_text("half")
    for name in (FILE, ROWS_FILE):  # left by an earlier run, or written after the records
        (folder / name).write_text("another")
    return folder


def records_of(folder):
    return recorded(folder, ALONE, is_first=True)


def test_whole_checkpoint_has_no_damage(checkpoint):
    """RESUME-14: files in folders too, under any number of ranks; a file that came later is no matter."""
    records = records_of(checkpoint)
    assert set(records) == {"weights", "optimizer", "shards/one", "shards/.metadata"}
    assert json.loads(json.dumps(records)) == records
    written(checkpoint, later="")
    for num_ranks in (1, 2, 5):
        assert on_ranks(num_ranks, lambda comm: damages(checkpoint, records, comm)) == [[]] * num_ranks
    os.remove(checkpoint / "later")
    assert on_ranks(3, lambda comm: recorded(checkpoint, comm, is_first=comm.rank == 0)) == [records] * 3


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("w" * 999 + "v", "is another file: its first or last 64 kB are not what was written"),
        ("v" + "w" * 999, "is another file: its first or last 64 kB are not what was written"),
        ("w" * 999, "is cut off: it has 999 bytes, 1,000 were written"),
        ("", "is empty: it has 0 bytes, 1,000 were written"),
        ("w" * 1001, "is another file: it has 1,001 bytes, 1,000 were written"),
        (None, "is missing"),
    ],
)
def test_every_damage_is_named_with_its_path_on_every_rank(content, told, checkpoint):
    """RESUME-14"""
    records = records_of(checkpoint)
    path = checkpoint / "weights"
    path.unlink() if content is None else path.write_text(content)
    assert damages(checkpoint, records, ALONE) == [f"{path} {told}"]
    for found in on_ranks(2, lambda comm: damages(checkpoint, records, comm)):
        assert found[0].startswith(f"{path} {told}")


def test_nodes_with_disks_of_their_own_see_their_own_files(tmp_path):
    """RESUME-14: two nodes of two ranks; `args.json` has other paths on each, and shards are on one only."""
    nodes = [
        written(tmp_path / str(node), weights="w" * 50, args=f"of node {node}", **{f"shard{node}": "s" * 20})
        for node in range(2)
    ]
    records, *others = on_ranks(4, lambda comm: recorded(nodes[comm.rank // 2], comm, is_first=comm.rank in (0, 2)))
    assert others == [records] * 3
    assert [len(records[name]) for name in ("weights", "args", "shard0", "shard1")] == [1, 2, 1, 1]
    assert on_ranks(4, lambda comm: damages(nodes[comm.rank // 2], records, comm)) == [[]] * 4
    (nodes[1] / "weights").write_text("w" * 49 + "v")
    found, *others = on_ranks(4, lambda comm: damages(nodes[comm.rank // 2], records, comm)[0].split(" (")[1])
    assert [found, *others] == ["rank 2 sees it)"] * 4
    os.remove(nodes[0] / "shard0")
    assert "shard0 is missing" in on_ranks(4, lambda comm: damages(nodes[comm.rank // 2], records, comm))[0][0]


def test_optimizer_of_another_step_has_another_record(tmp_path):
    """RESUME-14: of equal size, also if both differ in the middle only: torch ends a file with the checksums in it."""
    numbers = torch.zeros(100_000)
    torch.save({"state": numbers}, tmp_path / "optimizer.pt")
    records = records_of(tmp_path)
    numbers[50_000] = 1.0
    size = (tmp_path / "optimizer.pt").stat().st_size
    torch.save({"state": numbers}, tmp_path / "optimizer.pt")
    assert (tmp_path / "optimizer.pt").stat().st_size == size > 2 * BYTES_OF_END
    (found,) = damages(tmp_path, records, ALONE)
    assert "optimizer.pt is another file: " in found


def test_only_the_ends_of_a_file_are_read(tmp_path, monkeypatch):
    """RESUME-14: a save reads nothing back whole."""
    (tmp_path / "model.safetensors").write_bytes(bytes(10 * BYTES_OF_END))
    num_read, open_file = [], Path.open

    class Counting:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def read(self, *args):
            found = self.file.read(*args)
            num_read.append(len(found))
            return found

    monkeypatch.setattr(Path, "open", lambda path, *args: Counting(open_file(path, *args)))
    monkeypatch.setattr(builtins, "open", lambda *_: pytest.fail("it opens the file in another way"))
    records_of(tmp_path)
    assert num_read == [BYTES_OF_END, BYTES_OF_END]
