"""Causes that no key sees, through ms-swift's templates: they show in the lengths, and every length is right again."""

import pytest

from swift_vlpack.host import length_pass
from swift_vlpack.rows.encoder import RowEncoder
from tests.host.lengths.support import ARGS, source, texts, warnings_of
from tests.host.lengths.test_observed import plugin

FROM_FILE = 'int((Path(__file__).parent / "prompt.txt").read_text())'
SETTINGS = """
from dataclasses import dataclass, field

@dataclass
class Inner:
    words: int = 1

@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
"""
CHANGED = """
def changed(template):
    template.__class__ = Mine
    {setting}
    return template
"""


def with_setting(setting, number):
    """A plugin that keeps a setting, which it reads from a file, one level deep in an object of the template."""
    return plugin(number, SETTINGS) + CHANGED.format(setting=setting)


@pytest.mark.parametrize("order", [("1", "20"), ("20", "1")])
@pytest.mark.parametrize(
    "text",
    [
        plugin("words", inside=f"words = {FROM_FILE}"),
        plugin("words", before=f"words = {FROM_FILE}"),
        with_setting(f"template.mine = Outer(Inner({FROM_FILE}))", "self.mine.inner.words"),
    ],
    ids=["inside", "at import", "dataclass"],
)
def test_text_file_that_a_plugin_reads(text, order, starts, tmp_path):
    """LEN-24: and settings that came from it, one level deep in an object."""
    for words in order:
        (tmp_path / "prompt.txt").write_text(words)
        lengths, encoded = starts.lengths(text, texts(50))
        assert lengths == encoded
        assert starts.measured == 50
    starts.lengths(text, texts(50))
    assert starts.measured == 0, "what is measured again is remembered"


COUNTER = """
SEEN = 0
"""
COUNTS = {
    "attribute": "self.num_seen = getattr(self, 'num_seen', 0) + 1",
    "config": "self.config.num_seen = getattr(self.config, 'num_seen', 0) + 1",
    "vision": "self.config.vision_config.num_seen = getattr(self.config.vision_config, 'num_seen', 0) + 1",
    "global": "globals()['SEEN'] += 1",
}


@pytest.mark.parametrize("counter", COUNTS)
def test_counter_that_encoding_moves_measures_nothing_anew(counter, starts, tmp_path):
    """LEN-7: neither the next start, nor another source of this one."""
    text = plugin("3", COUNTER, inside=COUNTS[counter])
    (tmp_path / "plugin.py").write_text(text)
    args = type(ARGS)(**{**vars(ARGS), "external_plugins": [str(tmp_path / "plugin.py")]})
    for number in range(3):
        template = starts.runs.template([tmp_path / "plugin.py"])
        for config in (template.config, template.config.vision_config):
            vars(config).pop("num_seen", None)  # of the start before: a process begins without
        sources = [source(texts(num_rows + 3 * number), name) for name, num_rows in (("one", 20), ("two", 9))]
        found = length_pass.with_all_lengths(sources, RowEncoder(template), args, starts.runs.cache)
        measured = [len(one.sizes) - one.sizes.num_remembered for one in found]
        assert measured == ([20, 9] if not number else [3, 3])


@pytest.mark.parametrize("first", ["1", "0"])
def test_plugin_that_patches_the_call_of_the_tokenizer(first, starts, template, tmp_path, monkeypatch):
    """LEN-24: headers pass it by. Where it changed nothing at first, they were trusted."""
    kind = type(template.tokenizer)
    call, path = kind.__call__, tmp_path / "prompt.txt"

    def longer(self, *args, **options):
        made = call(self, *args, **options)
        more = int(path.read_text())
        for name in ("input_ids", "attention_mask"):
            if name in made and made[name] and isinstance(made[name][0], int):
                made[name] = [*made[name], *[1] * more]
        return made

    monkeypatch.setattr(kind, "__call__", longer)
    said = warnings_of(monkeypatch)
    for words in (first, "7", "2"):
        path.write_text(words)
        lengths, encoded = starts.lengths("def changed(template):\n    return template\n", texts(50))
        assert lengths == encoded
        assert starts.measured == 50
    assert any("remembered lengths are wrong" in line for line in said)
    assert "every row is encoded" in said[-1]
