"""`train_on_eos` and `mask_boundary_loss`: which tokens are targets, wherever a row is encoded."""

import pytest
import torch
from swift.template import Template

from swift_vlpack import PackingConfig, PackingDataset
from swift_vlpack.cli.plan import training_report
from swift_vlpack.errors import StateMismatch
from swift_vlpack.rows.contents import NO_LABEL
from swift_vlpack.rows.encoder import Targets
from tests.data_rows import image_row, text_row, write_jsonl
from tests.environment import packing_options
from tests.host.runs import argv, packed_argv, train
from tests.images import photo

FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    texts = [text_row(f"question {n}", "word " * (5 * n + 1)) for n in range(6)]
    return [*texts, *(image_row([photo(folder, str(n), 90, 60, seed=n)]) for n in range(3))]


@pytest.fixture(scope="module")
def data(rows, tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", rows)


def by_hand(template, row):
    """Labels of ms-swift, those of EOS taken out."""
    eos = template.tokenizer.eos_token_id
    labels = template.encode(row)["labels"]
    assert eos in labels
    return [NO_LABEL if label == eos else label for label in labels]


def test_labels_are_taken_out_and_shapes_stay():
    """LOSS-7 LOSS-8: literal cases, of lists and of tensors."""
    labels = [7, -100, 2, 5, 2, -100, 2]
    assert Targets().labels(labels) == [-100, -100, 2, 5, 2, -100, 2]
    assert Targets(mask_boundary_loss=False).labels(labels) == labels
    assert Targets(untrained=2).labels(labels) == [-100, -100, -100, 5, -100, -100, -100]
    assert Targets(mask_boundary_loss=False, untrained=7).labels(labels) == [-100, *labels[1:]]
    assert Targets().labels([]) == []
    made = Targets(untrained=2).labels(torch.tensor(labels))
    assert made.tolist() == [-100, -100, -100, 5, -100, -100, -100]
    assert labels[0] == 7, "what was given stays"


@pytest.mark.parametrize("mode", ["plan", "buffer"])
def test_eos_is_no_target_of_packs(mode, template, rows):
    """LOSS-8: planned and as they come; images too."""
    expected = sorted(by_hand(template, row) for row in rows)
    options = {"packing_length": 256, "packing_mode": mode, "packing_strategy": "exact", "packing_drop_last": False}
    found = {}
    for train_on_eos in (True, False):
        packs = PackingDataset(rows, template, PackingConfig(**options, train_on_eos=train_on_eos))
        packs = list(packs) if mode == "buffer" else [packs[n] for n in range(len(packs))]
        found[train_on_eos] = sorted(list(sample["labels"]) for pack in packs for sample in pack)
    assert found[False] == expected
    assert found[True] != expected
    assert list(map(len, sorted(found[True], key=len))) == list(map(len, sorted(expected, key=len)))


@pytest.mark.parametrize("is_masked", [True, False])
def test_first_token_is_no_target_whatever_the_template_says(is_masked, template, rows, monkeypatch):
    """LOSS-7: of a template that labels it, which ms-swift's own do not."""
    encode = type(template).encode

    def labelled(self, *args, **options):
        made = encode(self, *args, **options)
        return {**made, "labels": [made["input_ids"][0], *made["labels"][1:]]}

    monkeypatch.setattr(type(template), "encode", labelled)
    config = PackingConfig(packing_length=256, mask_boundary_loss=is_masked, packing_drop_last=False)
    firsts = {sample["labels"][0] for pack in PackingDataset(rows, template, config) for sample in pack}
    assert (firsts == {NO_LABEL}) is is_masked


def test_plan_counts_the_targets_that_are_trained(small_folder, data, rows, tmp_path):
    """LOSS-8 LEN-7: other targets are another key of remembered lengths, so neither run is told the other's."""
    found = []
    for train_on_eos in ("true", "false", "true"):
        packing_options(packing_strategy="exact", packing_drop_last="false", train_on_eos=train_on_eos)
        flags = packed_argv(small_folder(FAMILY), FAMILY, tmp_path / "never", dataset=data, split_dataset_ratio=0)
        report = training_report(flags, num_ranks=1, failures_file=tmp_path / "f.jsonl")
        found.append(report["step"]["num_supervised_tokens"] * report["num_packs"])
    assert found[0] - found[1] == pytest.approx(len(rows), abs=0.1), "one EOS a row"
    assert found[2] == found[0]


def of_step(folder, output, data, *, train_on_eos="false", make=packed_argv, **options):
    packing_options(
        packing_strategy="exact", packing_drop_last="false", packing_verify="false",
        train_on_eos=train_on_eos,
    )  # fmt: skip
    common = {
        "dataset": data, "split_dataset_ratio": 0, "gradient_accumulation_steps": 64, "num_train_epochs": 2,
        "learning_rate": 0, "val_dataset": data, "eval_strategy": "epoch", "per_device_eval_batch_size": 2,
    }  # fmt: skip
    return train(make(folder, FAMILY, output, **{**common, **options}))["log_history"]


def first(history, name):
    return next(line[name] for line in history if name in line)


@pytest.mark.slow
@pytest.mark.telling
def test_losses_of_training_and_evaluation_are_without_eos(small_folder, data, tmp_path, monkeypatch):
    """LOSS-8: those of plain ms-swift with a template from which EOS is taken by hand; a resume must say the same."""
    folder, out = small_folder(FAMILY), tmp_path / "out"
    history = of_step(folder, out, data, save_strategy="steps", save_steps=1)
    with pytest.raises(StateMismatch, match="train_on_eos"):
        of_step(folder, out, data, train_on_eos="true", resume_from_checkpoint=out / "checkpoint-1")
    encode = Template.encode

    def without_eos(self, *args, **options):
        made = encode(self, *args, **options)
        eos = self.tokenizer.eos_token_id
        return {**made, "labels": [NO_LABEL if label == eos else label for label in made["labels"]]}

    monkeypatch.setattr(Template, "encode", without_eos)
    plain = of_step(folder, tmp_path / "plain", data, make=argv)
    assert first(history, "loss") == pytest.approx(first(plain, "loss"), rel=1e-6)
    assert first(history, "eval_loss") == pytest.approx(first(plain, "eval_loss"), rel=1e-6)
    monkeypatch.setattr(Template, "encode", encode)
    other = of_step(folder, tmp_path / "other", data, make=argv)
    assert abs(first(other, "eval_loss") - first(plain, "eval_loss")) > 1e-4, "so EOS would be seen"
