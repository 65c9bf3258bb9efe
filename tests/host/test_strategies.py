"""Training with a strategy of one's own."""

import sys

import pytest

from swift_vlpack.errors import StrategyError
from swift_vlpack.host.launch import plugin_path
from swift_vlpack.plan import registry
from tests.data_rows import text_row, write_jsonl
from tests.host.runs import epoch_report, packed_argv, train

PLUGIN = """
from swift_vlpack import register_strategy

@register_strategy("pairs_of_plugin")
def pairs(lengths, capacity):
    return [[i for i in (n, n + 1) if i < len(lengths)] for n in range(0, len(lengths), 2)]
"""


@pytest.fixture
def run(small_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    # ms-swift imports these files again in every spawned worker of this process, of later tests too.
    monkeypatch.setattr("swift.utils.utils._external_files", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "strategies_of_run.py").write_text(
        "def all_in_one(lengths, capacity):\n    return [range(len(lengths))]\n"
    )
    rows = write_jsonl(tmp_path / "rows.jsonl", [text_row(f"question {n}", "word " * 20) for n in range(6)])

    def train_with(strategy, **options):
        monkeypatch.setenv("VLPACK_PACKING_STRATEGY", strategy)
        monkeypatch.setenv("VLPACK_PACKING_VERIFY", "false")
        monkeypatch.setenv("VLPACK_PACKING_DROP_LAST", "false")
        flags = packed_argv(
            small_folder("qwen2_5_vl"), "qwen2_5_vl", tmp_path / "out", dataset=rows, split_dataset_ratio=0,
            external_plugins=[plugin_path(), tmp_path / "plugin.py"], num_train_epochs=1, max_length=256, **options,
        )  # fmt: skip
        train(flags)
        return epoch_report(tmp_path / "out")

    return train_with


def test_a_plugins_strategy_packs_a_real_run(run):
    """STRAT-9 STRAT-11"""
    report = run("pairs_of_plugin")
    assert (report["num_packs"], report["num_samples"]) == (3, 6)


def test_a_strategy_that_breaks_a_rule_stops_the_run_before_step_1(run):
    """STRAT-10"""
    with pytest.raises(StrategyError, match=r"strategies_of_run:all_in_one: group 0 has \d+ tokens.*buffer 1, of 6"):
        run("strategies_of_run:all_in_one", packing_length=100)
