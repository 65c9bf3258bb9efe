"""`packing_share=media` in real runs: the same training as without sharing, with each image computed once."""

import random

import pytest

from tests.data_rows import rows_about_images, sentence, text_row, write_jsonl
from tests.host.runs import epoch_report, packed_argv, train
from tests.host.same_steps import curve, largest_differences, largest_gap, packed_steps, weights
from tests.marks import telling

FAMILY = "qwen2_5_vl"
NUM_IMAGES, ROWS_AN_IMAGE = 12, 5

pytestmark = pytest.mark.usefixtures("options")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Rows about images, one image after the other, and a text after each."""
    folder = tmp_path_factory.mktemp("vqa")
    rng = random.Random(5)
    rows = []
    for of_image in rows_about_images(folder, NUM_IMAGES, ROWS_AN_IMAGE, seed=5):
        rows += [*of_image, text_row(sentence(rng, 2, 9), sentence(rng, 1, 12))]
    rows = [{**row, "channel": "ab"[number % 3 == 0]} for number, row in enumerate(rows)]
    return write_jsonl(folder / "train.jsonl", rows)


def run(folder, dataset, output, family=FAMILY, **more):
    flags = packed_argv(
        folder, family, output,
        **{
            "dataset": dataset, "split_dataset_ratio": 0, "learning_rate": 1e-4, "save_strategy": "steps",
            "save_steps": 1000, "num_train_epochs": 5, **more,
        },
    )  # fmt: skip
    return train(flags)


def logged(lines, *names):
    """What was logged at every step, beside the curve."""
    return [[line[name] for name in names] for line in lines if "loss" in line]


@pytest.mark.parametrize(
    ("family", "packing", "flags", "metrics"),
    [
        ("qwen2_5_vl", {}, {"freeze_vit": "false"}, ["token_acc"]),
        telling("qwen3_vl", {}, {"tuner_type": "lora", "lora_dropout": 0, "gradient_checkpointing": "true"}, []),
        telling("qwen2_5_vl", {"packing_loss": "sample", "packing_pad_to": 64}, {}, []),
        telling("qwen2_5_vl", {"packing_loss": "sqrt", "packing_attention": "segments"}, {}, []),
        telling("qwen2_5_vl", {}, {"enable_channel_loss": "true"}, ["loss_a", "loss_b", "token_acc"]),
        telling("qwen2_5_vl", {"packing_attention": "grouped"}, {"acc_strategy": "seq"}, ["seq_acc"]),
    ],
)
def test_a_whole_run_trains_what_it_trains_without_sharing(  # noqa: PLR0913 - a case, and fixtures
    family, packing, flags, metrics, dataset, small_folder, tmp_path, options
):
    """SHARE-9: 30 steps with the same rows in each: loss, gradient norm, rate, metrics and weights."""
    options(packing_batch="samples", packing_strategy="exact", packing_length=1024, record_packs="true", **packing)
    made = {}
    for share in ("none", "media"):
        options(packing_share=share)
        output = tmp_path / share
        result = run(
            small_folder(family), dataset, output, family, per_device_train_batch_size=12,
            gradient_accumulation_steps=1, train_dataloader_shuffle="false", dataset_shuffle="false", **flags,
        )  # fmt: skip
        (last,) = output.glob("checkpoint-*")
        lines = result["log_history"]
        made[share] = curve(lines), packed_steps(output), weights(last), epoch_report(output), logged(lines, *metrics)
    plain, steps, trained, account, said = made["none"]
    shared, same_steps, same_trained, other_account, also_said = made["media"]
    assert len(plain) == 30
    assert same_steps == steps
    loss, norm, rate = largest_differences(plain, shared)
    assert loss < 1e-5
    assert norm < 1e-5
    assert rate == 0
    assert largest_gap(trained, same_trained) < 1e-5
    assert also_said == [pytest.approx(one, rel=1e-4) for one in said]
    assert other_account["num_samples"] == account["num_samples"] == NUM_IMAGES * (ROWS_AN_IMAGE + 1)
    assert other_account["num_images"] == NUM_IMAGES
    assert account["num_images"] == NUM_IMAGES * ROWS_AN_IMAGE
    assert other_account["num_tokens"] < 0.6 * account["num_tokens"]


def test_targets_alone_share_nothing_and_that_is_said(dataset, small_folder, tmp_path, options, monkeypatch):
    """SHARE-49: under `--loss_scale all` there is no token before the first target."""
    said = []
    monkeypatch.setattr("swift_vlpack.host.pipeline.logger.warning", said.append)
    options(packing_share="media", packing_length=1024, packing_verify="false")
    run(small_folder(FAMILY), dataset, tmp_path / "run", loss_scale="all", max_steps=1)
    assert "shares nothing under --loss_scale all: every token is a target" in "\n".join(map(str, said))
