"""What looks at a whole sequence: frequencies by the longest sample, noise by the length. Real runs of tiny models."""

import json
import shutil
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from swift_vlpack.attention.sequence_effects import check_rope, rope_limits
from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import ConfigError
from tests.data_rows import text_row, write_jsonl
from tests.environment import packing_options
from tests.host.runs import argv, packed_argv, train

FAMILY = "qwen2_5_vl"
LIMIT = 60
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


@pytest.fixture(autouse=True)
def environment():
    packing_options(packing_strategy="greedy", packing_drop_last="false")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Six rows, one of them longer than the limit."""
    rows = [text_row(f"question {n}", "answer " * (60 if n == 2 else 4)) for n in range(6)]
    return write_jsonl(tmp_path_factory.mktemp("data") / "train.jsonl", rows)


@pytest.fixture(scope="module")
def model_with(small_folder, tmp_path_factory):
    """The folder of a model with other RoPE parameters."""

    def make(**rope):
        folder = tmp_path_factory.mktemp("rope") / "model"
        shutil.copytree(small_folder(FAMILY), folder)
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["rope_parameters"].update(rope)
        config["text_config"]["max_position_embeddings"] = LIMIT
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def loss(result):
    return next(line["loss"] for line in result["log_history"] if "loss" in line)


COMMON = {
    "num_train_epochs": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 6,
    "split_dataset_ratio": 0, "max_length": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    "rope", [LONG | {"original_max_position_embeddings": LIMIT}, {"rope_type": "dynamic", "factor": 2.0}]
)
def test_packs_whose_longest_sample_decides_are_refused(rope, model_with, dataset, tmp_path):
    """LOSS-5: rows of their own are exact for longrope only, so they are no way out of `dynamic`."""
    message = rf"RoPE is {rope['rope_type']}: .* more than {LIMIT} tokens.*--max_length {LIMIT}"
    with pytest.raises(ConfigError, match=message) as error:
        train(packed_argv(model_with(**rope), FAMILY, tmp_path, dataset=dataset, **COMMON))
    assert (f"--packing_length {LIMIT}" in str(error.value)) == (rope["rope_type"] == "longrope")


def test_dynamic_rope_in_rows_of_their_own_is_warned_of(caplog):
    """LOSS-5"""
    text = SimpleNamespace(rope_parameters={"rope_type": "dynamic"}, max_position_embeddings=LIMIT)
    check_rope(text, (), 4 * LIMIT, PackingConfig(packing_length=LIMIT))
    assert "losses depend on the order, with" in caplog.text
    assert f"--max_length {LIMIT} makes them exact" in caplog.text
    caplog.clear()
    check_rope(text, (), LIMIT, PackingConfig(packing_length=LIMIT))
    assert not caplog.text


def test_long_samples_in_rows_of_their_own_train_as_without_packing(model_with, dataset, tmp_path):
    """LOSS-5: the way out that the error names; long and short factors differ, and matter."""
    folder = model_with(**LONG, original_max_position_embeddings=LIMIT)
    plain = loss(train(argv(folder, FAMILY, tmp_path / "plain", dataset=dataset, **COMMON)))
    flags = packed_argv(folder, FAMILY, tmp_path / "packed", dataset=dataset, packing_length=LIMIT, **COMMON)
    assert loss(train(flags)) == pytest.approx(plain, rel=1e-5)


def test_limits_are_found_where_models_keep_them():
    """LOSS-5"""

    class Text:
        max_position_embeddings = 4096
        rope_parameters = None
        rope_scaling = None

        def __init__(self, **kept):
            self.__dict__.update(kept)

    dynamic, long = {"rope_type": "dynamic"}, {"type": "su", "original_max_position_embeddings": 128}
    assert list(rope_limits(Text())) == []
    assert list(rope_limits(Text(rope_parameters={"rope_type": "yarn", "factor": 2.0}))) == []
    assert list(rope_limits(Text(rope_scaling=long))) == [("su", 128)]
    nested = Text(rope_parameters={"full_attention": dynamic, "sliding_attention": {"rope_type": "default"}})
    nested.text_config = nested
    assert list(rope_limits(nested)) == [("dynamic", 4096)]


def test_noise_shrinks_with_the_length_of_the_sample(small_folder, dataset, tmp_path, monkeypatch):
    """LOSS-6: measured behind the embedding of a real run, and gone when it ends."""
    from swift.callbacks import TrainerCallback, callbacks_map

    alpha, boundaries, noises, hooks = 5.0, [], [], []

    class Listening(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if hooks:
                return
            embeddings = model.get_input_embeddings()
            hooks.append(embeddings)
            model.register_forward_pre_hook(
                lambda module, args, kwargs: boundaries.append(kwargs["cu_seq_lens_q"].tolist()), with_kwargs=True
            )
            embeddings.register_forward_hook(
                lambda module, args, out: noises.append((out - module.weight[args[0]]).detach().abs()[0])
            )

    monkeypatch.setitem(callbacks_map, "listening", Listening)
    flags = packed_argv(
        small_folder(FAMILY), FAMILY, tmp_path, dataset=dataset, neftune_noise_alpha=alpha, callbacks="listening",
        **{**COMMON, "max_steps": 1, "learning_rate": 0},
    )  # fmt: skip
    train(flags)
    num_samples = 0
    for ends, noise in zip(boundaries, noises, strict=True):
        for start, end in pairwise(ends):
            most = alpha / ((end - start) * noise.shape[1]) ** 0.5
            assert 0.97 * most < float(noise[start:end].max()) <= 1.0001 * most
            num_samples += 1
    assert num_samples == 6
    assert len(noises) < 6, "some rows have several samples"
    assert not hasattr(hooks[0], "neftune_noise_alpha")
    assert torch.is_grad_enabled()
