"""Sort the flags of a training run into packing options, options of ms-swift, and mistakes.

>>> split_flags(["--model", "m", "--packing-length=4096", "--eval_packing"])
({'packing_length': '4096', 'eval_packing': 'true'}, ['--model', 'm'])
>>> given_options(["--model", "m", "--dataset", "a.jsonl", "b.jsonl", "--streaming", "true"])
{'model': 'm', 'dataset': ['a.jsonl', 'b.jsonl'], 'streaming': True}

ms-swift finds a wrong flag only after half a minute of imports. Here its flags are read from its source
(`swift_flags.py`), so that a wrong flag is refused at once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from swift_vlpack.config import kind_of, option_names
from swift_vlpack.errors import ConfigError
from swift_vlpack.gone import refuse_gone
from swift_vlpack.host.swift_flags import flag_names
from swift_vlpack.host.swift_flags import flags as flags_of_swift
from swift_vlpack.words import did_you_mean

OF_TRAINING = (".yaml", ".yml", ".json")
"""Suffixes by which ms-swift recognizes a training file."""
OF_DATA = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet", ".arrow")


def split_flags(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split a command line into packing options and all other flags.

    A packing flag is `--name value`, `--name=value`, or a bare `--name` for true.
    """
    known = set(option_names())
    flags: dict[str, str] = {}
    rest: list[str] = []
    at = 0
    while at < len(argv):
        name, has_value, value = argv[at].partition("=")
        option = option_name(name)
        refuse_gone(option)
        at += 1
        if option not in known:
            rest.append(argv[at - 1])
            continue
        if not has_value:
            is_bare = at == len(argv) or argv[at].startswith("--")
            if is_bare and "true" not in kind_of(option):
                raise ConfigError(f"--{option} needs a value: {kind_of(option)}")
            value = "true" if is_bare else argv[at]
            at += not is_bare
        flags[option] = value
    return flags, rest


def option_name(flag: str) -> str:
    """Return the name of the option that a flag sets, `a_b` for `--a-b=c`; "" for a word that is no flag."""
    return flag.partition("=")[0][2:].replace("-", "_") if flag.startswith("--") else ""


def without_options(flags: Sequence[str], names: Collection[str]) -> list[str]:
    """Remove the flags of these options, with their values.

    >>> without_options(["--model", "m", "--lora-rank=8", "--dataset", "a.jsonl", "b.jsonl"], ("lora_rank", "dataset"))
    ['--model', 'm']
    """
    kept: list[str] = []
    is_left_out = False
    for part in flags:
        if part.startswith("--"):
            is_left_out = option_name(part) in names
        if not is_left_out:
            kept.append(part)
    return kept


def as_flags(keys: Mapping[str, Any]) -> list[str]:
    """Write keys of a training file as ms-swift's flags: a list as several values, a mapping as JSON."""
    flags: list[str] = []
    for name, value in keys.items():
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
        flags += [f"--{name}", *map(str, text if isinstance(text, list) else [text])]
    return flags


def refuse_unknown(keys: Iterable[str], flags: Sequence[str], path: str | None) -> None:
    """Raise `ConfigError` for keys and flags that ms-swift does not have. It names all, with suggestions."""
    known = flag_names()
    if not known or ignores_errors(flags) or "ignore_args_error" in keys:
        return
    given = [flag.partition("=")[0] for flag in flags if flag.startswith("--")]
    unknown = [name for name in given if " " not in name and not _is_known(option_name(name), known)]
    names = {*known, *option_names()}
    problems = [f"unknown option {name}{_meant(name, {f'--{one}' for one in names})}" for name in unknown]
    problems += [f"{path}: unknown key {key}{_meant(key, names)}" for key in keys if not _is_known(str(key), known)]
    if problems:
        raise ConfigError(f"{'; '.join(problems)} (`swift sft --help` and `vlpack sft --help` list all)")


def ignores_errors(flags: Sequence[str]) -> bool:
    """Tell whether ms-swift was told to ignore unknown flags (`--ignore_args_error`)."""
    return any(option_name(flag) == "ignore_args_error" for flag in flags)


def _is_known(name: str, known: frozenset[str]) -> bool:
    """Tell whether ms-swift takes the name: an option, `no_` before one, or, as argparse allows, its beginning."""
    name = name.replace("-", "_")
    return any(option.startswith((name, name.removeprefix("no_"))) for option in known)


def _meant(name: object, known: Iterable[str]) -> str:
    return did_you_mean(name, known).replace(";", ",")


def given_options(flags: Sequence[str]) -> dict[str, Any]:
    """Return the value of every flag by option: a list if ms-swift takes a list, else a text, number or boolean.

    Raises `ConfigError` for a word that no flag takes, and for a value that is not among the flag's choices.
    """
    known = flags_of_swift()
    found: dict[str, list[str]] = {}
    values: list[str] | None = None
    takes_one = False
    for part in flags:
        if part.startswith("--") and " " not in part:
            name, has_value, value = part.partition("=")
            option = _full_name(option_name(name), known)
            values = found[option] = [value] if has_value else []
            takes_one = option in known and not known[option].takes_list  # an unknown option may take any number
        elif values is None or (takes_one and len(values) == 1):
            raise ConfigError(loose_word(part))
        else:
            values.append(part)
    return {name: _checked_value(name, given, known) for name, given in found.items()}


def _full_name(name: str, known: Collection[str]) -> str:
    """Return the option that argparse would choose for a name: an equal one, or the only one that begins with it."""
    if name in known:
        return name
    longer = [option for option in known if option.startswith(name)]
    return longer[0] if len(longer) == 1 else name


def _checked_value(name: str, given: Sequence[str], known: Mapping[str, Any]) -> Any:
    flag = known.get(name)
    if flag is None or flag.takes_list:
        return list(given)
    if flag.choices and given and given[0] not in flag.choices:
        raise ConfigError(
            f"--{name} must be one of {', '.join(flag.choices)}, got {given[0]!r}{did_you_mean(given[0], flag.choices)}"
        )
    if flag.number is not None and given and not _is_none(given[0]):
        try:
            return flag.number(given[0])
        except ValueError:
            kind = "a whole number" if flag.number is int else "a number"
            raise ConfigError(f"--{name} must be {kind}, got {given[0]!r}") from None
    return _value(given[0]) if given else True


def _is_none(text: str) -> bool:
    return text.lower() in ("none", "null")


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        return float(text)
    return text


def loose_word(word: str) -> str:
    """Return the error about a word that belongs to no option."""
    path = Path(word)
    if path.suffix in (".yaml", ".yml"):
        return f"{word}: give one training file, as the first word; options come after it"
    if path.suffix in OF_DATA:
        return f"{word} is not a training file; name data with --dataset {word}"
    if path.is_dir():
        return f"{word} is a folder; name a training file in it ({', '.join(OF_TRAINING)}), or --model {word}"
    return (
        f"no option takes {word!r}; a training file comes first and ends in {', '.join(OF_TRAINING)}, and every option "
        "begins with --"
    )
