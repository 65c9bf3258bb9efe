"""The attention of packed runs, through ms-swift's own pipeline."""

import logging
import re

import pytest

from swift_vlpack.attention import attention
from swift_vlpack.attention.kernels import grouped
from tests.data_rows import mixed_rows, write_jsonl
from tests.host.runs import packed_argv, train


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return write_jsonl(folder / "train.jsonl", mixed_rows(folder / "train", 10, largest=120))


def run(folder, family, data, output, **options):
    flags = {"max_steps": 1, "split_dataset_ratio": 0, "max_length": 400, **options}
    return train(packed_argv(folder, family, output, dataset=data, **flags))


def test_linear_attention_trains_packed(small_folder, data, tmp_path, caplog):
    """ISO-7 ATTN-7 ATTN-9: with ms-swift's own forward of these layers, which wants kernels for several samples.

    What attention kernel is used is chosen before the proof, which is made with it.
    """
    with caplog.at_level(logging.INFO):
        run(small_folder("qwen3_5"), "qwen3_5", data, tmp_path)
    (line,) = re.findall(r"attention vlpack: \w+ .*", caplog.text)
    assert "segments or grouped, by the lengths of each sequence (varlen needs CUDA" in line
    assert caplog.text.index("attention vlpack: ") < caplog.text.index("isolation verified")


def test_packing_attention_fixes_the_kernel(small_folder, data, tmp_path, caplog, monkeypatch):
    """ATTN-9"""
    monkeypatch.setenv("VLPACK_PACKING_ATTENTION", "grouped")
    in_training = []

    def noted(row):
        in_training.append(row.module.training)
        return grouped(row)

    use = attention.use_kernel
    monkeypatch.setattr(
        attention, "use_kernel", lambda model, kernel, *more: use(model, {grouped: noted}.get(kernel, kernel), *more)
    )
    with caplog.at_level(logging.INFO):
        run(small_folder("qwen2_5_vl"), "qwen2_5_vl", data, tmp_path)
    assert re.search("attention vlpack: grouped, as asked for", caplog.text)
    assert "isolation verified" in caplog.text
    assert any(in_training), "not in the proof only"
