"""Models without vision, which ms-swift treats in a way of their own."""

import pytest

from tests.data_rows import text_row, write_jsonl
from tests.host.runs import argv, epoch_report, packed_argv, train

MODEL_TYPE, TEMPLATE = "qwen2", "qwen2_5"


@pytest.mark.slow
@pytest.mark.telling
def test_text_model_trains_packed_and_evaluates_the_rows_that_plain_ms_swift_evaluates(
    text_folder, tmp_path, monkeypatch
):
    """DATA-13 TRAIN-6: rows that are too long are deleted there, where rows with images would be exchanged."""
    monkeypatch.setenv("VLPACK_PACKING_DROP_LAST", "false")
    rows = [text_row(f"question {n}", "word " * (5 * n + 3)) for n in range(12)]
    data = write_jsonl(tmp_path / "train.jsonl", rows)
    val = write_jsonl(tmp_path / "val.jsonl", [*rows[3:7], text_row("question", "word " * 300), *rows[:2]])
    flags = {
        "template": TEMPLATE, "dataset": data, "val_dataset": val,
        "max_length": 128, "eval_on_start": "true", "eval_strategy": "epoch",
        "num_train_epochs": 1, "learning_rate": 0, "per_device_eval_batch_size": 2,
    }  # fmt: skip
    found = {}
    for name, made in (("packed", packed_argv), ("plain", argv)):
        result = train(made(text_folder, MODEL_TYPE, tmp_path / name, **flags))
        found[name] = next(line["eval_loss"] for line in result["log_history"] if "eval_loss" in line)
    assert found["packed"] == pytest.approx(found["plain"], abs=1e-6)
    assert epoch_report(tmp_path / "packed")["num_samples"] == 12
