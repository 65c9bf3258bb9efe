"""`swift pt --packing true`: text and interleaved documents, every token a target, by the way that `swift sft` goes."""

import pytest

from tests.data_rows import write_jsonl
from tests.environment import packing_options
from tests.host.runs import (
    argv,
    assert_same_gradients,
    epoch_report,
    gradients_of_steps,
    packed_argv,
    train,
)
from tests.images import photo

FAMILY = "qwen2_5_vl"
NUM_ROWS = 8


def document(text, images=()):
    """A row as ms-swift's documentation has it for pretraining."""
    row = {"messages": [{"role": "assistant", "content": text}]}
    return {**row, "images": list(images)} if images else row


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = []
    for n in range(NUM_ROWS):
        images = [photo(folder, f"{n}_{k}", 60 + 9 * n, 80, seed=k) for k in range(n % 3)]
        parts = "".join(f"part {k} <image> of the page " for k in range(len(images)))
        rows.append(document(parts + "words " * (7 * n + 3), images))
    return write_jsonl(folder / "pages.jsonl", rows)


@pytest.fixture(autouse=True)
def environment():
    packing_options(packing_strategy="exact", packing_drop_last="false", record_packs="true")


def test_loss_and_gradients_are_those_of_ms_swifts_unpacked_pt(small_folder, data, tmp_path, caplog):
    """TRAIN-27: a step over all documents, with and without images, one batch of them against packs."""
    common = {
        "dataset": data, "num_train_epochs": 1, "per_device_train_batch_size": NUM_ROWS, "callbacks": "gradients",
        "max_grad_norm": 0, "max_length": 128,
    }  # fmt: skip
    with gradients_of_steps() as gradients:
        packed = train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path / "packed", **common), "pt")["log_history"][0]
        plain = train(argv(small_folder(FAMILY), FAMILY, tmp_path / "plain", **common), "pt")["log_history"][0]
    assert packed["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert_same_gradients(*gradients)
    assert "isolation verified: max difference 0.0" in caplog.text
    report = epoch_report(tmp_path / "packed")
    assert (report["num_samples"], report["is_closed"]) == (NUM_ROWS, True)
    assert report["num_packs"] < NUM_ROWS


def flags(folder, output, data, **options):
    common = {"dataset": data, "num_train_epochs": 2, "max_length": 200, "tuner_type": "lora", **options}
    return packed_argv(folder, FAMILY, output, **common)


def test_streamed_documents_are_packed(small_folder, data, tmp_path):
    """TRAIN-27"""
    result = train(flags(small_folder(FAMILY), tmp_path, data, streaming="true", max_steps=2), "pt")
    steps = [line for line in result["log_history"] if "loss" in line]
    assert len(steps) == 2
    assert max(line["pack/samples"] for line in steps) > 1
