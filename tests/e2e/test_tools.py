"""`vlpack verify` and `vlpack bench` as they are typed."""

import json
import platform

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
def test_demo_is_measured_in_every_way(tiny_folder, tmp_path):
    """CLI-22 CLI-39 SAME-6 SHARE-85: each in a process of its own."""
    flags = options(tiny_folder(FAMILY), tmp_path / "out", max_length=1024, use_cpu="true")
    (tmp_path / "train.yaml").write_text(yaml.safe_dump({name: str(value) for name, value in flags.items()}))
    folder = tmp_path / "empty"
    folder.mkdir()
    few = ("--rows", "40", "--steps", "1", "--turns", "1")
    done = run("bench", "--config", tmp_path / "train.yaml", "--demo", *few, cwd=folder)
    assert done.stdout.startswith("versions     swift_vlpack ")
    assert "vlpack bench: training, padding_free" in done.stderr
    assert sorted(folder.iterdir()) == [folder / "bench.json", folder / "bench.md"]
    assert not (tmp_path / "out").exists()
    text, page = ((folder / name).read_text() for name in ("bench.json", "bench.md"))
    report = json.loads(text)
    assert done.stdout in page
    assert report["kernels"]["grouped"]["float32"] < 1e-5
    for begin in ("attention vlpack:", "isolation verified: max", "isolation verified in training: the first"):
        assert any(line.startswith(begin) for line in report["proofs"])
    assert [*report["ways"]] == ["packs", "samples", "share=media", "padded", "padding_free"]
    for found in report["ways"].values():
        assert found["tokens_per_second"] > 0
        assert found["samples_per_second"] > 0
        assert found["peak_bytes"] > 2**20
        assert found["seconds_to_step_1"] > 1
        assert 0 <= found["loading_share"] < 1
        assert [turn["steps"] for turn in found["turns"]] == [1]
    assert report["is_demo"]
    assert report["options"]["max_length"] == report["options"]["packing_length"] == 1024
    assert not [name for name in (str(tmp_path), platform.node(), "/") if name in text]
    assert str(tmp_path) not in page
