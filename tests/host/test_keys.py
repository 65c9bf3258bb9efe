"""What a length is remembered under: edit what it depends on as a user would, and it is measured again, and right."""

import os
import sys
from types import SimpleNamespace

import pytest
from swift.agent_template import agent_template_map
from swift.loss_scale import loss_scale_map
from swift.template import get_template
from swift.template.templates.qwen import Qwen2_5VLTemplate
from swift.utils import import_external_file

from swift_vlpack.data.fusion import RowSource
from swift_vlpack.host.context import context_of
from swift_vlpack.host.lengths import measured
from swift_vlpack.host.source_code import code_of
from tests.rows import text_row

FAMILY = "qwen2_5_vl"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}}


def text_rows():
    return [{**text_row(f"row {number}"), "tools": [TOOL]} for number in range(4)]


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
        args = SimpleNamespace(dataset_num_proc=1, strict=False, external_plugins=[str(plugin) for plugin in plugins])
        found = measured(RowSource(name="rows", rows=rows), template, args, self.cache).sizes.lengths.tolist()
        return found, [template.encode(row, return_length=True)["length"] for row in rows]


@pytest.fixture
def runs(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # plugins put their folder first
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # an edit within a second would not be seen
    for registry in (agent_template_map, loss_scale_map):
        monkeypatch.setitem(registry, "mine", None)
    monkeypatch.setattr(Qwen2_5VLTemplate, "_swift_prepare_inputs", Qwen2_5VLTemplate._swift_prepare_inputs)
    return Runs(tiny(FAMILY).template.processor, tmp_path / "cache")


OWN_TEMPLATE = """
from swift.template.templates.qwen import Qwen2_5VLTemplate
{imports}
class Mine(Qwen2_5VLTemplate):
    def _preprocess_inputs(self, inputs):
        super()._preprocess_inputs(inputs)
        inputs.messages[0]["content"] += {words}

def changed(template):
    template.__class__ = Mine
    return template
"""
OWN_AGENT = """
from swift.agent_template import agent_template_map
from swift.agent_template.hermes import HermesAgentTemplate

class Mine(HermesAgentTemplate):
    def _format_tools(self, tools, system=None, user_message=None):
        return super()._format_tools(tools, system, user_message) + {words}

agent_template_map["mine"] = Mine
"""
OWN_LOSS_SCALE = """
from swift.loss_scale import loss_scale_map
from swift.loss_scale.base import LossScale

class Mine(LossScale):
    def get_loss_scale(self, context, **kwargs):
        return [*map(str, context), {words}], [1.0] * (len(context) + 1)

loss_scale_map["mine"] = Mine
"""
PATCH = """
from swift.template.templates.qwen import Qwen2_5VLTemplate

prepare = Qwen2_5VLTemplate._swift_prepare_inputs
if hasattr(prepare, "before"):
    prepare = prepare.before

def mine(self, inputs):
    prepare(self, inputs)
    inputs.messages[0]["content"] += {words}

mine.before = prepare
Qwen2_5VLTemplate._swift_prepare_inputs = mine
"""
FIRST, SECOND = '" word"', '" word" * 20'


@pytest.mark.parametrize(
    ("files", "options"),
    [
        ({"plugin.py": OWN_TEMPLATE}, {}),
        ({"plugin.py": OWN_AGENT}, {"agent_template": "mine"}),
        ({"plugin.py": OWN_LOSS_SCALE}, {"loss_scale": "mine"}),
        ({"plugin.py": PATCH}, {}),
        ({"plugin.py": OWN_TEMPLATE.replace("{words}", "WORDS"), "my_words.py": "WORDS = {words}"}, {}),
        ({"plugin.py": "", "second.py": PATCH}, {}),
    ],
    ids=["template", "agent template", "loss scale", "patch", "imported", "second plugin"],
)
def test_edited_code_of_the_user_is_measured_again(files, options, runs, tmp_path):
    """LEN-16"""

    def lengths(words):
        for name, text in files.items():
            imports = "from my_words import WORDS" if "my_words.py" in files else ""
            (tmp_path / name).write_text(text.replace("{imports}", imports).replace("{words}", words))
        return runs.lengths(text_rows(), [tmp_path / name for name in files if name != "my_words.py"], **options)

    first, encoded = lengths(FIRST)
    assert first == encoded
    second, encoded = lengths(SECOND)
    assert second == encoded
    assert min(second) > max(first) + 10, "an edit that changes nothing shows nothing"
    assert lengths(FIRST) == (first, first)


def test_code_without_a_file_is_in_the_key(runs, tmp_path):
    """LEN-16: as in a notebook, or a function that was loaded before its file was edited."""
    (tmp_path / "plugin.py").write_text("")

    def context(words):
        names = {}
        exec(compile(OWN_TEMPLATE.format(imports="", words=words), "<cell 1>", "exec"), names)
        return context_of(names["changed"](runs.template([tmp_path / "plugin.py"])))

    assert context(FIRST) == context(FIRST)
    assert context(FIRST) != context(SECOND)


def test_the_users_own_modules_are_followed_and_installed_ones_are_not(tmp_path):
    """LEN-16: also relative ones and those imported inside of functions; what cannot be parsed or found is no error."""
    package = tmp_path / "mine"
    package.mkdir()
    (tmp_path / "plugin.py").write_text("import os, numpy\nimport mine.a\nfrom mine import b\nimport nowhere.at.all\n")
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("def late():\n    from .c import d\n")
    (package / "b.py").write_text("this is no Python")
    (package / "c.py").write_text("import plugin\n")
    code = code_of([], [tmp_path / "plugin.py"])
    own = {os.path.relpath(file, tmp_path) for file in code.files if file.startswith(str(tmp_path))}
    assert own == {"plugin.py", "mine/__init__.py", "mine/a.py", "mine/b.py", "mine/c.py"}
    assert {file.rsplit("/", 2)[-2] for file in code.files if "site-packages" in file} == {"numpy"}
    assert "numpy" in code.packages
