"""What a user is told about steps and lengths."""

import numpy as np
import pytest

from swift_vlpack import PackingConfig
from swift_vlpack.plan.report import about_step, length_warning, long_sequence_warning, step_size, suggested_length


def test_step_is_counted_packed_and_unpacked():
    """TRAIN-21: batch 4, accumulation 2 on 2 ranks; 10 packs of 5 samples with 7 labels each."""
    step = step_size(num_packs=10, num_samples=50, num_supervised=350, accumulation=8, num_ranks=2)
    assert step == {
        "num_packs": 16, "num_samples": 80, "num_supervised_tokens": 560, "num_samples_unpacked": 16,
        "num_supervised_tokens_unpacked": 112, "accumulation_as_unpacked": 2, "num_samples_then": 20,
    }  # fmt: skip
    [(_, said), _] = about_step({"step": step})
    assert said == "16 packs with about 80 samples and 560 supervised tokens; un-packed it would be 16 samples and 112"


def test_step_of_one_pack_cannot_have_fewer_samples():
    """TRAIN-21"""
    step = step_size(num_packs=2, num_samples=60, num_supervised=60, accumulation=4, num_ranks=1)
    assert (step["accumulation_as_unpacked"], step["num_samples_then"]) == (1, 30)
    [_, (_, remedy)] = about_step({"step": step})
    assert "gradient_accumulation_steps 1 makes it about 30 samples a step" in remedy


@pytest.mark.parametrize(
    ("lengths", "suggested"),
    [([5], 1024), ([1024], 8192), ([128], 1024), ([129], 2048), ([10] * 99 + [4097], 8192)],
    ids=str,
)
def test_suggested_length_holds_the_longest_and_several_of_the_mean(lengths, suggested):
    """TRAIN-22"""
    assert suggested_length(np.array(lengths)) == suggested


def test_capacity_that_the_data_asks_for_is_no_reason_to_warn():
    """TRAIN-22"""
    assert length_warning(8192, np.array([], dtype=np.int64)) is None
    assert length_warning(8192, np.array([5000])) is None
    warning = length_warning(32768, np.array([30, 60, 90]))
    assert "32768 tokens" in warning
    assert "30 to 90 tokens" in warning
    assert "--max_length 1024 " in warning


def test_rows_that_cannot_have_the_one_shape_are_warned_of():
    """PAD-1: under `length`; with a multiple rows have many shapes anyway."""
    tokens = np.array([90, 100, 101, 250])
    warning = long_sequence_warning(tokens, PackingConfig(packing_length=100, packing_pad_to="length"))
    assert "2 samples are longer than packing_length (100)" in warning
    assert "packing_allow_single_long=false" in warning
    assert long_sequence_warning(tokens[:2], PackingConfig(packing_length=100, packing_pad_to="length")) is None
    assert long_sequence_warning(tokens, PackingConfig(packing_length=100, packing_pad_to=50)) is None
