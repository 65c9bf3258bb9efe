"""`swift pt --packing true`: text and interleaved documents, every token a target, by the way that `swift sft` goes."""

import pytest
import torch

from swift_vlpack.cli.plan import training_report
from tests.data_rows import write_jsonl
from tests.environment import packing_options
from tests.host.runs import argv, epoch_report, packed_argv, train
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


@pytest.fixture
def gradients(monkeypatch):
    """What a step is taken with, by name of parameter."""
    from swift.callbacks import TrainerCallback, callbacks_map

    found = {}

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            found.update({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})

    monkeypatch.setitem(callbacks_map, "gradients", Gradients)
    return found


def test_loss_and_gradients_are_those_of_ms_swifts_unpacked_pt(small_folder, data, tmp_path, gradients, caplog):
    """TRAIN-27: a step over all documents, with and without images, one batch of them against packs."""
    common = {
        "dataset": data, "num_train_epochs": 1, "per_device_train_batch_size": NUM_ROWS, "callbacks": "gradients",
        "max_grad_norm": 0, "max_length": 128,
    }  # fmt: skip
    packed = train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path / "packed", **common), "pt")["log_history"][0]
    of_packs = dict(gradients)
    gradients.clear()
    plain = train(argv(small_folder(FAMILY), FAMILY, tmp_path / "plain", **common), "pt")["log_history"][0]
    assert packed["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert of_packs.keys() == gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert torch.allclose(of_packs[name], gradient, rtol=1e-5, atol=1e-5 * largest), name
    assert "isolation verified: max difference 0.0" in caplog.text
    report = epoch_report(tmp_path / "packed")
    assert (report["num_samples"], report["is_closed"]) == (NUM_ROWS, True)
    assert report["num_packs"] < NUM_ROWS


def flags(folder, output, data, **options):
    common = {"dataset": data, "num_train_epochs": 2, "max_length": 200, "tuner_type": "lora", **options}
    return packed_argv(folder, FAMILY, output, **common)


def losses(history):
    return [line["loss"] for line in history["log_history"] if "loss" in line]


@pytest.mark.slow
@pytest.mark.telling
def test_plan_is_the_run_and_a_resume_is_its_rest(small_folder, data, tmp_path):
    """TRAIN-27 CLI-8: `vlpack plan pt`, two epochs, and from the second step on again."""
    packing_options(packing_strategy="exact", packing_drop_last="false", packing_verify="false")
    folder, out = small_folder(FAMILY), tmp_path / "out"
    planned, of_sft = (
        training_report(
            flags(folder, tmp_path / "never", data), num_ranks=1, failures_file=tmp_path / "f.jsonl", command=command
        )
        for command in ("pt", "sft")
    )
    assert planned["lengths"]["max"] < of_sft["lengths"]["max"], "no chat template"
    whole = losses(train(flags(folder, out, data, save_strategy="steps", save_steps=1), "pt"))
    report = epoch_report(out)
    assert len(whole) == planned["num_steps"]
    assert (report["num_packs"], report["num_tokens"]) == (planned["num_packs"], planned["num_tokens"])
    rest = train(flags(folder, out, data, resume_from_checkpoint=out / "checkpoint-2"), "pt")
    assert losses(rest)[-len(whole) + 2 :] == pytest.approx(whole[2:], rel=1e-6)


def test_streamed_documents_are_packed(small_folder, data, tmp_path):
    """TRAIN-27"""
    result = train(flags(small_folder(FAMILY), tmp_path, data, streaming="true", max_steps=2), "pt")
    steps = [line for line in result["log_history"] if "loss" in line]
    assert len(steps) == 2
    assert max(line["pack/samples"] for line in steps) > 1
