"""`vlpack completion`, in the shells themselves as far as they are installed."""

import os
import pty
import re
import select
import shutil
import subprocess
import time
from contextlib import redirect_stdout

import pytest

from swift_vlpack.cli import COMMANDS, main
from swift_vlpack.cli.completion import SHELLS
from swift_vlpack.config import option_names
from swift_vlpack.host.swift_flags import flag_names

WANTED = [
    ("vlpack ve", ["verify"]),
    ("vlpack plan --packing_mo", ["--packing_mode"]),
    ("vlpack sft --packing_mode ", ["auto", "plan", "buffer"]),
    ("vlpack sft --packing_mode b", ["buffer"]),
    ("vlpack sft --packing_drop_last f", ["false"]),
    ("vlpack sft --packing_pad_to l", ["length"]),
    ("vlpack sft train.yaml --packing_mode b", ["buffer"]),
    ("vlpack sft --dataset a.jsonl b.jsonl --packing_mode b", ["buffer"]),
    ("vlpack verify --learning_r", ["--learning_rate"]),
    ("vlpack verify --torch_dtype b", ["bfloat16"]),
    ("vlpack cache ", ["list", "clear"]),
    ("vlpack cache clear --ye", ["--yes"]),
    ("vlpack completion f", ["fish"]),
    ("vlpack plan --config tra", ["train.yaml"]),
    ("vlpack sft tra", ["train.yaml"]),
    ("vlpack sft --model tra", ["train.yaml"]),
    ("vlpack verify p", ["pt"]),
    ("vlpack report tra", ["train.yaml"]),
    ("vlpack doctor --packing_mo", []),
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """A folder with a training file, and with the script of each shell where docs/commands.md puts it."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        (folder / shell).mkdir()
        with (folder / shell / "_vlpack").open("w") as script, redirect_stdout(script):
            assert main(["completion", shell]) == 0
    (folder / "train.yaml").write_text("")
    return folder


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_have_every_command_and_flag(shell, scripts):
    """CLI-21"""
    words = set(re.findall(r"[\w-]+", (scripts / shell / "_vlpack").read_text()))
    flags = {name if shell == "fish" else f"--{name}" for name in (*option_names(), *flag_names())}
    assert len(flags) > 300
    assert flags | set(COMMANDS) <= words


def test_other_shell_is_refused(capsys):
    """CLI-21"""
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_completes(scripts):
    """CLI-21"""
    asked = "; ".join(f"echo '# {line}'; complete -C '{line}'" for line, _ in WANTED)
    command = ["fish", "--no-config", "-c", f"source fish/_vlpack; {asked}"]
    environ = {**os.environ, "HOME": str(scripts)}
    done = subprocess.run(command, cwd=scripts, capture_output=True, text=True, check=True, env=environ)
    answers = [part.splitlines() for part in done.stdout.split("# ")[1:]]
    found = {line: {word.partition("\t")[0] for word in words} for line, *words in answers}
    assert {line: set(words) <= found[line] for line, words in WANTED} == {line: True for line, _ in WANTED}


# Completion is a part of the line editor: these are set up to show their line at Ctrl-O, and to empty it.
BASH = r"""
PS1=; bind 'set enable-bracketed-paste off'; source bash/_vlpack
show() { printf '<<%s>>' "$READLINE_LINE"; READLINE_LINE=; READLINE_POINT=0; }
bind -x '"\C-o": show'
echo REA''DY
"""
ZSH = r"""
PROMPT=; RPROMPT=; zle_bracketed_paste=()
fpath=($PWD/zsh $fpath); autoload -Uz compinit; compinit -u -D
show() { print -rn -- "<<$BUFFER>>"; BUFFER= }
zle -N show; bindkey '^I' complete-word; bindkey '^O' show
print REA''DY
"""
TERMINALS = {"bash": (["bash", "--norc", "--noprofile", "-i"], BASH), "zsh": (["zsh", "-f", "-i"], ZSH)}


def read_until(terminal, pattern, seconds=60):
    """What a terminal says, up to the pattern."""
    said, end = b"", time.monotonic() + seconds
    while not (found := re.search(pattern, said)):
        assert time.monotonic() < end, said
        if select.select([terminal], [], [], 0.1)[0]:
            said += os.read(terminal, 65536)
    return found


@pytest.mark.parametrize(
    "shell",
    ["bash", pytest.param("zsh", marks=pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh"))],
)
def test_line_in_a_terminal_is_completed(shell, scripts):
    """CLI-21: whatever has one answer."""
    command, set_up = TERMINALS[shell]
    terminal, inside = pty.openpty()
    environ = {**os.environ, "HOME": str(scripts), "TERM": "dumb"}
    process = subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=inside, cwd=scripts, env=environ, start_new_session=True
    )
    try:
        os.close(inside)
        os.write(terminal, set_up.encode())
        read_until(terminal, b"READY")
        for line, words in WANTED:
            if len(words) > 1:
                continue
            os.write(terminal, f"{line}\t\x0f".encode())
            made = read_until(terminal, b"<<(.*)>>")[1].decode().rstrip()
            assert made == " ".join([*line.split(" ")[:-1], *(words or line.split(" ")[-1:])]), line
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
