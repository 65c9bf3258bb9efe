"""Variables that a plugin reads, in any way, and helpers that it loads, by any name."""

import sys

import pytest

PLUGIN = """
import builtins, functools, importlib, os, runpy, sys
from os import environ as settings
from pathlib import Path
from swift.template.templates.qwen import Qwen2_5VLTemplate
from swift.utils import get_env_args

NAME = "MY_WORDS"
look = os.environ.get
{before}

class Mine(Qwen2_5VLTemplate):
    def _preprocess_inputs(self, inputs):
        super()._preprocess_inputs(inputs)
        {inside}
        inputs.messages[0]["content"] += " word" * int({number})

def changed(template):
    template.__class__ = Mine
    return template
"""


def plugin(number, before="", inside=""):
    return PLUGIN.format(number=number, before=before, inside=inside)


@pytest.mark.parametrize(
    "text",
    [
        plugin('os.environ["MY_WORDS"]'),
        plugin('get_env_args("my_words", int, 1)'),
        plugin('os.environ["MY_" + "words".upper()]'),
        plugin("words()", before="words = (lambda number: lambda: number)(os.environ[NAME])"),
    ],
    ids=["item", "get_env_args", "computed", "closure"],
)
def test_variable_that_is_read_in_any_way_is_in_the_key(text, starts, monkeypatch):
    """LEN-21: while rows are encoded, or when the plugin is imported: its name stands in quotes."""
    found = []
    for number in ("1", "20", "1", "20"):
        monkeypatch.setenv("MY_WORDS", number)
        lengths, encoded = starts.lengths(text)
        assert lengths == encoded
        found.append((lengths, starts.measured))
    assert min(found[1][0]) > max(found[0][0]) + 10, "a variable that changes nothing shows nothing"
    assert [num_measured for _, num_measured in found[2:]] == [0, 0], "both values are remembered"


FIRST, SECOND = '" word"', '" word" * 20'
HELPER = "WORDS = {words}\n\ndef words():\n    return len(WORDS.split())\n"


@pytest.mark.parametrize(
    "text",
    [
        plugin("words()", before='words = importlib.import_module("my_words").words'),
        plugin("my['words']()", before='my = runpy.run_path(str(Path(__file__).with_name("my_words" + ".py")))'),
    ],
    ids=["by name", "run"],
)
def test_helper_that_is_loaded_by_name_is_in_the_key(text, starts, tmp_path):
    """LEN-18: it lies beside the plugin."""
    found = []
    for words in (FIRST, SECOND, FIRST, SECOND):
        (tmp_path / "my_words.py").write_text(HELPER.format(words=words))
        sys.modules.pop("my_words", None)
        lengths, encoded = starts.lengths(text)
        assert lengths == encoded
        found.append((lengths, starts.measured))
    assert min(found[1][0]) > max(found[0][0]) + 10, "an edit that changes nothing shows nothing"
    assert [num_measured for _, num_measured in found[2:]] == [0, 0]


@pytest.mark.parametrize("name", ["LANG", "ROLE_PROMPT", "MASTER_PROMPT", "HF_TEXT_COLUMN"])
def test_variables_that_sound_like_those_of_the_machine_are_in_the_key_where_a_plugin_names_them(
    name, starts, monkeypatch
):
    """LEN-21"""
    for number in ("1", "20"):
        monkeypatch.setenv(name, number)
        lengths, encoded = starts.lengths(plugin(f'int(os.environ.get("{name}") or 1)'))
        assert lengths == encoded
    assert starts.measured > 0
