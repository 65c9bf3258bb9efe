"""`vlpack inspect`: its flags, and the run in an output directory, before any heavy library is loaded."""

import json
import shutil

import pytest

from swift_vlpack.cli import inspect, main
from swift_vlpack.cli.in_run import command_and_flags
from swift_vlpack.cli.run_options import run_options
from swift_vlpack.errors import ConfigError
from swift_vlpack.runlog.events import EventLog


@pytest.fixture
def folder(tmp_path):
    """What a run leaves, as far as its options go."""
    args = {
        "model": "/m", "dataset": ["/d/a.jsonl", "/d/b.jsonl#20"], "use_chat_template": False, "loss_scale": "all",
        "packing": True, "packing_length": 512, "packing_strategy": "exact", "learning_rate": 1e-3, "system": None,
        "model_kwargs": {"a": 1}, "columns": {}, "global_world_size": 2, "seed": 7,
    }  # fmt: skip
    (tmp_path / "args.json").write_text(json.dumps(args))
    return tmp_path


@pytest.fixture
def became(monkeypatch):
    """What the command would become."""
    found = {}

    def in_run(args):
        command, flags = command_and_flags(args)
        found.update(num_ranks=args.num_ranks, command=command, flags=flags, args=args)
        raise KeyboardInterrupt  # which the command line takes for its end

    monkeypatch.setattr(inspect, "in_run", in_run)
    return found


def note_start(folder, **facts):
    EventLog(folder).append("start", 0, **{"num_ranks": 4, "mode": "plan", "options": {}, "variables": {}, **facts})


def test_run_is_started_again_with_the_options_that_rows_follow_from(folder):
    """SEE-4: false ones too; what has nothing to do with rows stays behind."""
    note_start(
        folder,
        options={"packing": True, "packing_length": 256, "packing_buffer": 64},
        variables={"MAX_PIXELS": "50176"},
    )
    found = run_options(folder)
    assert found.flags[:5] == ["--model", "/m", "--model_kwargs", '{"a": 1}', "--dataset"]
    assert found.flags[5:7] == ["/d/a.jsonl", "/d/b.jsonl#20"]
    both = {name: value for name, value in zip(found.flags, found.flags[1:], strict=False) if name.startswith("--")}
    assert both["--use_chat_template"] == "false"
    assert both["--loss_scale"] == "all"
    assert (both["--packing_length"], both["--packing_buffer"]) == ("256", "64"), "as noted when it began"
    assert not {"--learning_rate", "--system", "--columns", "--global_world_size"} & set(found.flags)
    assert (found.variables, found.num_ranks) == ({"MAX_PIXELS": "50176"}, 4)


def test_sources_of_a_fusion_config_take_the_place_of_the_data(folder):
    """SEE-4"""
    note_start(folder, options={"fusion_config": "/c/mix.yaml"})
    flags = run_options(folder).flags
    assert "--dataset" not in flags
    assert flags[flags.index("--fusion_config") + 1] == "/c/mix.yaml"


def test_folder_without_a_run_is_named_with_what_was_meant(tmp_path, folder):
    """SEE-4 CLI-5"""
    with pytest.raises(ConfigError, match="no such directory"):
        run_options(tmp_path / "nothing")
    empty = tmp_path / "outer"
    (empty / "v0-20260101").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"has no args\.json; name the output_dir"):
        run_options(empty)
    (empty / "v0-20260101" / "args.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"did you mean .*v0-20260101"):
        run_options(empty)
    (folder / "args.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        run_options(folder)


def test_flags_of_the_command_and_those_of_the_run_are_told_apart(folder, became):
    """SEE-2"""
    main(["inspect", "pt", "--model", "/m", "--dataset", "d", "--pack", "3", "--epoch", "1", "--seed", "5"])
    assert (became["command"], became["flags"]) == ("pt", ["--model", "/m", "--dataset", "d", "--seed", "5"])
    assert (became["args"].pack, became["args"].epoch) == (3, 1)
    main(["inspect", "--config", "c.yaml", "--random", "2", "--seed", "5"])
    assert became["flags"] == ["c.yaml"], "a seed of the choice is none of the run"
    assert (became["args"].random, became["args"].seed) == (2, 5)
    main(["inspect", "--run", str(folder), "--loss-spikes", "--model", "/moved"])
    assert became["args"].loss_spikes == 5
    assert became["args"].run == folder
    assert became["flags"][-2:] == ["--model", "/moved"], "behind the run's own, so that it wins"
    assert became["num_ranks"] == 2


def test_newest_version_in_the_output_dir_is_the_run(folder, became, tmp_path_factory, capsys):
    """SEE-4: ms-swift puts every run into a version of its own; ten of them are more than two."""
    outer = tmp_path_factory.mktemp("outer")
    for version in ("v2-20260101-000000", "v10-20260102-000000"):
        shutil.copytree(folder, outer / version)
        (outer / version / "vlpack").mkdir()
    main(["inspect", "--run", str(outer), "--step", "3"])
    assert became["args"].run == outer / "v10-20260102-000000"
    assert f"the newest of 2 runs there: {outer / 'v10-20260102-000000'}" in capsys.readouterr().err
    main(["inspect", "--run", str(outer / "v2-20260101-000000"), "--step", "3"])
    assert became["args"].run == outer / "v2-20260101-000000"
    assert main(["inspect", "--run", str(folder), "--loss-spikes", "--html", str(outer / "p.html")]) == 2
    assert "give --step N of one of them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--pack", "1", "--step", "2"], "--pack and --step are different things to look at"),
        (["--pack", "-1"], "--pack must be at least 0"),
        (["--step", "0"], "--step must be at least 1"),
        (["--random", "0"], "--random must be at least 1"),
        (["--loss-spikes"], "name its output_dir with --run"),
        (["--step", "3", "--epoch", "1"], "steps are counted through the whole run"),
        (["--html", "no/such/folder/x.html"], "no such directory"),
        (["--html", "/"], "--html / is a directory; name a file in it"),
        (["--html", "x.html", "--json"], "leave --json and --examples out"),
        (["--html", "x.html", "--html_mb", "0"], "--html_mb must be above 0"),
    ],
)
def test_mistakes_are_one_line(argv, said, capsys, became):
    """SEE-2 CLI-5"""
    assert main(["inspect", "--model", "/m", "--dataset", "d", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vlpack inspect: ")
    assert said in line
    assert became == {}


def test_nothing_to_inspect_is_said(capsys):
    """SEE-2 CLI-5"""
    assert main(["inspect"]) == 2
    assert "nothing to inspect: give --config CONFIG.yaml" in capsys.readouterr().err


def test_colour_is_for_terminals_without_no_color(monkeypatch):
    """SEE-2"""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, is_colourful = inspect._terminal()
    assert is_colourful
    monkeypatch.setenv("NO_COLOR", "1")
    _, is_colourful = inspect._terminal()
    assert not is_colourful
