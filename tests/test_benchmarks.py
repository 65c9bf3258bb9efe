"""The published benchmarks measure what a user gets."""

import os
import re
import subprocess
import sys

import pytest

from benchmarks import beside_plain, first_step, loader, long_run, turns, ways
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


@pytest.mark.parametrize(
    "command",
    [
        "same_steps --capacities 8192",
        pytest.param("scale --quick", marks=pytest.mark.slow),
        pytest.param("strategies --quick", marks=pytest.mark.slow),
        pytest.param("documents --num_documents 20", marks=pytest.mark.slow),
        pytest.param("export --rows 12 --size 64 48 --processes 1", marks=pytest.mark.slow),
    ],
)
def test_benchmark_that_a_page_names_runs_at_its_smallest(command):
    """DOC-5: and prints a table, or a line for each run."""
    done = subprocess.run(
        [sys.executable, "-m", *f"benchmarks.{command}".split()], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, bool(done.stdout.strip())) == (0, True), done.stderr[-2000:]


def test_benchmarks_that_pages_name_are_there():
    """DOC-5"""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "RESULTS.md", ROOT / "Makefile"]
    named = {name for page in pages for name in re.findall(r"\bbenchmarks\.([a-z_]+)\b", page.read_text())} - {"py"}
    there = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert len(named & there) > 8
    assert named - there == set()


@pytest.mark.slow
@pytest.mark.parametrize("mode", long_run.MODES)
def test_memory_and_descriptors_stay_as_they_are_in_a_long_run(mode, tmp_path):
    """RANKS-16: of the main process and of two workers, with packs planned and streamed."""
    _, second, last = long_run.thirds(list(long_run.watched(mode, tmp_path, 600)), 600)
    for who in ("main", "workers"):
        for what, slack in (
            ("resident_mb", long_run.MB_FLAT),
            ("private_mb", long_run.MB_FLAT),
            ("num_descriptors", 4),
        ):
            grown = long_run.median(last, who, what) - long_run.median(second, who, what)
            assert grown <= slack, (who, what)


@pytest.mark.slow
def test_kinds_of_run_take_turns_and_reach_the_first_step(tmp_path):
    """DOC-5: by the real command line, each of them."""
    data = first_step.Data(24, "photos", first_step.KINDS, 1, [(first_step.WARM, first_step.UNPACKED, 3.0)])
    starts = first_step.measured(tmp_path, data, runs=1, processes=1)
    assert all(start.seconds > 1 and start.peak_mib > 300 for [start] in starts.values())
    assert list(starts) == list(first_step.KINDS)
    assert any(path.is_file() for path in (tmp_path / "lengths_of_24_photos").rglob("*")), (
        "lengths, in their own folder"
    )
    assert len(list(first_step.lines(data, starts))) == 3 + len(first_step.KINDS)


@pytest.mark.slow
def test_all_rows_are_delivered_by_every_kind_of_loader(tmp_path):
    """DOC-5: the same rows, by six ways."""
    template = loader.template_of(tmp_path)
    kinds = loader.kinds_of(loader.photo_rows(tmp_path, 20), template)
    measured = turns.in_turns(kinds, 1)
    assert tuple(kinds) == loader.KINDS
    assert {kind: one.num_samples for kind, [one] in measured.items()} == dict.fromkeys(loader.KINDS, 20)
    assert all(one.processor_ms > 1 for [one] in measured.values())
    lines = loader.lines_of("photos", measured, has_media=True)
    assert [line for line in lines if f"{loader.LEAST_SHARE} of {loader.ALONE}" in line]


@pytest.mark.slow
def test_fifty_steps_are_those_of_plain(tmp_path):
    """SAME-1 SAME-3: the first row of the published table."""
    row, wrong = beside_plain.compared(beside_plain.CASES[0], tmp_path / "runs", beside_plain.Material(tmp_path))
    assert (wrong, row.count("|")) == ([], beside_plain.HEADER.splitlines()[0].count("|"))


@pytest.mark.slow
def test_four_ways_train_the_same_samples(tmp_path, capsys):
    """DOC-5: by ms-swift's own trainer, and the first three to the same losses."""
    bench = ways.Bench(tmp_path)
    data = ways.data_of(ways.EXAMPLE, tmp_path, 6, 256)
    measured = {way: [bench.train(way, data, 2, 2)] for way in ways.WAYS}
    ways.check(measured)
    assert measured[ways.SAME][0].num_tokens == measured[ways.PACKS][0].num_tokens > 300
    assert all(epoch.processor > 0 for [epoch] in measured.values())
