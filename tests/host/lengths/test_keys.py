"""What a length is remembered under: edit what it depends on as a user would, and it is measured again, and right."""

import os

import numpy
import pytest
from swift.dataset import load_dataset

from swift_vlpack.lengths.context import dependencies_of, digest_of, own_files
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.samples import SampleId
from swift_vlpack.rows.source import RowSource
from tests.data_rows import image_row, text_row, write_jsonl
from tests.host.lengths.support import ARGS, context_of, with_lengths
from tests.images import photo
from tests.tiny import FAMILIES

FAMILY = "qwen2_5_vl"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}}


def text_rows():
    return [{**text_row(f"row {number}"), "tools": [TOOL]} for number in range(4)]


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
    """LEN-18"""

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


def test_the_users_own_files_are_followed_and_installed_ones_are_not(template, tmp_path, monkeypatch):
    """LEN-18: every package of the user that a plugin imports, whole; what only lies beside a plugin is not."""
    monkeypatch.syspath_prepend(tmp_path)  # as ms-swift does for a plugin
    package = tmp_path / "mine"
    package.mkdir()
    (tmp_path / "plugin.py").write_text("import os, numpy, mine.a as one, alone\nimport nowhere.at.all\n")
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "alone.py").write_text("")
    for name in ("__init__", "a", "b"):
        (package / f"{name}.py").write_text("")
    own = {os.path.relpath(file, tmp_path) for file in own_files([], [tmp_path / "plugin.py"])}
    assert own == {"plugin.py", "alone.py", "mine/__init__.py", "mine/a.py", "mine/b.py"}
    packages = dependencies_of(template, [tmp_path / "plugin.py"])["packages"]
    assert packages["numpy"] == numpy.__version__, "of what is installed the version is in the key"


OF_A_PROCESS = (
    *("_", "USER", "LOGNAME", "HOSTNAME", "LS_COLORS", "SHLVL", "PWD", "OLDPWD", "PATH", "TERM", "TMPDIR", "SSH_TTY"),
    *("RANK", "LOCAL_RANK", "MASTER_PORT", "SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "WANDB_MODE"),
    *("PYTHONPATH", "OMP_NUM_THREADS", "HF_TOKEN", "TRANSFORMERS_VERBOSITY", "LOGLEVEL"),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_variables_by_which_processes_differ_are_in_no_key(family, tiny, tmp_path, monkeypatch):
    """LEN-21: not even if a plugin names them; nor a word of the template's source that happens to be a variable."""
    plugin = tmp_path / "plugin.py"
    plugin.write_text(f"NAMES = {OF_A_PROCESS}\nself = row = 'and a word'\n")

    def context():
        return digest_of(dependencies_of(tiny(family).template, [str(plugin)]), 16)

    before = context()
    for name in (*OF_A_PROCESS, "self", "row", "ROW", "inputs", "template", "x", "MY_OWN"):
        monkeypatch.setenv(name, "another")
        assert context() == before, name
    plugin.write_text(f"{plugin.read_text()}MINE = 'MY_OWN'\n")
    named = context()
    monkeypatch.setenv("MY_OWN", "yet another")
    assert context() != named


def test_variables_that_only_files_beside_a_plugin_name_are_in_no_key(template, tmp_path, monkeypatch):
    """LEN-21: a script with `os.environ` in the same folder says nothing about lengths; its content counts."""
    (tmp_path / "plugin.py").write_text("")
    (tmp_path / "deploy.py").write_text("import os\nos.environ['MY_SECRET']\n")

    def context():
        return digest_of(dependencies_of(template, [str(tmp_path / "plugin.py")]), 16)

    before = context()
    monkeypatch.setenv("MY_SECRET", "1")
    assert context() == before
    (tmp_path / "deploy.py").write_text("")
    assert context() != before


@pytest.mark.parametrize("name", ["QWENVL_BBOX_FORMAT", "MAX_PIXELS", "VIDEO_MAX_PIXELS", "FPS_MAX_FRAMES"])
def test_variables_that_swift_reads_are_in_the_key(name, template, monkeypatch):
    """LEN-7: by `get_env_args` in the code of the template, or as a constant of the module that loads media."""
    before = context_of(template)
    monkeypatch.setenv(name, "77")
    assert context_of(template) != before


# -- the row ----------------------------------------------------------------------------------------------------------


def lengths_of(rows, template, cache):
    return with_lengths(RowSource(name="rows", rows=rows), template, ARGS, str(cache)).sizes.lengths.tolist()


def test_tools_in_another_order_are_other_tokens(template, tmp_path):
    """LEN-7: by ms-swift's loader, whose Arrow columns keep the order of each schema."""
    long, short = {"type": "string", "description": "a b c"}, {"enum": ["x", "yy"], "type": "string"}

    def loaded(*properties):
        tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": dict(properties)}}}
        rows = [{**text_row(f"row {number}"), "tools": [tool]} for number in range(3)]
        return load_dataset([write_jsonl(tmp_path / "rows.jsonl", rows)], split_dataset_ratio=0.0)[0]

    seen = set()
    for properties in ((("at", long), ("how_far_away", short)), (("how_far_away", short), ("at", long))):
        rows = loaded(*properties)
        encoded = [template.encode(row, return_length=True) for row in rows]
        assert lengths_of(rows, template, tmp_path / "cache") == [one["length"] for one in encoded]
        seen.add(tuple(encoded[0]["input_ids"]))
        num_bytes = size_of_cache(tmp_path / "cache")
        assert lengths_of(loaded(*properties), template, tmp_path / "cache") == [one["length"] for one in encoded]
        assert size_of_cache(tmp_path / "cache") == num_bytes, "the same rows, loaded again, are measured again"
    assert len(seen) == 2


def size_of_cache(folder):
    return sum(path.stat().st_size for path in folder.glob("*.lengths"))


def test_file_urls_are_the_paths_that_they_name(template, tmp_path):
    """LEN-17: in every form of a row; the file is watched as any other."""
    path = photo(tmp_path, "a photo", 300, 200)
    other = photo(tmp_path, "50%20", 300, 200)
    urls = [f"file://{path}", f"file://{path.replace(' ', '%20')}", f"file://localhost{path}", f"file://{other}"]
    rows = [image_row([url]) for url in urls]
    rows.append({**image_row([path]), "images": [{"bytes": None, "path": urls[1]}]})
    content = [{"type": "image", "image": urls[1]}, {"type": "text", "text": "file:///what is this?"}]
    rows.append({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "a photo"}]})
    found = with_lengths(RowSource(name="rows", rows=rows), template, ARGS, str(tmp_path / "cache")).sizes
    assert found.failures == {}
    assert found.lengths[:5].tolist() == [template.encode(image_row([path]), return_length=True)["length"]] * 5
    assert found.images.tolist() == [1] * 6
    sample = RowEncoder(template).sample(rows[1], SampleId("rows", 1))
    assert sample["length"] == found.lengths[1], "as training has it"
