"""`swift pt` over pages of text and images laid end to end: the plan is the run, a resume goes on inside of a page."""

import json

import pytest

from swift_vlpack.cli.plan import training_report
from swift_vlpack.errors import ConfigError
from tests.data_rows import text_row, write_jsonl
from tests.environment import packing_options, restored_environment
from tests.host.parts.test_runs import page, trained_ids
from tests.host.runs import epoch_report, packed_argv, train
from tests.images import photo

FAMILY = "qwen2_5_vl"
LENGTH = 96
OPTIONS = {"packing_strategy": "window", "packing_drop_last": "false", "record_packs": "true"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    rows = [page(folder, number, number % 3, 6 + 5 * number) for number in range(6)]
    # An image of 12 x 16 tokens, more than a pack has room for.
    rows[1]["images"] = [photo(folder, "large", 336, 448)]
    return write_jsonl(folder / "pages.jsonl", rows)


def flags(folder, output, data, **options):
    common = {
        "dataset": data,
        "num_train_epochs": 1,
        "packing_length": LENGTH,
        "max_length": 120,
        "save_steps": 1,
        "tuner_type": "lora",
    }
    return packed_argv(folder, FAMILY, output, **{**common, "save_strategy": "steps", **options})


@pytest.fixture(scope="module")
def run(small_folder, data, tmp_path_factory):
    """Planned by the command, proved, and trained."""
    out = tmp_path_factory.mktemp("run")
    with restored_environment():
        packing_options(**OPTIONS)
        planned = training_report(
            flags(small_folder(FAMILY), out / "never", data),
            num_ranks=1,
            failures_file=out / "left.jsonl",
            command="pt",
        )  # fmt: skip
        return out, planned, train(flags(small_folder(FAMILY), out, data), "pt")


def test_plan_is_the_run(run):
    """WIN-3 WIN-5 WIN-6: rows of three times max_length and more; packs are full but for images."""
    out, planned, result = run
    report = epoch_report(out)
    assert planned["lengths"]["max"] <= LENGTH
    for name in ("num_packs", "num_samples", "num_tokens"):
        assert report[name] == planned[name], name
    steps = [line for line in result["log_history"] if "loss" in line]
    assert len(steps) == planned["num_steps"]
    assert report["rows"] == planned["cut"]["rows"]
    assert report["rows"]["pages"]["num_packed"] == 6
    assert report["lost_by_cutting"] == planned["cut"]["lost_by_cutting"]
    assert report["lost_by_cutting"]["image_over_length"]["num_images"] == 1
    assert report["is_closed"]
    assert report["fill_p50"] >= 99
    once = trained_ids(out)
    assert len(once) == len(set(once)) == planned["num_samples"]
    assert [key.partition("/")[0] for key in once].count("pages:5") > 3


@pytest.mark.slow
@pytest.mark.telling
def test_resume_goes_on_inside_of_a_page(run, small_folder, data):
    """WIN-4: with the losses that the uninterrupted run had."""
    packing_options(**OPTIONS, packing_verify="false")
    out, _, result = run
    losses = [line["loss"] for line in result["log_history"] if "loss" in line]
    packs = [json.loads(line)["ids"] for line in (out / "vlpack" / "packs_rank0.jsonl").read_text().splitlines()]
    step = next(n for n in range(2, len(packs)) if packs[n][0].split("/")[0] == packs[n - 1][-1].split("/")[0])
    (out / "vlpack" / "packs_rank0.jsonl").unlink()
    rest = train(flags(small_folder(FAMILY), out, data, resume_from_checkpoint=out / f"checkpoint-{step}"), "pt")
    assert trained_ids(out) == [key for ids in packs[step:] for key in ids]
    again = [line["loss"] for line in rest["log_history"] if "loss" in line]
    assert again[-len(losses) + step :] == pytest.approx(losses[step:], rel=1e-6)


@pytest.mark.slow
@pytest.mark.telling
def test_streamed_pages_are_windows_too(small_folder, data, tmp_path, caplog):
    """WIN-1 WIN-6: and whoever lays conversations end to end is told."""
    packing_options(**OPTIONS, packing_verify="false")
    train(flags(small_folder(FAMILY), tmp_path, data, streaming="true", max_steps=5, save_strategy="no"), "pt")
    assert "cuts conversations" not in caplog.text
    report = epoch_report(tmp_path)
    assert report["fill_p50"] >= 99
    assert report["num_samples"] > report["num_packs"]
    rows = write_jsonl(tmp_path / "chat.jsonl", [text_row(f"question {n}", "word " * 40) for n in range(6)])
    train(flags(small_folder(FAMILY), tmp_path / "chat", rows, max_steps=1, save_strategy="no"))
    assert "packing_strategy=window cuts conversations" in caplog.text


@pytest.mark.parametrize("given", ["split", "left", "right"])
def test_a_truncation_strategy_beside_windows_is_refused_by_name(given, small_folder, data, tmp_path):
    """CUT-15"""
    packing_options(**OPTIONS)
    made = flags(small_folder(FAMILY), tmp_path / "never", data, truncation_strategy=given)
    with pytest.raises(ConfigError) as refused:
        training_report(made, num_ranks=1, failures_file=tmp_path / "f.jsonl", command="pt")
    assert f"packing_strategy=window cuts rows wherever a pack is full, so --truncation_strategy {given}" in str(
        refused.value
    )
    assert "leave that out, or take another strategy" in str(refused.value)
    assert "packing_overflow" not in str(refused.value)
