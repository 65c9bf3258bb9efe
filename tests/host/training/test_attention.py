"""The attention of packed runs, through ms-swift's own pipeline."""

import logging

import pytest

from tests.host.runs import packed_argv, train
from tests.rows import mixed_rows, write_jsonl


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return write_jsonl(folder / "train.jsonl", mixed_rows(folder / "train", 10, largest=120))


def run(folder, family, data, output, **options):
    flags = {"max_steps": 1, "split_dataset_ratio": 0, "max_length": 400, **options}
    return train(packed_argv(folder, family, output, dataset=data, **flags))


def test_linear_attention_trains_packed(small_folder, data, tmp_path, caplog):
    """ISO-7 ATTN-7: with ms-swift's own forward of these layers, which wants kernels for a row of several samples."""
    with caplog.at_level(logging.INFO):
        run(small_folder("qwen3_5"), "qwen3_5", data, tmp_path)
    assert "isolation verified" in caplog.text
