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
        plugin('os.environ.get("MY_WORDS")'),
        plugin('os.getenv("MY_WORDS")'),
        plugin('get_env_args("my_words", int, 1)'),
        plugin('settings["MY_WORDS"]'),
        plugin("os.environ[NAME]"),
        plugin('os.environ.setdefault("MY_WORDS", "1")'),
        plugin('os.environ["MY_" + "words".upper()]'),
        plugin("look(NAME)"),
        plugin('os.environb[b"MY_WORDS"]'),
        plugin('20 if "MY_20_WORDS" in os.environ else 1'),
        plugin('{**{"MY_WORDS": 1}, **{name: os.environ[name] for name in [NAME]}}["MY_WORDS"]'),
        plugin("words", before="words = os.environ[NAME]"),
        plugin("Words.number", before="class Words:\n    number = os.environ[NAME]"),
        plugin("words()", before="def words(number=os.environ[NAME]):\n    return number"),
        plugin("words()", before="words = functools.partial(lambda: os.environ[NAME])"),
        plugin("words()", before="words = (lambda number: lambda: number)(os.environ[NAME])"),
    ],
    ids=[
        *("item", "get", "getenv", "get_env_args", "alias", "constant", "setdefault", "computed", "function", "bytes"),
        *("in", "loop", "global", "class", "default", "partial", "closure"),
    ],
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
        plugin("my.words()", before='my = importlib.import_module("my_" + "words")'),
        plugin("len(my.WORDS.split())", before='my = importlib.import_module("my_" + "words")'),
        plugin('importlib.import_module("my_" + "words").words()'),
        plugin("words()", before='exec(Path(__file__).with_name("my_words.py").read_text())'),
        plugin("words()", before='exec(Path(__file__).with_name("my_words" + ".py").read_text())'),
        plugin("len(WORDS.split())", before='exec(Path(__file__).with_name("my_words" + ".py").read_text())'),
        plugin("words()", inside='exec(Path(__file__).with_name("my_words.py").read_text(), globals())'),
        plugin("my['words']()", before='my = runpy.run_path(str(Path(__file__).with_name("my_words" + ".py")))'),
    ],
    ids=[
        *("by name", "computed", "a value of it", "late", "executed", "executed, computed", "a value of that"),
        *("executed late", "run"),
    ],
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


@pytest.mark.parametrize(
    ("before", "inside"),
    [("", "words = dict(os.environ).get(NAME, 1)"), ("ALL = dict(os.environ)", "words = ALL.get(NAME, 1)")],
    ids=["inside", "at import"],
)
def test_variable_out_of_a_copy_of_the_environment_is_in_the_key(before, inside, starts, monkeypatch):
    """LEN-21"""
    for number in ("1", "20"):
        monkeypatch.setenv("MY_WORDS", number)
        lengths, encoded = starts.lengths(plugin("words", before, inside))
        assert lengths == encoded
        assert starts.measured > 0


@pytest.mark.parametrize("num_processes", [1, 2])
def test_variable_that_few_rows_read_is_in_the_key(num_processes, starts, monkeypatch):
    """LEN-21: by its name in the plugin, and not by what rows do."""
    text = plugin("words", inside='words = os.environ[NAME] if "row 77" in inputs.messages[0]["content"] else 1')
    for number in ("1", "20", "20"):
        monkeypatch.setenv("MY_WORDS", number)
        lengths, encoded = starts.lengths(text, texts(100), num_processes)
        assert lengths == encoded
    starts.lengths(text, texts(100))
    assert starts.measured == 0


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


def test_launchers_variables_are_not_in_the_key(starts, monkeypatch):
    """LEN-21: a template may ask for its rank, as to log on one only."""
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        starts.lengths(plugin('1 if os.environ.get("LOCAL_RANK") else 1'))
    assert starts.measured == 0
