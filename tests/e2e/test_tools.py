"""`vlpack verify` and `vlpack bench` as they are typed."""

import json

import pytest
import yaml

from tests.data_rows import mixed_rows, write_jsonl
from tests.e2e.test_command_line import options
from tests.e2e.test_plan import run

FAMILY = "qwen2_5_vl"


@pytest.mark.slow
@pytest.mark.telling
def test_file_of_a_run_is_verified_and_nothing_is_left_behind(tiny_folder, tmp_path):
    """CLI-16 CLI-17: of a run of two ranks, in one process, without what its ranks need."""
    dataset = write_jsonl(tmp_path / "rows.jsonl", mixed_rows(tmp_path / "images", 10, largest=120))
    flags = options(tiny_folder(FAMILY), tmp_path / "out", dataset=dataset, max_length=200, use_cpu="true")
    content = {**{name: str(value) for name, value in flags.items()}, "ENV": {"NPROC_PER_NODE": 2}}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump({**content, "deepspeed": "zero2"}))
    folder = tmp_path / "empty"
    folder.mkdir()
    done = run("verify", "--config", tmp_path / "train.yaml", cwd=folder)
    for part in ("isolation    isolation verified: max difference 0.0", "rows: equal", "result       holds ("):
        assert part in done.stdout
    assert "[INFO" not in done.stdout, "no line of a log"
    assert list(folder.iterdir()) == []
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.telling
def test_file_of_a_run_is_measured_packed_and_padded(tiny_folder, tmp_path):
    """CLI-22: each in a process of its own."""
    dataset = write_jsonl(tmp_path / "rows.jsonl", mixed_rows(tmp_path / "images", 30, largest=120))
    flags = options(tiny_folder(FAMILY), tmp_path / "out", dataset=dataset, max_length=200, use_cpu="true")
    (tmp_path / "train.yaml").write_text(yaml.safe_dump({name: str(value) for name, value in flags.items()}))
    folder = tmp_path / "empty"
    folder.mkdir()
    done = run("bench", "--config", tmp_path / "train.yaml", "--steps", "2", "--json", cwd=folder)
    report = json.loads(done.stdout)
    assert report["ratio"] > 0
    assert report["packed"]["speed"]["num_measured"] == report["padded"]["speed"]["num_measured"] == 2
    assert report["packed"]["memory"]["peak"] > 0
    assert [one["workers"] for one in report["loader"]][:2] == [0, 1]
    assert all(set(one) == {"advice", "because"} for one in report["advice"])
    assert "vlpack bench: measurement 2 of 2" in done.stderr
    assert list(folder.iterdir()) == []
    assert not (tmp_path / "out").exists()
