"""`vlpack inspect`: its flags, and the run in an output directory, before any heavy library is loaded."""

import json

import pytest

from swift_vlpack.cli import inspect, main
from swift_vlpack.cli.in_run import command_and_flags
from tests.cli.test_trained_steps import train_segment


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
    assert (became["command"], became["flags"]) == ("pt", ["--model", "/m", "--seed", "5", "--dataset", "d"])
    assert (became["args"].pack, became["args"].epoch) == (3, 1)


def test_newest_version_in_the_output_dir_is_the_run(tmp_path, capsys):
    """SEE-3: ms-swift puts every run into a version of its own; ten of them are more than two."""
    for version in ("v2-20260101-000000", "v10-20260102-000000"):
        train_segment(tmp_path / version, (3,), 1, version)
    assert main(["inspect", "--run", str(tmp_path), "--step", "3"]) == 0
    assert "v10-20260102-0000000:3" in capsys.readouterr().out
    assert main(["inspect", "--run", str(tmp_path / "v2-20260101-000000"), "--step", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"][0]["packs"][0]["ids"] == ["v2-20260101-0000000:3"]
    for argv, said in (([], "give --step N; packs are those of --config"), (["--step", "9"], "has steps 3 to 3")):
        assert main(["inspect", "--run", str(tmp_path), *argv]) == 2
        assert said in capsys.readouterr().err
    assert main(["inspect", "--run", str(tmp_path / "nothing"), "--step", "1"]) == 2
    assert "no such directory" in capsys.readouterr().err
    (tmp_path / "v10-20260102-000000" / "vlpack" / "run.jsonl").unlink()
    assert main(["inspect", "--run", str(tmp_path), "--step", "3"]) == 2
    assert "run.jsonl) is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--pack", "1", "--step", "2"], "--pack and --step are different things to look at"),
        (["--pack", "-1"], "--pack must be at least 0"),
        (["--step", "0"], "--step must be at least 1"),
        (["--run", ".", "--step", "1", "--html", "x.html"], "--html is a page of packs, which --run has not"),
        (["--step", "3", "--epoch", "1"], "steps are counted through the whole run"),
        (["--html", "no/such/folder/x.html"], "no such directory"),
        (["--html", "/"], "--html / is a directory; name a file in it"),
        (["--html", "x.html", "--json"], "--html and --json are different forms"),
        (["--examples", "2", "--config", "x.yaml"], "a row of a run is shown by --sample"),
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
