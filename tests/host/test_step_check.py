"""What stands between the loss and the optimizer is what it says, or the run stops at its first step."""

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer

from swift_vlpack.host.step_check import StepIsOther
from tests.data_rows import mixed_rows, write_jsonl
from tests.environment import packing_options
from tests.host.runs import packed_argv, train
from tests.marks import telling

FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return write_jsonl(folder / "train.jsonl", mixed_rows(folder, 24, largest=100))


@pytest.fixture
def run(small_folder, data, tmp_path):
    """Train three steps of two packs."""

    def trained(**options):
        packing_options(packing_drop_last="false", packing_verify=options.pop("verify", "true"))
        settings = {"dataset": data, "max_steps": 3, "split_dataset_ratio": 0, "gradient_accumulation_steps": 2}
        return train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path / "run", **{**settings, **options}))

    return trained


def backward_divided(monkeypatch):
    """The backward begins at a part of the loss that is logged."""
    backward = Accelerator.backward
    monkeypatch.setattr(Accelerator, "backward", lambda self, loss, **kwargs: backward(self, loss / 5, **kwargs))


def divided_by_accumulation_too(monkeypatch):
    """The mistake of transformers 4.46: divided by the tokens of the step, and by its sequences."""
    step = Trainer.training_step

    def training_step(self, model, inputs, num_items_in_batch=None):
        backward = self.accelerator.backward
        num = self.current_gradient_accumulation_steps
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(self.accelerator, "backward", lambda loss, **kwargs: backward(loss / num, **kwargs))
            return step(self, model, inputs, num_items_in_batch)

    monkeypatch.setattr(Trainer, "training_step", training_step)


def items_of_first_sequence(monkeypatch):
    """Losses are divided by the tokens of the first sequence of a step."""
    count = Trainer._get_num_items_in_batch
    monkeypatch.setattr(
        Trainer, "_get_num_items_in_batch", lambda self, batches, device: count(self, batches[:1], device)
    )


@pytest.mark.parametrize(
    ("sabotage", "said"),
    [
        (backward_divided, "backward begins at"),
        telling(divided_by_accumulation_too, "backward begins at"),
        (items_of_first_sequence, "losses are divided by"),
    ],
)
def test_wrong_factor_stops_the_first_step(sabotage, said, run, monkeypatch):
    """TRAIN-30: the logged loss is the same."""
    sabotage(monkeypatch)
    with pytest.raises(StepIsOther, match=f"step 1 follows another gradient than that of its loss: {said}"):
        run()
    if sabotage is backward_divided:  # one of them says it for all
        assert len(run(verify="false")["log_history"]) > 3


def test_wrong_divisor_of_a_later_step_stops_at_the_log_line(run, monkeypatch):
    """TRAIN-30"""
    count, calls = Trainer._get_num_items_in_batch, []

    def wrong_from_the_second(self, batches, device):
        calls.append(1)
        return count(self, batches[: 2 if len(calls) < 2 else 1], device)

    monkeypatch.setattr(Trainer, "_get_num_items_in_batch", wrong_from_the_second)
    with pytest.raises(StepIsOther, match=r"one of the steps up to 2 .* losses are divided by"):
        run()


@pytest.mark.parametrize(
    "options", [{}, telling({"loss_scale": "last_round"}), {"tuner_type": "lora", "torch_dtype": "bfloat16"}]
)
def test_right_steps_go_on(options, run):
    """TRAIN-30"""
    logged = [line for line in run(**options)["log_history"] if "loss" in line]
    assert len(logged) == 3
    assert all(line["pack/supervised_tokens"] > 0 for line in logged)


def test_backward_that_is_given_a_gradient_is_seen(run, monkeypatch):
    """TRAIN-30"""
    backward = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda self, *of: backward(self, torch.full_like(self, 0.5)))
    with pytest.raises(StepIsOther, match="backward begins at"):
        run()
