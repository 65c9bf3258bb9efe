"""The files of a checkpoint, recorded by some ranks and compared by others."""

import json
import os
import pickle
import shutil
import struct
import zipfile

import pytest

from swift_vlpack.comm import ALONE
from swift_vlpack.envelope import check_shape
from swift_vlpack.host import checkpoint_files
from swift_vlpack.host.checkpoint_files import damages, digest_of_file, recorded, unreadable
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
    return folder


def test_whole_checkpoint_has_no_damage(checkpoint):
    """RESUME-14: files in folders too, under any number of ranks; a file that came later is no matter."""
    records = recorded(checkpoint, ALONE, without=("optimizer",))
    assert set(records) == {"weights", "shards/one", "shards/.metadata"}
    records = recorded(checkpoint, ALONE)
    check_shape(json.loads(json.dumps(records)), checkpoint_files.RECORDS, "files")
    written(checkpoint, later="")
    for num_ranks in (1, 2, 5):
        assert on_ranks(num_ranks, lambda comm: damages(checkpoint, records, comm)) == [[]] * num_ranks
    os.remove(checkpoint / "later")
    assert on_ranks(3, lambda comm: recorded(checkpoint, comm)) == [records] * 3


def test_every_damage_is_named_with_its_path(checkpoint):
    """RESUME-14: on every rank, whichever of them read the file."""
    records = recorded(checkpoint, ALONE)
    for change, told in (
        (lambda path: path.write_text("w" * 999 + "v"), "is damaged, or another file: its content is not what was"),
        (lambda path: path.write_text("w" * 999), "is cut off: it has 999 bytes, 1,000 were written"),
        (lambda path: path.write_text(""), "is empty: it has 0 bytes, 1,000 were written"),
        (lambda path: path.write_text("w" * 1001), "is another file: it has 1,001 bytes, 1,000 were written"),
        (lambda path: path.unlink(), "is missing"),
    ):
        path = checkpoint / "weights"
        change(path)
        for found in on_ranks(2, lambda comm: damages(checkpoint, records, comm)):
            assert len(found) == 1
            assert found[0].startswith(f"{path} {told}")
        path.write_text("w" * 1000)
    assert damages(checkpoint, records, ALONE) == []


def test_nodes_with_disks_of_their_own_see_their_own_files(tmp_path):
    """RESUME-14: two nodes of two ranks; `args.json` has other paths on each, and shards are on one only."""
    nodes = [
        written(tmp_path / str(node), weights="w" * 50, args=f"of node {node}", **{f"shard{node}": "s" * 20})
        for node in range(2)
    ]
    records = on_ranks(4, lambda comm: recorded(nodes[comm.rank // 2], comm))
    assert records[1:] == records[:1] * 3
    assert [len(records[0][name]) for name in ("weights", "args", "shard0", "shard1")] == [1, 2, 1, 1]
    assert on_ranks(4, lambda comm: damages(nodes[comm.rank // 2], records[0], comm)) == [[]] * 4
    (nodes[1] / "weights").write_text("w" * 49 + "v")
    found = on_ranks(4, lambda comm: damages(nodes[comm.rank // 2], records[0], comm))
    assert found[1:] == found[:1] * 3
    assert found[0][0].startswith(f"{nodes[1] / 'weights'} is damaged")
    os.remove(nodes[0] / "shard0")
    (nodes[1] / "weights").write_text("w" * 50)
    assert "shard0 is missing" in on_ranks(4, lambda comm: damages(nodes[comm.rank // 2], records[0], comm))[0][0]


def test_every_distinct_file_is_read_once(tmp_path, monkeypatch):
    """RESUME-14: by one of the ranks that see it."""
    shared, own = written(tmp_path / "shared", a="a" * 9, b="b" * 5, c="c" * 4), tmp_path / "own"
    shutil.copytree(shared, own)
    read, digest = [], digest_of_file
    monkeypatch.setattr(checkpoint_files, "digest_of_file", lambda path: read.append(path) or digest(path))
    on_ranks(3, lambda comm: recorded(own if comm.rank == 2 else shared, comm))
    assert sorted(read) == sorted(folder / name for folder in (shared, own) for name in "abc")


def test_any_flipped_bit_changes_the_digest(tmp_path, monkeypatch):
    """RESUME-14: in every piece of a large file; so does an exchange of pieces."""
    monkeypatch.setattr(checkpoint_files, "BYTES_OF_PIECE", 16)
    path = tmp_path / "large"
    content = bytes(range(70))
    path.write_bytes(content)
    whole = digest_of_file(path)
    for bit in range(len(content) * 8):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        assert digest_of_file(path) != whole
    path.write_bytes(content[16:32] + content[:16] + content[32:])
    assert digest_of_file(path) != whole


def test_file_without_a_record_is_known_by_its_own_format(tmp_path):
    """RESUME-15: cut off anywhere, or empty; what another program wrote in a format of its own is left alone."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"x" * 32)
    with zipfile.ZipFile(tmp_path / "optimizer.pt", "w") as file:  # as torch saves
        file.writestr("archive/data.pkl", pickle.dumps({"lr": list(range(50))}))
    (tmp_path / "rng_state.pth").write_bytes(pickle.dumps({"lr": 1}, protocol=2))  # as torch saved once
    (tmp_path / "trainer_state.json").write_text('{"global_step": 3}')
    written(tmp_path, README="", latest="global_step3")
    assert unreadable(tmp_path) == []
    for name in ("model.safetensors", "optimizer.pt", "trainer_state.json"):
        path = tmp_path / name
        content = path.read_bytes()
        for length in (0, 1, 5, len(content) // 2, len(content) - 2):
            path.write_bytes(content[:length])
            (said,) = unreadable(tmp_path)
            assert said.startswith(str(path)), (length, said)
        path.write_bytes(content)
