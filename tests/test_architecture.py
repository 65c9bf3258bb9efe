"""The shape of the project: layers, names, and specs that tests keep."""

import ast
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "swift_vlpack"
FORBIDDEN = {
    "core": ("swift", "torch", "transformers", *(f"swift_vlpack.{name}" for name in ("data", "text", "host", "cli"))),
    "data": ("swift", "swift_vlpack.text", "swift_vlpack.host", "swift_vlpack.cli"),
    "text": ("swift", "swift_vlpack.data", "swift_vlpack.host", "swift_vlpack.cli"),
    "host": ("swift_vlpack.cli",),
}
CLAUSE = re.compile(r"\b([A-Z]+-\d+)\b")


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            names.update(arg.value for arg in node.args if isinstance(arg, ast.Constant))
    return names


def is_below(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_imports_go_one_way(layer):
    """ARCH-1"""
    exempt = {(PACKAGE / "core" / "packing" / "strategies.py", "swift.dataset.packing")}
    wrong = [
        (str(path.relative_to(ROOT)), name)
        for path in (PACKAGE / layer).rglob("*.py")
        for name in imported(path)
        for package in FORBIDDEN[layer]
        if is_below(name, package) and (path, name) not in exempt
    ]
    assert wrong == []


def test_core_has_modules_to_check():
    """ARCH-1"""
    assert len(list((PACKAGE / "core").rglob("*.py"))) > 10
    assert "swift.dataset.packing" in imported(PACKAGE / "core" / "packing" / "strategies.py")


def test_importing_the_package_loads_neither_torch_nor_swift():
    """ARCH-2"""
    code = (
        "import sys, swift_vlpack, swift_vlpack.cli; "
        "print([name for name in ('torch', 'swift', 'transformers', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_module_shadows_an_installed_package():
    """ARCH-3"""
    installed = {name.lower() for name in importlib.metadata.packages_distributions()} | set(sys.stdlib_module_names)
    ours = {path.stem for path in PACKAGE.rglob("*.py")} | {path.parent.name for path in PACKAGE.rglob("*.py")}
    ours -= {"swift_vlpack"}  # installed under this very name
    assert ours & installed == set()


def clauses_defined() -> list[str]:
    text = "\n".join(path.read_text() for path in (ROOT / "specs").glob("*.md"))
    return re.findall(r"\*\*([A-Z]+-\d+)\*\*", text)


def functions_of_tests() -> list[ast.FunctionDef]:
    trees = [ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("*.py")]
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def names_called(function: ast.FunctionDef) -> set[str]:
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {getattr(call, "attr", getattr(call, "id", "")) for call in calls}


def can_fail_by_itself(function: ast.FunctionDef) -> bool:
    has_assert = any(isinstance(node, ast.Assert) for node in ast.walk(function))
    return has_assert or bool(names_called(function) & {"raises", "warns", "fail"})


def clauses_cited(*, by_tests_that_can_fail: bool) -> set[str]:
    """A test can fail that asserts something, or calls a helper that does."""
    functions = functions_of_tests()
    able = {function.name for function in functions if can_fail_by_itself(function)}
    cited = set()
    for function in functions:
        if function.name.startswith("test_") and (
            not by_tests_that_can_fail or function.name in able or names_called(function) & able
        ):
            cited |= set(CLAUSE.findall(ast.get_docstring(function) or ""))
    return cited


def test_every_clause_is_cited_by_a_test_and_exists():
    """ARCH-4"""
    defined = clauses_defined()
    assert sorted(set(defined)) == sorted(defined), "a number that two clauses have"
    proved = clauses_cited(by_tests_that_can_fail=True)
    assert set(defined) - proved == set(), "clauses without a test that can fail"
    assert clauses_cited(by_tests_that_can_fail=False) - set(defined) == set(), "citations of no clause in specs/"
