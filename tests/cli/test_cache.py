"""`vlpack cache`: what is remembered of lengths is listed and cleared, and nothing else is touched."""

import io
import json
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

from swift_vlpack.cli import main
from swift_vlpack.lengths.cache_folder import About, lengths_folder, write_about
from swift_vlpack.lengths.length_file import KEYED_SIZE, LengthFile

DAY = 86400


def write_lengths(folder, stem, num_rows, *, days=0.0, about=None):
    """A file of lengths as a pass writes it, each row twice; used so many days ago."""
    records = np.zeros(2 * num_rows, KEYED_SIZE)
    records["key"]["high"] = [*range(num_rows)] * 2
    records["key"]["low"] = 1
    path = folder / f"{stem}.lengths"
    file = LengthFile(path)
    file.load()
    file.append(records[:num_rows])
    file.append(records[num_rows:])
    if about:
        write_about(path, about)
    for each in folder.glob(f"{stem}.*"):
        os.utime(each, (time.time() - days * DAY,) * 2)
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two sources, what they share, files of earlier versions, and files of somebody else."""
    cache = tmp_path / "lengths"
    cache.mkdir()
    monkeypatch.setenv("VLPACK_PACKING_CACHE_DIR", str(cache))
    about = About("captions", "/data/captions.jsonl", "qwen2_5_vl", "qwen2_5_vl", "0.1.0")
    write_lengths(cache, "captions-0123456789ab", 3, days=1.5, about=about)
    (cache / "captions-0123456789ab.failures").write_text('["00", "file_missing", "gone", []]\n')
    (cache / f"captions-0123456789ab.{'cd' * 6}.parts").write_text('["00", [0, 9, 0, 0, 0, 9, ""]]\n')
    (cache / f"captions-0123456789ab.{'cd' * 6}.notes.parts").write_text("")
    for name, content in OF_0_2_0.items():
        (cache / name).write_bytes(content)
    for path in cache.glob("captions-*"):
        if path.suffix not in (".lengths", ".about"):
            os.utime(path, (time.time() - 2 * DAY,) * 2)
    write_lengths(cache, "scans-ba9876543210", 2, days=40)
    (cache / f"{'ab' * 16}.trust").write_text('{"agreed": {}}\n')
    (cache / "unreachable.urls").write_text("")
    for name, content in FOREIGN.items():
        (cache / name).write_bytes(content)
    (cache / "mine-0123456789ab.notes").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text("")
    (cache / "below").mkdir()
    (cache / "below" / "scans-ba9876543210.lengths").write_bytes(b"")
    return cache


OF_0_2_0 = {
    "captions-0123456789ab.notes": b"vlpack lengths 3\n",
    "captions-0123456789ab.heads": b"vlpack heads 1\n",
    "captions-0123456789ab.0of2.keys": b"vlpack keys 1\n",
    "captions-0123456789ab.damaged-77": b"",
    f"{'ab' * 16}.observed": b'{"source": "captions"}\n',
    f"{'ab' * 16}.damaged-77": b"",
}
FOREIGN = {
    "notes.txt": b"mine",
    "captions.lengths": b"mine",
    "thesis-0123456789ab.lengths": b"another program's",
    "thesis-0123456789ab.failures": b"none so far",
    "model.trust": b"{}",
}


def listed(capsys, *argv):
    assert main(["cache", "list", "--json", *argv]) == 0
    return json.loads(capsys.readouterr().out)


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_list_says_of_what_how_many_and_how_old(folder, capsys):
    """CLI-19"""
    report = listed(capsys)
    captions, scans = report["entries"]
    of = ("source", "origin", "template", "model_type", "rows")
    assert [captions[name] for name in of] == ["captions", "/data/captions.jsonl", "qwen2_5_vl", "qwen2_5_vl", 3]
    assert [scans[name] for name in of] == ["scans", None, None, None, 2], "as far as it is known"
    assert captions["seconds_since_used"] == pytest.approx(1.5 * DAY, abs=600)
    kinds = {"lengths", "about", "failures", "parts", "notes", "heads", "keys", "damaged-77"}
    assert {name.rpartition(".")[2] for name in captions["files"]} == kinds
    of_all = [f"{'ab' * 16}.{kind}" for kind in ("damaged-77", "observed", "trust")]
    assert sorted(report["shared_files"]) == [*of_all, "unreachable.urls"]
    assert report["bytes"] == sum(
        (folder / name).stat().st_size for name in [*captions["files"], *scans["files"], *report["shared_files"]]
    )
    assert main(["cache", "list"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"captions +qwen2_5_vl +qwen2_5_vl +3 .*1 day ago", said)
    assert re.search(r"scans +\? +\? +2 .*40 days ago", said)
    assert "2 sources, 14 files" in said


def test_cache_is_where_ms_swift_has_its_models():
    """CLI-19"""
    from modelscope.hub.utils.utils import get_cache_dir

    assert lengths_folder(None, os.environ) == Path(get_cache_dir()) / "vlpack" / "lengths"
    assert lengths_folder(None, {}) == Path.home() / ".cache" / "modelscope" / "hub" / "vlpack" / "lengths"
    assert lengths_folder("~/x", {}) == Path.home() / "x"


def test_clear_removes_all_that_is_ours_and_nothing_of_others(folder, capsys):
    """CLI-19"""
    assert main(["cache", "clear", "--yes"]) == 0
    assert names(folder) == {*FOREIGN, "below", "mine-0123456789ab.notes"}
    assert (folder / "below" / "scans-ba9876543210.lengths").exists()
    assert all((folder / name).read_bytes() == content for name, content in FOREIGN.items())
    assert "14 files removed" in capsys.readouterr().out
    assert main(["cache", "clear", "--yes"]) == 0
    assert "no cached lengths" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("answer", "is_removed"), [("y\n", True), ("\n", False), ("no\n", False)])
def test_clear_asks(answer, is_removed, folder, capsys, monkeypatch):
    """CLI-19"""
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    assert main(["cache", "clear"]) == 0
    assert ("captions-0123456789ab.lengths" not in names(folder)) is is_removed
    assert "Remove these?" in capsys.readouterr().out


def test_clear_does_not_ask_where_nobody_is(folder, capsys, monkeypatch):
    """CLI-19"""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    before = names(folder)
    assert main(["cache", "clear"]) == 2
    assert "--yes" in capsys.readouterr().err
    assert names(folder) == before


def test_folder_that_is_not_there_has_nothing(tmp_path, capsys):
    """CLI-19"""
    assert listed(capsys, "--packing_cache_dir", str(tmp_path / "nowhere"))["entries"] == []
