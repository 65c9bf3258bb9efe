"""Variables that a plugin reads, in any way, and helpers that it loads, by any name."""

import sys

import pytest

from tests.host.lengths.support import ARGS, source, texts, with_lengths

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


class Starts:
    """Starts of a run with one plugin; `measured` says how many rows of the last one had to be encoded."""

    def __init__(self, runs, folder, encoded):
        self.runs, self.folder, self.encoded = runs, folder, encoded
        self.measured = 0

    def lengths(self, text, rows=None, num_processes=1):
        plugin = self.folder / "plugin.py"
        plugin.write_text(text)
        template, rows = self.runs.template([plugin]), rows or texts(4)
        args = {**vars(ARGS), "external_plugins": [str(plugin)], "dataset_num_proc": num_processes}
        self.encoded.clear()
        sized = with_lengths(source(rows), template, type(ARGS)(**args), self.runs.cache)
        self.measured = len(rows) - sized.sizes.num_remembered
        return sized.sizes.lengths.tolist(), [template.encode(row, return_length=True)["length"] for row in rows]


@pytest.fixture
def starts(runs, tmp_path, encoded):
    yield Starts(runs, tmp_path, encoded)
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


def plugin(number, before="", inside=""):
    return PLUGIN.format(number=number, before=before, inside=inside)


@pytest.mark.parametrize(
    "text",
    [
        plugin('os.environ["MY_WORDS"]'),
        plugin('get_env_args("my_words", int, 1)'),
        plugin('settings["MY_WORDS"]'),
        plugin("os.environ[NAME]"),
        plugin('os.environ["MY_" + "words".upper()]'),
        plugin('20 if "MY_20_WORDS" in os.environ else 1'),
        plugin("words()", before="words = (lambda number: lambda: number)(os.environ[NAME])"),
    ],
    ids=["item", "get_env_args", "alias", "constant", "computed", "in", "closure"],
)
def test_variable_that_is_read_in_any_way_is_in_the_key(text, starts, monkeypatch):
    """LEN-21: while rows are encoded, or when the plugin is imported: its name stands in quotes."""
    found = []
    for number in ("1", "20", "1", "20"):
        monkeypatch.setenv("MY_WORDS", number)
        monkeypatch.delenv("MY_20_WORDS", raising=False)
        if number == "20":
            monkeypatch.setenv("MY_20_WORDS", "")
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
        plugin('importlib.import_module("my_" + "words").words()'),
        plugin("len(WORDS.split())", before='exec(Path(__file__).with_name("my_words" + ".py").read_text())'),
        plugin("my['words']()", before='my = runpy.run_path(str(Path(__file__).with_name("my_words" + ".py")))'),
    ],
    ids=["by name", "late, computed", "a value of it, executed", "run"],
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
