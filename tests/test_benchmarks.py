"""The published benchmarks measure what a user gets."""

import doctest
import os
import re

import pytest

from benchmarks import demo, first_step, turns
from swift_vlpack.config import ENV_PREFIX, PackingConfig, option_names
from swift_vlpack.host.launch import plugin_path
from tests.doc_blocks import ROOT


def flags_of(kind, tmp_path):
    return first_step.flags_of(kind, tmp_path / "model", "rows.jsonl", tmp_path / "out", tmp_path / "unchecked.py", 2)


def test_first_step_is_measured_in_the_environment_of_a_user(tmp_path, monkeypatch):
    """DOC-5: neither what a shell happens to have set for us nor what the benchmark would like to leave out."""
    monkeypatch.setenv("VLPACK_PACKING_VERIFY", "false")
    environ = first_step.environment(tmp_path, tmp_path / "lengths", os.environ)
    users = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    assert {name: environ[name] for name in environ.keys() - set(first_step.CACHES)} == {
        name: users[name] for name in users.keys() - set(first_step.CACHES)
    }
    config = PackingConfig.from_env(environ, packing_length=2048)
    assert config == PackingConfig(packing_length=2048)
    assert config.packing_verify


def test_first_step_gives_no_option_of_ours(tmp_path):
    """DOC-5: our run has the plugin and `packing`; all else is as in the un-packed one, and as in ms-swift's."""
    plain, theirs, cold, warm = (flags_of(kind, tmp_path) for kind in first_step.KINDS)
    assert cold == warm == {**plain, "external_plugins": plugin_path(), "packing": "true"}
    assert theirs == {**cold, "external_plugins": tmp_path / "unchecked.py"}
    assert not {*option_names(), "attn_impl", "dataloader_num_workers"} & set(plain)


def test_proof_that_is_switched_off_is_said_beside_the_numbers():
    """DOC-5: in the section of RESULTS.md that names the benchmark."""
    sections = re.split(r"^## ", (ROOT / "benchmarks" / "RESULTS.md").read_text(), flags=re.M)
    without = [path.stem for path in (ROOT / "benchmarks").glob("*.py") if "packing_verify" in path.read_text().lower()]
    for name in without:
        named = [text for text in sections if re.search(rf"benchmarks.{name}\b|make {name}\b", text)]
        assert any("packing_verify=false" in text for text in named), name


def test_layers_of_the_demo_outweigh_its_vocabulary(tmp_path):
    """DOC-5: with next to no layers it would compare how many logits each way makes."""
    model, ratio = demo.build_model(tmp_path / "model")
    assert ratio > 4
    assert (model / "model.safetensors").exists()
    lengths = [len(row["messages"][-1]["content"]) for row in demo.samples(tmp_path / "images")]
    assert len(lengths) == demo.NUM_SAMPLES
    assert max(lengths) > 10 * min(lengths)


def test_cells_are_medians_with_their_spread():
    """DOC-5"""
    assert doctest.testmod(first_step).failed == 0
    assert first_step.ratio([2.0, 4.0, 9.0], [2.0]) == "2.00"


def test_kinds_take_turns_and_are_compared_with_the_limit_of_their_own_turn():
    """DOC-5: so that what disturbs a run disturbs what it is compared with."""
    assert doctest.testmod(turns).failed == 0
    order = []
    turns.in_turns({kind: lambda kind=kind: order.append(kind) for kind in "ab"}, 2)
    assert order == ["a", "b", "a", "b"]
    quick_then_slow = [10.0, 20.0, 30.0]
    assert turns.is_reached(quick_then_slow, turns.Limit("", [11.0, 21.0, 29.0]))
    assert not turns.is_reached(quick_then_slow, turns.Limit("", [9.0, 21.0, 29.0]))
    assert turns.is_reached([9.0], turns.Limit("", [8.0], at_least=True))
    assert not turns.is_reached([9.0], turns.Limit("", [10.0], at_least=True))


@pytest.mark.slow
def test_kinds_of_run_take_turns_and_reach_the_first_step(tmp_path):
    """DOC-5: by the real command line, each of them."""
    took = first_step.in_turns(tmp_path, 24, first_step.KINDS, runs=1, processes=1)
    assert [len(seconds) for seconds in took.values()] == [1] * len(first_step.KINDS)
    assert any(path.is_file() for path in (tmp_path / "lengths_24_0").rglob("*")), "lengths, in a folder of its own"
