"""The script of each shell."""

from __future__ import annotations

from collections.abc import Sequence

from swift_vlpack.cli.completion_words import Option, Words


def bash(commands: Sequence[Words]) -> str:
    """For bash 3.2 and newer."""
    names = " ".join(words.name for words in commands)
    return f"""# Completion of vlpack for bash: source this, or put it where bash-completion looks.
_vlpack() {{
    local cur prev IFS=$' \\t\\n'
    COMPREPLY=()
    cur=${{COMP_WORDS[COMP_CWORD]}}
    prev=${{COMP_WORDS[COMP_CWORD-1]}}
    # `--flag=value` is three words to bash
    if [ "$cur" = "=" ]; then cur=""; elif [ "$prev" = "=" ]; then prev=${{COMP_WORDS[COMP_CWORD-2]}}; fi
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{names} --help --version" -- "$cur"))
        return
    fi
    case "$prev" in
{_indented(_bash_values(commands), 8)}
    esac
    case "${{COMP_WORDS[1]}}" in
{_indented([_bash_command(words) for words in commands], 8)}
    esac
}}
_vlpack_files() {{
    local IFS=$'\\n'
    compopt -o filenames 2>/dev/null
    COMPREPLY+=($(compgen -f -- "$1"))
}}
complete -F _vlpack vlpack
"""


def _bash_values(commands: Sequence[Words]) -> list[str]:
    """What comes behind a flag, which is the same in every command."""
    by_choices: dict[tuple[str, ...], list[str]] = {}
    files = set()
    for option in (option for words in commands for option in words.options):
        if option.choices:
            flags = by_choices.setdefault(option.choices, [])
            flags += [] if option.flag in flags else [option.flag]
        elif option.takes_file:
            files.add(option.flag)
    lines = [
        f'{"|".join(flags)}) COMPREPLY=($(compgen -W "{" ".join(choices)}" -- "$cur")); return;;'
        for choices, flags in by_choices.items()
    ]
    return [*lines, f'{"|".join(sorted(files))}) _vlpack_files "$cur"; return;;']


def _bash_command(words: Words) -> str:
    behind = [f'COMPREPLY=($(compgen -W "{" ".join(words.actions)}" -- "$cur"));'] if words.actions else []
    behind += ['_vlpack_files "$cur";'] if words.takes_file else []
    flags = " ".join(option.flag for option in words.options)
    return (
        f'{words.name}) if [[ "$cur" == -* ]]; then COMPREPLY=($(compgen -W "{flags}" -- "$cur")); '
        f"else {' '.join(behind) or ':;'} fi;;"
    )


def zsh(commands: Sequence[Words]) -> str:
    """For a file `_vlpack` in a folder of fpath, or to be sourced behind compinit."""
    described = "\n".join(f"        {_quoted(f'{words.name}:{_escaped(words.text)}')}" for words in commands)
    cases = "\n".join(
        f"        {words.name})\n            _arguments -S \\\n"
        + " \\\n".join(f"                {_quoted(part)}" for part in _zsh_arguments(words))
        + "\n            ;;"
        for words in commands
    )
    return f"""#compdef vlpack
# Completion of vlpack for zsh.
_vlpack() {{
    local -a commands
    commands=(
{described}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    shift words
    (( CURRENT-- ))
    case $words[1] in
{cases}
    esac
}}
# Read from fpath this is the function itself; sourced, it has yet to be made known.
if [ "$funcstack[1]" = "_vlpack" ]; then _vlpack "$@"; else compdef _vlpack vlpack; fi
"""


def _zsh_arguments(words: Words) -> list[str]:
    behind = [f"1:which:({' '.join(words.actions)})"] if words.actions else []
    files = ["*:file:_files"] if words.takes_file else []
    return [*map(_zsh_option, words.options), *behind, *files]


def _zsh_option(option: Option) -> str:
    text = f"[{_escaped(option.text)}]" if option.text else ""
    if option.is_switch:
        return f"{option.flag}{text}"
    value = f"({' '.join(option.choices)})" if option.choices else "_files" if option.takes_file else ""
    return f"*{option.flag}={text}:value:{value}"


def _escaped(text: str) -> str:
    for sign in ("\\", "[", "]", ":"):
        text = text.replace(sign, f"\\{sign}")
    return text


def fish(commands: Sequence[Words]) -> str:
    """For ~/.config/fish/completions/vlpack.fish."""
    lines = ["# Completion of vlpack for fish.", "complete -c vlpack -f"]
    of_commands: dict[Option, list[str]] = {}
    for words in commands:
        lines.append(f"complete -c vlpack -n __fish_use_subcommand -a {words.name} -d {_quoted_fish(words.text)}")
        if words.actions:
            lines.append(f"{_fish_behind([words.name])} -a '{' '.join(words.actions)}'")
        if words.takes_file:
            lines.append(f"{_fish_behind([words.name])} -F")
        for option in words.options:
            of_commands.setdefault(option, []).append(words.name)
    lines += [f"{_fish_behind(names)} {_fish_option(option)}" for option, names in of_commands.items()]
    return "\n".join(lines) + "\n"


def _fish_behind(names: Sequence[str]) -> str:
    return f"complete -c vlpack -n '__fish_seen_subcommand_from {' '.join(names)}'"


def _fish_option(option: Option) -> str:
    value = ""
    if option.choices:
        value = f" -x -a '{' '.join(option.choices)}'"
    elif option.takes_file:
        value = " -r -F"
    elif not option.is_switch:
        value = " -x"
    text = f" -d {_quoted_fish(option.text)}" if option.text else ""
    return f"-l {option.flag.removeprefix('--')}{value}{text}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _quoted_fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _indented(lines: Sequence[str], by: int) -> str:
    return "\n".join(" " * by + line for line in lines)


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}
