"""`vlpack bench`, in process: both phases on a tiny run, and what is made of them."""

import json

import pytest

from swift_vlpack.cli import bench_run
from swift_vlpack.cli.bench import bench_report
from swift_vlpack.cli.bench_report import bench_text
from swift_vlpack.rows.source import RowSource
from tests.cli.in_process import run_here
from tests.data_rows import mixed_rows, rows_about_images, text_row, write_jsonl
from tests.environment import packing_options
from tests.host.runs import packed_argv

FAMILY = "qwen2_5_vl"


@pytest.fixture
def measure(small_folder, tmp_path, monkeypatch, capfd):
    """A phase, as its process measures it: exit code, report, stderr."""
    packing_options()
    monkeypatch.setattr(bench_run, "workers_to_try", lambda cores: [0, 1])
    dataset = write_jsonl(tmp_path / "photos.jsonl", mixed_rows(tmp_path / "images", 40, largest=120))
    chat = write_jsonl(tmp_path / "chat.jsonl", [text_row(f"question {n}", "word " * (n + 1)) for n in range(10)])
    (tmp_path / "mix.yaml").write_text(f"sources: [{{dataset: {dataset}, ratio: 0.9}}, {{dataset: {chat}}}]\n")
    monkeypatch.setenv("VLPACK_FUSION_CONFIG", str(tmp_path / "mix.yaml"))

    def measured(phase, **flags):
        flags = {"max_length": 200, **flags}
        argv = packed_argv(small_folder(FAMILY), FAMILY, tmp_path / "out", **flags)
        of_phase = ["--phase", phase, "--tokens_of_pack", 200 * phase.startswith("padd")]
        code = run_here(["bench", *argv, "--steps", 3, "--rows", 20, *of_phase])
        said = capfd.readouterr()
        return code, json.loads(said.out) if said.out else None, said.err

    return measured


@pytest.mark.slow
@pytest.mark.telling
def test_both_phases_measure_the_same_rows_and_leave_nothing(measure, tmp_path):
    """CLI-22 CLI-39"""
    code, packed, said = measure("packed")
    assert code == 0, said[-3000:]
    code, padded, said = measure("padded", per_device_train_batch_size=2)
    assert code == 0, said[-3000:]
    assert packed["length_pass"]["rows"] == 30, "twenty rows of the one, ten of the other"
    assert packed["length_pass"]["rows_per_second"] > 0
    assert [one["workers"] for one in packed["loader"]] == [0, 1]
    assert all(one["first_batch_seconds"] > 0 for one in packed["loader"])
    assert packed["loader"][0]["samples_per_second"] > 0
    assert packed["attention"].startswith("attention vlpack")
    assert [*packed["start"]] == ["imports", "model", "data", "lengths", "plan", "trainer", "attention", "proof"]
    assert all(seconds >= 0 for seconds in packed["start"].values())
    assert packed["start"]["lengths"] == pytest.approx(packed["length_pass"]["seconds"], abs=0.5)
    assert packed["rows_of_run"] == 50
    assert len(packed["measurements"]) == len(padded["measurements"]) == 3
    assert all(0 < one["tokens"] <= 200 and one["batches"] == 1 for one in packed["measurements"])
    assert all(one["tokens"] >= 200 and one["samples"] == 2 * one["batches"] for one in padded["measurements"])
    assert all(one["seconds"] > 0 for one in [*packed["measurements"], *padded["measurements"]])
    assert sum(one["patches"] for one in packed["measurements"]) > 0
    assert not (tmp_path / "out").exists()
    report = bench_report(packed, padded, seconds=1.0)
    json.dumps(report)
    speeds = [report[name]["speed"]["tokens_per_second"] for name in ("packed", "padded")]
    assert report["ratio"] == pytest.approx(speeds[0] / speeds[1], abs=1e-3)
    assert report["limit"] in ("loader", "step")
    assert report["start"]["seconds"] == pytest.approx(sum(report["start"]["parts"].values()), abs=0.01)
    assert "samples/s" in bench_text(report)


@pytest.mark.slow
def test_steps_that_keep_their_samples_are_measured_sequence_by_sequence(measure, monkeypatch):
    """SAME-6"""
    monkeypatch.setenv("VLPACK_PACKING_BATCH", "samples")
    monkeypatch.setenv("VLPACK_PACKING_STRATEGY", "exact")
    code, packed, said = measure("packed", per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert code == 0, said[-3000:]
    assert len(packed["measurements"]) == 3
    assert all(0 < one["tokens"] <= 200 and one["samples"] <= 8 for one in packed["measurements"])
    assert packed["plan"]["packs"] >= 44 // 8, "the rows of 20 and 10 with their ratios, eight a step"
    assert packed["plan"]["packing_batch"] == "samples"
    unpacked = {}
    for phase in ("padded", "padding_free"):
        code, unpacked[phase], said = measure(phase, per_device_train_batch_size=2)
        assert code == 0, said[-3000:]
    sizes = [
        [(one["tokens"], one["samples"], one["patches"]) for one in found["measurements"]]
        for found in unpacked.values()
    ]
    assert sizes[0] == sizes[1], "the same batches"
    report = bench_report(packed, **unpacked, seconds=1.0)
    assert report["ratio_padding_free"] > 0
    assert "padding_free to padded" in bench_text(report)


@pytest.mark.slow
@pytest.mark.telling
def test_run_whose_rows_share_is_measured_beside_packs_without_sharing(measure, monkeypatch, tmp_path):
    """SHARE-85"""
    rows = [row for rows in rows_about_images(tmp_path, 30, 4, seed=3) for row in rows]
    monkeypatch.delenv("VLPACK_FUSION_CONFIG")
    monkeypatch.setenv("VLPACK_PACKING_SHARE", "media")
    monkeypatch.setenv("VLPACK_PACKING_STRATEGY", "exact")
    monkeypatch.setenv("VLPACK_PACKING_VERIFY", "false")
    data = write_jsonl(tmp_path / "vqa.jsonl", rows)
    found = {}
    for phase in ("packed", "unshared", "padded"):
        code, found[phase], said = measure(phase, dataset=data, max_length=400, dataloader_num_workers=0)
        assert code == 0, said[-3000:]
    share = found["packed"]["plan"]["share"]
    assert share["num_units"] > 0
    assert share["num_tokens"] < share["num_tokens_alone"]
    assert "share" not in found["unshared"]["plan"]
    assert found["unshared"]["plan"]["packs"] > found["packed"]["plan"]["packs"]
    assert found["packed"]["length_pass"]["rows"] == found["unshared"]["length_pass"]["rows"] == 20
    assert any(one["tokens_alone"] > one["tokens"] for one in found["packed"]["measurements"])
    assert all(one["tokens_alone"] == one["tokens"] for one in found["unshared"]["measurements"])
    report = bench_report(**found, seconds=1.0)
    assert report["ratio_sharing"] > 0
    text = bench_text(report)
    assert f"sharing      {report['ratio_sharing']:.2f} times the tokens a second of the rows alone" in text
    assert f"{share['num_tokens']} of {share['num_tokens_alone']} tokens of these rows are computed" in text
    assert "\nunshared     " in text


@pytest.mark.parametrize(
    ("flags", "part"), [({"streaming": "true", "max_steps": 3}, "--streaming true"), ({"packing": "false"}, "no packs")]
)
def test_what_has_no_packs_to_measure_is_refused(flags, part, measure, monkeypatch, tmp_path):
    """CLI-22"""
    data = write_jsonl(tmp_path / "rows.jsonl", [text_row()])
    monkeypatch.delenv("VLPACK_FUSION_CONFIG")
    code, report, said = measure("packed", dataset=data, **flags)
    assert (code, report) == (2, None)
    assert part in said


def test_rows_are_taken_from_all_over_and_those_that_may_share_side_by_side():
    """CLI-22 SHARE-85"""
    source = RowSource(name="x", rows=list(range(1000)))
    assert bench_run.some_of(source, 5).rows == [0, 249, 499, 749, 999]
    assert bench_run.some_of(source, 6, together=3).rows == [0, 1, 2, 997, 998, 999]
    assert bench_run.some_of(source, 4, together=3).rows == [0, 1, 2, 997]
    assert bench_run.some_of(source, 1000, together=50) is source
    assert len(bench_run.some_of(source, 990, together=50).rows) == 990


def test_workers_are_powers_of_two_up_to_the_cores():
    """CLI-22"""
    assert bench_run.workers_to_try(1) == [0, 1]
    assert bench_run.workers_to_try(6) == [0, 1, 2, 4, 6]
    assert bench_run.workers_to_try(8) == [0, 1, 2, 4, 8]
