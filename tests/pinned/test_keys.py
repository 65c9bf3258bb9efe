"""What lengths are remembered under: same in, same key; changed in, another key. Through the flags of a run alone.

The keys themselves are not pinned: a rebuild may choose others. That each setting is in them is.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.data_rows import image_row, text_row, write_jsonl
from tests.environment import packing_options, restored_environment
from tests.host.runs import packed_argv
from tests.images import photo
from tests.pinned.adapter import keys_of

FAMILY = "qwen2_5_vl"
OTHER_KEY: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": 500},
    "truncation_strategy": {"truncation_strategy": "left"},
    "system": {"system": "Be brief."},
    "max_pixels": {"max_pixels": 30_000},
    "template": {"template": "qwen2_vl"},
    "agent_template": {"agent_template": "react_en"},
    "response_prefix": {"response_prefix": "<think>"},
    "loss_scale": {"loss_scale": "hermes"},
    "use_chat_template": {"use_chat_template": "false"},
    "norm_bbox": {"norm_bbox": "norm1000"},
}
SAME_KEY: dict[str, dict[str, Any]] = {
    "nothing": {},
    "optimizer": {"learning_rate": 1, "gradient_accumulation_steps": 3, "num_train_epochs": 4},
    "tuner": {"tuner_type": "lora", "lora_rank": 4},
    "precision": {"torch_dtype": "bfloat16"},
    "attention": {"attn_impl": "sdpa"},
    "seeds": {"seed": 1, "data_seed": 2},
    "workers": {"dataloader_num_workers": 2},
}
SAME_KEY_BY_OPTION = {
    "strategy": {"packing_strategy": "exact"},
    "capacity": {"packing_length": "300"},
    "buffer": {"packing_buffer": "7", "packing_drop_last": "false"},
    "padding": {"packing_pad_to": "64"},
    "loss": {"packing_loss": "sample"},
}

OTHER_KEY_BY_OPTION = {"targets": {"train_on_eos": "false"}}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    images = [photo(folder, str(n), 60 + 30 * n, 90) for n in range(2)]
    return write_jsonl(folder / "rows.jsonl", [text_row(), image_row(images[:1]), image_row(images), text_row("why?")])


@pytest.fixture(scope="module")
def of(small_folder, data, tmp_path_factory):
    """`of(max_length=500)`: the keys of the rows in a run with these flags; `options` are those of packing."""

    def keys(options=None, dataset=data, **flags):
        with restored_environment():
            packing_options(packing_cache_dir=str(tmp_path_factory.mktemp("lengths")), **(options or {}))
            argv = packed_argv(small_folder(FAMILY), FAMILY, "never", dataset=dataset, dataset_shuffle="false", **flags)
            (found,) = keys_of(argv).values()
            return found

    return keys


@pytest.fixture(scope="module")
def first(of):
    keys = of()
    assert len(set(keys)) == len(keys) == 4
    return keys


@pytest.mark.parametrize("name", SAME_KEY)
def test_key_knows_nothing_of_how_a_model_is_trained(name, of, first):
    assert of(**SAME_KEY[name]) == first


@pytest.mark.parametrize("name", SAME_KEY_BY_OPTION)
def test_key_knows_nothing_of_how_samples_are_packed(name, of, first):
    assert of(SAME_KEY_BY_OPTION[name]) == first


@pytest.mark.parametrize("name", OTHER_KEY)
def test_key_is_another_where_a_length_may_be(name, of, first):
    assert not {*of(**OTHER_KEY[name])} & {*first}


@pytest.mark.parametrize("name", OTHER_KEY_BY_OPTION)
def test_key_is_another_where_other_tokens_are_targets(name, of, first):
    assert not {*of(OTHER_KEY_BY_OPTION[name])} & {*first}


def test_each_row_has_its_own_key_wherever_it_stands(of, data, tmp_path):
    """In one file, which is edited; the same rows in a file of another name are another source."""
    lines, path = Path(data).read_text().splitlines(), tmp_path / "rows.jsonl"

    def keys(rows):
        path.write_text("".join(f"{row}\n" for row in rows))
        return of(dataset=str(path))

    before = keys(lines)
    after = keys([*lines[::-1], lines[0].replace("hi, how", "hi, who"), lines[0]])
    assert after[:4] == before[::-1]
    assert after[4] not in before
    assert after[5] == before[0]


def test_key_follows_the_files_of_a_row(of, tmp_path):
    path = photo(tmp_path, "mine", 90, 90)
    dataset = write_jsonl(tmp_path / "rows.jsonl", [text_row(), image_row([path])])
    before = of(dataset=dataset)
    assert of(dataset=dataset) == before
    os.utime(path, (1, 1))
    after = of(dataset=dataset)
    assert after[0] == before[0]
    assert after[1] != before[1]
    photo(tmp_path, "mine", 120, 90)
    os.utime(path, (1, 1))
    assert of(dataset=dataset)[1] not in (before[1], after[1])
