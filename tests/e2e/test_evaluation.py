"""Evaluation on two real ranks: `eval_loss` is that of `swift sft` without packing, on the same weights."""

import json

import pytest

from tests.data_rows import mixed_rows, write_jsonl
from tests.e2e.ranks import Run
from tests.host.runs import SMALL_VOCABULARY, argv, log_lines

FAMILY = "qwen2_5_vl"
NUM_ROWS = 11
"""No multiple of the rows of a step, so the last step has fewer, and rows a second time."""
OWN_LOSS = """
from swift.loss import BaseLoss, loss_map
import torch.nn.functional as F

class FocalMean(BaseLoss):
    def __call__(self, outputs, labels, **kwargs):
        logits = outputs.logits[:, :-1].flatten(0, 1).float()
        loss = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="none")
        return ((1 - (-loss).exp()) ** 2 * loss).sum() / (labels[:, 1:] != -100).sum()

loss_map["focal_mean"] = FocalMean
"""
# Plain ms-swift multiplies a mean by the number of ranks, unless this is off.
MEANS = {"average_tokens_across_devices": "false"}


@pytest.fixture(scope="module")
def eval_loss(small_folder, tmp_path_factory):
    """`eval_loss(packing="true", ...)` on the weights before step 1, on two ranks."""
    folder = tmp_path_factory.mktemp("evaluation")
    data = write_jsonl(folder / "rows.jsonl", mixed_rows(folder / "images", NUM_ROWS, largest=100))
    (folder / "own_loss.py").write_text(OWN_LOSS)

    def run(packing, **flags):
        output = folder / f"{packing}-{json.dumps(flags)[:60]}".replace("/", "_")
        output.mkdir()
        ours = Run(
            argv(
                small_folder(FAMILY), FAMILY, output, dataset=data, val_dataset=data, max_length=256, max_steps=1,
                eval_on_start="true", eval_strategy="steps", eval_steps=1, split_dataset_ratio=0, learning_rate=0,
                packing=packing, external_plugins=[SMALL_VOCABULARY, folder / "own_loss.py"],
                **{"per_device_eval_batch_size": 2, **flags},
            ),
            output / "log.txt",
            packing_strategy="exact", packing_drop_last="false", packing_verify="false",
        )  # fmt: skip
        assert ours.wait(120) == 0, ours.output[-3000:]
        return next(line["eval_loss"] for line in log_lines(output) if "eval_loss" in line)

    return run


@pytest.mark.slow
@pytest.mark.telling
@pytest.mark.parametrize(
    "flags", [{"label_smoothing_factor": 0.1}, {"loss_type": "focal_mean"}], ids=["smoothing", "loss_type"]
)
def test_a_loss_that_is_a_mean_is_that_of_an_unpacked_evaluation(flags, eval_loss):
    """LOSS-2 TRAIN-6: of batches of unlike sizes."""
    plain = eval_loss("false", **flags, **MEANS)
    assert eval_loss("true", **flags) == pytest.approx(plain, abs=1e-5)
