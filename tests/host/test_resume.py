"""Resuming packed training through ms-swift's own pipeline, in process; every pack that is trained is on record."""

import copy
import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import ConfigError, StateMismatch
from swift_vlpack.feed.saved_rows import RunRows
from swift_vlpack.host.state import (
    FILE,
    RANK_FILE,
    ROWS_FILE,
    StateNotSaved,
    check_settings,
    load_rank_state,
    load_state,
    save_rank_state,
    save_state,
)
from swift_vlpack.host.trainer import PackingTrainer
from tests.data_rows import image_row, mixed_rows, text_row, write_jsonl
from tests.environment import packing_variables
from tests.host.runs import epoch_report, packed_argv, train
from tests.images import photo
from tests.marks import telling

FAMILY = "qwen2_5_vl"


NUM_ROWS = 36


OPTIONS = {
    "VLPACK_RECORD_PACKS": "true",
    "VLPACK_PACKING_STRATEGY": "exact",
    "VLPACK_PACKING_VERIFY": "false",
    "VLPACK_PACKING_DROP_LAST": "false",
}


@pytest.fixture(scope="module", autouse=True)
def environment():
    yield
    packing_variables({})


@pytest.fixture(autouse=True)
def environment_of_a_test():
    packing_variables(OPTIONS)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return write_jsonl(folder / "train.jsonl", mixed_rows(folder / "train", NUM_ROWS, largest=160))


@pytest.fixture(scope="module")
def uninterrupted(small_folder, dataset, tmp_path_factory):
    """Two epochs under ms-swift's defaults, adapters with dropout and one persistent worker; a checkpoint a step."""
    packing_variables(OPTIONS)
    output = tmp_path_factory.mktemp("uninterrupted")
    options = {"save_strategy": "steps", "save_steps": 1, **workers_like(1, True)}
    return output, losses(train(flags(small_folder, output, dataset, **options)))


def workers_like(number, persistent):
    return {"dataloader_num_workers": number, "dataloader_persistent_workers": "true" if persistent else "false"}


def flags(small_folder, output, dataset, **options):
    return packed_argv(
        small_folder(FAMILY), FAMILY, output, dataset=dataset,
        **{"num_train_epochs": 2, "tuner_type": "lora", "save_strategy": "no",
           "gradient_accumulation_steps": 2, "split_dataset_ratio": 0, **options},
    )  # fmt: skip


def losses(result):
    return {line["step"]: line["loss"] for line in result["log_history"] if "loss" in line}


def trained(output, rank=0):
    """Packs as they were trained: (step, epoch, ids)."""
    path = output / "vlpack" / f"packs_rank{rank}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(line["step"], line["epoch"], line["ids"]) for line in lines]


def ids(packs, epoch):
    return sorted(sample_id for _, of, inside in packs if of == epoch for sample_id in inside)


ALL = sorted(f"train:{n}" for n in range(NUM_ROWS))


def steps_per_epoch(packs):
    return len({step for step, epoch, _ in packs if epoch == 0})


def checkpoint_at(output, where):
    """The checkpoint at a step, counted from the epoch's boundary."""
    return output / f"checkpoint-{steps_per_epoch(trained(output)) + where}"


@pytest.mark.parametrize(
    ("where", "workers"),
    [
        (-3, (1, True)),
        telling(-1, (3, False)),
        telling(0, (0, False)),
        telling(1, (1, True)),
        *(
            pytest.param(where, workers, marks=pytest.mark.slow)
            for where in (-2, 0, 2)
            for workers in ((1, True), (2, False), (2, True))
        ),
    ],
)
def test_resumed_run_is_the_rest_of_the_uninterrupted_one(
    where, workers, small_folder, dataset, uninterrupted, tmp_path
):
    """RESUME-2 RESUME-3 RESUME-8 RAND-5: in the first epoch, on its end, in the second; workers make no difference."""
    whole, expected = uninterrupted
    checkpoint = checkpoint_at(whole, where)
    step = int(checkpoint.name.split("-")[1])
    result = train(flags(small_folder, tmp_path, dataset, resume_from_checkpoint=checkpoint, **workers_like(*workers)))
    assert trained(tmp_path) == [pack for pack in trained(whole) if pack[0] > step]
    seen = {at: loss for at, loss in losses(result).items() if at > step}
    # But for the last place of fp32: libraries add up in another order where memory is aligned otherwise.
    assert seen == pytest.approx({at: loss for at, loss in expected.items() if at > step}, abs=2e-6)
    assert max(seen) == max(expected)
    for epoch in range(0 if where <= 0 else 1, 2):
        report = epoch_report(tmp_path, epoch)
        assert report == epoch_report(whole, epoch)
        assert report["is_closed"]
        assert report["num_samples"] == NUM_ROWS


@pytest.mark.slow
@pytest.mark.telling
def test_losses_and_evaluations_do_not_depend_on_workers(small_folder, dataset, uninterrupted, tmp_path):
    """RAND-1 RAND-2: nor does it matter that evaluations lie between the steps."""
    _, expected = uninterrupted
    evaluated = {"val_dataset": dataset + "#3", "eval_strategy": "steps", "eval_steps": 2}
    result = train(flags(small_folder, tmp_path, dataset, **workers_like(0, False), **evaluated))
    assert losses(result) == expected


@pytest.mark.parametrize(
    ("accumulation", "where"), [telling(1, -3), pytest.param(3, -2, marks=pytest.mark.slow), (3, 2)]
)
def test_other_accumulation_trains_what_is_left_once(
    accumulation, where, small_folder, dataset, uninterrupted, tmp_path
):
    """RESUME-4"""
    whole, _ = uninterrupted
    checkpoint = checkpoint_at(whole, where)
    step = int(checkpoint.name.split("-")[1])
    flagged = flags(
        small_folder, tmp_path, dataset, resume_from_checkpoint=checkpoint, gradient_accumulation_steps=accumulation
    )
    result = train(flagged)
    before = [pack for pack in trained(whole) if pack[0] <= step]
    after = trained(tmp_path)
    assert [ids(before + after, epoch) for epoch in (0, 1)] == [ALL, ALL]
    packs_left = [[pack for pack in after if pack[1] == epoch] for epoch in (0, 1)]
    num_steps = sum(-(-len(packs) // accumulation) for packs in packs_left)
    assert [at for at, _, _ in after][-1] == step + num_steps, "the bound was not moved to what is left"
    per_step = [sum(at == pack[0] for pack in after) for at in sorted({pack[0] for pack in after})]
    assert set(per_step[:-1]) <= {accumulation, len(packs_left[0]) % accumulation}
    assert max(losses(result)) == step + num_steps


def test_only_trained_packs_are_consumed(small_folder, dataset, tmp_path):
    """RESUME-2: three workers are ahead of the one step that was trained."""
    train(
        flags(
            small_folder, tmp_path, dataset, max_steps=1, dataloader_num_workers=3, save_strategy="steps", save_steps=1
        )
    )
    state = json.loads((tmp_path / "checkpoint-1" / FILE).read_text())["state"]
    assert [cut[0] for cut in state["cuts"]] == [1]
    assert [cut[2] for cut in state["cuts"]] == [2]
    assert state["counted"]["num_packs"] == 2
    report = epoch_report(tmp_path)
    assert report["num_held"] == NUM_ROWS - report["num_samples"]


def test_resumed_run_saves_evaluates_and_logs_as_it_is_told(small_folder, dataset, uninterrupted, tmp_path):
    """RESUME-17: the run that wrote the checkpoint did so after each step."""
    whole, expected = uninterrupted
    checkpoint = checkpoint_at(whole, 1)
    step = int(checkpoint.name.split("-")[1])
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "logging_steps": 2}
    options |= {"val_dataset": dataset + "#3", "resume_from_checkpoint": checkpoint}
    log = train(flags(small_folder, tmp_path, dataset, **options))["log_history"]
    last = max(expected)  # after which a run saves and evaluates in any case
    due = [at for at in range(step + 1, last) if at % 2 == 0]
    saved = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*"))
    assert [at for at in saved if at != last] == due
    assert [line["step"] for line in log if "eval_loss" in line and line["step"] != last] == due
    assert [line["step"] for line in log if "loss" in line and step < line["step"] != last] == due


@pytest.mark.slow
@pytest.mark.telling
def test_finished_run_trains_no_more(small_folder, dataset, uninterrupted, tmp_path):
    """RESUME-5"""
    whole, _ = uninterrupted
    last = whole / f"checkpoint-{trained(whole)[-1][0]}"
    train(flags(small_folder, tmp_path, dataset, resume_from_checkpoint=last))
    assert trained(tmp_path) == []
    assert epoch_report(tmp_path, 1) == epoch_report(whole, 1), "its last report is written if it was not"


@pytest.mark.slow
def test_checkpoints_of_epochs_resume(small_folder, dataset, uninterrupted, tmp_path):
    """RESUME-3: the epoch's account is closed before such a checkpoint is written."""
    whole, _ = uninterrupted
    first = flags(
        small_folder, tmp_path / "first", dataset, save_strategy="epoch", max_steps=steps_per_epoch(trained(whole))
    )
    train(first)
    [checkpoint] = (tmp_path / "first").glob("checkpoint-*")
    train(flags(small_folder, tmp_path / "second", dataset, resume_from_checkpoint=checkpoint))
    assert trained(tmp_path / "first") + trained(tmp_path / "second") == trained(whole)


def test_state_is_small_and_names_what_it_depends_on(uninterrupted):
    """RESUME-1"""
    whole, _ = uninterrupted
    for checkpoint in whole.glob("checkpoint-*"):
        assert (checkpoint / FILE).stat().st_size < 20_000
        saved = json.loads((checkpoint / FILE).read_text())
        assert saved["kind"] == "plan"
        assert {"seed", "data", "lengths", "sources", "packing_length", "packing_balance"} <= set(saved["fingerprint"])
        assert (checkpoint / ROWS_FILE).stat().st_size < 5000
        assert not list(checkpoint.glob("*.partial"))


def changed(dataset, folder, change):
    lines = Path(dataset).read_text().splitlines()
    path = folder / "train.jsonl"
    path.write_text("\n".join(change(lines)) + "\n")
    return path


@pytest.mark.parametrize(
    ("change", "fields", "told"),
    [
        (
            lambda lines: [*lines[:-1], lines[-1].replace("the", "car").replace("tree", "house")],
            ["data"],
            r"train:35 \(.*/train\.jsonl:36.*\) is not the row that was saved",
        ),
        (
            lambda lines: lines[:-1],
            ["data", "lengths", "sources"],
            r"train has 35 rows, but 36 were saved; they differ from row 36 of the saved run, which is missing",
        ),
        (
            lambda lines: [lines[1], lines[0], *lines[2:]],
            ["data", "lengths"],
            r"train:0 \(.* tokens.*, but had \d+ tokens",
        ),
    ],
)
def test_other_data_is_refused(change, fields, told, small_folder, dataset, uninterrupted, tmp_path):  # noqa: PLR0913
    """RESUME-6 RESUME-11"""
    other = changed(dataset, tmp_path, change)
    assert other.read_text() != Path(dataset).read_text()
    checkpoint = checkpoint_at(uninterrupted[0], -2)
    with pytest.raises(StateMismatch) as refused:
        train(flags(small_folder, tmp_path / "out", other, resume_from_checkpoint=checkpoint))
    for field in fields:
        assert f"{field} (" in str(refused.value)
    assert re.search(told, str(refused.value))
    assert "VLPACK_RESUME_DATA=restart" in str(refused.value)


def test_other_options_and_lengths_are_refused(small_folder, dataset, uninterrupted, tmp_path, monkeypatch):
    """RESUME-6: what of the samples is trained, too; defaults by their value."""
    checkpoint = checkpoint_at(uninterrupted[0], -2)
    for name, value in (("PACKING_BUFFER", "9"), ("PACKING_LOSS", "sqrt"), ("MASK_BOUNDARY_LOSS", "false")):
        monkeypatch.setenv(f"VLPACK_{name}", value)
    with pytest.raises(StateMismatch, match=r"packing_buffer \(512, now 9\)") as refused:
        train(
            flags(
                small_folder, tmp_path, dataset, resume_from_checkpoint=checkpoint, max_pixels=6000, seed=7, data_seed=7
            )
        )
    assert re.search(
        r"lengths \(train:\d+ .*files: [^)]*\.jpg\) has \d+ tokens.*, but had \d+ tokens", str(refused.value)
    )
    for part in ("seed (42, now 7)", "packing_loss ('token', now 'sqrt')", "mask_boundary_loss (True, now False)"):
        assert part in str(refused.value)
    assert "packing_min_fill_ratio" not in str(refused.value)


def edited_model(original, folder, change):
    """A copy of a model's folder with one change."""
    shutil.copytree(original, folder)
    if change == "tokenizer":
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text())
        vocabulary = content["model"]["vocab"]
        one, other = [token for token in vocabulary if len(token) == 1 and token.isalpha()][:2]
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    elif change == "image_mean":
        path = next(path for path in folder.glob("*processor_config.json") if "image_mean" in path.read_text())
        content = json.loads(path.read_text())
        content.get("image_processor", content)["image_mean"] = [0.5, 0.5, 0.5]
    elif change == "chat_template":
        path = folder / "chat_template.jinja"
        path.write_text(path.read_text().replace("<|im_end|>", "<|im_end|>."))
        return folder
    else:
        path = folder / "config.json"
        content = json.loads(path.read_text())
        content.get("text_config", content)[change] = {"rms_norm_eps": 1e-3, "hidden_act": "gelu"}[change]
    path.write_text(json.dumps(content))
    return folder


SAID = {
    "tokenizer": r"tokenizer.content \('digest \w+', now 'digest \w+'\)|tokenizer.content \('\w+', now '\w+'\)",
    "image_mean": r"processor.image_processor.image_mean \(\[0.48145466, .*\], now \[0.5, 0.5, 0.5\]\)",
    "chat_template": "chat_templates ",
    "rms_norm_eps": r"config.text_config.rms_norm_eps \(1e-05, now 0.001\)",
    "hidden_act": r"config.text_config.hidden_act \('silu', now 'gelu'\)",
}


@pytest.mark.parametrize("change", [name if name in ("tokenizer", "rms_norm_eps") else telling(name) for name in SAID])
def test_what_rows_become_and_how_the_model_computes_cannot_change(
    change, small_folder, dataset, uninterrupted, tmp_path
):
    """RESUME-20: of equal lengths, so that nothing else tells."""
    checkpoint = checkpoint_at(uninterrupted[0], 1)
    model = edited_model(small_folder(FAMILY), tmp_path / "model", change)
    with pytest.raises(StateMismatch, match=SAID[change]) as refused:
        train(flags(lambda family: model, tmp_path, dataset, resume_from_checkpoint=checkpoint))
    assert "\n" not in str(refused.value)
    assert "VLPACK_RESUME_DATA=restart" in str(refused.value)


def test_code_versions_and_variables_may_change_and_a_state_of_before_has_none_of_them(tmp_path, caplog):
    """RESUME-20: one warning; values that another version sets are in it; nothing is said without a change."""
    saved = {"packages.transformers": "5.1", "packages.pillow": "1", "code": "digest a", "variables.FPS": "2"}
    saved |= {"config.rms_norm_eps": 1e-6, "config.of_then": 1}
    for same in ({}, {"settings": saved}):
        check_settings(tmp_path, same, {**saved, "config.of_now": 2})
    assert not caplog.records
    with pytest.raises(StateMismatch, match=r"another config.rms_norm_eps \(1e-06, now 1\)\. "):
        check_settings(tmp_path, {"settings": saved}, {**saved, "packages.pillow": "2", "config.rms_norm_eps": 1})
    check_settings(tmp_path, {"settings": saved}, {**saved, "config.rms_norm_eps": 1}, model=str(tmp_path))
    assert "config.rms_norm_eps (1e-06, now 1)" in caplog.text, "--resume_only_model, whose model is the saved copy"
    caplog.clear()
    now = {name: value for name, value in saved.items() if name != "variables.FPS"}
    now |= {"packages.transformers": "5.2", "code": "digest b", "variables.MAX_PIXELS": "9", "config.rms_norm_eps": 1}
    check_settings(tmp_path, {"settings": saved}, now)
    (line,) = [record.message for record in caplog.records]
    for said in ("code (", "'5.1', now '5.2'", "variables.FPS ('2', now absent)", "MAX_PIXELS (absent, now '9')"):
        assert said in line
    assert "config.rms_norm_eps (1e-06, now 1)" in line


def test_options_that_decide_what_is_trained_are_warned_of(small_folder, dataset, uninterrupted, tmp_path, caplog):
    """RESUME-16: with both values, in one line; those of adapter and optimizer stay as they were."""
    whole, _ = uninterrupted
    checkpoint = checkpoint_at(whole, 1)
    step = int(checkpoint.name.split("-")[1])
    others = {"loss_scale": "all", "neftune_noise_alpha": 5, "lora_dropout": 0.5, "learning_rate": 0.5}
    others |= {"max_steps": step + 1, "save_strategy": "steps", "save_steps": 1}
    result = train(flags(small_folder, tmp_path, dataset, resume_from_checkpoint=checkpoint, **others))
    (line,) = [record.message for record in caplog.records if "was written with another" in record.message]
    assert line.startswith(
        f"{checkpoint} was written with another learning_rate (0.001, now 0.5), lora_dropout (0.05, now 0.5), "
        "loss_scale ('default', now 'all'), neftune_noise_alpha (None, now 5.0); the new values count, but"
    )
    assert all(line["learning_rate"] <= 0.001 for line in result["log_history"] if "learning_rate" in line)
    written = json.loads((tmp_path / f"checkpoint-{step + 1}" / "adapter_config.json").read_text())
    assert written["lora_dropout"] == 0.05


@pytest.mark.slow
@pytest.mark.telling
def test_data_that_starts_anew_may_have_another_objective_and_that_is_said(
    small_folder, dataset, uninterrupted, tmp_path, monkeypatch, caplog
):
    """RESUME-16: of packing options too; without a change nothing is said."""
    checkpoint = checkpoint_at(uninterrupted[0], 1)
    step = int(checkpoint.name.split("-")[1])
    monkeypatch.setenv("VLPACK_RESUME_DATA", "restart")
    again = flags(small_folder, tmp_path, dataset, resume_from_checkpoint=checkpoint, max_steps=step + 1)
    train(again)
    assert "was written with another" not in caplog.text
    monkeypatch.setenv("VLPACK_PACKING_LOSS", "sqrt")
    train(again)
    assert "was written with another packing_loss ('token', now 'sqrt'); the new values count" in caplog.text


@pytest.mark.slow
@pytest.mark.telling
def test_checkpoint_without_a_state_is_refused_unless_the_data_shall_restart(
    small_folder, dataset, uninterrupted, tmp_path, monkeypatch, caplog
):
    """RESUME-7"""
    whole, _ = uninterrupted
    original = checkpoint_at(whole, -2)
    checkpoint = tmp_path / original.name
    shutil.copytree(original, checkpoint)
    (checkpoint / FILE).unlink()
    step = int(original.name.split("-")[1])
    with pytest.raises(StateMismatch, match=rf"has no {FILE}.*VLPACK_RESUME_DATA=restart"):
        train(flags(small_folder, tmp_path / "out", dataset, resume_from_checkpoint=checkpoint))
    monkeypatch.setenv("VLPACK_RESUME_DATA", "restart")
    train(flags(small_folder, tmp_path / "out", dataset, resume_from_checkpoint=checkpoint))
    assert [pack[1:] for pack in trained(tmp_path / "out")] == [pack[1:] for pack in trained(whole)]
    assert trained(tmp_path / "out")[0][0] == step + 1, "the steps go on"
    assert trained(tmp_path / "out")[-1][0] == step + trained(whole)[-1][0]
    assert "the data starts anew" in caplog.text


def test_only_restart_can_be_asked_for(tmp_path, monkeypatch):
    """RESUME-7"""
    monkeypatch.setenv("VLPACK_RESUME_DATA", "again")
    with pytest.raises(ConfigError, match="VLPACK_RESUME_DATA can only be restart, got 'again'"):
        load_state(tmp_path, "plan", {})
    PackingConfig.from_env({"VLPACK_RESUME_DATA": "restart"}, packing_length=8)


def test_state_that_cannot_be_written_leaves_the_old_one(tmp_path):
    """RESUME-9: the kernel refuses the bytes in the middle of the file, as on a full disk."""
    import resource

    save_state(tmp_path, "plan", {"a": 1}, {"cuts": []})
    before = (tmp_path / FILE).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
    try:
        with pytest.raises(StateNotSaved, match=rf"{FILE} cannot be written: .*File too large"):
            save_state(tmp_path, "plan", {"a": 1}, {"cuts": [[2, 400, 20]] * 50})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / FILE).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_first_batch_after_a_resume_comes_at_once(small_folder, tmp_path):
    """RESUME-2: 1,999 of 2,000 packs are behind, and nothing of them is read again."""
    from swift_vlpack.host.loader import PackLoader
    from tests.feeds import OneRank, planned_feed, resumed

    num_encoded = 0

    class Template:
        packing = padding_free = False

        def encode(self, inputs, return_length=False):
            nonlocal num_encoded
            num_encoded += 1
            return {"input_ids": [1] * 60, "labels": [1] * 60, "length": 60}

    config = PackingConfig(packing_length=100)
    feeds = [planned_feed([{"messages": []}] * 2000, Template(), config) for _ in range(2)]
    num_measured = num_encoded
    feed = resumed(*feeds, [None] * 1999)
    assert feed.batches_left == 1
    [[last]] = feed.loader(0, PackLoader, ranks=OneRank, collate_fn=list)
    assert last.record.number == 1999
    assert num_encoded == num_measured + 1


@pytest.mark.slow
@pytest.mark.telling
def test_run_keeps_its_plan_when_files_go_and_come_back(small_folder, tmp_path, caplog):
    """RESUME-10: one image is lost after the start, one that was missing is there again; then it is resumed twice."""
    paths = [photo(tmp_path, f"photo{n}", 150 + 10 * n, 100, seed=n) for n in range(8)]
    hidden = tmp_path / "hidden"
    Path(paths[2]).rename(hidden)
    rows = [image_row([path], answer="word " * (5 * n + 3)) for n, path in enumerate(paths)]
    data = write_jsonl(tmp_path / "rows.jsonl", [*rows, *[text_row(f"question {n}", "answer " * 20) for n in range(8)]])
    options = {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 1, "max_length": 256}
    train(flags(small_folder, tmp_path / "whole", data, **options))
    whole = trained(tmp_path / "whole")
    first = next(step for step, _, _ in whole if step > 1)
    lost = next(int(key.split(":")[1]) for _, epoch, inside in whole[first:] if not epoch for key in inside
                if int(key.split(":")[1]) < 8)  # fmt: skip
    assert not any("rows:2" in inside for _, _, inside in whole)
    hidden.rename(paths[2])
    Path(paths[lost]).unlink()
    caplog.clear()
    begin = {**options, "resume_from_checkpoint": tmp_path / "whole" / f"checkpoint-{first}"}
    train(flags(small_folder, tmp_path / "rest", data, **begin))
    expected = [(step, epoch, [key for key in inside if key != f"rows:{lost}"]) for step, epoch, inside in whole]
    assert trained(tmp_path / "rest") == [pack for pack in expected if pack[0] > first]
    assert re.search(rf"1 planned row cannot be read .*rows:{lost} .*has file_missing, but had", caplog.text)
    assert re.search(r"readable again, but out until the next run: 1 row: rows:2 ", caplog.text)
    for epoch in (0, 1):
        report = epoch_report(tmp_path / "rest", epoch)
        assert report["is_closed"]
        assert report["num_dropped"] == {"file_missing": 2}
        assert report["num_packs"] == epoch_report(tmp_path / "whole", epoch)["num_packs"]
    again = {**options, "resume_from_checkpoint": tmp_path / "rest" / f"checkpoint-{first + 1}"}
    train(flags(small_folder, tmp_path / "again", data, **again))
    assert trained(tmp_path / "again") == [pack for pack in expected if pack[0] > first + 1]
    train(flags(small_folder, tmp_path / "new", data, **{**options, "max_steps": 1}))
    left_out = json.loads((tmp_path / "new" / "checkpoint-1" / FILE).read_text())["fingerprint"]
    assert left_out["lengths"] != json.loads((tmp_path / "again" / f"checkpoint-{whole[-1][0]}" / FILE).read_text())[
        "fingerprint"]["lengths"], "a new run plans anew"  # fmt: skip


def places(value, path=()):
    """Every place in a JSON document."""
    if path:
        yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from places(inner, (*path, key))


def damaged(document):
    """The document with one place gone, or with another value, of every place in turn; and where that is."""
    for path, value in zip(places(document), itertools.cycle((None, 7, "gone")), strict=False):
        other = copy.deepcopy(document)
        parent = other
        for key in path[:-1]:
            parent = parent[key]
        if value == "gone" or parent[path[-1]] == value:
            del parent[path[-1]]
        else:
            parent[path[-1]] = value
        yield ".".join(map(str, path)), other


def assert_every_damage_is_refused(file, load):
    """Every key deleted and altered, and the file cut off anywhere."""
    text = file.read_text()
    load()
    num_tried = 0
    for where, other in damaged(json.loads(text)):
        file.write_text(json.dumps(other))
        with pytest.raises(StateMismatch, match=rf"{re.escape(str(file))}: .*VLPACK_RESUME_DATA=restart"):
            pytest.fail(f"{where} is damaged, and was taken: {load()}")
        num_tried += 1
    assert num_tried > 40
    for length in range(0, len(text) - 2, 61):
        file.write_text(text[:length])
        with pytest.raises(StateMismatch, match=re.escape(str(file))):
            load()
    file.write_text(text)


def test_every_damage_of_a_plans_state_is_refused_by_name(uninterrupted, tmp_path):
    """RESUME-7 STATE-3: the state of a real run."""
    original = checkpoint_at(uninterrupted[0], -2)
    for name in (FILE, ROWS_FILE):
        shutil.copy(original / name, tmp_path / name)
    file = tmp_path / FILE
    saved = json.loads(file.read_text())
    assert_every_damage_is_refused(file, lambda: load_state(tmp_path, "plan", saved["fingerprint"]))
    file.write_text(json.dumps({**saved, "version": 1}))
    with pytest.raises(StateMismatch, match=r"format version 1; this package reads version 3\. .*restart"):
        load_state(tmp_path, "plan", saved["fingerprint"])


def test_every_damage_of_the_saved_rows_is_refused_by_name(uninterrupted, tmp_path):
    """RESUME-7"""
    original = checkpoint_at(uninterrupted[0], -2)
    for name in (FILE, ROWS_FILE):
        shutil.copy(original / name, tmp_path / name)
    file, fingerprint = tmp_path / ROWS_FILE, json.loads((tmp_path / FILE).read_text())["fingerprint"]
    content = file.read_bytes()
    for other in (b"", content[:-9], content[:100], content + b"x", content.replace(b"sizes0", b"sizes9"), b"{}"):
        file.write_bytes(other)
        with pytest.raises(StateMismatch, match=rf"{re.escape(str(file))}: damaged.*restart"):
            load_state(tmp_path, "plan", fingerprint, RunRows(()))
    file.unlink()
    with pytest.raises(StateMismatch, match=rf"has no {ROWS_FILE}: .*restart"):
        load_state(tmp_path, "plan", fingerprint, RunRows(()))


def test_every_damage_of_a_ranks_state_is_refused_by_name(tmp_path):
    """STREAM-10 STATE-3: two workers of a rank, with held samples."""
    from swift_vlpack import PackingDataset
    from swift_vlpack.feed.streamed import ReaderProgress

    class Template:
        packing = padding_free = False

        def encode(self, inputs, return_length=False):
            return {"input_ids": [1] * 30, "labels": [1] * 30, "length": 30}

    packs = PackingDataset(
        [{"messages": []}] * 40, Template(),
        PackingConfig(packing_length=100, packing_mode="buffer", packing_buffer=4),
    )  # fmt: skip
    progress = ReaderProgress(1)
    for _, pack in zip(range(4), packs, strict=False):
        progress.trained(pack.record)
    save_rank_state(tmp_path, 0, 4, progress.state())
    file = tmp_path / RANK_FILE.format(0)
    assert json.loads(file.read_text())["state"]["workers"][0]["packer"]["state"]["held"]
    assert_every_damage_is_refused(file, lambda: load_rank_state(tmp_path, 0, 4))


@pytest.mark.parametrize("family", ["qwen2_5_vl", telling("qwen3_vl")])
def test_whole_models_go_on_with_the_weights_of_the_checkpoint(family, small_folder, dataset, tmp_path):
    """RESUME-18: transformers saves Qwen2.5-VL under names that its trainer does not know; red without the cure."""
    options = {"tuner_type": "full", "learning_rate": 1e-3, "lr_scheduler_type": "constant", "num_train_epochs": 1}
    common = {"dataset": dataset, "save_strategy": "steps", "save_steps": 2, "split_dataset_ratio": 0, **options}
    whole = losses(train(packed_argv(small_folder(family), family, tmp_path / "whole", **common)))
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    again = {**common, "resume_from_checkpoint": checkpoint}
    rest = losses(train(packed_argv(small_folder(family), family, tmp_path / "rest", **again)))
    assert max(whole) > 3
    assert rest[max(whole)] == pytest.approx(whole[max(whole)], rel=2e-6)


@pytest.mark.slow
@pytest.mark.telling
def test_the_best_model_is_loaded_at_the_end(small_folder, dataset, tmp_path, monkeypatch):
    """RESUME-18: also one that transformers saves by other names than it has; red without the cure."""
    family, loaded = "qwen2_5_vl", {}
    load = PackingTrainer._load_best_model

    def kept(trainer):
        load(trainer)
        loaded.update({name: tensor.clone() for name, tensor in trainer.model.state_dict().items()})

    monkeypatch.setattr(PackingTrainer, "_load_best_model", kept)
    train(
        packed_argv(
            small_folder(family), family, tmp_path, dataset=dataset, val_dataset=f"{dataset}#4", split_dataset_ratio=0,
            max_steps=3, learning_rate=1e-2, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
            load_best_model_at_end="true", metric_for_best_model="loss", greater_is_better="true",
        )
    )  # fmt: skip
    best, last = (
        Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / f"checkpoint-{step}").state_dict()
        for step in (1, 3)
    )
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    assert torch.equal(loaded[name], best[name])
    assert not torch.equal(best[name], last[name])
