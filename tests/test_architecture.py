"""The shape of the project: layers, names, and specs that tests keep."""

import ast
import importlib.metadata
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from swift_vlpack.gone import GONE
from tests.parsed import nodes_of, tree_of

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "swift_vlpack"
NUMBERS = ("plan", "runlog")
TENSORS = ("rows", "lengths", "attention", "feed", "proof")
BASE = (
    "config",
    "cores",
    "gone",
    "reasons",
    "errors",
    "files",
    "json_lines",
    "lines",
    "envelope",
    "comm",
    "words",
    "yaml_files",
)
HEAVY_OF_HOST = ("swift", "torch", "transformers")


def ours(*rooms: str) -> tuple[str, ...]:
    return tuple(f"swift_vlpack.{room}" for room in rooms)


FORBIDDEN = {
    "testing": ("swift", *ours("text", "pages", "host", "cli")),
    **dict.fromkeys(BASE, (*HEAVY_OF_HOST, *ours(*NUMBERS[1:], *TENSORS, "text", "pages", "host", "cli"))),
    "plan": (*HEAVY_OF_HOST, *ours("runlog", *TENSORS, "text", "pages", "host", "cli")),
    "runlog": (*HEAVY_OF_HOST, *ours(*TENSORS, "text", "pages", "host", "cli")),
    **dict.fromkeys(TENSORS, ("swift", *ours("text", "host", "cli"))),
    "rows": ("swift", *ours("lengths", "attention", "feed", "proof", "text", "host", "cli")),
    "lengths": ("swift", *ours("attention", "feed", "proof", "text", "host", "cli")),
    "text": ("swift", *ours(*TENSORS, "host", "cli")),
    "pages": ("swift", *ours("text", "host", "cli")),
    "host": ours("cli"),
    "cli": ("swift",),
}
"""What each room must not import: numbers <- tensors <- host <- cli. A file of the base is named without its suffix."""
CLAUSE = re.compile(r"\b([A-Z]+-\d+)\b")


@cache
def imported(path: Path) -> set[str]:
    names = set()
    for node in nodes_of(path):
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


def files_of(layer: str) -> list[Path]:
    """The modules of a room, or a file of the base."""
    found = [path for path in (PACKAGE / layer, PACKAGE / f"{layer}.py") if path.exists()]
    assert found, layer
    return sorted(found[0].rglob("*.py")) if found[0].is_dir() else found


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_imports_go_one_way(layer):
    """ARCH-1"""
    wrong = [
        (str(path.relative_to(ROOT)), name)
        for path in files_of(layer)
        for name in imported(path)
        for package in FORBIDDEN[layer]
        if is_below(name, package)
    ]
    assert wrong == []


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Everything a file imports, modules and what is taken from them; and whether that stands inside a function."""
    found = []

    def walk(node: ast.AST, is_inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name, is_inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                taken = (f"{child.module}.{alias.name}" for alias in child.names)
                found.extend((name if name in modules() else child.module, is_inside) for name in taken)
            walk(child, is_inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))

    walk(tree_of(path), False)
    return found


def reached(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen, todo = set(), list(graph[start])
    while todo:
        if (name := todo.pop()) not in seen:
            seen.add(name)
            todo += graph[name]
    return seen


def test_no_module_imports_itself_by_way_of_others():
    """ARCH-5: wherever in a file the imports stand."""
    known = modules()
    graph = {name: {of for of, _ in imports(path) if of in known} - {name} for name, path in known.items()}
    assert sum(map(len, graph.values())) > 300
    assert [name for name in graph if name in reached(name, graph)] == []


def test_trainer_knows_no_mode():
    """ARCH-8"""
    trainer = (PACKAGE / "host" / "trainer.py").read_text()
    assert re.findall(r"planned|streamed|buffer|packing_mode", trainer, flags=re.I) == []
    asks = [
        path.name for path in PACKAGE.rglob("*.py") if path.parent.name != "text" and "packing_mode" in code_of(path)
    ]
    assert set(asks) - {"stream.py"} == {"config.py"}  # an option of the same name, of streams of text


KINDS = (
    *("PlannedFeed", "StreamedFeed", "PlannedPackingDataset", "StreamedPackingDataset"),
    *("FusionCaptionDataset", "StreamedRows"),
)


def test_kinds_are_told_apart_where_rows_are_taken_in():
    """ARCH-8: give the kinds a method instead, and call it."""
    asking = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in ("isinstance", "issubclass", "type")
        and {name.id for name in ast.walk(node) if isinstance(name, ast.Name)} & set(KINDS)
    }
    assert asking == {"feed/packs.py"}


def test_options_are_read_from_variables_where_a_process_begins():
    """ARCH-11: elsewhere, take them from `packing_config(args)`, or from the config of the launch."""
    reading = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", getattr(node.func, "attr", "")) in ("chosen_options", "options_in_env", "from_env")
    }
    assert reading == {"config.py", "host/args.py", "host/launch.py", "cli/cache.py", "cli/plan.py"}


def test_nothing_of_ours_is_kept_on_objects_of_others():
    """ARCH-11: but for marks on functions of ours, which stand for functions of others."""
    marked = {
        (str(path.relative_to(PACKAGE)), ast.unparse(target.value), target.attr)
        for path in PACKAGE.rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and "vlpack" in target.attr.lower()
    }
    assert marked == {
        ("host/install.py", "_check_padding_free", "_vlpack_original"),
        ("host/install.py", "_prepare_dataset", "_vlpack_original"),
        ("host/messages.py", "hook", "is_of_vlpack"),
    }


def code_of(path: Path) -> str:
    """Without comments, texts and docstrings."""
    return " ".join(node.attr for node in nodes_of(path) if isinstance(node, ast.Attribute))


HEAVY = ("swift", "torch", "transformers", "accelerate", "datasets", "pyarrow", "yaml", "rich")
MISSING_BESIDE_NUMPY = ("packaging", "PIL")
"""Light, and not installed where only plans are made."""


def test_imports_inside_functions_keep_heavy_libraries_out_of_light_paths():
    """ARCH-5"""
    known = modules()
    graph = {name: {of for of, _ in imports(path)} for name, path in known.items()}

    def is_heavy(name: str) -> bool:
        names = {name} | ({*graph[name], *reached(name, known_graph)} if name in known else set())
        names |= {of for module in names & set(known) for of in graph[module]}
        return any(is_below(of, package) for of in names for package in HEAVY)

    known_graph = {name: {of for of in found if of in known} for name, found in graph.items()}
    inside = {
        (module, of)
        for module, path in known.items()
        for of, is_inside in imports(path)
        if is_inside and (of in known or of.split(".")[0] not in (*HEAVY, *MISSING_BESIDE_NUMPY, "swift_vlpack"))
    }
    assert [both for both in sorted(inside) if not is_heavy(both[1])] == []


def test_rooms_are_those_of_the_map():
    """ARCH-6"""
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "architecture.md").read_text(), flags=re.M)
    on_map = {PACKAGE / name for row in rows for name in re.findall(r"`([\w/]+)`", row)}
    on_map = {path for path in on_map if path.suffix == "" and path.is_dir()}
    exist = {path.parent for path in modules().values()} - {PACKAGE, PACKAGE / "plugin"}
    assert {str(path.relative_to(PACKAGE)) for path in exist ^ on_map} == set()


def test_every_file_beside_the_rooms_is_checked():
    """ARCH-1"""
    assert {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"} == {*BASE, "testing"}


@pytest.mark.parametrize("room", [*NUMBERS, *TENSORS])
def test_tests_of_a_room_need_no_host(room):
    """ARCH-9: but for ms-swift's packer, the reference for our own, where it is compared."""
    foreign = ("swift", "tests.host", *ours("host", "cli"), *(("torch", "transformers") if room in NUMBERS else ()))
    found = []
    for path in (ROOT / "tests" / room).rglob("*.py"):
        found += [(path.name, name) for name in imported(path) for package in foreign if is_below(name, package)]
        arguments = [
            argument.arg for node in nodes_of(path) if isinstance(node, ast.arguments) for argument in node.args
        ]
        found += [(path.name, name) for name in arguments if name in ("tiny", "tiny_folder", "small_folder")]
    assert {name for _, name in found} <= {"swift.dataset.packing"}, found


def test_importing_the_package_loads_neither_torch_nor_swift():
    """ARCH-2"""
    code = (
        "import sys, swift_vlpack, swift_vlpack.cli; "
        "print([name for name in ('torch', 'swift', 'transformers', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_plugin_shadows_no_installed_package():
    """ARCH-3: ms-swift puts the folder of a plugin first on `sys.path`, and that of ours has the plugin alone."""
    installed = {name.lower() for name in importlib.metadata.packages_distributions()} | set(sys.stdlib_module_names)
    beside = {path.stem for path in (PACKAGE / "plugin").iterdir()} - {"__pycache__"}
    assert beside == {"vlpack"}
    assert beside & installed == set()


def clauses_defined() -> list[str]:
    text = "\n".join(path.read_text() for path in (ROOT / "specs").glob("*.md"))
    return re.findall(r"\*\*([A-Z]+-\d+)\*\*", text)


def functions_of_tests() -> list[ast.FunctionDef]:
    paths = (ROOT / "tests").rglob("*.py")
    return [node for path in paths for node in nodes_of(path) if isinstance(node, ast.FunctionDef)]


@cache
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


def test_package_is_no_longer_than_its_spec_says():
    """ARCH-14"""
    most = re.search(r"The package has at most ([\d,]+) lines", (ROOT / "specs" / "ARCH.md").read_text())[1]
    lines = sum(path.read_text().count("\n") for path in PACKAGE.rglob("*.py"))
    assert lines <= int(most.replace(",", "")), "raise the number in specs/ARCH.md with the reason, or remove lines"


def test_what_is_gone_is_in_the_changelog_and_the_table_of_what_was_given_up_is_short():
    """ARCH-13"""
    changes = (ROOT / "CHANGELOG.md").read_text()
    words = {written: written.removeprefix("vlpack ").replace("=", " ").split() for written in GONE}
    assert [written for written, parts in words.items() if any(part not in changes for part in parts)] == []
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("## What was given up")[2].partition("\n## ")[0]
    assert 10 < sum(line.startswith("|") for line in table.splitlines()) <= 30
