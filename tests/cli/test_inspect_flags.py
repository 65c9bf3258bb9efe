"""`vlpack inspect`: its flags, and the run in an output directory, before any heavy library is loaded."""

import json

import pytest

from swift_vlpack.cli import inspect, main
from swift_vlpack.cli.in_run import command_and_flags
from swift_vlpack.runlog.pack_log import PackLog, pack_file


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


def test_flags_of_the_command_and_those_of_the_run_are_told_apart(became):
    """SEE-2"""
    main(["inspect", "pt", "--model", "/m", "--dataset", "d", "--pack", "3", "--epoch", "1", "--seed", "5"])
    assert (became["command"], became["flags"]) == ("pt", ["--model", "/m", "--dataset", "d", "--seed", "5"])
    assert (became["args"].pack, became["args"].epoch) == (3, 1)
    main(["inspect", "--config", "c.yaml", "--random", "2", "--seed", "5"])
    assert became["flags"] == ["c.yaml"], "a seed of the choice is none of the run"
    assert (became["args"].random, became["args"].seed) == (2, 5)


def test_newest_version_in_the_output_dir_is_the_run(tmp_path, capsys):
    """SEE-4: ms-swift puts every run into a version of its own; ten of them are more than two."""
    for version in ("v2-20260101-000000", "v10-20260102-000000"):
        PackLog(pack_file(tmp_path / version, 0)).append([{"step": 3, "epoch": 0, "pack": 0, "ids": [f"{version}:0"]}])
    assert main(["inspect", "--run", str(tmp_path), "--step", "3"]) == 0
    assert "v10-20260102-000000:0" in capsys.readouterr().out
    assert main(["inspect", "--run", str(tmp_path / "v2-20260101-000000"), "--step", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"][0]["packs"][0]["ids"] == ["v2-20260101-000000:0"]
    for argv, said in (([], "give --step N or --loss-spikes"), (["--step", "9"], "has steps 3 to 3")):
        assert main(["inspect", "--run", str(tmp_path), *argv]) == 2
        assert said in capsys.readouterr().err
    assert main(["inspect", "--run", str(tmp_path / "nothing"), "--step", "1"]) == 2
    assert "no such directory" in capsys.readouterr().err


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
