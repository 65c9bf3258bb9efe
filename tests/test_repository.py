"""What people expect to find in a repository, and that none of it drifts from what it is about."""

import ast
import re
import shutil
import subprocess
import sys

import pytest
import yaml

import swift_vlpack
from swift_vlpack.cli import all_commands
from tests.doc_blocks import ROOT
from tests.parsed import nodes_of

WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def made(*arguments, **environ):
    """The commands that make would run for a target in an environment that is not there yet."""
    clean = {"PATH": "/usr/bin:/bin", **environ}
    done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, env=clean, capture_output=True, text=True, check=True)
    return done.stdout


# -- version ----------------------------------------------------------------------------------------------------------


def test_version_is_the_same_wherever_it_stands():
    """PKG-8"""
    sections = re.findall(r"^## \[([^\]]+)\](.*)$", text_of("CHANGELOG.md"), flags=re.M)
    assert sections[0] == ("Unreleased", "")
    version, date = sections[1]
    assert version == swift_vlpack.__version__
    assert re.fullmatch(r" - \d{4}-\d\d-\d\d", date)
    assert f"swift-vlpack  {version}, python" in text_of("docs/commands.md")
    cited = yaml.safe_load(text_of("CITATION.cff"))
    assert (cited["version"], f" - {cited['date-released']}") == (version, date)


# -- CI ---------------------------------------------------------------------------------------------------------------


def test_hosted_ci_runs_the_script_that_people_run():
    """PKG-9: nothing is installed or tested that only the workflow knows of."""
    workflow = yaml.safe_load(WORKFLOW.read_text())
    (job,) = workflow["jobs"].values()
    uses, runs = job["steps"]
    assert runs["run"] == ".ci/run"
    assert set(runs["env"]) == {"SWIFT"}
    assert re.fullmatch(r"actions/checkout@[0-9a-f]{40}", uses["uses"]), "a tag can be moved, a commit cannot"
    assert workflow["permissions"] == {"contents": "read"}
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text_of("pyproject.toml"))
    assert job["strategy"]["matrix"] == {"python": pythons, "swift": ["oldest", "newest"]}
    assert f'requires-python = ">={pythons[0]}"' in text_of("pyproject.toml")
    assert "matrix.python" in job["container"]["image"]


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


@needs_make
def test_make_takes_the_python_and_the_ms_swift_that_ci_asks_for():
    """PKG-9: from the environment or the command line, each pair in a folder of its own."""
    (oldest,) = re.findall(r'"ms-swift>=([\d.]+),', text_of("pyproject.toml"))
    everywhere = made("lint", SWIFT="oldest", PYTHON="/no/where/python3.99")
    assert "/no/where/python3.99 -m venv .venv-python3.99-oldest" in everywhere
    assert f"-e '.[test,docs]' ms-swift=={oldest};" in everywhere
    assert ".venv-python3.99-oldest/bin/ruff check ." in everywhere
    assert everywhere == made("lint", "SWIFT=oldest", "PYTHON=/no/where/python3.99")
    assert "ms-swift==4.98.7;" in made("lint", SWIFT="4.98.7")
    assert ".venv/bin/ruff check ." in made("lint", SWIFT="newest", PYTHON="python3")
    assert "ms-swift==" not in made("-B", "lint")


@needs_make
def test_tests_on_the_oldest_ms_swift_run_in_its_environment():
    """PKG-9: and by the same Python."""
    for target in ("test-oldest", "test-oldest-few"):
        said = made(target, PYTHON="python3.99")
        assert ".venv-python3.99-oldest/bin/python -m pytest" in said
        assert ".venv-python3.99/" not in said


@needs_make
def test_hooks_of_commits_run_what_make_lint_runs():
    """PKG-9: the same commands in the same order, by the tools of the same environment."""
    (local,) = yaml.safe_load(text_of(".pre-commit-config.yaml"))["repos"]
    assert local["repo"] == "local"
    run = [line for line in made("lint").splitlines() if re.match(r"\.venv/bin/(ruff|mypy)", line)]
    assert [hook["entry"] for hook in local["hooks"]] == run
    for hook in local["hooks"]:
        assert not hook["pass_filenames"], "the whole tree, as in CI"
        assert re.search(hook["files"], "tests/tiny.py")
        assert re.search(hook["files"], "pyproject.toml")


# -- what machines read -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ("github-workflows", [".github/workflows/ci.yml"]),
        ("github-issue-forms", [".github/ISSUE_TEMPLATE/bug.yml", ".github/ISSUE_TEMPLATE/question.yml"]),
        ("github-issue-config", [".github/ISSUE_TEMPLATE/config.yml"]),
        ("citation-file-format", ["CITATION.cff"]),
    ],
)
def test_files_fit_the_schemas_of_those_who_read_them(schema, names):
    """PKG-10: check-jsonschema has them in itself and asks no network."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    done = subprocess.run([*command, *names], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_citation_names_the_contributors_and_the_license_of_the_package():
    """PKG-10"""
    cited = yaml.safe_load(text_of("CITATION.cff"))
    assert cited["authors"] == [{"name": "swift_vlpack contributors"}]
    assert f'license = "{cited["license"]}"' in text_of("pyproject.toml")
    assert not {"repository-code", "url", "doi", "contact"} & set(cited)


def test_form_for_bugs_asks_for_what_doctor_says():
    """PKG-10: and only for commands that exist."""
    text = text_of(".github/ISSUE_TEMPLATE/bug.yml") + text_of(".github/ISSUE_TEMPLATE/question.yml")
    named = set(re.findall(r"`vlpack (\w+)", text))
    assert "doctor" in named
    assert named <= {command.name for command in all_commands()}
    fields = {field.get("id"): field for field in yaml.safe_load(text_of(".github/ISSUE_TEMPLATE/bug.yml"))["body"]}
    assert fields["doctor"]["validations"]["required"]


# -- what strangers read ----------------------------------------------------------------------------------------------

KNOWN = ("https://github.com/modelscope/ms-swift", "https://keepachangelog.com/")


def for_strangers():
    files = [
        path for path in ROOT.iterdir() if path.suffix in (".md", ".cff", ".toml", ".yaml") or path.stem == "Dockerfile"
    ]
    return [*files, *(ROOT / ".github").rglob("*.yml")]


def test_no_address_is_named_that_is_not_known():
    """PKG-10: a placeholder is worse than nothing."""
    names = {path.name for path in for_strangers()}
    assert {"README.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "pyproject.toml", "bug.yml"} <= names
    for path in for_strangers():
        text = path.read_text(encoding="utf-8")
        assert re.findall(r"[\w.+-]+@[\w-]+\.[a-z]+", text) == [], path.name
        named = re.findall(r"https?://[^\s)\"'>`]+", text)
        assert [url for url in named if not url.startswith(KNOWN)] == [], path.name


def test_what_security_says_of_files_is_so():
    """PKG-13: objects are loaded from no file, and no text is run."""
    refused = {
        "yaml": ("load", "full_load", "unsafe_load"),
        "torch": ("load",),
        "pickle": ("load",),
        "": ("eval", "exec"),
    }
    for path in (ROOT / "swift_vlpack").rglob("*.py"):
        for node in nodes_of(path):
            if not isinstance(node, ast.Call):
                continue
            module, _, name = ast.unparse(node.func).rpartition(".")
            assert name not in refused.get(module, ()), f"{path.name}: {ast.unparse(node)}"
            assert [keyword for keyword in node.keywords if keyword.arg == "allow_pickle" and keyword.value.value] == []
