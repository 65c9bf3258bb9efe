"""`vlpack completion`, in the shells themselves as far as they are installed."""

import os
import pty
import re
import select
import shutil
import subprocess
import time

import pytest

from swift_vlpack.cli import all_commands, main, parser
from swift_vlpack.cli.completion_shells import SHELLS
from swift_vlpack.cli.completion_words import words_of
from swift_vlpack.config import option_names
from swift_vlpack.host.swift_flags import flag_names

WANTED = [
    ("vlpack ve", ["verify"]),
    ("vlpack plan --packing_mo", ["--packing_mode"]),
    ("vlpack sft --packing_mode ", ["auto", "plan", "buffer"]),
    ("vlpack sft --packing_drop_last f", ["false"]),
    ("vlpack verify --learning_r", ["--learning_rate"]),
    ("vlpack verify --torch_dtype b", ["bfloat16"]),
    ("vlpack cache ", ["list", "clear"]),
    ("vlpack cache clear --ye", ["--yes"]),
    ("vlpack completion f", ["fish"]),
    ("vlpack plan --config tra", ["train.yaml"]),
    ("vlpack sft tra", ["train.yaml"]),
    ("vlpack verify p", ["pt"]),
    ("vlpack report tra", ["train.yaml"]),
    ("vlpack doctor --packing_mo", []),
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """A script of each shell, and a folder with a training file."""
    folder = tmp_path_factory.mktemp("completion")
    for name, write in SHELLS.items():
        (folder / f"script.{name}").write_text(write(words_of(parser())))
    (folder / "train.yaml").write_text("")
    return folder


def test_words_are_those_of_the_parser():
    """CLI-21"""
    words = {one.name: one for one in words_of(parser())}
    assert list(words) == [command.name for command in all_commands()]
    flags = {option.flag: option for option in words["verify"].options}
    assert {f"--{name}" for name in (*option_names(), *flag_names())} <= set(flags)
    assert flags["--packing_strategy"].choices[:2] == ("binpack", "greedy")
    assert flags["--packing_drop_last"].choices == ("true", "false")
    assert flags["--packing_pad_to"].choices == ("none", "length")
    assert flags["--config"].takes_file
    assert flags["--json"].is_switch
    assert flags["--packing_buffer"].text == "window: samples the packer may choose from at a time"


BASH = """
source "$1"
while IFS= read -r line; do
    read -ra COMP_WORDS <<< "$line"
    [[ "$line" == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _vlpack
    printf '%s|' "${COMPREPLY[@]}"
    echo
done
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(scripts):
    """CLI-21"""
    lines = [
        *WANTED,
        ("vlpack sft --packing_mode = bu", ["buffer"]),
        ("vlpack sft --packing_mode =", ["auto", "plan", "buffer"]),
    ]
    done = subprocess.run(
        ["bash", "-c", BASH, "bash", str(scripts / "script.bash")],
        input="".join(f"{line}\n" for line, _ in lines), cwd=scripts, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    found = [[word for word in line.split("|") if word] for line in done.stdout.splitlines()]
    assert dict(zip([line for line, _ in lines], found, strict=True)) == dict(lines)


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_completes(scripts):
    """CLI-21"""
    asked = "; ".join(f"echo '# {line}'; complete -C '{line}'" for line, _ in WANTED)
    command = ["fish", "--no-config", "-c", f"source script.fish; {asked}"]
    environ = {**os.environ, "HOME": str(scripts)}
    done = subprocess.run(command, cwd=scripts, capture_output=True, text=True, check=True, env=environ)
    answers = [part.splitlines() for part in done.stdout.split("# ")[1:]]
    found = {line: {word.partition("\t")[0] for word in words} for line, *words in answers}
    assert {line: set(words) <= found[line] for line, words in WANTED} == {line: True for line, _ in WANTED}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_can_read_its_script(scripts):
    """CLI-21"""
    done = subprocess.run(["zsh", "-n", str(scripts / "script.zsh")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# Completion of zsh exists in its line editor only: this one is a terminal's, shows its line at Ctrl-X, and empties it.
ZSH = r"""
PROMPT=; RPROMPT=; zle_bracketed_paste=()
autoload -Uz compinit; compinit -u -D; source script.zsh
show() { print -rn -- "<<$BUFFER>>"; BUFFER= }
zle -N show; bindkey '^I' complete-word; bindkey '^X' show
print REA''DY
"""


def read_until(terminal, pattern, seconds=60):
    """What a terminal says, up to the pattern."""
    said, end = b"", time.monotonic() + seconds
    while not (found := re.search(pattern, said)):
        assert time.monotonic() < end, said
        if select.select([terminal], [], [], 0.1)[0]:
            said += os.read(terminal, 65536)
    return found


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_completes(scripts):
    """CLI-21: whatever has one answer."""
    terminal, inside = pty.openpty()
    environ = {**os.environ, "HOME": str(scripts), "TERM": "dumb"}
    process = subprocess.Popen(
        ["zsh", "-f", "-i"],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        cwd=scripts,
        env=environ,
        start_new_session=True,
    )
    try:
        os.close(inside)
        os.write(terminal, ZSH.encode())
        read_until(terminal, b"READY")
        for line, words in [*WANTED, ("vlpack sft --packing_mode b", ["buffer"])]:
            if len(words) > 1:
                continue
            os.write(terminal, f"{line}\t\x18".encode())
            made = read_until(terminal, b"<<(.*)>>")[1].decode().rstrip(" =")
            assert made == " ".join([*line.split(" ")[:-1], *(words or line.split(" ")[-1:])]), line
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_script_of_zsh_has_every_command_in_quotes_that_close(scripts):
    """CLI-21: also where there is no zsh."""
    script = (scripts / "script.zsh").read_text()
    for command in all_commands():
        assert f"        {command.name})\n            _arguments -S" in script
    assert "'*--packing_mode=[plan packs ahead of time and refuses data without a length, buffer packs rows" in script
    assert ":value:(auto plan buffer)'" in script
    lines = [line for line in script.splitlines() if line.lstrip().startswith("'")]
    assert len(lines) > 1000
    assert [line for line in lines if line.replace("'\\''", "").count("'") != 2] == []


def test_command_prints_the_script(scripts, capsys):
    """CLI-21"""
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == (scripts / "script.bash").read_text()
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
