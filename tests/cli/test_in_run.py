"""A command about a run is executed again in the environment of the run, in the same process."""

import argparse
import logging
import os
import signal
import subprocess
import sys

import pytest

from swift_vlpack.cli import in_run, main
from swift_vlpack.cli.in_run import _MAIN, MARK, is_in_run, own_command
from swift_vlpack.errors import ConfigError
from tests.data_rows import text_row, write_jsonl
from tests.environment import packing_options

PRINTING = """
import logging, os, sys
from argparse import Namespace
from swift_vlpack.cli.in_run import in_run
args = Namespace(command="plan", config=None, flags=["--model", "m"], verbose=False, argv=[])
with in_run(args) as (run, out):
    print("a library")
    os.write(1, b"a library in C\\n")
    os.system("echo a process")
    print("the report of", run.num_ranks, file=out)
print("a library at the end")
"""


@pytest.fixture
def train(tmp_path, monkeypatch):
    """A training file in this folder; the executions of a command, and the environment of each."""
    packing_options()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAX_PIXELS", "1000")
    monkeypatch.delenv("FPS_MAX_FRAMES", raising=False)
    write_jsonl(tmp_path / "rows.jsonl", [text_row()])
    (tmp_path / "train.yaml").write_text(
        "model: owner/m\ndataset: rows.jsonl\npacking_buffer: 8\n"
        "ENV: {NPROC_PER_NODE: 4, MAX_PIXELS: 2000, FPS_MAX_FRAMES: 3}\n"
    )
    executed = []

    def execve(path, command, environ):
        executed.append((command, environ))
        raise KeyboardInterrupt  # as the process does not go on

    monkeypatch.setattr(os, "execve", execve)
    return executed


@pytest.mark.parametrize("command", ["plan", "verify", "inspect"])
def test_same_command_line_is_executed_again_with_the_variables_of_the_run(command, train, caplog):
    """CLI-38"""
    argv = [command, "--config", "train.yaml", "--packing_length=64", "--lora_rank", "8", "--json"]
    main(argv)
    ((command, environ),) = train
    assert command == own_command(argv)
    assert environ[MARK] == str(os.getpid())
    assert (environ["FPS_MAX_FRAMES"], environ["MAX_PIXELS"]) == ("3", "1000"), "what is set outside wins"
    assert environ["VLPACK_PACKING_BUFFER"] == "8"
    assert {record.getMessage() for record in caplog.records} == {
        "MAX_PIXELS=1000 is set already and wins over 2000 in the ENV block of train.yaml"
    }


def test_second_execution_goes_on_and_does_not_warn_again(train, monkeypatch, caplog):
    """CLI-38"""
    monkeypatch.setenv(MARK, str(os.getpid()))
    monkeypatch.setattr(signal, "signal", lambda *of: None)
    monkeypatch.setattr(os, "dup2", lambda *of: None)
    args = argparse.Namespace(command="plan", config="train.yaml", flags=["pt", "--max_length", "64"], verbose=True)
    with in_run.in_run(args) as (run, _):
        assert (run.command, run.num_ranks) == ("pt", 4)
        assert run.flags[:4] == ["--model", "owner/m", "--dataset", "rows.jsonl"]
    assert (train, caplog.records) == ([], [])
    assert logging.root.manager.disable == logging.NOTSET


def test_mark_of_another_process_does_not_count(train, monkeypatch):
    """CLI-38: a process that a command starts inherits the variable, and may be a command itself."""
    monkeypatch.setenv(MARK, str(os.getppid()))
    assert not is_in_run()
    main(["plan", "--config", "train.yaml"])
    assert len(train) == 1


def test_mistake_is_found_before_the_second_execution(train, monkeypatch, capsys):
    """CLI-38 CLI-31"""
    assert main(["verify", "--config", "train.yaml", "--dataset", "nowhere.jsonl"]) == 2
    assert "nowhere.jsonl: no such file" in capsys.readouterr().err
    monkeypatch.setattr(in_run, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="ms-swift is not installed"):
        in_run.need_ms_swift()
    assert train == []


def test_stdout_has_the_report_alone():
    """CLI-38 CLI-6: whatever prints, and however."""
    script = f"import os; os.environ[{MARK!r}] = str(os.getpid())\n{PRINTING}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "the report of 1\n"
    for line in ("a library", "a library in C", "a process", "a library at the end"):
        assert f"{line}\n" in done.stderr


@pytest.mark.parametrize("name", ["queue", "torch", "swift", "swift_vlpack"])
def test_command_about_a_run_imports_nothing_from_the_current_folder(name, tmp_path):
    """CLI-40: as `swift sft` does not, so that a plan is that of the ms-swift that trains."""
    (tmp_path / f"{name}.py").touch()
    python, flag, code, *argv = own_command(["plan"])
    show = f"from importlib.util import find_spec; print(find_spec({name!r}).origin)"
    shown = [python, flag, code.replace(_MAIN, show), *argv]
    done = subprocess.run(shown, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout
    assert str(tmp_path) not in done.stdout
