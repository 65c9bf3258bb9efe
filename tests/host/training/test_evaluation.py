"""Evaluation of a packed run: padded or packed, `eval_loss` is that of `swift sft` without packing."""

import pytest

from tests.environment import packing_options
from tests.host.runs import argv, packed_argv, train
from tests.marks import telling
from tests.rows import mixed_rows, write_jsonl

FAMILY = "qwen2_5_vl"
NUM_ROWS = 7
"""No multiple of the batch size, so the last batch is smaller."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = mixed_rows(folder / "images", NUM_ROWS, seed=1, largest=100)
    return write_jsonl(folder / "val.jsonl", [{**row, "channel": "ab"[n % 2]} for n, row in enumerate(rows)])


@pytest.fixture
def evaluation(small_folder, data, tmp_path):
    """`evaluation(packed=True, options={...}, **flags)`: the log line of an evaluation before step 1."""

    def run(*, packed, options=None, **flags):
        packing_options(packing_verify="false", packing_strategy="exact", **(options or {}))
        make = packed_argv if packed else argv
        history = train(
            make(
                small_folder(FAMILY), FAMILY, tmp_path / str(packed),
                **{"dataset": data, "val_dataset": data, "split_dataset_ratio": 0, "eval_on_start": "true",
                   "eval_strategy": "steps", "eval_steps": 1, "max_steps": 1, "learning_rate": 0, "max_length": 256,
                   "per_device_eval_batch_size": 3, **flags},
            )
        )["log_history"]  # fmt: skip
        return next(line for line in history if "eval_loss" in line)

    return run


@pytest.mark.parametrize(
    "flags",
    [
        {},
        telling({"per_device_eval_batch_size": 1}),
        telling({"label_smoothing_factor": 0.1}),
        telling({"loss_scale": "all", "is_binary_loss_scale": "false", "enable_dft_loss": "true"}),
        telling({"loss_type": "cross_entropy", "enable_channel_loss": "true"}),
        telling({"use_logits_to_keep": "false", "dataloader_drop_last": "true"}),
    ],
    ids=lambda flags: " ".join(flags) or "default",
)
def test_packed_evaluation_is_a_mean_of_the_batches_of_rows(flags, evaluation):
    """TRAIN-6: a mean over packs, or over tokens, is another number."""
    plain = evaluation(packed=False, **flags)
    packed = evaluation(packed=True, options={"eval_packing": "true"}, **flags)
    assert packed["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-5)
    if "dataloader_drop_last" not in flags:  # whose rows are counted in packs
        same = [name for name in plain if "acc" in name or "loss_" in name]
        assert {name: packed[name] for name in same} == pytest.approx({name: plain[name] for name in same}, rel=1e-5)
    assert plain["eval_samples_per_second"] * plain["eval_runtime"] == pytest.approx(NUM_ROWS, abs=0.1)
    assert packed["eval_samples_per_second"] * packed["eval_runtime"] == pytest.approx(NUM_ROWS, abs=0.1)
