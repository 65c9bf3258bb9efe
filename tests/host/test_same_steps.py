"""`packing_batch=samples` beside plain `swift sft`, in process: the same samples in every step, the same curve."""

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest
import torch.nn.functional as F
from datasets import load_from_disk
from swift.loss import BaseLoss, loss_map
from swift.template import Template

from swift_vlpack.cli.plan import training_report
from swift_vlpack.cli.trained_steps import trained_step
from swift_vlpack.errors import ConfigError, StateMismatch
from swift_vlpack.host import run_events
from swift_vlpack.runlog.folder import RunFolder
from swift_vlpack.runlog.plan_text import plan_text
from swift_vlpack.runlog.report import run_report
from tests.data_rows import image_row, text_row, write_jsonl
from tests.family_models import FAMILIES
from tests.host.runs import argv, epoch_report, packed_argv, train
from tests.host.same_steps import (
    OPTIONS,
    RECORDER,
    curve,
    eval_losses,
    held_out_rows,
    largest_differences,
    largest_gap,
    numbered_rows,
    packed_steps,
    recipe,
    unpacked_steps,
    weights,
)
from tests.host.test_export import flags_of, ours
from tests.images import BROKEN, make
from tests.marks import telling

FAMILY = "qwen2_5_vl"
NUM_ROWS = 23
TEXT_MODEL = "qwen2"

pytestmark = pytest.mark.usefixtures("options")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return numbered_rows(tmp_path_factory.mktemp("data"), NUM_ROWS)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    return held_out_rows(tmp_path_factory.mktemp("held_out"), 7)


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


def saved(output):
    """The weights at the end."""
    (last,) = output.glob("checkpoint-*")
    return weights(last)


@pytest.mark.parametrize(
    ("family", "batch_size", "accumulation", "more"),
    [
        ("qwen2_5_vl", 2, 3, {}),
        telling("qwen3_vl", 4, 1, {"tuner_type": "lora", "lora_dropout": 0, "gradient_checkpointing": "false"}),
        telling("qwen2_5_vl", 1, 12, {"freeze_vit": "false", "train_dataloader_shuffle": "false"}),
        telling("qwen2_5_vl", 2, 2, {"group_by_length": "true"}),
        ("qwen2_5_vl", 3, 2, {"dataloader_drop_last": "true", "dataloader_num_workers": 2}),
    ],
)
def test_every_step_is_that_of_the_unpacked_run(  # noqa: PLR0913 - a case, and fixtures
    family, batch_size, accumulation, more, dataset, held_out, small_folder, tmp_path, record, options
):
    """SAME-1 SAME-3: evaluated as without packing too, and in one case packed."""
    is_eval_packed = family == "qwen3_vl"  # then a mean over tokens, as of all 7 rows in one batch
    evaluated = {"val_dataset": held_out, "eval_strategy": "epoch"}
    evaluated |= {"per_device_eval_batch_size": 7 if is_eval_packed else 3}
    flags = recipe(batch_size, accumulation, dataset=dataset, **evaluated, **more)
    in_order = {"dataloader_num_workers": 0}  # so that the recorder is called batch by batch
    plain = train(argv(small_folder(family), family, tmp_path / "plain", **{**flags, **in_order}))
    expected = unpacked_steps(record, accumulation=accumulation, num_epochs=2)
    del os.environ["RECORD_FOLDER"]
    options(**OPTIONS, eval_packing=is_eval_packed)
    packed = train(packed_argv(small_folder(family), family, tmp_path / "packed", **flags))
    assert packed_steps(tmp_path / "packed") == expected
    loss, grad_norm, rate = largest_differences(curve(plain["log_history"]), curve(packed["log_history"]))
    assert loss < 1e-5
    assert grad_norm < 1e-5
    assert rate == 0
    assert eval_losses(packed["log_history"]) == pytest.approx(eval_losses(plain["log_history"]), rel=1e-5)
    assert len(eval_losses(packed["log_history"])) > 1
    assert largest_gap(saved(tmp_path / "plain"), saved(tmp_path / "packed")) < 3e-6
    assert epoch_report(tmp_path / "packed")["num_packs"] < sum(map(len, expected)) // 2, "it packed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "num_steps"),
    [
        ({"max_steps": 8}, 8),
        ({"num_train_epochs": 0.5}, 3),
        ({"num_train_epochs": 1.5}, 9),
        ({"num_train_epochs": 1, "per_device_train_batch_size": 40}, 1),
    ],
    ids=str,
)
def test_a_run_ends_where_the_unpacked_one_ends(  # noqa: PLR0913 - a case, and fixtures
    more, num_steps, dataset, small_folder, tmp_path, record, options
):
    """SAME-1 SAME-3: within an epoch, too."""
    flags = {**recipe(2, 2, dataset=dataset), **more}
    plain = train(argv(small_folder(FAMILY), FAMILY, tmp_path / "plain", **flags))
    (path,) = record.glob("rank_*.jsonl")
    trained = [row for line in path.read_text().splitlines() for row in json.loads(line)]
    del os.environ["RECORD_FOLDER"]
    options(**OPTIONS)
    packed = train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path / "packed", **flags))
    steps = packed_steps(tmp_path / "packed")
    assert len(steps) == num_steps
    for step in steps:
        here, trained = trained[: len(step)], trained[len(step) :]
        assert step == sorted(here)
    assert max(largest_differences(curve(plain["log_history"]), curve(packed["log_history"]))) < 1e-5


def stopped_after(output, dataset, folder, family, num_steps, **more):
    """A run that ends early, with a checkpoint; its schedule is that of the whole run."""
    flags = recipe(2, 2, dataset=dataset, **{**more, "save_steps": num_steps, "max_steps": num_steps})
    train(packed_argv(folder, family, output, **flags))
    return output / f"checkpoint-{num_steps}"


def test_a_resumed_run_goes_on_with_the_next_step(dataset, small_folder, tmp_path, options):
    """SAME-4: within the second epoch; another number of samples a step is refused, and the way out is named."""
    options(**OPTIONS)
    folder, constant = small_folder(FAMILY), {"lr_scheduler_type": "constant", "warmup_ratio": 0, "dataset": dataset}
    constant |= {"tuner_type": "lora", "lora_dropout": 0}
    whole = train(packed_argv(folder, FAMILY, tmp_path / "whole", **recipe(2, 2, **constant)))
    first = stopped_after(tmp_path / "first", folder=folder, family=FAMILY, num_steps=8, **constant)
    again = {**recipe(4, 1, **constant), "resume_from_checkpoint": first}
    rest = train(packed_argv(folder, FAMILY, tmp_path / "rest", **again))
    assert packed_steps(tmp_path / "first", tmp_path / "rest") == packed_steps(tmp_path / "whole")
    gaps = largest_differences(curve(whole["log_history"])[8:], curve(rest["log_history"])[-4:])
    assert max(gaps) < 2e-6
    with pytest.raises(StateMismatch, match=r"run has 4 samples .*--gradient_accumulation_steps 2"):
        train(packed_argv(folder, FAMILY, tmp_path / "other", **{**again, **recipe(2, 4, **constant)}))
    options(packing_batch="packs")
    with pytest.raises(StateMismatch, match="packing_batch"):
        train(packed_argv(folder, FAMILY, tmp_path / "packs", **again))


@pytest.mark.parametrize(
    ("flags", "variables", "said"),
    [
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor weighs samples by their batch"),
        ({"average_tokens_across_devices": "false"}, {}, "average_tokens_across_devices false weighs samples by rank"),
        ({"neftune_noise_alpha": 5}, {}, "neftune_noise_alpha sizes its noise by the longest row of a batch"),
        ({}, {"packing_overflow": "split"}, "packing_overflow=split cuts rows"),
        ({}, {"packing_overflow": "truncate"}, "packing_overflow=truncate cuts rows"),
        ({"truncation_strategy": "split"}, {}, "packing_overflow=split cuts rows"),
        ({}, {"packing_mode": "buffer"}, "packing_mode=buffer packs rows as they come"),
        ({"streaming": "true", "max_steps": 2}, {}, "packing_batch=samples needs data with a length"),
    ],
)
def test_other_objectives_are_refused_by_name(  # noqa: PLR0913 - a case, and fixtures
    flags, variables, said, dataset, small_folder, tmp_path, options
):
    """SAME-5"""
    options(**{**OPTIONS, **variables})
    with pytest.raises(ConfigError, match=said):
        train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path, **recipe(2, 1, dataset=dataset, **flags)))


@pytest.mark.parametrize("is_decoded_ahead", [True, telling(False)])
def test_broken_image_makes_the_steps_others_and_that_is_said(
    is_decoded_ahead, dataset, small_folder, tmp_path, options, monkeypatch
):
    """SAME-1: in the plan before, in log and report after; not where plain training meets the row in its step, too."""
    options(**OPTIONS, packing_verify="false")
    said = []
    monkeypatch.setattr(run_events.logger, "warning", said.append)
    broken = make(tmp_path / "broken", {"truncated.jpg": BROKEN["truncated.jpg"]})["truncated.jpg"]
    rows = [
        *map(json.loads, Path(dataset).read_text().splitlines()),
        *[image_row([broken], f"row {n}") for n in (90, 91)],
    ]
    more = {"dataset": write_jsonl(tmp_path / "rows.jsonl", rows)}
    more |= {"lazy_tokenize": "false"} if is_decoded_ahead else {}
    flags = packed_argv(small_folder(FAMILY), FAMILY, tmp_path / "out", **{**recipe(2, 3), **more})
    report = training_report(flags, num_ranks=1, failures_file=tmp_path / "f.jsonl")
    assert ("pixels are not looked at" in plan_text(report)) is is_decoded_ahead
    train(flags)
    others = [one for one in said if "the steps are no longer those of un-packed training" in one]
    notes = [one for one in run_report(RunFolder(tmp_path / "out"))["notes"] if "no longer those of un-packed" in one]
    assert len(others) == len(notes) == is_decoded_ahead
    assert not notes or "4 rows failed only when they were loaded" in notes[0], "two rows, two epochs"


def test_a_loss_that_is_a_mean_over_a_batch_is_refused(dataset, small_folder, tmp_path, options, monkeypatch):
    """SAME-5: a loss of a plugin, without the proof too; packs would weigh it by their tokens."""

    class Mean(BaseLoss):
        def __call__(self, outputs, labels, **kwargs):
            return F.cross_entropy(outputs.logits[0, :-1].float(), labels[0, 1:])

    monkeypatch.setitem(loss_map, "mean_of_batch", Mean)
    options(**OPTIONS, packing_verify="false")
    flags = recipe(1, 2, dataset=dataset, loss_type="mean_of_batch")
    with pytest.raises(ConfigError, match="--loss_type mean_of_batch is a mean over the tokens of a batch"):
        train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path, **flags))


def test_a_model_that_is_not_given_the_tokens_of_a_step_is_refused(
    dataset, small_folder, tmp_path, options, monkeypatch
):
    """SAME-5: ms-swift then takes the mean of each batch."""
    monkeypatch.setattr(Template, "model_accepts_loss_kwargs", False)
    options(**OPTIONS)
    with pytest.raises(ConfigError, match=r"packing_batch=samples cannot be used with Qwen2_5_VL\w+: .* mean of each"):
        train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path, **recipe(1, 2, dataset=dataset)))


def test_a_loss_that_balances_experts_is_refused(dataset, tmp_path, options):
    """SAME-5: it is computed over an un-packed batch. Without it, experts are trained."""
    family = FAMILIES["Qwen3-VL-MoE"]
    (tmp_path / "model").mkdir()
    family.build(tmp_path / "model")
    options(**OPTIONS)
    flags = {**recipe(2, 1, dataset=dataset, max_steps=1), "template": family.template}
    with pytest.raises(ConfigError, match=r"packing_batch=samples cannot be used with --router_aux_loss_coef 0.01"):
        train(packed_argv(tmp_path / "model", family.model_type, tmp_path, **flags, router_aux_loss_coef=0.01))
    train(packed_argv(tmp_path / "model", family.model_type, tmp_path / "without", **flags))
    assert len(packed_steps(tmp_path / "without")) == 1


def test_a_text_model_and_rows_that_fail(text_folder, tmp_path, record, options):
    """SAME-1: plain deletes rows of a text model that cannot be encoded before it draws; here they are left out."""
    data = numbered_rows(tmp_path / "data", 21, with_images=False)
    with open(data, "a") as file:
        file.write(json.dumps(text_row("row 99 " + "a house " * 900)) + "\n")  # longer than max_length
    flags = recipe(2, 2, dataset=data, template="qwen2_5")
    plain = train(argv(text_folder, TEXT_MODEL, tmp_path / "plain", **flags))
    expected = unpacked_steps(record, accumulation=2, num_epochs=2)
    del os.environ["RECORD_FOLDER"]
    options(**OPTIONS)
    packed = train(packed_argv(text_folder, TEXT_MODEL, tmp_path / "packed", **flags))
    assert packed_steps(tmp_path / "packed") == expected
    assert max(largest_differences(curve(plain["log_history"]), curve(packed["log_history"]))) < 1e-5


@pytest.mark.parametrize("more", [{}, telling({"group_by_length": "true"})], ids=str)
def test_cached_rows_come_in_the_batches_of_plain(more, held_out, small_folder, tmp_path, record, options):
    """SAME-1: beside other rows; plain deletes those of the other rows that it cannot encode, and no cached ones."""
    rows, others = (numbered_rows(tmp_path / name, num) for name, num in (("rows", 13), ("others", 8)))
    renumbered = Path(others).read_text()
    for number in range(8):
        renumbered = renumbered.replace(f"row {number} ", f"row {100 + number} ")
    broken = json.dumps({**text_row("<image>row 108 of a picture that is gone"), "images": ["gone.png"]})
    Path(others).write_text(f"{broken}\n{renumbered}")
    given = flags_of(small_folder(FAMILY), rows, max_length=512, split_dataset_ratio=0)
    cached = ours(given, tmp_path / "cached") / "train"
    numbers = [int(re.search(r"row (\d+)", str(row["messages"]))[1]) for row in load_from_disk(str(cached))]
    assert sorted(numbers) == list(range(13)) != numbers
    flags = recipe(2, 2, dataset=others, cached_dataset=cached, **more)
    plain = train(argv(small_folder(FAMILY), FAMILY, tmp_path / "plain", **flags))
    expected = unpacked_steps(record, accumulation=2, num_epochs=2)
    del os.environ["RECORD_FOLDER"]
    options(**OPTIONS)
    packed = train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path / "packed", **flags))

    def number_of(sample_id):
        name, _, number = sample_id.rpartition(":")
        return numbers[int(number)] if name == "cached/train" else 99 + int(number)

    assert packed_steps(tmp_path / "packed", number_of=number_of) == expected
    assert max(largest_differences(curve(plain["log_history"]), curve(packed["log_history"]))) < 1e-5


def test_a_fusion_config_takes_the_next_samples_of_the_mix(dataset, small_folder, tmp_path, options):
    """SAME-7"""
    other = numbered_rows(tmp_path / "other", 9)
    mix = tmp_path / "mix.yaml"
    mix.write_text(f"sources: [{{name: a, dataset: {dataset}}}, {{name: b, dataset: {other}, ratio: 0.5}}]\n")
    options(**OPTIONS, fusion_config=mix)
    train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path / "out", **recipe(2, 2)))
    steps = packed_steps(tmp_path / "out")
    num_rows = NUM_ROWS + round(9 * 0.5)
    assert [len(step) for step in steps] == 2 * [*[4] * (num_rows // 4), num_rows % 4]


def test_a_trainer_of_ones_own_keeps_steps_too(small_folder, tiny):
    """SAME-7: `samples_per_step` says how many samples the next step takes of all ranks."""
    from swift_vlpack import PackingConfig, PackingDataset

    made = tiny(FAMILY)
    rows = [text_row(f"row {n}", "a house " * (n % 7)) for n in range(22)]
    config = PackingConfig(packing_length=128, packing_strategy="exact", packing_batch="samples")
    packs = PackingDataset(rows, made.template, config, samples_per_step=5, num_ranks=2)
    assert packs.plan.batches.sum() * 2 == len(packs)
    ends = packs.plan.batches.cumsum() * 2
    sizes = [
        sum(len(packs[number]) for number in range(first, end)) for first, end in zip([0, *ends], ends, strict=False)
    ]
    assert sizes == [5, 5, 5, 5, 2]
    with pytest.raises(ConfigError, match="samples_per_step"):
        PackingDataset(rows, made.template, config)
    with pytest.raises(ConfigError, match="samples_per_step needs packing_batch=samples"):
        PackingDataset(rows, made.template, PackingConfig(packing_length=128), samples_per_step=5)


def test_plan_and_inspect_show_the_steps_that_were_trained(dataset, small_folder, tmp_path, options):
    """SAME-6 SAME-3: `vlpack plan` before, `vlpack inspect --step` after; and what ms-swift saved is what was given."""
    options(**OPTIONS)
    flags = packed_argv(small_folder(FAMILY), FAMILY, tmp_path / "out", **recipe(2, 3, dataset=dataset, save_steps=3))
    report = training_report(flags, num_ranks=1, failures_file=tmp_path / "failures.jsonl")
    train(flags)
    args = json.loads((tmp_path / "out" / "args.json").read_text())
    assert (args["per_device_train_batch_size"], args["gradient_accumulation_steps"]) == (2, 3)
    begun = json.loads((tmp_path / "out" / "vlpack" / "run.jsonl").read_text().splitlines()[0])
    assert begun["gradient_accumulation_steps"] == 3
    steps = packed_steps(tmp_path / "out")
    assert (report["steps_per_epoch"], report["num_steps"]) == (4, 8) == (len(steps) // 2, len(steps))
    kept = report["kept_steps"]
    assert kept["num_samples"] == 6
    assert 1 <= kept["num_sequences"] < 6
    assert 0 < kept["padding_saved"] < 1
    text = plan_text(report)
    assert f"in {kept['num_sequences']:.1f} sequences; padding saved: {kept['padding_saved']:.1%}" in text
    assert "8 in 2 epochs, 4 an epoch, as many as un-packed" in text
    assert "the same 6 samples as un-packed" in text
    assert re.search(r"lower bound +\d+ packs?, if steps could share packs", text)
    for step, rows in enumerate(steps, 1):
        packs = trained_step(tmp_path / "out", step).packs
        assert sorted(int(one.rpartition(":")[2]) for pack in packs for one in pack.ids) == rows


def test_a_row_that_cannot_be_read_leaves_its_step_one_smaller(small_folder, tmp_path, options, caplog):
    """SAME-1: even where the step then has no sample; steps and rates stay those of the un-packed run."""
    data = numbered_rows(tmp_path / "data", 5)
    (tmp_path / "data" / "4.png").unlink(missing_ok=True)
    (tmp_path / "data" / "4.jpg").unlink(missing_ok=True)
    options(**OPTIONS)
    flags = recipe(1, 1, dataset=data, num_train_epochs=1)
    result = train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path / "out", **flags))
    steps = packed_steps(tmp_path / "out")
    assert sorted(map(len, steps)) == [0, 1, 1, 1, 1]
    assert sorted(row for step in steps for row in step) == [0, 1, 2, 3]
    lines = [line for line in result["log_history"] if "loss" in line]
    assert len(lines) == 5
    assert lines[steps.index([])]["grad_norm"] == 0
    assert epoch_report(tmp_path / "out")["num_dropped"] == {"file_missing": 1}
