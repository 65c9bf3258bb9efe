"""What the documentation shows is run, or, where that needs a hub or a GPU, checked name by name."""

import ast
import doctest
import importlib
import importlib.util
import json
import pkgutil
import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest
import yaml

import swift_vlpack
import swift_vlpack.text
from swift_vlpack.cli import COMMANDS, command_of, main
from swift_vlpack.config import ENV_PREFIX, NO_OPTIONS, PackingConfig, option_names
from swift_vlpack.host.swift_flags import flag_names
from swift_vlpack.plan.strategies import STRATEGIES
from tests.browser import measured, needs_chromium
from tests.doc_blocks import PAGES, ROOT, all_blocks, blocks, commands
from tests.doc_tables import TABLES, with_tables
from tests.parsed import nodes_of

LIGHT = [
    module.name
    for folder in ("", "plan", "runlog", "rows", "feed", "pages", "cli")
    for module in pkgutil.iter_modules(
        [str(ROOT / "swift_vlpack" / folder)], f"swift_vlpack.{folder}.".replace("..", ".")
    )
    if not module.ispkg and module.name != "swift_vlpack.__main__"
]


@pytest.mark.parametrize("name", LIGHT)
def test_examples_of_light_modules(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


# -- blocks -----------------------------------------------------------------------------------------------------------

EXAMPLES = [page for page in PAGES if any(">>>" in block.text for block in blocks(page, "python"))]


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.stem)
def test_examples_of_a_page(page):
    """DOC-1"""
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    names = {}
    for block in blocks(page, "python"):
        test = parser.get_doctest(block.text, names, str(block), str(page), 0)
        names = test.globs
        assert runner.run(test, clear_globs=False).failed == 0


def test_python_that_needs_a_model_is_python_and_imports_what_exists():
    for block in (block for block in all_blocks("python") if ">>>" not in block.text):
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("swift_vlpack"):
                module = importlib.import_module(node.module)
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == [], str(block)


def test_commands_that_need_nothing_run(capsys, monkeypatch):
    """DOC-1: the tutorial has a test of its own, which runs its blocks one after the other."""
    monkeypatch.chdir(ROOT)
    lines = [line for block in all_blocks("bash") if block.mark == "run" for line in commands(block)]
    assert any("--lengths" in line for line in lines)
    for line in lines:
        assert main(shlex.split(line)[1:]) == 0
        assert capsys.readouterr().out


@pytest.mark.parametrize("block", all_blocks("bash", "shell"), ids=str)
def test_commands_name_what_exists(block):
    """DOC-1"""
    for line in commands(block):
        check_command(line)


def check_command(line):
    """Variables, programs, subcommands and flags, and the values of packing options."""
    words = shlex.split(re.sub(r"\$\(.*?\)", "X", line))
    while "=" in words[0]:
        name = words.pop(0).partition("=")[0]
        known = {ENV_PREFIX + option.upper() for option in option_names()} | set(NO_OPTIONS)
        assert name in known or not name.startswith(ENV_PREFIX), f"{name}: {line}"
    program, *rest = words
    program = Path(program).name  # of an environment
    if program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), flags=re.M), line
    elif program in ("vlpack", "swift"):
        check_flags(program, rest, line)
    elif program == "python":
        check_script(rest, line)
    else:
        assert program in (
            "pip",
            "accelerate",
            "cd",
            "cat",
            "ls",
            "nproc",
            "megatron",
            "ulimit",
            "nvidia-smi",
            "source",
            "export",
            "sed",
            "echo",
        ), f"what is {program}? {line}"


def check_flags(program, words, line):
    if words[0].startswith("--"):
        assert words[0] in ("--help", "--version"), line
        return
    known = set(flag_names())
    if program == "vlpack":
        command = command_of(words[0])
        parser = ArgumentParser()
        command.add_flags(parser)
        below = [choices for action in parser._actions if isinstance(choices := action.choices, dict)]
        parsers = [parser, *(one for choices in below for one in choices.values())]  # `vlpack cache clear` is two
        of_command = {option.removeprefix("--") for one in parsers for option in one._option_string_actions}
        known = of_command | (known if command.takes_run_flags else set())
    given = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    assert [flag for flag in given if flag not in known] == [], line
    for before, word in zip(words, [*words[1:], ""], strict=True):
        if before[2:] in option_names() and program == "vlpack" and ":" not in word:
            assert PackingConfig.from_mapping({before[2:]: word}, **({} if "packing_length" in before else LENGTH))
        if before.endswith(".yaml") and before.startswith("configs/"):
            assert (ROOT / before).exists(), line


LENGTH = {"packing_length": 8192}


def check_script(words, line):
    """A module or a file of ours; pip and others are there or not."""
    if words[0] == "-m":
        assert words[1] in ("pip", "venv") or importlib.util.find_spec(words[1]), line
    elif words[0].endswith(".py") and "/" in words[0]:
        assert (ROOT / words[0]).exists(), line


def test_json_and_yaml_of_the_pages_can_be_read():
    for block in all_blocks("json"):
        assert json.loads(block.text), str(block)
    for block in all_blocks("yaml"):
        content = yaml.safe_load(block.text)
        keys = set(content) - {"ENV", "sources", "ratio_by"}
        assert keys <= {*flag_names(), *option_names()}, str(block)


def test_wrong_commands_are_found():
    """DOC-1: the checks themselves."""
    for line in (
        "VLPACK_PACKNG=true swift sft",
        "make nothing",
        "vlpack sft --packing_bufer 3",
        "vlpack sft --packing_strategy magic",
        "vlpack plan --config configs/nothing.yaml",
        "swift sft --lerning_rate 1",
        "python -m tests.nothing",
        "rm -rf x",
    ):
        with pytest.raises((AssertionError, ValueError)):
            check_command(line)


# -- text -------------------------------------------------------------------------------------------------------------


def anchors_of(page):
    """As GitHub and the site make them of headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda path: path.stem)
def test_links_lead_somewhere(page):
    """DOC-3"""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = page if not path else (page.parent / path).resolve()
        assert file.exists(), target
        assert not anchor or anchor in anchors_of(file), target


FILES = [
    f"/{path.relative_to(ROOT)}"
    for folder in ("swift_vlpack", "tests", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
]


@pytest.mark.parametrize("page", ["architecture", "contributing", "core", "lengths", "resume", "streaming"])
def test_modules_that_a_page_names_are_there(page):
    """As `room/module.py`, or `module.py::name`, by the end of a path."""
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / f"{page}.md").read_text())
    for name, inside in named:
        found = [ROOT / path[1:] for path in FILES if path.endswith(f"/{name}")]
        assert found, f"{name} is nowhere"
        defined = rf"\b(def|class) {inside}\b|^{inside}\b.* = "
        assert any(re.search(defined, path.read_text(), flags=re.M) for path in found) or not inside


def test_every_strategy_has_its_row():
    rows = re.findall(r"^\| `(\w+)`", (ROOT / "docs" / "strategies.md").read_text(), flags=re.M)
    missing, gone = {*STRATEGIES} - set(rows), set(rows) - {*STRATEGIES}
    assert not missing, f"docs/strategies.md: write a row for {', '.join(missing)}"
    assert not gone, f"docs/strategies.md: {', '.join(gone)} is in no `STRATEGIES`"


def test_every_command_is_shown_on_a_page():
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    for name in COMMANDS:
        assert re.search(rf"\bvlpack {name}\b", pages), f"docs/ never shows `vlpack {name}`"


@pytest.mark.parametrize("page", TABLES)
def test_tables_that_follow_from_code_are_in_step(page):
    """DOC-2"""
    assert (ROOT / "docs" / page).read_text() == with_tables(page), "run `make docs-tables`"


def classes_of_errors():
    """Every class of the package that is a VLPackError, read from source, which imports nothing heavy."""
    bases = {}
    for path in (ROOT / "swift_vlpack").rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]

    def is_ours(name):
        return name == "VLPackError" or any(map(is_ours, bases.get(name, ())))

    return sorted(name for name in bases if is_ours(name))


def test_catalogue_of_errors_has_every_class_with_its_cause_and_cure():
    """DOC-2"""
    text = (ROOT / "docs" / "errors.md").read_text()
    sections = re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", text, flags=re.S | re.M)
    assert sorted(name for name, _ in sections) == classes_of_errors(), "each of them once"
    assert [name for name, said in sections if "**Cause**" not in said or "**Cure**" not in said] == []


def test_reference_has_every_public_name():
    """DOC-2"""
    text = (ROOT / "docs" / "api.md").read_text()
    for module in (swift_vlpack, swift_vlpack.text):
        named = re.findall(rf"^\.\. auto\w+:: {re.escape(module.__name__)}\.(\w+)$", text, flags=re.M)
        assert sorted(named) == sorted(module.__all__)


def test_every_page_is_in_the_navigation_once():
    """DOC-3: a new page needs a line in docs/index.md; the build of the site asks for the same."""
    index = (ROOT / "docs" / "index.md").read_text()
    menus = "".join(re.findall(r"```{toctree}\n(.*?)```", index, flags=re.S))
    listed = [line.strip() for line in menus.splitlines()]
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert sorted(line for line in listed if line in pages) == sorted(pages)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_ready_config_has_its_row(path):
    """DOC-4"""
    assert f"](../configs/{path.name})" in (ROOT / "docs" / "configs.md").read_text()


def test_pictures_are_used_and_need_nothing_from_elsewhere():
    pictures = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
    text = "".join(page.read_text() for page in PAGES)
    for picture in pictures:
        assert f"pictures/{picture.name})" in text
        drawn = picture.read_text()
        assert "<title>" in drawn
        assert re.findall(r'(?:href|src)="(?!#)', drawn) == []
        assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", drawn) == []
    assert pictures


# -- the site ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `make docs` builds it; broken links and pages that are in no menu are warnings, and end it."""
    for package in ("sphinx", "furo", "myst_parser"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not there: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("docs")
    # A process of its own, as in the Makefile: Sphinx's warnings are errors, those of Python within it are not ours.
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", ROOT / "docs"]
    done = subprocess.run([*command, "-d", folder / "trees", ROOT, folder / "site"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.mark.slow
@pytest.mark.telling
def test_site_builds_without_a_warning_and_asks_nobody_for_anything(site):
    """DOC-3"""
    pages = list(site.rglob("*.html"))
    assert len(pages) > len([page for page in PAGES if page.parent != ROOT]), "the others are for the repository"
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"(?:https?:)?//[^\"]*\"", text)
        assert [tag for tag in loaded if 'rel="canonical"' not in tag] == [], page.name


@pytest.mark.slow
@pytest.mark.telling
def test_site_has_a_front_page_that_says_how_to_install_and_to_train(site):
    """DOC-3: at the top of what is built, where a server looks for it; its commands are those of README."""
    text = (site / "index.html").read_text()
    links = re.findall(r'href="([^"]+)"', text)
    assert "docs/index.html" in links
    assert [link for link in links if not (site / link).exists()] == []
    shown = re.findall(r"<pre[^>]*>(.*?)</pre>", text)
    assert shown[0] == "pip install ."
    for line in shown:
        check_command(line.removesuffix(" ..."))


SHAPE_OF_OPTIONS = """({
  wide: root.scrollWidth,
  cells: [...root.querySelectorAll("#options td")].map(one => one.clientWidth),
  tables: [...root.querySelectorAll(".table-wrapper")].map(one => [one.tabIndex, one.scrollWidth - one.clientWidth]),
  scopes: [...root.querySelectorAll("th")].map(one => one.scope),
})"""


@pytest.mark.slow
@pytest.mark.telling
@needs_chromium
def test_table_of_options_can_be_read_on_a_phone(site):
    """DOC-3: at 390 px no cell is out of sight, and none is so narrow that it has a word on each line."""
    page = site / "docs" / "options.html"
    text = page.read_text().replace("<head>", f'<head><base href="{page.as_uri()}">', 1)
    look = measured(text, SHAPE_OF_OPTIONS, width=390)
    assert look["wide"] <= 390
    assert look["tables"]
    assert {tab for tab, _ in look["tables"]} == {0}
    assert max(hidden for _, hidden in look["tables"]) <= 1, "pixels"
    assert min(look["cells"]) > 300
    assert set(look["scopes"]) == {"col"}
    assert measured(text, SHAPE_OF_OPTIONS, width=1280)["cells"][0] < 300, "a table again where there is room"
