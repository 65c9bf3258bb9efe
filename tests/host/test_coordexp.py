"""Coming from CoordExp: its keys are ours where they mean the same, and are refused with ours where they do not."""

import re

import pytest
import yaml

from swift_vlpack import PackingConfig
from swift_vlpack.cli.plan import training_report
from swift_vlpack.errors import ConfigError
from swift_vlpack.gone import COORDEXP
from swift_vlpack.host.launch import train_launch
from swift_vlpack.rows.fusion_config import read_fusion_config
from tests.data_rows import text_row, write_jsonl
from tests.doc_blocks import ROOT
from tests.host.runs import packed_argv

TRAINING = {
    "packing": True,
    "packing_mode": "static",
    "packing_length": 12000,
    "packing_buffer": 256,
    "packing_min_fill_ratio": 0.7,
    "packing_drop_last": True,
    "packing_allow_single_long": True,
    "eval_packing": True,
    "effective_batch_size": 12,
}
"""The packing keys of its `training:` block, with values of its guide."""
FUSION = """
targets:
  - {dataset: lvis, name: lvis_train, train_jsonl: ./photos.jsonl, val_jsonl: ./other.jsonl, template: aux_dense,
     ratio: 0.3, sample_without_replacement: false}
sources:
  - {dataset: vg, train_jsonl: ./chat.jsonl, val_jsonl: null, template: aux_dense, ratio: 1.7, mode: dense}
"""


def test_its_packing_keys_are_options_here():
    """CONF-13: with the same meaning; `static` is a plan."""
    config = PackingConfig.from_mapping(TRAINING)
    assert config == PackingConfig(**{**TRAINING, "packing_mode": "plan"})
    assert config.accumulation(num_ranks=4) == 3
    assert train_launch([f"--{name}={value}" for name, value in TRAINING.items()], {}).config == config


@pytest.mark.parametrize("key", COORDEXP)
def test_its_other_keys_are_refused_with_ours(key, tmp_path):
    """CONF-13: in one line, in training files, flags and Python."""
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"model": "m", key: {"a": 1}}))
    ways = (
        lambda: train_launch([str(file)], {}),
        lambda: train_launch([f"--{key}", "1"], {}),
        lambda: PackingConfig.from_mapping({key: 1}, packing_length=8),
    )
    for way in ways:
        with pytest.raises(ConfigError, match=re.escape(f"{key} is a key of CoordExp: {COORDEXP[key]}")):
            way()


def test_every_key_is_in_the_table_of_the_page():
    """CONF-13"""
    section = (ROOT / "docs" / "migrate.md").read_text().partition("## From CoordExp")[2].partition("\n## ")[0]
    for key in (*COORDEXP, *TRAINING, "targets", "train_jsonl", "val_jsonl", "ratio", "sample_without_replacement"):
        assert re.search(rf"`[^`]*\b{key}\b[^`]*`", section), key


@pytest.fixture
def folder(tmp_path):
    write_jsonl(tmp_path / "photos.jsonl", [text_row(f"photo {number}") for number in range(20)])
    write_jsonl(tmp_path / "chat.jsonl", [text_row(f"chat {number}") for number in range(10)])
    (tmp_path / "fusion.yaml").write_text(FUSION)
    return tmp_path


def test_its_fusion_file_is_planned_as_it_is(folder, small_folder, options, caplog):
    """CONF-13 DATA-3: so many rows of each source as its quotas; what it evaluates on is warned of, once."""
    options(packing_drop_last="false", fusion_config=folder / "fusion.yaml")
    report = training_report(
        packed_argv(small_folder("qwen2_5_vl"), "qwen2_5_vl", folder / "out"),
        num_ranks=1,
        failures_file=folder / "failures.jsonl",
    )
    assert {name: source["num_samples"] for name, source in report["sources"].items()} == {"lvis_train": 6, "vg": 17}
    assert caplog.text.count("val_jsonl is not read; name rows for evaluation by val_dataset") == 1


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("sample_without_replacement: true", "sample_without_replacement is a key of CoordExp: give a ratio of at"),
        ("system_prompt: Be short.", "system_prompt is a key of CoordExp: write system"),
        ("user_prompt: Look.", "user_prompt is a key of CoordExp: write it into the rows"),
        ("params: {a: 1}", "unknown key 'params'"),
        ("train_jsonl: null", "train_jsonl names no file; give one, or dataset and name"),
    ],
)
def test_keys_that_would_mix_otherwise_are_refused(key, said, folder):
    """CONF-13"""
    file = "" if "train_jsonl" in key else "train_jsonl: ./photos.jsonl, "
    (folder / "fusion.yaml").write_text(f"targets: [{{dataset: lvis, {file}{key}}}]")
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_fusion_config(str(folder / "fusion.yaml"))


def test_a_file_that_extends_another_is_refused(folder):
    """CONF-13"""
    (folder / "fusion.yaml").write_text("extends: base.yaml\ntargets: []")
    with pytest.raises(ConfigError, match="extends is a key of CoordExp: a file is whole here"):
        read_fusion_config(str(folder / "fusion.yaml"))
