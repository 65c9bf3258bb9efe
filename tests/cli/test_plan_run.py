"""`vlpack plan` for a run, in process: what it says is what training does, and it needs no weights."""

import json
import math
import os
import shutil
import socket
from pathlib import Path

import httpx
import pytest
import requests

from swift_vlpack.cli.plan import training_report
from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.host import pipeline
from swift_vlpack.host.args import _fold_batch_size
from swift_vlpack.host.messages import is_of_network as said_to_be
from swift_vlpack.host.ranks import counted_as
from swift_vlpack.runlog.plan_text import plan_text
from tests.cli.in_process import run_here
from tests.data_rows import image_row, mixed_rows, text_row, write_jsonl
from tests.host.runs import epoch_report, log_lines, packed_argv, train
from tests.images import BROKEN, REASON_OF, make, photo
from tests.marks import telling

FAMILY = "qwen2_5_vl"

pytestmark = pytest.mark.usefixtures("options")


@pytest.fixture(scope="module")
def bare_folder(small_folder, tmp_path_factory):
    """The tiny model without its weights."""
    folder = tmp_path_factory.mktemp("bare") / "model"
    shutil.copytree(small_folder(FAMILY), folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    return folder


@pytest.fixture
def folders(small_folder, bare_folder):
    """The model with and without its weights."""
    return {"whole": small_folder(FAMILY), "bare": bare_folder}


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    """Two sources by ratio: 12 of 16 rows with images, and 15 of 10 rows of text."""
    folder = tmp_path_factory.mktemp("mix")
    write_jsonl(folder / "photos.jsonl", mixed_rows(folder / "images", 16, largest=160))
    write_jsonl(folder / "chat.jsonl", [text_row(f"question {n}", "word " * (7 * n + 1)) for n in range(10)])
    (folder / "mix.yaml").write_text(
        f"sources:\n  - {{dataset: {folder}/photos.jsonl, ratio: 0.75}}\n"
        f"  - {{dataset: {folder}/chat.jsonl, ratio: 1.5}}\n"
    )
    return folder


def planned(model, tmp_path, num_ranks=1, packing="true", **flags):
    argv = [*packed_argv(model, FAMILY, tmp_path / "never", **flags), "--packing", packing]
    return training_report(argv, num_ranks=num_ranks, failures_file=tmp_path / "failures.jsonl")


def sizes_of_files(folder):
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def state_of(output):
    return [line["global_step/max_steps"] for line in log_lines(output) if "global_step/max_steps" in line][-1]


@pytest.mark.parametrize(
    "length",
    [
        {"num_train_epochs": 2},
        telling({"max_steps": 7}),
        pytest.param({"num_train_epochs": 1.5}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_steps_and_packs_are_those_of_the_training_run(length, folders, mix, tmp_path, options, monkeypatch):
    """CLI-6 CLI-7 CLI-8: with another draw in every epoch, and from a folder without weights."""
    cache = tmp_path / "lengths"
    options(packing_strategy="exact", packing_verify="false", fusion_config=mix / "mix.yaml", packing_cache_dir=cache)
    flags = {"max_length": 256, "gradient_accumulation_steps": 2, **length}
    report = planned(folders["bare"], tmp_path, **flags)
    assert not (tmp_path / "never").exists(), "a plan leaves no output folder"

    remembered = sizes_of_files(cache)
    assert sorted(name.partition("-")[0] for name in remembered if name.endswith(".lengths")) == ["chat", "photos"]
    digests = []
    planned_feed = pipeline.planned_feed

    def watched(*args):
        feed = planned_feed(*args)
        digests.append(feed.epoch_plan.digest())
        return feed

    monkeypatch.setattr(pipeline, "planned_feed", watched)
    for name in ("_", "USER", "HOSTNAME", "LS_COLORS", "SHLVL", "PWD", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "of another command and user")
    result = train(packed_argv(folders["whole"], FAMILY, tmp_path / "out", **flags))
    steps = [line for line in result["log_history"] if "loss" in line]
    assert report["num_steps"] == len(steps)
    assert state_of(tmp_path / "out") == f"{report['num_steps']}/{report['num_steps']}"
    assert digests == [report["plan_digest"]]
    if "num_train_epochs" in length:
        told = epoch_report(tmp_path / "out")
        assert [report[name] for name in ("num_samples", "num_tokens", "dropped")] == [
            told[name] for name in ("num_samples", "num_tokens", "num_dropped")
        ]
    assert sizes_of_files(cache) == remembered, "training measured again what the plan had measured"
    assert report["num_epochs"] == math.ceil(steps[-1]["epoch"])
    ends = {report["steps_per_epoch"] * epoch: epoch for epoch in range(1, report["num_epochs"])}
    assert ends
    for step, epoch in ends.items():
        assert steps[step - 1]["epoch"] == pytest.approx(epoch), "an epoch ends where the plan says"
    assert report["packs_per_epoch"] == report["packs_per_rank"]


def test_report_says_what_the_data_is_like(bare_folder, mix, tmp_path, options):
    """CLI-6"""
    options(fusion_config=mix / "mix.yaml", packing_drop_last="false")
    report = planned(bare_folder, tmp_path)
    assert (report["rows"], report["num_rows"]) == (26, 27)
    assert report["num_samples"] + report["num_dropped"] == 27
    photos, chat = report["sources"]["photos"], report["sources"]["chat"]
    assert (photos["rows"], photos["asked_ratio"], photos["asked_share"]) == (16, 0.75, round(12 / 27, 4))
    assert (chat["rows"], chat["asked_ratio"], chat["asked_share"]) == (10, 1.5, round(15 / 27, 4))
    for part in ("samples", "tokens"):
        assert photos[f"num_{part}"] + chat[f"num_{part}"] == report[f"num_{part}"]
        assert photos[f"share_of_{part}"] == pytest.approx(photos[f"num_{part}"] / report[f"num_{part}"], abs=1e-4)
    lengths = report["lengths"]
    assert lengths["min"] <= lengths["median"] <= lengths["p95"] <= lengths["p99"] <= lengths["max"]
    assert lengths["mean"] * 27 == pytest.approx(report["num_tokens"], rel=0.01)
    assert 0 < report["share_of_rows_with_image"] <= 12 / 27
    assert 0 < report["share_of_vision_tokens"] < photos["share_of_tokens"]
    assert (report["unreadable"], report["failures_file"]) == ({}, None)
    assert not (tmp_path / "failures.jsonl").exists()
    assert {"seconds", "seconds_lengths", "seconds_plan"} <= set(report)
    assert report["ratio_by"] == "rows"


def test_sources_by_tokens_get_the_share_that_the_file_asks_for(bare_folder, mix, tmp_path, options):
    """MIX-7 CLI-6 DATA-3"""
    (tmp_path / "mix.yaml").write_text(
        f"ratio_by: tokens\nsources:\n  - {{dataset: {mix}/photos.jsonl, ratio: 0.3}}\n"
        f"  - {{dataset: {mix}/chat.jsonl, ratio: 0.9}}\n"
    )
    options(fusion_config=tmp_path / "mix.yaml", packing_drop_last="false")
    report = planned(bare_folder, tmp_path)
    photos, chat = report["sources"]["photos"], report["sources"]["chat"]
    assert (photos["asked_share"], chat["asked_share"]) == (0.25, 0.75)
    assert abs(photos["num_tokens"] - report["num_tokens"] / 4) <= report["lengths"]["max"]
    assert "ratios are shares of tokens" in plan_text(report)


def test_vision_tokens_are_counted_exactly(bare_folder, tmp_path, options):
    """CLI-6: a 280 x 140 image is 20 x 10 patches, of which four make a token."""
    options(packing_drop_last="false")
    rows = [image_row([photo(tmp_path, str(n), 280, 140)], "what?", "noise") for n in range(4)]
    report = planned(bare_folder, tmp_path, dataset=write_jsonl(tmp_path / "rows.jsonl", rows))
    assert report["share_of_vision_tokens"] == round(50 / report["lengths"]["max"], 4)
    assert report["share_of_rows_with_image"] == 1


def untrained(row):
    """The same row without an answer, of which ms-swift masks every token."""
    return {**row, "messages": row["messages"][:1]}


def test_rows_without_a_target_and_with_more_tags_than_images_are_counted(bare_folder, tmp_path, options):
    """LOSS-10 LEN-22"""
    options(packing_drop_last="false")
    picture = photo(tmp_path, "a", 140, 70)
    rows = [untrained(text_row()), text_row(), untrained(image_row([picture]))]
    rows.append({**text_row("<image>two<image>"), "images": [picture]})
    report = planned(bare_folder, tmp_path, dataset=write_jsonl(tmp_path / "rows.jsonl", rows))
    assert report["rows_without_target"] == 2
    assert "2 rows have no token to train: all labels are -100" in plan_text(report)
    assert (report["rows_with_surplus_tags"], report["unreadable"]) == (1, {})
    assert "1 row has more tags than media" in plan_text(report)


@pytest.mark.parametrize("mode", ["plan", "buffer"])
def test_data_without_any_target_is_refused(mode, folders, tmp_path, options):
    """LOSS-10: with its loss of 0 the run would go on to its end."""
    options(packing_drop_last="false", packing_mode=mode)
    data = write_jsonl(tmp_path / "rows.jsonl", [untrained(text_row(f"question {n}")) for n in range(4)])
    flags = {"dataset": data, "split_dataset_ratio": 0, "max_steps": 2}
    with pytest.raises(DataError, match=r"^there is nothing to train: [^\n]* all are -100") as error:
        train(packed_argv(folders["whole"], FAMILY, tmp_path / "out", **flags))
    assert "packing_verify" not in str(error.value)
    if mode == "plan":
        with pytest.raises(DataError, match="there is nothing to train"):
            planned(folders["bare"], tmp_path, **flags)


def test_rows_that_cannot_be_encoded_are_written_with_reasons(bare_folder, tmp_path, options):
    """CLI-9"""
    options(packing_drop_last="false")
    broken = make(tmp_path / "broken", BROKEN)
    rows = [text_row(), *(image_row([path]) for path in broken.values()), text_row()]
    report = planned(bare_folder, tmp_path, dataset=write_jsonl(tmp_path / "rows.jsonl", rows))
    failed = [json.loads(line) for line in (tmp_path / "failures.jsonl").read_text().splitlines()]
    assert report["failures_file"] == str(tmp_path / "failures.jsonl")
    assert report["sources"]["rows"]["num_unreadable"] == sum(report["unreadable"].values()) == len(failed)
    by_name = {os.path.basename(line["files"][0]): line for line in failed}
    # Good headers before broken pixels (truncated.jpg, broken.png) show when the rows are loaded.
    assert set(by_name) >= {"text.jpg", "empty.jpg", "folder.jpg", "aspect.png", "missing.jpg"}
    for name, line in by_name.items():
        number = 1 + list(broken).index(name)
        assert broken[name] in line.pop("error")
        assert line.pop("when")
        assert line == {
            "id": f"rows:{number}",
            "where": f"{tmp_path}/rows.jsonl:{number + 1}",
            "reason": REASON_OF[name],
            "epoch": None,
            "files": [broken[name]],
        }
    assert report["num_samples"] + report["num_dropped"] + len(failed) == report["num_rows"] == len(rows)


def test_list_says_why_the_loader_deleted_a_row_in_the_order_of_the_file(bare_folder, tmp_path, options):
    """DATA-16 CLI-9: by ms-swift's own words; ids count from 0, lines from 1; no earlier list stays."""
    options(packing_drop_last="false", packing_length=100, packing_allow_single_long="false")
    rows = [text_row(f"question {n}") for n in range(12)]
    rows[2] = text_row("long", "word " * 150)
    rows[3] = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]}
    rows[5] = image_row([str(tmp_path / "never.png")])
    rows[7] = {"messages": []}
    rows[9] = {**text_row("box"), "objects": {"ref": ["a"], "bbox": [[1, 2, 3]]}}
    rows[10] = text_row("longer", "word " * 600)
    rows[11] = text_row("long", "word " * 150)
    planned(bare_folder, tmp_path, dataset=write_jsonl(tmp_path / "rows.jsonl", rows))
    lines = [json.loads(line) for line in (tmp_path / "failures.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines if line["epoch"] is None] == [
        *(f"rows:{number}" for number in (3, 5, 7, 9, 10))
    ]
    assert [line["id"] for line in lines if line["epoch"] == 0] == ["rows:2", "rows:11"]
    errors = {line["id"]: line["error"] for line in lines}
    said = "ms-swift's loader deleted the row: AssertionError: "
    assert errors["rows:3"] == f"{said}message: {{'role': 'assistant', 'content': None}}"
    assert errors["rows:7"].startswith("ms-swift's MessagesPreprocessor makes nothing of the row {'messages': []")
    assert errors["rows:9"] == f"{said}len(box): 3"
    assert all(line["where"].endswith(f":{1 + int(line['id'].split(':')[1])}") for line in lines)
    assert [line["reason"] for line in lines if line["id"] in ("rows:2", "rows:10")] == ["over_max_length", "oversize"]
    planned(bare_folder, tmp_path, dataset=write_jsonl(tmp_path / "rows.jsonl", rows[:1]))
    assert not (tmp_path / "failures.jsonl").exists()


def test_report_is_not_lost_where_the_list_cannot_be_written(bare_folder, tmp_path, options, caplog):
    """CLI-34: a length pass is behind it."""
    options(packing_drop_last="false")
    data = write_jsonl(tmp_path / "rows.jsonl", [text_row(), {"messages": []}])
    argv = packed_argv(bare_folder, FAMILY, tmp_path / "never", dataset=data)
    report = training_report(argv, num_ranks=1, failures_file=tmp_path / "gone" / "list.jsonl")
    assert (report["num_samples"], report["failures_file"]) == (1, None)
    assert "cannot be written (No such file or directory), so the list of 1 left-out row is missing" in caplog.text


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("qwen2_vl", "--model_type qwen2_vl is for Qwen2VLForConditionalGeneration, but config.json of "),
        ("qwen2_vl", "says Qwen2_5_VLForConditionalGeneration, which is --model_type qwen2_5_vl"),
        ("llama", "--model_type llama is for LlamaForCausalLM"),
    ],
)
def test_model_type_of_another_model_is_refused_by_name(model_type, said, bare_folder, tmp_path):
    """CLI-37"""
    data = write_jsonl(tmp_path / "rows.jsonl", [text_row()])
    with pytest.raises(ConfigError) as refused:
        planned(bare_folder, tmp_path, dataset=data, model_type=model_type)
    assert said in str(refused.value)


def test_file_that_is_no_list_is_kept(bare_folder, tmp_path):
    """CLI-9"""
    data = write_jsonl(tmp_path / "failures.jsonl", [text_row()])
    with pytest.raises(ConfigError, match="is not a list of left-out rows, and is not overwritten"):
        planned(bare_folder, tmp_path, dataset=data)
    assert os.path.getsize(data)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_plan_for_several_ranks_is_made_by_one_process(num_ranks, bare_folder, mix, tmp_path, options):
    """CLI-7"""
    options(packing_strategy="exact", fusion_config=mix / "mix.yaml")
    report = planned(bare_folder, tmp_path, num_ranks, max_length=128, gradient_accumulation_steps=2)
    assert report["num_ranks"] == num_ranks
    assert report["packs_per_epoch"] == num_ranks * report["packs_per_rank"] >= report["num_packs"]
    assert report["steps_per_epoch"] == math.ceil(report["packs_per_rank"] / 2)


@pytest.mark.parametrize("per_device", [1, 3, 4])
def test_accumulation_that_is_not_given_follows_the_ranks(per_device, bare_folder, mix, tmp_path, options):
    """CLI-7: ms-swift aims at 16 rows a step over all ranks; a batch becomes accumulation (TRAIN-4)."""
    options(fusion_config=mix / "mix.yaml")
    argv = packed_argv(bare_folder, FAMILY, tmp_path, per_device_train_batch_size=per_device)
    at = argv.index("--gradient_accumulation_steps")
    del argv[at : at + 2]
    report = training_report(argv, num_ranks=2, failures_file=tmp_path / "failures.jsonl")
    assert report["gradient_accumulation_steps"] == math.ceil(16 / per_device / 2) * per_device


def test_options_that_need_devices_do_not_stop_a_plan(bare_folder, mix, tmp_path, options):
    """CLI-6: neither GPUs, deepspeed, flash-attn nor liger are needed to plan a run that uses them."""
    options(packing_drop_last="false")
    flags = {"dataset": mix / "chat.jsonl", "max_length": 100}
    plain = planned(bare_folder, tmp_path, **flags)
    gpus = {"ddp_backend": "nccl", "deepspeed": "zero2", "use_liger_kernel": "true", "attn_impl": "flash_attn"}
    report = planned(bare_folder, tmp_path, **flags, **gpus, torch_dtype="bfloat16", bf16="true")
    assert report["plan_digest"] == plain["plan_digest"]


def test_launched_ranks_count_where_no_plan_is_made(monkeypatch):
    """CLI-7"""
    from types import SimpleNamespace

    monkeypatch.setenv("WORLD_SIZE", "4")
    for ranks, accumulation in ((None, 4), (8, 2)):
        args = SimpleNamespace(per_device_train_batch_size=1, gradient_accumulation_steps=None)
        if ranks is None:
            _fold_batch_size(args, PackingConfig(packing_length=8))
        else:
            with counted_as(ranks):
                _fold_batch_size(args, PackingConfig(packing_length=8))
        assert args.gradient_accumulation_steps == accumulation


@pytest.mark.parametrize(
    ("flags", "mode", "message"),
    [
        ({"streaming": "true", "max_steps": 2}, "auto", "--streaming true .* cannot be planned"),
        ({"packing": "false"}, "auto", "--packing false has no packs"),
        ({"max_steps": 2}, "buffer", "packing_mode=buffer .* cannot be planned"),
    ],
)
def test_run_without_a_plan_is_refused(flags, mode, message, bare_folder, mix, tmp_path, options):  # noqa: PLR0913
    """CLI-5"""
    options(packing_mode=mode)
    with pytest.raises(ConfigError, match=message):
        planned(bare_folder, tmp_path, dataset=mix / "chat.jsonl", attn_impl="flash_attn", **flags)


def test_hub_that_cannot_be_reached_is_said_to_be_that(mix, tmp_path, capfd):
    """CLI-14: tests run without one; and a model that is not there is no mistake in the options either way."""
    argv = packed_argv("no/such-model", FAMILY, tmp_path / "out", dataset=mix / "chat.jsonl")
    assert run_here(["plan", *argv, "--failures", tmp_path / "failures.jsonl"]) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(
        f"vlpack plan: the hub cannot be reached: no/such-model is not a file or folder in {Path.cwd()}"
    )
    assert "it was looked for on Hugging Face" in last
    assert "refuses" not in last
    assert "local folder" in last


@pytest.mark.parametrize(
    ("error", "is_of_network"),
    [
        (ConnectionResetError("peer"), True),
        (socket.gaierror(-3, "Temporary failure in name resolution"), True),
        (httpx.ConnectTimeout("slow"), True),
        (requests.exceptions.ReadTimeout("slow"), True),
        (requests.exceptions.HTTPError("404 Client Error"), False),
        (FileNotFoundError("rows.jsonl"), False),
        (ValueError("bad flag"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_of_the_network_are_told_from_others(error, is_of_network):
    """CLI-14"""
    assert said_to_be(error) is is_of_network
    wrapped = OSError("cannot find the files")
    wrapped.__cause__ = error
    assert said_to_be(wrapped) is is_of_network


@pytest.mark.parametrize("is_given", [True, False], ids=["max_length", "no max_length"])
def test_capacity_that_nobody_chose_is_warned_of(is_given, bare_folder, mix, tmp_path, options, caplog):
    """TRAIN-22"""
    options(packing_strategy="exact", packing_cache_dir=tmp_path / "lengths")
    argv = packed_argv(bare_folder, FAMILY, tmp_path / "never", dataset=mix / "chat.jsonl")
    if not is_given:
        at = argv.index("--max_length")
        del argv[at : at + 2]
    report = training_report(argv, num_ranks=1, failures_file=tmp_path / "failures.jsonl")
    assert report["packing_length"] == (512 if is_given else 32768)
    warnings = [record.getMessage() for record in caplog.records if "the model's maximum" in record.getMessage()]
    assert len(warnings) == (not is_given)
    if warnings:
        assert f"{report['lengths']['min']} to {report['lengths']['max']} tokens" in warnings[0]
        assert "--max_length 1024 " in warnings[0]
