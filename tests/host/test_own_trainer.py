"""Packs in trainers of one's own: every loop gives what ms-swift and the samples one by one give."""

import copy
import json
import os
import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from swift.model import get_model_processor
from swift.template import get_template
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from swift_vlpack import Collator, PackingConfig, PackingDataset, prepare_model, prove
from swift_vlpack.errors import ConfigError, IsolationError
from tests.data_rows import mixed_rows, text_row, write_jsonl
from tests.doc_blocks import blocks
from tests.marks import telling

FAMILY = "qwen2_5_vl"
ROOT = Path(__file__).parents[2]
RATE = 0.05


def loaded(folder):
    """A model and a template as ms-swift gives them to anybody: sdpa, and a mode without labels."""
    model, processor = get_model_processor(
        str(folder), model_type=FAMILY, torch_dtype=torch.float32, attn_impl="sdpa", use_hf=True
    )
    return model, get_template(processor, template_type=FAMILY, max_length=2048)


@pytest.fixture(scope="module")
def fresh(small_folder):
    """The same weights again and again, in a model nobody has touched."""
    return lambda: loaded(small_folder(FAMILY))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return mixed_rows(tmp_path_factory.mktemp("own"), 16, seed=4, largest=120)


@pytest.fixture(scope="module")
def door(fresh):
    """One prepared model for the tests that do not train it."""
    model, template = fresh()
    return prepare_model(model, template), template


def config(**options):
    return PackingConfig(
        **{"packing_length": 300, "packing_strategy": "best_fit", "packing_drop_last": False, **options}
    )


# -- loops ------------------------------------------------------------------------------------------------------------


def plain(model, template, packs, tmp_path):
    """PyTorch and nothing else."""
    optimizer, losses = torch.optim.SGD(model.parameters(), RATE), []
    for batch in DataLoader(packs, batch_size=1, collate_fn=Collator(template), num_workers=2):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((batch.record, loss.item()))
    return losses


def accelerated(model, template, packs, tmp_path):
    """Everything prepared by accelerate."""
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(packs, batch_size=1, collate_fn=Collator(template))
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), RATE), loader)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((batch.record, loss.item()))
    return losses


def transformers_trainer(model, template, packs, tmp_path):
    """The trainer of transformers, which moves batches to the device once more by itself."""
    losses = []

    class Recording(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            losses.append((inputs.record, loss.item()))
            return loss

    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=1,
        num_train_epochs=1, optim="sgd", learning_rate=RATE, lr_scheduler_type="constant", max_grad_norm=0,
        train_sampling_strategy="sequential", use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    arguments.max_epochs = None  # ms-swift, once its trainers are loaded, asks every Trainer's arguments for it
    Recording(model=model, args=arguments, train_dataset=packs, data_collator=Collator(template)).train()
    return losses


def one_by_one(model, template, rows, steps):
    """Every sample alone, by ms-swift's template and the model's own loss; none of our code."""
    template.set_mode("train")
    template.model = model
    optimizer, losses = torch.optim.SGD(model.parameters(), RATE), []
    for sample_ids in steps:
        samples = [template.encode(rows[sample_id.row]) for sample_id in sample_ids]
        num_targets = [sum(label != -100 for label in sample["labels"]) for sample in samples]
        total = 0.0
        for sample, num in zip(samples, num_targets, strict=True):
            batch = template.data_collator([sample])
            batch.pop("text_position_ids")
            loss = model(**batch).loss * num / sum(num_targets)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def assert_same_weights(model, other):
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert float((one - two).detach().abs().max()) < 1e-5, name


@pytest.fixture(scope="module")
def reference(fresh, rows):
    """Losses and weights of an epoch, sample by sample, over the packs that the loops train on."""
    model, template = fresh()
    packs = PackingDataset(rows, in_training(template), config())
    steps = [packs[index].record.sample_ids for index in range(len(packs))]
    assert len(steps) > 3
    assert max(map(len, steps)) > 2
    template.packing = template.padding_free = False
    before = copy.deepcopy(model)
    losses = one_by_one(model, template, rows, steps)
    with pytest.raises(AssertionError):
        assert_same_weights(model, before)
    return model, losses


def in_training(template):
    template.set_mode("train")
    return template


@pytest.mark.parametrize("loop", [plain, accelerated, transformers_trainer])
def test_loop_trains_as_the_samples_one_by_one(loop, fresh, rows, reference, tmp_path):
    """OWN-2 OWN-1: losses and, after the epoch, all weights; the record is there where the loss is computed."""
    model, template = fresh()
    prepare_model(model, template).train()
    packs = PackingDataset(rows, template, config())
    assert prove(model, template, packs).startswith("isolation verified: max difference 0.0 over 4 samples")
    losses = loop(model, template, packs, tmp_path)
    expected, expected_losses = reference
    assert [loss for _, loss in losses] == pytest.approx(expected_losses, abs=1e-5)
    assert [record for record, _ in losses] == [packs[index].record for index in range(len(packs))]
    assert_same_weights(model, expected)


def test_number_of_tokens_that_a_trainer_gives_reaches_the_loss(door, rows):
    """OWN-2: trainers that accumulate divide by the tokens of the step; ms-swift's hook would take them away."""
    model, template = door
    packs = PackingDataset(rows, template, config())
    batch = Collator(template)([packs[0]])
    num_targets = int((batch["labels"] != -100).sum())
    with torch.no_grad():
        mean = model(**batch).loss
        assert torch.allclose(model(**batch, num_items_in_batch=torch.tensor(10.0)).loss, mean * num_targets / 10)
        assert isinstance(model(**batch, return_dict=False), tuple)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_template_in_its_default_mode_is_refused(fresh, rows, door):
    """OWN-3: it makes no labels, and the loss would be None."""
    _, template = fresh()
    with pytest.raises(ConfigError, match=r"mode 'transformers'.*no labels.*prepare_model\(model, template\) first"):
        PackingDataset(rows, template, config())
    with pytest.raises(ConfigError, match="mode 'transformers'"):
        Collator(template)
    later = copy.copy(door[1])
    later.set_mode("transformers")
    with pytest.raises(ConfigError, match="mode 'transformers'"):
        Collator(later)


def test_source_with_a_template_of_its_own_is_read_by_the_prepared_one(fresh, rows):
    """OWN-3: a source with `max_pixels` has a copy of the template, made when packs are."""
    from swift_vlpack import FusionCaptionDataset, RowSource

    model, template = fresh()
    data = FusionCaptionDataset([RowSource(name="small", rows=rows, max_pixels=50_000)], template)
    prepare_model(model, template)
    packs = PackingDataset(data, template, config())
    assert [encoder.template.mode for encoder in packs.dataset.encoders] == ["train"]
    assert packs.dataset.encoders[0].template.max_pixels == 50_000


def test_model_that_nobody_prepared_is_refused(fresh, rows):
    """OWN-3: without it neighbours moved by 1.74."""
    model, template = fresh()
    template.set_mode("train")
    with pytest.raises(ConfigError, match=r"knows no model.*prepare_model\(model, template\) first"):
        Collator(template)
    template.model = model
    for refused in (lambda: Collator(template), lambda: PackingDataset(rows, template, config())):
        with pytest.raises(ConfigError, match=r"attention 'sdpa' the samples of a pack see each other.*prepare_model"):
            refused()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "rlhf"}, "mode 'rlhf'; packing is for supervised training"),
        ({"task_type": "seq_cls"}, "seq_cls; packing is for causal_lm"),
        ({"support_padding_free": False}, "ms-swift does not pack the template 'qwen2_5_vl'"),
    ],
)
def test_what_cannot_be_packed_is_refused_before_the_model_is_touched(fresh, change, message):
    """OWN-3"""
    model, template = fresh()
    for name, value in change.items():
        setattr(template, name, value)
    with pytest.raises(ConfigError, match=message):
        prepare_model(model, template)
    assert model.config.text_config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks


# -- the proof --------------------------------------------------------------------------------------------------------


def test_proof_finds_an_attention_that_was_changed_afterwards(fresh, rows):
    """OWN-4 ISO-5"""
    model, template = fresh()
    packs = PackingDataset(rows, prepare_model(model, template) and template, config())
    model.set_attn_implementation("eager")
    with pytest.raises(IsolationError, match="with attention eager: attention eager knows no boundaries"):
        prove(model, template, packs)
    prepare_model(model, template)
    assert "attention vlpack" in prove(model, template, packs)


@pytest.mark.parametrize("form", ["plan", "buffer"])
def test_proof_needs_no_trainer_and_leaves_the_model_as_it_was(door, rows, form):
    """OWN-4 ISO-6"""
    model, template = door
    packs = PackingDataset(rows, template, config(packing_mode=form))
    model.train()
    line = prove(model, template, packs)
    assert line.startswith("isolation verified: max difference 0.0 over 4 samples, attention vlpack")
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


# -- the model afterwards ---------------------------------------------------------------------------------------------


def test_prepared_model_generates_as_before(fresh, tmp_path):
    """OWN-5: with a cache, with images, and by ms-swift's own engine's template."""
    model, template = fresh()
    row = {"messages": [{"role": "user", "content": "<image>what is this"}], "images": [str(tmp_path / "one.png")]}
    from tests.images import noise

    noise(90, 60).save(tmp_path / "one.png")
    template.set_mode("transformers")
    inputs = template.data_collator([template.encode(row)])
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**inputs, **options)
    prepare_model(prepare_model(model, template), template)
    assert len(model._forward_pre_hooks) == 1, "again changes nothing"
    assert model.generate(**inputs, **options).tolist() == expected.tolist()
    assert model.config.text_config.use_cache
    model.save_pretrained(tmp_path / "saved")
    assert "vlpack" not in (tmp_path / "saved" / "config.json").read_text()


def test_prepared_model_can_be_pickled(door, rows):
    """OWN-5: as starting processes by spawn does."""
    model, template = door
    again = pickle.loads(pickle.dumps(model))
    batch = Collator(template)([PackingDataset(rows, template, config())[0]])
    with torch.no_grad():
        assert again(**batch).loss == model(**batch).loss


# -- epochs and streams -----------------------------------------------------------------------------------------------


LIVE_ON = {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 4}


@pytest.mark.parametrize("context", ["fork", telling("spawn")])
def test_workers_of_accelerate_that_live_on_see_the_new_epoch(context, door, rows):
    """OWN-6 DATA-4: its loader sets the epoch by itself."""
    template = door[1]
    packs = PackingDataset(rows, template, config(), num_epochs=3)
    loader = Accelerator(cpu=True).prepare(
        DataLoader(
            packs, batch_size=1, collate_fn=Collator(template), sampler=packs.sampler, multiprocessing_context=context,
            **LIVE_ON,
        )
    )  # fmt: skip
    for epoch in range(3):
        found = [(batch.record.epoch, batch.record.sample_ids) for batch in loader]
        assert found == [(epoch, packs[index].record.sample_ids) for index in range(len(packs))]


class Endless:
    """Rows without a length."""

    def __iter__(self):
        return iter([text_row(f"number {n}", "word " * 12) for n in range(12)])


def test_stream_comes_through_accelerate_or_not_at_all(door):
    """OWN-6 OWN-1: it would cut and join rows of data without a length, and stops; told not to, it hands them on."""
    model, template = door
    packs = PackingDataset(Endless(), template, config(packing_length=120, packing_buffer=4))

    def prepared(**options):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
        return accelerator.prepare(DataLoader(packs, batch_size=1, collate_fn=Collator(template)))

    with pytest.raises(RuntimeError, match="dispatch_batches=False"):
        next(iter(prepared()))
    batches = list(prepared(dispatch_batches=False))
    assert [batch.record.sample_ids for batch in batches] == [pack.record.sample_ids for pack in packs]
    with torch.no_grad():
        assert model(**batches[0]).loss > 0


# -- the example ------------------------------------------------------------------------------------------------------


EXAMPLE = ROOT / "examples" / "own_trainer.py"


def test_page_shows_the_loop_of_the_example():
    """OWN-7"""
    (shown,) = (block.text for block in blocks(ROOT / "docs" / "own_trainer.md", "python") if "prove(" in block.text)
    loop = re.search(r"^def train\(.*?(?=\n\n\n)", EXAMPLE.read_text(), flags=re.S | re.M)
    assert shown == f"{loop[0]}\n"


def test_example_trains_a_model_and_rows_of_ones_own(small_folder, rows, tmp_path, monkeypatch, capsys):
    """OWN-7: as it is written."""
    data = write_jsonl(tmp_path / "captions.jsonl", rows)
    named = ["--model", small_folder(FAMILY), "--model_type", FAMILY, "--template", FAMILY, "--data", data]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *map(str, named), "--length", "512"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert_trained(capsys.readouterr().out)


def assert_trained(out):
    assert "isolation verified: max difference 0.0 over " in out
    epochs = [json.loads(line) for line in out.splitlines() if line.startswith('{"epoch"')]
    assert [line["epoch"] for line in epochs] == [0, 1, 2]
    assert all(0 < line["loss"] < 20 and line["packs"] > 2 for line in epochs)


@pytest.mark.slow
@pytest.mark.telling
def test_example_runs_without_arguments_wherever_it_is_called(tmp_path):
    """OWN-7: on a tiny model and rows that it makes itself."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLPACK_"))}
    done = subprocess.run(
        [sys.executable, EXAMPLE], cwd=tmp_path, env=clean, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_trained(done.stdout)
