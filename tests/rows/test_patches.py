"""What is replaced of torch and of video readers for a time is checked before, and as it was afterwards."""

import ast
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import swift_vlpack
from swift_vlpack.rows import patches
from swift_vlpack.rows.patches import Place, SeamMoved, check_worker, found, no_worker, replaced
from swift_vlpack.rows.streams import StreamedRows
from tests.parsed import nodes_of
from tests.plain_template import PlainTemplate

PACKAGE = Path(swift_vlpack.__file__).parent


def test_no_mock_and_no_private_torch_elsewhere():
    """ARCH-7"""
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            names += [node.attr] if isinstance(node, ast.Attribute) else []
            wrong += [
                (str(path.relative_to(PACKAGE)), name)
                for name in names
                if name.startswith("unittest") or name == "_worker_info" or (name.startswith("torch.") and "._" in name)
            ]
    assert wrong == []


class Asks(IterableDataset):
    def __iter__(self):
        with no_worker():
            inside = get_worker_info()
        yield inside is None, get_worker_info() is not None


def test_worker_is_hidden_and_seen_again():
    """ARCH-7: as torch itself says, in a worker of its own."""
    check_worker()
    assert get_worker_info() is None
    assert list(DataLoader(Asks(), batch_size=None, num_workers=1)) == [[True, True]]
    with pytest.raises(KeyError), replaced(patches.WORKER, "mark"):
        raise KeyError
    assert get_worker_info() is None


@pytest.mark.parametrize("moved", [Place("torch.gone", "_worker_info"), Place("torch.utils.data", "_nothing")])
def test_torch_that_moved_it_is_told_so_before_a_row_is_read(moved, monkeypatch):
    """ARCH-7"""
    monkeypatch.setattr(patches, "WORKER", moved)
    check_worker.cache_clear()
    with pytest.raises(SeamMoved, match=r"torch .* no longer stores its dataloader workers in .*streaming false"):
        StreamedRows([{}], PlainTemplate())
    monkeypatch.undo()
    StreamedRows([{}], PlainTemplate())


def test_attribute_that_nobody_reads_is_no_seam(monkeypatch):
    """ARCH-7: torch keeps the name, and looks elsewhere."""
    monkeypatch.setattr(patches, "get_worker_info", lambda: None)
    check_worker.cache_clear()
    with pytest.raises(SeamMoved):
        check_worker()
    check_worker.cache_clear()


def test_reader_that_changed_decodes_and_is_named(monkeypatch, caplog):
    """ARCH-7 LEN-2: lengths stay right, only slower; one that is not installed is none."""
    assert found(Place("vlpack_not_there", "VideoReader")) is None
    with pytest.raises(SeamMoved, match=r"json\.JSONDecoder has no get_batch"):
        found(Place("json", "JSONDecoder", ("decode", "get_batch")))
    places = Place("json", "JSONDecoder", ("get_batch",)), Place("vlpack_not_there", "VideoDecoder")
    monkeypatch.setattr(patches, "VIDEO_READERS", dict.fromkeys(places))
    patches._readers.cache_clear()
    try:
        for _ in range(2):
            with patches.without_frames():
                pass
        (line,) = [record.message for record in caplog.records]
        assert line.startswith(
            "videos are decoded to measure their lengths, which takes longer: json.JSONDecoder has no"
        )
    finally:
        patches._readers.cache_clear()
