"""`packing_batch=samples` beside plain `swift sft`, in process: the same samples in every step, the same curve."""

import importlib.util
import os

import pytest

from tests.host.runs import argv, epoch_report, packed_argv, train
from tests.host.same_steps import (
    OPTIONS,
    RECORDER,
    curve,
    largest_differences,
    largest_gap,
    numbered_rows,
    packed_steps,
    unpacked_steps,
    weights,
)

FAMILY = "qwen2_5_vl"
NUM_ROWS = 23

pytestmark = pytest.mark.usefixtures("options")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return numbered_rows(tmp_path_factory.mktemp("data"), NUM_ROWS)


@pytest.fixture
def record(monkeypatch, tmp_path):
    """Record the batches of plain runs of this process; the folder of the records."""
    from swift.template import Template

    folder = tmp_path / "recorded"
    folder.mkdir()
    monkeypatch.setattr(Template, "data_collator", Template.data_collator)  # undone after the test
    os.environ["RECORD_FOLDER"] = str(folder)
    spec = importlib.util.spec_from_file_location("record_samples", RECORDER)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return folder


def recipe(batch_size, accumulation, **options):
    """As a user trains: warmup, cosine, clipping, weight decay; every step logged."""
    return {
        "per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation, "num_train_epochs": 2,
        "learning_rate": 1e-4, "warmup_ratio": 0.1, "lr_scheduler_type": "cosine", "max_grad_norm": 0.5,
        "weight_decay": 0.1, "split_dataset_ratio": 0, "save_strategy": "steps", "save_steps": 1000, **options,
    }  # fmt: skip


def saved(output):
    """The weights at the end."""
    (last,) = output.glob("checkpoint-*")
    return weights(last)


@pytest.mark.parametrize(
    ("family", "batch_size", "accumulation", "more"),
    [
        ("qwen2_5_vl", 2, 3, {}),
        ("qwen3_vl", 4, 1, {"tuner_type": "lora", "lora_dropout": 0, "gradient_checkpointing": "false"}),
        ("qwen2_5_vl", 1, 12, {"freeze_vit": "false", "train_dataloader_shuffle": "false"}),
        ("qwen2_5_vl", 2, 2, {"group_by_length": "true"}),
        ("qwen2_5_vl", 3, 2, {"dataloader_drop_last": "true", "dataloader_num_workers": 2}),
    ],
)
def test_every_step_is_that_of_the_unpacked_run(  # noqa: PLR0913 - a case, and fixtures
    family, batch_size, accumulation, more, dataset, small_folder, tmp_path, record, options
):
    """SAME-1 SAME-3"""
    flags = recipe(batch_size, accumulation, dataset=dataset, **more)
    in_order = {"dataloader_num_workers": 0}  # so that the recorder is called batch by batch
    plain = train(argv(small_folder(family), family, tmp_path / "plain", **{**flags, **in_order}))
    expected = unpacked_steps(record, accumulation=accumulation, num_epochs=2)
    del os.environ["RECORD_FOLDER"]
    options(**OPTIONS)
    packed = train(packed_argv(small_folder(family), family, tmp_path / "packed", **flags))
    assert packed_steps(tmp_path / "packed") == expected
    loss, grad_norm, rate = largest_differences(curve(plain["log_history"]), curve(packed["log_history"]))
    assert loss < 1e-5
    assert grad_norm < 1e-5
    assert rate == 0
    assert largest_gap(saved(tmp_path / "plain"), saved(tmp_path / "packed")) < 3e-6
    assert epoch_report(tmp_path / "packed")["num_packs"] < sum(map(len, expected)) // 2, "it packed"
