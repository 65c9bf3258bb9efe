"""`packing_pad_to` in real runs: one shape, the same losses, what was added is counted."""

import re

import pytest

from swift_vlpack.attention import attention
from swift_vlpack.cli.plan import training_report
from swift_vlpack.runlog.plan_text import plan_text
from tests.data_rows import mixed_rows, write_jsonl
from tests.environment import packing_options
from tests.host.runs import epoch_report, packed_argv, train

FAMILY = "qwen2_5_vl"
LENGTH = 512
OPTIONS = {"packing_strategy": "best_fit", "packing_drop_last": "false", "packing_verify": "false"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return write_jsonl(folder / "train.jsonl", mixed_rows(folder, 16, largest=160))


def test_rows_of_an_epoch_have_one_shape_and_the_losses_without_padding(small_folder, data, tmp_path, caplog):
    """PAD-1 PAD-2 PAD-4: planned, counted by plan and report; evaluated as ever."""
    evaluated = {"val_dataset": f"{data}#5", "eval_strategy": "epoch", "per_device_eval_batch_size": 5}
    common = {"dataset": data, "num_train_epochs": 1, "max_length": LENGTH, **evaluated}
    folder, found = small_folder(FAMILY), {}
    for pad_to in ("none", "length"):
        packing_options(**OPTIONS, packing_pad_to=pad_to)
        flags = packed_argv(folder, FAMILY, tmp_path / pad_to, **common)
        with attention.recorded_calls() as rows:
            history = train(flags)["log_history"]
        found[pad_to] = history, {row.ends[-1] for row in rows}
    assert found["length"][1] == {LENGTH}
    assert len(found["none"][1]) > 1
    for name in ("loss", "eval_loss", "pack/fill"):
        plain, padded = ([line[name] for line in found[pad_to][0] if name in line] for pad_to in found)
        assert padded == pytest.approx(plain, rel=1e-5)
        assert padded
    report = epoch_report(tmp_path / "length")
    assert (report["num_samples"], report["is_closed"]) == (16, True)
    assert report["num_padding"] + report["num_tokens"] == LENGTH * report["num_packs"]
    assert epoch_report(tmp_path / "none")["num_padding"] == 0
    planned = training_report(flags, num_ranks=1, failures_file=tmp_path / "failures.jsonl")
    assert (planned["num_padding"], planned["packing_pad_to"]) == (report["num_padding"], "length")
    assert f"{report['num_padding']} tokens by packing_pad_to=length, " in plan_text(planned)


@pytest.mark.slow
@pytest.mark.telling
def test_streamed_rows_have_one_shape_over_epochs(small_folder, data, tmp_path, caplog):
    """PAD-1: those of a stream, one that is longer than a pack, and one without a sample at the end of an epoch."""
    packing_options(**OPTIONS, packing_pad_to="length")
    shapes = {}
    for length in (LENGTH, 100):
        options = {"streaming": "true", "max_steps": 4, "gradient_accumulation_steps": 4, "packing_length": length}
        flags = packed_argv(small_folder(FAMILY), FAMILY, tmp_path / str(length), dataset=data, **options)
        with attention.recorded_calls() as rows:
            train(flags)
        shapes[length] = {row.ends[-1] for row in rows}
    assert shapes[LENGTH] == {LENGTH}
    assert shapes[100] == {100, 200}
    assert re.search(r"packing_pad_to=length: \d+ samples? (is|are) longer than packing_length \(100\)", caplog.text)
