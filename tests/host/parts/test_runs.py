"""Runs over pages that are longer than a pack: the plan is the run, each part is trained once, evaluation as ever."""

import json
import re

import pytest

from swift_vlpack.cli.plan import training_report
from swift_vlpack.errors import ConfigError
from tests.data_rows import write_jsonl
from tests.environment import packing_options, restored_environment
from tests.host.runs import epoch_report, packed_argv, train
from tests.images import photo

FAMILY = "qwen2_5_vl"
NUM_ROWS = 6


def page(folder, number, num_images, num_words):
    images = [photo(folder, f"{number}_{k}", 84, 56 + 28 * k, seed=k) for k in range(num_images)]
    text = "<image>".join("the small red house " * num_words for _ in range(num_images + 1))
    return {"messages": [{"role": "assistant", "content": text}], "images": images}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    rows = [page(folder, number, number % 4, 6 + 3 * number) for number in range(NUM_ROWS)]
    # An image of 12 x 16 tokens, more than a pack has room for.
    rows[1]["images"] = [photo(folder, "large", 336, 448)]
    return write_jsonl(folder / "pages.jsonl", rows)


@pytest.fixture(autouse=True)
def environment():
    packing_options(
        packing_strategy="exact", packing_drop_last="false", packing_verify="false", record_packs="true",
        packing_overflow="split", packing_stride="4", packing_min_len="3",
    )  # fmt: skip


def flags(folder, output, data, **options):
    common = {"dataset": data, "num_train_epochs": 2, "packing_length": 96, "max_length": 120, "save_steps": 1}
    return packed_argv(folder, FAMILY, output, **{**common, "save_strategy": "steps", **options})


@pytest.fixture(scope="module")
def run(small_folder, data, tmp_path_factory):
    """Planned by the command, and trained for two epochs with an evaluation on the same pages."""
    out = tmp_path_factory.mktemp("run")
    with restored_environment():
        packing_options(
            packing_strategy="exact", packing_drop_last="false", record_packs="true",
            packing_overflow="split", packing_stride="4", packing_min_len="3",
        )  # fmt: skip
        planned = training_report(
            flags(small_folder(FAMILY), out / "never", data),
            num_ranks=1,
            failures_file=out / "left.jsonl",
            command="pt",
        )  # fmt: skip
        result = train(flags(small_folder(FAMILY), out, data, val_dataset=data, eval_strategy="epoch"), "pt")
    return out, planned, result


def test_plan_is_the_run(run):
    """CUT-9 CUT-13 CLI-8: packs, samples, tokens, what is left out, and the account in rows."""
    out, planned, result = run
    report = epoch_report(out)
    for name in ("num_packs", "num_samples", "num_tokens"):
        assert report[name] == planned[name], name
    assert len([line for line in result["log_history"] if "loss" in line]) == planned["num_steps"]
    assert report["is_closed"]
    assert report["rows"] == planned["cut"]["rows"]
    assert report["lost_by_cutting"] == planned["cut"]["lost_by_cutting"]
    assert report["lost_by_cutting"]["image_over_length"] == {"num_parts": 1, "num_tokens": 194, "num_images": 1}
    assert report["num_samples"] > NUM_ROWS
    [counts] = report["rows"].values()
    assert (counts["num_read"], counts["num_packed"], counts["num_dropped"]) == (NUM_ROWS, NUM_ROWS, {})
    assert "in rows: 6 read = 6 packed" in report["account"]
    planned_lines = [json.loads(line) for line in (out / "left.jsonl").read_text().splitlines()]
    trained_lines = [json.loads(line) for line in (out / "vlpack" / "left_out.jsonl").read_text().splitlines()]
    assert {line["id"] for line in planned_lines} == {line["id"] for line in trained_lines if line["epoch"] == 0}
    [line] = [line for line in planned_lines if line["reason"] == "image_over_length"]
    assert line["id"].startswith("pages:1/")
    assert line["error"].endswith("of its row, 1 image")


@pytest.mark.slow
@pytest.mark.telling
def test_evaluation_is_that_of_a_run_that_cuts_nothing(small_folder, data, tmp_path, monkeypatch):
    """CUT-15: the template that evaluates has its max_length, and rows beyond it are left out there as ever."""
    packing_options(packing_strategy="exact", packing_drop_last="false", packing_verify="false")
    options = {"val_dataset": data, "eval_strategy": "epoch", "learning_rate": 0, "num_train_epochs": 1}
    losses = []
    for overflow in ("keep", "split"):
        monkeypatch.setenv("VLPACK_PACKING_OVERFLOW", overflow)
        made = train(flags(small_folder(FAMILY), tmp_path / overflow, data, **options, save_strategy="no"), "pt")
        losses += [line["eval_loss"] for line in made["log_history"] if "eval_loss" in line]
    assert len(losses) >= 2
    assert len(set(losses)) == 1


def test_ms_swifts_split_is_ours(run, small_folder, data, tmp_path, monkeypatch):
    """CUT-15: for sft and pt, with images; left and right, which are another rule for the same rows, are refused."""
    _, planned, _ = run
    monkeypatch.delenv("VLPACK_PACKING_OVERFLOW")

    def report(**options):
        made = flags(small_folder(FAMILY), tmp_path / "never", data, **options)
        return training_report(made, num_ranks=1, failures_file=tmp_path / "f.jsonl", command="pt")

    asked = report(truncation_strategy="split")
    assert asked["plan_digest"] == planned["plan_digest"]
    monkeypatch.setenv("VLPACK_PACKING_OVERFLOW", "truncate")
    with pytest.raises(ConfigError, match="--truncation_strategy split and packing_overflow=truncate contradict"):
        report(truncation_strategy="split")
    monkeypatch.setenv("VLPACK_PACKING_OVERFLOW", "split")
    with pytest.raises(ConfigError, match="--truncation_strategy left and packing_overflow=split are two rules"):
        report(truncation_strategy="left")


@pytest.mark.usefixtures("never_again")
def test_parts_are_remembered_with_the_lengths(run, small_folder, data, tmp_path, monkeypatch):
    """CUT-16: nothing is encoded again under the same options; under another pack length what is longer."""
    from swift_vlpack.rows.encoder import RowEncoder

    measured = []
    measure = RowEncoder.sample
    monkeypatch.setattr(
        RowEncoder, "sample", lambda *args, **options: measured.append(args[2].row) or measure(*args, **options)
    )

    def report(**options):
        measured.clear()
        made = flags(small_folder(FAMILY), tmp_path / "never", data, dataset_num_proc=1, **options)
        found = training_report(made, num_ranks=1, failures_file=tmp_path / "f.jsonl", command="pt")
        return found, set(measured)

    _, planned, _ = run
    again, encoded = report()
    assert again["plan_digest"] == planned["plan_digest"]
    assert encoded == set()
    other, encoded = report(packing_length=200)
    assert 0 < len(encoded) == other["cut"]["num_rows_cut"] < planned["cut"]["num_rows_cut"]


@pytest.mark.parametrize("overflow", ["truncate", "drop"])
def test_rows_that_are_truncated_or_dropped_are_counted(overflow, small_folder, data, tmp_path, caplog):
    """CUT-5 CUT-13"""
    packing_options(packing_strategy="exact", packing_drop_last="false", packing_overflow=overflow)
    made = training_report(
        flags(small_folder(FAMILY), tmp_path / "never", data),
        num_ranks=1,
        failures_file=tmp_path / "f.jsonl",
        command="pt",
    )
    lost = made["cut"]["lost_by_cutting"]
    reason = {"truncate": "truncated", "drop": "overflow"}[overflow]
    assert lost[reason]["num_tokens"] > 0
    assert lost[reason]["num_images"] > 0
    assert made["lengths"]["max"] <= 96
    [counts] = made["cut"]["rows"].values()
    num_lost = lost[reason]["num_parts"]
    assert counts["num_packed"] == (NUM_ROWS if overflow == "truncate" else NUM_ROWS - num_lost)
    assert re.search(rf"{num_lost} of \d+ samples of the epoch are left out", caplog.text), "not rows"
