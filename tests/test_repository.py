"""What people expect to find in a repository, and that none of it drifts from what it is about."""

import re
import subprocess

import check_jsonschema
import pytest
import yaml
from click.testing import CliRunner

import swift_vlpack
from swift_vlpack.cli import COMMANDS
from tests.doc_blocks import ROOT, blocks

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
    assert f"swift-vlpack {version}, python" in text_of("docs/commands.md")
    cited = yaml.safe_load(text_of("CITATION.cff"))
    assert (cited["version"], f" - {cited['date-released']}") == (version, date)


# -- CI ---------------------------------------------------------------------------------------------------------------


def test_hosted_ci_runs_the_script_that_people_run():
    """PKG-9: nothing is installed or tested that only the workflow knows of."""
    workflow = yaml.safe_load(WORKFLOW.read_text())
    job, newest, rehearsal = workflow["jobs"].values()
    uses, runs = job["steps"]
    assert runs["run"] == ".ci/run"
    assert set(runs["env"]) == {"SWIFT"}
    assert re.fullmatch(r"actions/checkout@[0-9a-f]{40}", uses["uses"]), "a tag can be moved, a commit cannot"
    assert workflow["permissions"] == {"contents": "read"}
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text_of("pyproject.toml"))
    assert job["strategy"]["matrix"] == {"python": pythons, "swift": ["oldest", "newest"]}
    assert f'requires-python = ">={pythons[0]}"' in text_of("pyproject.toml")
    assert "matrix.python" in job["container"]["image"]
    assert newest["continue-on-error"] is True
    assert newest["steps"] == [uses, {"run": "make test-transformers"}]
    assert rehearsal["steps"] == [uses, {"run": "make test-torch"}]


def test_rehearsal_runs_on_the_oldest_torch_that_has_the_kernel():
    """PKG-9: and what the pages say is the oldest."""
    said = made("test-torch")
    (oldest,) = re.findall(r"pip install .*torch==([\d.]+)\.0 torchvision", said)
    assert ".venv-torch/bin/python -m pytest tests/attention/test_rehearsal.py" in said
    for page in ("docs/attention.md", "docs/gpu.md"):
        assert f"{oldest} or newer" in text_of(page)


def test_newest_transformers_is_tried_and_is_not_in_the_range():
    """PKG-9: and what the pages say is the end of the range."""
    said = made("test-transformers")
    assert ".venv-transformers/bin/python -m pip install --quiet --disable-pip-version-check --upgrade tra" in said
    assert ".venv-transformers/bin/python -m pytest tests/attention" in said
    (end,) = re.findall(r'"transformers>=[\d.]+,<([\d.]+)"', text_of("pyproject.toml"))
    assert f"below {end} as ms-swift" in text_of("docs/dependencies.md")
    assert f"below {end} (" in text_of("docs/versions.md")


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
        (
            "github-issue-forms",
            [".github/ISSUE_TEMPLATE/bug.yml", ".github/ISSUE_TEMPLATE/gpu.yml", ".github/ISSUE_TEMPLATE/question.yml"],
        ),
        ("github-issue-config", [".github/ISSUE_TEMPLATE/config.yml"]),
        ("citation-file-format", ["CITATION.cff"]),
    ],
)
def test_files_fit_the_schemas_of_those_who_read_them(schema, names):
    """PKG-10: check-jsonschema has them in itself and asks no network."""
    command = ["--builtin-schema", f"vendor.{schema}", *(str(ROOT / name) for name in names)]
    done = CliRunner().invoke(check_jsonschema.main, command)
    assert done.exit_code == 0, done.output


def test_form_for_bugs_asks_for_what_doctor_says():
    """PKG-10: and only for commands that exist."""
    text = text_of(".github/ISSUE_TEMPLATE/bug.yml") + text_of(".github/ISSUE_TEMPLATE/question.yml")
    named = set(re.findall(r"`vlpack (\w+)", text))
    assert "doctor" in named
    assert named <= set(COMMANDS)
    fields = {field.get("id"): field for field in yaml.safe_load(text_of(".github/ISSUE_TEMPLATE/bug.yml"))["body"]}
    assert fields["doctor"]["validations"]["required"]


# -- what strangers read ----------------------------------------------------------------------------------------------

ENGLISH, CHINESE = "README.md", "README.zh-CN.md"
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


RUNS_CODE = re.compile(
    r"(pickle|torch)\.load\(|yaml\.(load|full_load|unsafe_load)\(|(?<![.\w])(eval|exec)\(|allow_pickle=True"
)


def test_what_security_says_of_files_is_so():
    """PKG-13: objects are loaded from no file, and no text is run."""
    files = list((ROOT / "swift_vlpack").rglob("*.py"))
    assert len(files) > 50
    assert [path.name for path in files if RUNS_CODE.search(path.read_text(encoding="utf-8"))] == []
    for line in ("torch.load(path)", "x = eval(text)", "yaml.load(text)", "np.load(path, allow_pickle=True)"):
        assert RUNS_CODE.search(line), line
    assert not RUNS_CODE.search("model.eval(); yaml.safe_load(text); np.load(path)")


def test_chinese_readme_has_the_commands_of_the_english_one():
    """PKG-11: in blocks letter for letter, marked alike, and the same names in the text."""
    english, chinese = blocks(ROOT / ENGLISH), blocks(ROOT / CHINESE)
    assert len(english) > 4
    assert [(block.language, block.text, block.mark) for block in chinese] == [
        (block.language, block.text, block.mark) for block in english
    ]
    assert names_in(CHINESE) == names_in(ENGLISH)


def names_in(name):
    """What a page sets in code in its sentences."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text_of(name), flags=re.S)))


def test_both_readmes_lead_to_the_same_places_and_to_each_other():
    """PKG-11"""
    links = {name: re.findall(r"\]\(([^)\s]+)\)", text_of(name)) for name in (ENGLISH, CHINESE)}
    assert links[ENGLISH][0] == CHINESE
    assert links[CHINESE][0] == ENGLISH
    assert links[CHINESE][1:] == links[ENGLISH][1:]
    headings = [re.findall(r"^#+ ", text_of(name), flags=re.M) for name in (ENGLISH, CHINESE)]
    assert headings[0] == headings[1]
    assert len(re.findall(r"^\|", text_of(CHINESE), flags=re.M)) == len(
        re.findall(r"^\|", text_of(ENGLISH), flags=re.M)
    )


def test_dockerfile_builds_what_make_builds_and_runs_the_demo():
    """PKG-12: hadolint looked at the rest, by hand."""
    lines = re.sub(r"\\\n", "", re.sub(r"^#.*\n", "", text_of("Dockerfile"), flags=re.M)).splitlines()
    steps = [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]
    (base,) = [rest for word, rest in steps if word == "FROM"]
    python = re.fullmatch(r"python:(3\.\d+)-slim-\w+", base)[1]
    assert f'"Programming Language :: Python :: {python}"' in text_of("pyproject.toml")
    assert [int(rest) > 0 for word, rest in steps if word == "USER"] == [True]
    assert steps[-1] == ("CMD", '["make", "demo"]')
    assert steps[-2] == ("RUN", "make .venv/.ready")
    assert "--no-install-recommends make " in steps[1][1]
    assert "not built" in text_of("Dockerfile")
    ignored = text_of(".dockerignore").split()
    assert {".git", ".venv*", "build", "dist", "demo_output"} <= set(ignored)
