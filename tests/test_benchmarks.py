"""The published benchmarks measure what a user gets."""

import dataclasses
import doctest
import os
import re

import pytest

from benchmarks import beside_plain, demo, first_step, loader, long_run, turns, ways
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


def test_starts_are_compared_with_all_that_the_table_promises():
    """DOC-5: un-packed ms-swift and its own packing; of very many rows only a warm start, which is what is promised."""
    compared = {str(data): {(ours, other, more) for ours, other, more in data.limits} for data in first_step.DATA}
    theirs = {(first_step.COLD, first_step.THEIRS, 0.0), (first_step.WARM, first_step.THEIRS, 0.0)}
    assert all(theirs <= compared[rows] for rows in ("200 photos", "2,000 photos", "10,000 photos"))
    assert (first_step.COLD, first_step.UNPACKED, 3.0) in compared["200 photos"]
    assert compared["100,000 photos"] == compared["300,000 texts"] == {(first_step.WARM, first_step.UNPACKED, 4.0)}
    for data in first_step.DATA:
        assert {kind for limit in data.limits for kind in limit[:2]} <= set(data.kinds), "measured in the same turns"


@pytest.mark.parametrize("mode", long_run.MODES)
def test_long_run_is_watched_as_a_user_starts_it(mode, tmp_path):
    """DOC-5: the proof is on; workers, and where packs come from, are what the measurement is about."""
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "ready.json").touch()
    flags = long_run.command(mode, tmp_path, 10)
    given = {flag.removeprefix("--") for flag in flags if flag.startswith("--")}
    assert set(option_names()) & given == {"packing"}
    assert ("streaming" in given) == (mode == "streamed")


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


def test_starts_are_printed_beside_their_limits():
    """DOC-5: seconds beside those of another kind in the same turn, memory of ours beside what it may be."""
    starts = {kind: [first_step.Start(10.0 + number, 900.0)] for number, kind in enumerate(first_step.KINDS)}
    data = first_step.Data(24, "photos", first_step.KINDS, 1, [(first_step.WARM, first_step.UNPACKED, 3.0)])
    assert list(first_step.lines(data, starts)) == [
        "| 24 photos: un-packed, s | 10.0 | - | - | - |",
        "| 24 photos: ms-swift's packing, s | 11.0 | - | - | - |",
        "| 24 photos: ours, warm, s | 13.0 | un-packed + 3 s: 13.0 | 1.00 | yes |",
        "| 24 photos: un-packed, MiB of the main process | 900 | - | - | - |",
        "| 24 photos: ms-swift's packing, MiB of the main process | 900 | - | - | - |",
        "| 24 photos: ours, cold, MiB of the main process | 900 | 2,000 MiB: 2000 | 0.45 | yes |",
        "| 24 photos: ours, warm, MiB of the main process | 900 | 2,000 MiB: 2000 | 0.45 | yes |",
    ]


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


def test_loaders_are_made_as_the_defaults_of_ms_swift_make_them():
    """DOC-5: one worker, and what a user gets who gives no option of a dataloader."""
    from swift.arguments import SftArguments

    given = {field.name: field.default for field in dataclasses.fields(SftArguments)}
    options = loader.options_of(1)
    assert given["dataloader_pin_memory"] is options["pin_memory"]
    assert given["dataloader_persistent_workers"] is options["persistent_workers"]
    assert given["dataloader_prefetch_factor"] is None  # set to 2, and one worker
    assert options["prefetch_factor"] == 2


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


def test_steps_are_compared_with_plain_on_one_and_two_ranks_and_of_three_sizes():
    """SAME-3: of both families with images; of the text model, and grouped by length, on both numbers of ranks."""
    cases = beside_plain.CASES
    for family in ("qwen2_5_vl", "qwen3_vl"):
        compared = {(case.num_ranks, case.num_samples) for case in cases if case.family == family}
        assert compared >= {(ranks, size) for ranks in (1, 2) for size in (4, 8, 12)}
        assert {bool(case.flags.get("tuner_type")) for case in cases if case.family == family} == {True, False}
    assert all(case.num_rows % 2 and case.num_rows % case.num_samples for case in cases)
    assert {case.num_ranks for case in cases if case.family == beside_plain.TEXT_MODEL} == {1, 2}
    assert {case.num_ranks for case in cases if not case.can_be_exchanged} == {1, 2}


@pytest.mark.slow
def test_fifty_steps_are_those_of_plain(tmp_path):
    """SAME-1 SAME-3: the first row of the published table."""
    row, wrong = beside_plain.compared(beside_plain.CASES[0], tmp_path / "runs", beside_plain.Material(tmp_path))
    assert (wrong, row.count("|")) == ([], beside_plain.HEADER.splitlines()[0].count("|"))


def test_ways_that_come_to_other_losses_are_not_published():
    """DOC-5"""
    epoch = ways.Epoch(processor=2.0, wall=3.0, num_steps=2, num_tokens=100, losses=(8.0, 7.0))
    quick = epoch._replace(processor=1.0)
    measured = {ways.PADDED: [epoch], ways.PADDING_FREE: [quick], ways.SAME: [quick], ways.PACKS: [quick]}
    ways.check(measured)
    data = ways.Data("captions", "rows.jsonl", 8, 1024)
    assert ways.row_of(data, (4, 1), measured, is_wall=False).count("2.00, 0.50") == 3
    assert ways.row_of(data, (4, 1), measured, is_wall=True).count("1.00, 1.00") == 3
    for way in (ways.PADDING_FREE, ways.SAME):
        with pytest.raises(SystemExit, match=f"losses of {way} differ"):
            ways.check({**measured, way: [epoch._replace(losses=(8.0, 7.1))]})


@pytest.mark.slow
def test_four_ways_train_the_same_samples(tmp_path, capsys):
    """DOC-5: by ms-swift's own trainer, and the first three to the same losses."""
    bench = ways.Bench(tmp_path)
    data = ways.data_of(ways.EXAMPLE, tmp_path, 6, 256)
    measured = {way: [bench.train(way, data, 2, 2)] for way in ways.WAYS}
    ways.check(measured)
    assert measured[ways.SAME][0].num_tokens == measured[ways.PACKS][0].num_tokens > 300
    assert all(epoch.processor > 0 for [epoch] in measured.values())
