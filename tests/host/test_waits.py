"""A packed training step asks the device for no number between log lines: on a GPU every answer is waited for."""

import pytest
import swift.dataloader.shard
import torch

from swift_vlpack.attention import packed_sequence
from tests.data_rows import mixed_rows, rows_about_images, text_row, write_jsonl
from tests.environment import packing_options
from tests.host.runs import packed_argv, train
from tests.marks import telling
from tests.waits import waits_of_steps

FAMILY = "qwen2_5_vl"
FIRST, LAST = 2, 6
SETTINGS = {
    "split_dataset_ratio": 0, "max_steps": 8, "gradient_accumulation_steps": 2, "logging_steps": 8,
    "callbacks": "waits", "dataloader_num_workers": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return write_jsonl(folder / "train.jsonl", mixed_rows(folder, 40, largest=100))


@pytest.fixture(scope="module")
def shared_data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    return write_jsonl(
        folder / "train.jsonl", [row for rows in rows_about_images(folder, 12, 4, seed=1) for row in rows]
    )


@pytest.fixture
def moved(monkeypatch):
    """A batch that moves to a device has other tensors than before; that device is played by the CPU."""

    def to_device(batch, device, non_blocking=False):
        return type(batch)({name: one.clone() if torch.is_tensor(one) else one for name, one in batch.items()})

    monkeypatch.setattr(swift.dataloader.shard, "to_device", to_device)
    monkeypatch.setattr(packed_sequence, "ON_HOST", "")


def counted(model, family, folder, options=None, **flags):
    packing_options(**(options or {}))
    with waits_of_steps(FIRST, LAST) as found:
        train(packed_argv(model, family, folder, **{**SETTINGS, **flags}))
    return found


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, {"gradient_checkpointing": "true"}),
        ({"packing_loss": "sqrt", "packing_attention": "grouped"}, {"neftune_noise_alpha": 5}),
        telling({"packing_batch": "samples"}, {"per_device_train_batch_size": 2}),
    ],
)
def test_step_waits_for_nothing_of_ours(small_folder, data, tmp_path, moved, options, flags):
    """TRAIN-31"""
    found = counted(small_folder(FAMILY), FAMILY, tmp_path, options, dataset=data, **flags)
    assert not found.ours, found.ours
    assert found.of_host, "the host's own are counted"


def test_step_with_shared_images_waits_for_nothing_of_ours(small_folder, shared_data, tmp_path, moved):
    """TRAIN-31"""
    flags = {"dataset": shared_data, "packing_length": 400}
    found = counted(small_folder(FAMILY), FAMILY, tmp_path, {"packing_share": "media"}, **flags)
    assert not found.ours, found.ours


@pytest.mark.parametrize("family", ["qwen3_5", telling("qwen3_vl")])
def test_step_of_another_family_waits_for_nothing_of_ours(small_folder, data, tmp_path, moved, family):
    """TRAIN-31"""
    found = counted(small_folder(family), family, tmp_path, dataset=data)
    assert not found.ours, found.ours


def test_evaluation_of_packs_waits_once(small_folder, data, tmp_path, moved):
    """TRAIN-31: for the losses of all packs, at its end."""
    flags = {
        "dataloader_persistent_workers": "false",
        "val_dataset": data,
        "eval_strategy": "steps",
        "eval_steps": FIRST + 1,
    }
    found = counted(small_folder(FAMILY), FAMILY, tmp_path, {"eval_packing": "true"}, dataset=data, **flags)
    assert sum(found.ours.values()) <= 1, found.ours


@pytest.mark.slow
@pytest.mark.telling
def test_text_of_one_document_waits_for_nothing_of_ours(text_folder, tmp_path, moved):
    """TRAIN-31"""
    data = write_jsonl(tmp_path / "train.jsonl", [text_row("question", "word " * n) for n in range(2, 60)])
    found = counted(text_folder, "qwen2", tmp_path / "run", dataset=data, template="qwen2_5", packing_length=200)
    assert not found.ours, found.ours
