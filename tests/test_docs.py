"""What the documentation shows is run."""

import doctest
import importlib
import pkgutil
import re
import shlex
from pathlib import Path

import pytest

import swift_vlpack
from swift_vlpack.cli import main
from swift_vlpack.core.packing.strategies import STRATEGIES

ROOT = Path(__file__).parent.parent
CORE = [
    module.name
    for module in pkgutil.walk_packages([str(ROOT / "swift_vlpack" / "core")], "swift_vlpack.core.")
    if not module.ispkg
]


@pytest.mark.parametrize("name", CORE)
def test_doctests_of_the_core(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("page", ["README.md", "docs/strategies.md", "docs/documents.md", "docs/core.md"])
def test_examples_of_a_page(page):
    text = (ROOT / page).read_text()
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert blocks, f"{page} has no example"
    names = {}
    for number, block in enumerate(blocks):
        test = parser.get_doctest(block, names, f"{page} block {number}", page, 0)
        names = test.globs
        assert runner.run(test, clear_globs=False).failed == 0


def test_plan_commands_in_the_readme_run(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = re.findall(r"^vlpack plan --lengths .*$", (ROOT / "README.md").read_text(), flags=re.M)
    assert commands
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0
        assert "lower bound" in capsys.readouterr().out


PAGES = sorted(path for folder in ("docs", "specs", "benchmarks") for path in (ROOT / folder).glob("*.md"))


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda path: path.stem)
def test_lines_end_at_120_characters(page):
    """Tables, what stands between fences, and single words (a link) may be longer; a change is one line of its log."""
    outside = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.S | re.M)
    lines = [line for line in outside.splitlines() if not line.lstrip().startswith("|")]
    assert [line for line in lines if len(line) > 120 and " " in line.strip().removeprefix("- ")] == []


FILES = [
    f"/{path.relative_to(ROOT)}"
    for folder in ("swift_vlpack", "tests", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
]


@pytest.mark.parametrize("page", ["architecture", "contributing", "core", "lengths", "resume", "streaming"])
def test_modules_that_a_page_names_are_there(page):
    """As `room/module.py`, or `module.py::function`, by the end of a path."""
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / f"{page}.md").read_text())
    for name, function in named:
        found = [ROOT / path[1:] for path in FILES if path.endswith(f"/{name}")]
        assert found, f"{name} is nowhere"
        assert any(re.search(rf"\b(def|class) {function}\b", path.read_text()) for path in found) or not function


def test_every_strategy_has_its_row():
    rows = re.findall(r"^\| `(\w+)`", (ROOT / "docs" / "strategies.md").read_text(), flags=re.M)
    assert sorted(rows) == sorted(STRATEGIES)


def test_changelog_begins_with_this_version():
    versions = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert next(version for version in versions if version != "Unreleased") == swift_vlpack.__version__


def test_public_names_are_sorted_and_there():
    names = swift_vlpack.__all__
    assert names == sorted(names)
    assert all(hasattr(swift_vlpack, name) for name in names)
