"""Packed training through ms-swift's own pipeline, in process."""

import json
import logging
import re

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from swift_vlpack.errors import ConfigError, IsolationError
from tests.data_rows import image_row, mixed_rows, text_row, write_jsonl
from tests.host.runs import argv, epoch_report, log_lines, packed_argv, train
from tests.images import GOOD, make
from tests.marks import telling

FAMILY = "qwen2_5_vl"


pytestmark = pytest.mark.usefixtures("options")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return {
        "train": write_jsonl(folder / "train.jsonl", mixed_rows(folder / "train", 16, largest=160)),
        "val": write_jsonl(folder / "val.jsonl", mixed_rows(folder / "val", 7, seed=1, largest=160)),
    }


def test_accuracy_by_sequence_counts_the_samples_of_a_row(small_folder, data, tmp_path, options, monkeypatch):
    """docs/training.md: `--acc_strategy seq` has an entry for each sample, as in a padded batch, and none for a row."""
    from swift.trainers import mixin

    options(packing_strategy="exact", packing_drop_last="false", packing_verify="false")
    counted, compute = [], mixin.compute_acc

    def counting(*args, **kwargs):
        found = compute(*args, **kwargs)
        counted.append(len(found["seq_acc"]))
        return found

    monkeypatch.setattr(mixin, "compute_acc", counting)
    train(
        packed_argv(
            small_folder(FAMILY), FAMILY, tmp_path, dataset=data["train"], num_train_epochs=1, split_dataset_ratio=0,
            acc_strategy="seq",
        )
    )  # fmt: skip
    assert sum(counted) == 16
    assert len(counted) == epoch_report(tmp_path)["num_packs"] < 16


def test_packed_run_logs_reports_and_closes_its_account(small_folder, data, tmp_path, options, caplog):
    """TRAIN-7 TRAIN-8 TRAIN-9 TRAIN-21 REPORT-4 DATA-6 ISO-5 STAT-5"""
    options(packing_strategy="exact", packing_drop_last="false")
    with caplog.at_level(logging.INFO):
        result = train(
            packed_argv(
                small_folder(FAMILY),
                FAMILY,
                tmp_path,
                dataset=data["train"],
                num_train_epochs=2,
                split_dataset_ratio=0,
                report_to="tensorboard",
            )
        )
    steps = [line for line in result["log_history"] if "loss" in line]
    (speed,) = (line for line in result["log_history"] if "train_runtime" in line)
    assert speed["train_samples_per_second"] * speed["train_runtime"] == pytest.approx(32, abs=0.01), "not packs"
    assert "counts add up: 16 read = 16 packed + 0 left out + 0 not reached" in caplog.text
    reports = [epoch_report(tmp_path, epoch) for epoch in (0, 1)]
    assert len(steps) == sum(report["num_packs"] for report in reports)
    assert reports[0]["num_packs"] == reports[1]["num_packs"]
    for report in reports:
        assert report["is_closed"]
        assert report["num_read"] == report["num_samples"] == 16
        assert report["fill_mean"] > 0.8
        assert report["sources"]["train"]["num_packed"] == 16
        assert (report["single_long_per_cent"], report["dropped_per_cent"]) == (0.0, 0.0)
    for line in steps:
        assert 0 < line["pack/fill"] <= 1
        assert line["pack/samples"] >= 1
        assert line["pack/images"] >= 0
        assert line["pack/padding_saved"] == 0, "REPORT-3: batches of one were asked for, which have no padding"
        assert 0 <= line["pack/vision_share"] < 1
        assert "pack/sharing_saved" not in line, "SHARE-82"
        assert line["pack/tokens_per_second"] > 0
        assert line["pack/supervised_tokens"] > 0
        assert "token_acc" in line
    assert sum(line["pack/samples"] for line in steps) == 32
    assert not [key for line in steps for key in line if "train" in key and key != "train_loss"]
    assert "\none step     1 pack with about " in caplog.text, "TRAIN-21"
    supervised = sum(line["pack/supervised_tokens"] for line in steps[: len(steps) // 2])
    each = float(re.search(r"about \d+ samples and (\d+) supervised tokens", caplog.text)[1])
    assert supervised / (len(steps) // 2) == pytest.approx(each, abs=1)
    ended = caplog.text.rpartition("packing: ended at step ")[2]
    assert ended.startswith(f"{len(steps)} of {len(steps)}, 1 rank\ntrained      {len(steps)} steps here: ")
    assert ", 32 samples, " in ended
    assert f"look: vlpack report {tmp_path}"[:80] in ended
    events = EventAccumulator(str(next(tmp_path.glob("runs/*"), tmp_path / "runs")))
    events.Reload()
    assert "packing/text_summary" in events.Tags()["tensors"]
    assert {"train/pack/tokens_per_second", "train/pack/supervised_tokens"} <= set(events.Tags()["scalars"])


def eval_loss(flags):
    result = train(flags)
    return next(line["eval_loss"] for line in result["log_history"] if "eval_loss" in line)


@pytest.mark.parametrize("family", [FAMILY, telling("qwen3_vl")])
def test_eval_is_padded_and_equals_an_unpacked_run(family, small_folder, data, tmp_path, options):
    """TRAIN-6 DATA-11 DATA-13: evaluated on the first weights, before a step, with batches of 3."""
    options(packing_verify="true")
    split = {"dataset": [f"{data['train']}#12", data["val"]], "split_dataset_ratio": 0.3, "data_seed": 7}
    common = {
        **(split if family == FAMILY else {"dataset": data["train"], "val_dataset": data["val"]}),
        "eval_on_start": "true",
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 2,
        "per_device_eval_batch_size": 3,
        "learning_rate": 0,
    }
    packed = eval_loss(packed_argv(small_folder(family), family, tmp_path / "packed", **common))
    plain = eval_loss(argv(small_folder(family), family, tmp_path / "plain", **common))
    assert packed == pytest.approx(plain, abs=1e-6)
    if family == FAMILY:
        saved = [(tmp_path / run / "val_dataset.jsonl").read_bytes() for run in ("packed", "plain")]
        assert saved[0] == saved[1]
        assert saved[0].count(b"\n") == 5, "3 of the 12 drawn, 2 of the 7"


def test_row_that_breaks_after_the_length_pass_is_left_out(small_folder, data, tmp_path, options, monkeypatch):
    """DATA-7 DATA-10: its pack goes on without it; a pack that loses all its rows trains without loss."""
    from swift_vlpack.rows.fusion import FusionCaptionDataset
    from swift_vlpack.rows.samples import SampleError

    rows = [image_row([path], answer="x " * 40) for path in make(tmp_path / "good", GOOD).values()]
    dataset = write_jsonl(tmp_path / "rows.jsonl", [*rows, *[text_row(answer="y " * 50) for _ in range(3)]])
    encode = FusionCaptionDataset.encode

    def breaking(data, address, *read):
        row = data.sources[address.source].row(address.row_index)
        if row.get("images") and "photo" not in str(row["images"]):
            raise SampleError(data.sample_id(address), "file_missing", "gone")
        return encode(data, address, *read)

    monkeypatch.setattr(FusionCaptionDataset, "encode", breaking)  # which the length pass does not call
    options(packing_length=140, packing_strategy="greedy", packing_drop_last="false", packing_verify="false")
    result = train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path / "out", dataset=dataset, num_train_epochs=1))
    report = epoch_report(tmp_path / "out")
    assert report["num_samples"] == 4
    assert report["num_dropped"] == {"file_missing": len(GOOD) - 1}
    assert report["is_closed"]
    losses = [line["loss"] for line in result["log_history"] if "loss" in line]
    assert len(losses) > report["num_packs"], "the packs that lost all their rows took a step too"
    assert all(loss == loss for loss in losses), "a loss is NaN"
    assert 0.0 in losses


def test_wrong_attention_is_stopped_by_the_proof(small_folder, data, tmp_path, options, monkeypatch):
    """ISO-5: with plain sdpa samples see each other, and training stops before step 1."""
    from swift_vlpack.host.trainer import PackingTrainer

    def train_with_sdpa(self, *args, **kwargs):
        self.model.set_attn_implementation("sdpa")
        return original(self, *args, **kwargs)

    original = PackingTrainer.train
    monkeypatch.setattr(PackingTrainer, "train", train_with_sdpa)
    with pytest.raises(IsolationError, match="attention sdpa: attention sdpa knows no boundaries"):
        train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path, dataset=data["train"], max_steps=1))
    assert not [line for line in log_lines(tmp_path) if "loss" in line]


@pytest.mark.parametrize("attn_impl", ["sdpa", telling("eager")])
def test_attention_that_knows_no_boundaries_is_replaced(attn_impl, small_folder, data, tmp_path, options, caplog):
    """ISO-1 TRAIN-10, and TRAIN-4: `args.json` has the batch as accumulation."""
    options(packing_verify="true")
    flags = packed_argv(
        small_folder(FAMILY), FAMILY, tmp_path, dataset=data["train"], max_steps=1, attn_impl=attn_impl,
        save_strategy="steps", save_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=2,
    )  # fmt: skip
    train(flags)
    args = json.loads((tmp_path / "args.json").read_text())
    assert args["attn_impl"] == attn_impl
    assert (args["per_device_train_batch_size"], args["gradient_accumulation_steps"]) == (1, 8)
    saved = (tmp_path / "checkpoint-1" / "config.json").read_text()
    assert "vlpack" not in saved


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        ({"deepspeed_autotp_size": 2}, {}, "--deepspeed_autotp_size above 1 cannot be used with packing"),
        ({"use_flash_ckpt": "true"}, {}, "--use_flash_ckpt true cannot be used with packing"),
        ({}, {"fusion_config": "mix.yaml"}, "both --dataset"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(  # noqa: PLR0913
    flags, variables, message, small_folder, data, tmp_path, options
):
    """TRAIN-5 TRAIN-3 RANKS-7"""
    options(**variables)
    with pytest.raises(ConfigError, match=message):
        train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path, dataset=data["train"], **flags))


def test_without_packing_the_plugin_changes_nothing(small_folder, data, tmp_path, options):
    """TRAIN-2: same losses with and without the plugin, and ms-swift's own trainer."""
    from swift.trainers import TrainerFactory

    from swift_vlpack.host.launch import plugin_path

    common = {"dataset": data["train"], "max_steps": 2, "per_device_train_batch_size": 2}
    plain = train(argv(small_folder(FAMILY), FAMILY, tmp_path / "plain", **common))
    train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path / "packed", **common))
    loaded = train(argv(small_folder(FAMILY), FAMILY, tmp_path / "loaded", external_plugins=plugin_path(), **common))
    losses = [[line["loss"] for line in result["log_history"] if "loss" in line] for result in (plain, loaded)]
    assert losses[0] == losses[1]
    assert TrainerFactory.TRAINER_MAPPING["causal_lm"] == "swift.trainers.Seq2SeqTrainer"
    assert not (tmp_path / "loaded" / "vlpack").exists()
    assert torch.is_grad_enabled()
