"""Fixtures of the tests of the length pass."""

import sys
from types import SimpleNamespace

import pytest
from swift.agent_template import agent_template_map
from swift.loss_scale import loss_scale_map
from swift.template import Template, get_template
from swift.template.templates.qwen import Qwen2_5VLTemplate
from swift.utils import import_external_file
from swift.utils import utils as swift_utils

from tests.host.lengths.support import ARGS, FAMILY, source, texts, with_lengths
from tests.images import BROKEN, GOOD, make


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    return {**make(folder / "good", GOOD), **make(folder / "broken", BROKEN)}


@pytest.fixture
def encoded(monkeypatch):
    """The rows that templates encode, with or without pixels, in this process."""
    calls, encode = [], Template.encode

    def noted(self, row, **options):
        calls.append(row["messages"][0]["content"])
        return encode(self, row, **options)

    monkeypatch.setattr(Template, "encode", noted)
    return calls


class Runs:
    """Starts of a run, each with its plugins imported anew, as by another process."""

    def __init__(self, processor, cache):
        self.processor = processor
        self.cache = str(cache)

    def template(self, plugins, **options):
        for name in [name for name in sys.modules if name.startswith("_swift_external_") or name == "my_words"]:
            del sys.modules[name]
        for plugin in plugins:
            module = import_external_file(str(plugin))
        made = get_template(self.processor, template_type=FAMILY, max_length=2048, **options)
        made = getattr(module, "changed", lambda template: template)(made)
        made.set_mode("train")
        return made

    def lengths(self, rows, plugins, **options):
        """Of a start with these plugins, and what encoding says without any memory."""
        template = self.template(plugins, **options)
        args = SimpleNamespace(**vars(ARGS), external_plugins=[str(plugin) for plugin in plugins])
        found = with_lengths(source(rows), template, args, self.cache).sizes.lengths.tolist()
        return found, [template.encode(row, return_length=True)["length"] for row in rows]


@pytest.fixture
def runs(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # plugins put their folder first
    monkeypatch.setattr(swift_utils, "_external_files", [])  # which dataloader workers import again
    for name in [name for name in sys.modules if name.startswith("_swift_external_")]:
        monkeypatch.delitem(sys.modules, name)  # plugins of other tests, back afterwards
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # an edit within a second would not be seen
    for registry in (agent_template_map, loss_scale_map):
        monkeypatch.setitem(registry, "mine", None)
    monkeypatch.setattr(Qwen2_5VLTemplate, "_swift_prepare_inputs", Qwen2_5VLTemplate._swift_prepare_inputs)
    return Runs(tiny(FAMILY).template.processor, tmp_path / "cache")


class Starts:
    """Starts of a run with one plugin; `measured` says how many rows of the last one had to be encoded."""

    def __init__(self, runs, folder):
        self.runs, self.folder, self.measured = runs, folder, 0

    def lengths(self, text, rows=None):
        plugin = self.folder / "plugin.py"
        plugin.write_text(text)
        template, rows = self.runs.template([plugin]), rows or texts(4)
        args = SimpleNamespace(**vars(ARGS), external_plugins=[str(plugin)])
        sizes = with_lengths(source(rows), template, args, self.runs.cache).sizes
        self.measured = len(rows) - sizes.num_remembered
        return sizes.lengths.tolist(), [template.encode(row, return_length=True)["length"] for row in rows]


@pytest.fixture
def starts(runs, tmp_path):
    yield Starts(runs, tmp_path)
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]
