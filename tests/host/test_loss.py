"""The loss of a step: what plain ms-swift computes of the same samples in one padded batch, on every way to a loss."""

import os

import pytest
import torch
from swift.trainers.mixin import SwiftMixin

from swift_vlpack.errors import ConfigError, IsolationError
from swift_vlpack.host.losses import LossNotAdditive
from swift_vlpack.host.trainer import PackingTrainer
from tests.data_rows import mixed_rows, write_jsonl
from tests.environment import packing_options
from tests.host.runs import argv, assert_same_gradients, gradients_of_steps, packed_argv, train
from tests.marks import telling

FAMILY = "qwen2_5_vl"
NUM_ROWS = 8


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = mixed_rows(folder / "images", NUM_ROWS, largest=100)
    return write_jsonl(folder / "train.jsonl", [{**row, "channel": "ab"[n % 2]} for n, row in enumerate(rows)])


@pytest.fixture(autouse=True)
def environment():
    packing_options(packing_strategy="exact", packing_drop_last="false")


@pytest.fixture
def step(small_folder, data, tmp_path):
    """`step(packed=True, ...)` trains all rows in one step: its loss, and the gradients behind it."""

    def run(*, packed, **flags):
        steps.clear()
        make = packed_argv if packed else argv
        history = train(
            make(
                small_folder(FAMILY), FAMILY, tmp_path / str(packed), dataset=data,
                **{"max_length": 256, "num_train_epochs": 1, "per_device_train_batch_size": NUM_ROWS,
                   "callbacks": "gradients", "max_grad_norm": 0, "split_dataset_ratio": 0, **flags},
            )
        )["log_history"]  # fmt: skip
        return next(line["loss"] for line in history if "loss" in line), *steps

    with gradients_of_steps() as steps:
        yield run


def assert_same(packed, plain):
    assert packed[0] == pytest.approx(plain[0], rel=1e-5)
    assert_same_gradients(packed[1], plain[1], rtol=1e-3)


@pytest.fixture
def own_losses(monkeypatch):
    """Losses as a user's plugin registers them."""
    import torch.nn.functional as F
    from swift.loss import BaseLoss, loss_map

    def per_token(outputs, labels):
        logits = outputs.logits[:, :-1].flatten(0, 1).float()
        return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="none")

    class FocalMean(BaseLoss):
        def __call__(self, outputs, labels, **kwargs):
            loss = per_token(outputs, labels)
            return ((1 - torch.exp(-loss)) ** 2 * loss).sum() / (labels[:, 1:] != -100).sum()

    class FocalSum(FocalMean):
        def __call__(self, outputs, labels, *, num_items_in_batch=None, **kwargs):
            loss = per_token(outputs, labels)
            return ((1 - torch.exp(-loss)) ** 2 * loss).sum() / num_items_in_batch

    class MeanOfSamples(BaseLoss):
        def __call__(self, outputs, labels, **kwargs):
            loss = per_token(outputs, labels).view(len(labels), -1)
            return loss.sum(dim=1).mean() / labels.shape[1]

    class Raising(BaseLoss):
        def __call__(self, outputs, labels, **kwargs):
            raise RuntimeError("no such head")

    monkeypatch.setitem(loss_map, "raising", Raising)
    for name, loss in {"focal_mean": FocalMean, "focal_sum": FocalSum, "mean_of_samples": MeanOfSamples}.items():
        monkeypatch.setitem(loss_map, name, loss)


@pytest.mark.parametrize(
    "flags",
    [
        {"label_smoothing_factor": 0.1, "use_logits_to_keep": "true"},
        telling({"loss_type": "focal_mean"}),
        telling(
            {
                "enable_dft_loss": "true",
                "enable_channel_loss": "true",
                "loss_scale": "all",
                "is_binary_loss_scale": "false",
            }
        ),
        *(
            pytest.param(flags, marks=pytest.mark.slow)
            for flags in (
                {},
                {"label_smoothing_factor": 0.1},
                {"use_logits_to_keep": "true"},
                {"loss_type": "focal_sum"},
                {"loss_type": "cross_entropy", "average_tokens_across_devices": "false"},
            )
        ),
    ],
    ids=lambda flags: " ".join(flags.values() if "loss_type" in flags else flags) or "default",
)
def test_loss_of_a_step_is_that_of_one_batch(flags, step, own_losses):
    """LOSS-1 LOSS-2: loss and gradients, on every way ms-swift has to a loss."""
    assert_same(step(packed=True, **flags), step(packed=False, **flags))


@pytest.mark.parametrize(
    "flags", [{"label_smoothing_factor": 0.1}, pytest.param({"loss_type": "focal_mean"}, marks=pytest.mark.slow)]
)
def test_accumulated_means_are_the_mean_of_the_step(flags, step, own_losses):
    """LOSS-2: where plain ms-swift adds up the means of two batches, the reference is one batch of all rows."""
    half = {"per_device_train_batch_size": NUM_ROWS // 2, "gradient_accumulation_steps": 2}
    assert_same(step(packed=True, **flags, **half), step(packed=False, **flags))


def test_loss_that_is_neither_sum_nor_mean_over_tokens_is_refused(step, own_losses):
    """LOSS-3: whatever packing_verify says, before step 1."""
    os.environ["VLPACK_PACKING_VERIFY"] = "false"
    with pytest.raises(LossNotAdditive, match=r"--loss_type mean_of_samples cannot be used.*num_items_in_batch"):
        step(packed=True, loss_type="mean_of_samples")


def test_boundaries_that_the_trainer_loses_are_not_the_fault_of_the_loss(step, monkeypatch):
    """LOSS-3: the proof asks the model itself, which gets all; on the way of training its boundaries are lost."""
    right = PackingTrainer.compute_loss

    def losing(self, model, inputs, *args, **kwargs):
        num_tokens = inputs["input_ids"].shape[1]
        inputs = {name: value for name, value in inputs.items() if not name.startswith("cu_seq_lens")}
        inputs["position_ids"] = torch.arange(num_tokens).expand_as(inputs["position_ids"]).clone()
        return right(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(PackingTrainer, "compute_loss", losing)
    with pytest.raises(IsolationError, match=r"on the way that training takes, samples of a sequence see each other"):
        step(packed=True)


def test_logits_that_are_kept_one_late_are_named(step, monkeypatch):
    """LOSS-3: with all logits the loss is right, so it is not the loss that cannot be used."""
    right = SwiftMixin.prepare_logits_to_keep

    def one_late(self, inputs):
        right(self, inputs)
        if isinstance(inputs.get("logits_to_keep"), torch.Tensor):
            inputs["logits_to_keep"] = inputs["logits_to_keep"].roll(1, dims=-1)

    monkeypatch.setattr(SwiftMixin, "prepare_logits_to_keep", one_late)
    with pytest.raises(IsolationError, match=r"where only the logits of targets are computed \(logits_to_keep\)"):
        step(packed=True, use_logits_to_keep="true")


@pytest.mark.slow
def test_loss_that_cannot_be_checked_stops_before_step_1(step, own_losses):
    """LOSS-3"""
    with pytest.raises(LossNotAdditive, match=r"could not be checked.*RuntimeError: no such head"):
        step(packed=True, loss_type="raising")


@pytest.mark.parametrize(
    ("name", "rule"),
    [("listwise_reranker", "cannot be used with packing"), ("infoncee", "is not known; known are .*infonce")],
)
def test_loss_of_another_task_and_an_unknown_one_are_refused_by_name(name, rule, step):
    """LOSS-4"""
    with pytest.raises(ConfigError, match=f"--loss_type {name} {rule}"):
        step(packed=True, loss_type=name)
