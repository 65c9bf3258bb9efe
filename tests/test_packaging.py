"""What is handed out: the wheel, the sdist, and a core that needs numpy alone."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_string
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest

import swift_vlpack
from swift_vlpack.words import INSTALL
from tests.runlog.test_segments import train

ROOT = Path(__file__).parent.parent
NOT_SOURCE = (".venv*", ".git", ".*_cache", "__pycache__", "*.egg-info", "build", "dist", "demo_output")
BUILD = "from setuptools import build_meta as b; import sys; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the sdist, made by the build backend from a copy of the folder."""
    folder = tmp_path_factory.mktemp("build")
    shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(*NOT_SOURCE))

    def build(kind):
        command = [sys.executable, "-W", "ignore", "-c", BUILD, kind, str(folder)]
        done = subprocess.run(command, cwd=folder / "source", capture_output=True, text=True, check=True)
        return folder / done.stdout.splitlines()[-1]

    return build("wheel"), build("sdist")


def test_wheel_has_the_package_its_types_and_its_command(built):
    """PKG-1"""
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        info = next(name.rpartition("/")[0] for name in wheel.namelist() if name.endswith("METADATA"))
        metadata = message_from_string(wheel.read(f"{info}/METADATA").decode())
        assert "vlpack = swift_vlpack.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "swift_vlpack").rglob("*.py")}
    of_pages = [path for kind in ("css", "html", "js") for path in (ROOT / "swift_vlpack").rglob(f"*.{kind}")]
    pages = {str(path.relative_to(ROOT)) for path in of_pages}
    assert pages
    configs = {f"swift_vlpack/configs/{path.name}" for path in (ROOT / "configs").iterdir()}
    assert names == {*ours, *pages, *configs, "swift_vlpack/py.typed"}
    assert metadata["Version"] == swift_vlpack.__version__
    classifiers = metadata.get_all("Classifier")
    assert "Typing :: Typed" in classifiers
    assert any(each.startswith("Development Status") for each in classifiers)
    assert all(url.count(", ") == 1 for url in metadata.get_all("Project-URL"))
    assert metadata["License-Expression"] == "Apache-2.0"
    wanted = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    always = {line.split(">")[0].split("<")[0].split(";")[0].strip() for line in wanted}
    assert {"ms-swift", "torch", "transformers", "numpy"} <= always, "one line installs what trains"


def test_text_of_the_wheel_has_no_link_that_only_a_checkout_can_follow(built):
    """PKG-1: an index shows it beside no other file."""
    with zipfile.ZipFile(built[0]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("METADATA"))
        metadata = message_from_string(wheel.read(name).decode())
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = str(metadata.get_payload())
    assert "vlpack plugin-path" in text
    assert [
        link for link in re.findall(r"\]\(([^)]*)\)|(?:src|href)=\"([^\"]*)", text) if "://" not in "".join(link)
    ] == []
    assert "pip install" not in text, "of a name that is not ours yet"


def test_ready_configs_are_found_where_the_wheel_is_installed(built, tmp_path):
    """PKG-7: and the copy names its files and the plugin as they are there."""
    site, folder = tmp_path / "site", tmp_path / "own"
    folder.mkdir()
    installer = [sys.executable, "-m", *(("uv", "pip") if find_spec("uv") else ("pip",)), "install", "--no-deps"]
    subprocess.run([*installer, "--target", str(site), str(built[0])], check=True, capture_output=True)

    def vlpack(*arguments):
        environ = {**os.environ, "PYTHONPATH": str(site)}
        command = [sys.executable, "-m", "swift_vlpack", *arguments]
        return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)

    listed = vlpack("configs").stdout
    names = sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))
    assert [line.split()[0] for line in listed.splitlines()[: len(names)]] == names
    assert "Where most people begin: LoRA on the language model" in listed
    written = vlpack("configs", "--copy", "fusion_by_ratio").stdout.split()
    assert written == [
        "configs/fusion_by_ratio.yaml", "configs/vlpack.schema.json", "configs/fusion_example.yaml",
        "configs/vlpack.fusion.schema.json",
    ]  # fmt: skip
    for name in written:
        assert (folder / name).read_text() == (ROOT / name).read_text()
    assert vlpack("configs", "--copy", "qwen2_5_vl_packed.yaml").returncode == 0
    assert f"- {site}/swift_vlpack/plugin/vlpack.py" in (folder / "configs" / "qwen2_5_vl_packed.yaml").read_text()
    (folder / "configs" / "captions.yaml").write_text("model: mine\n")
    for name, said in (("captions", "is another one"), ("captoins", "did you mean captions.yaml?")):
        done = vlpack("configs", "--copy", name)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert said in done.stderr


def test_sdist_has_docs_specs_tests_and_the_changelog(built):
    """PKG-2"""
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = {"LICENSE", "Makefile", "pyproject.toml", "swift_vlpack/py.typed", "CITATION.cff", "Dockerfile"}
    wanted |= {path.name for path in ROOT.glob("*.md")} | {".dockerignore", ".pre-commit-config.yaml"}
    for folder in (".ci", ".github", "benchmarks", "configs", "docs", "examples", "specs", "tests"):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        wanted |= {str(path.relative_to(ROOT)) for path in files}
    assert wanted - names == set()
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", ".git/"))]


@pytest.fixture(scope="module")
def with_numpy_only(built, tmp_path_factory):
    """Run in an environment of its own that has the wheel and numpy, as `pip install --no-deps` leaves it."""
    folder = tmp_path_factory.mktemp("numpy_only")
    venv.create(folder / "env", symlinks=True)
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(site)
    installed = Path(numpy.__file__).parent.parent
    for part in ("numpy", "numpy.libs", f"numpy-{numpy.__version__}.dist-info"):
        if (installed / part).exists():
            (site / part).symlink_to(installed / part)

    def run(*arguments):
        command = [str(folder / "env" / "bin" / "python"), *arguments]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True)

    return run


def test_core_plans_on_numpy_alone(with_numpy_only):
    """PKG-3"""
    code = (
        "import json, importlib.util as u, swift_vlpack as v\n"
        "assert not any(u.find_spec(name) for name in ('torch', 'swift', 'tqdm', 'yaml', 'binpacking'))\n"
        "lengths = [1 + 37 * n % 400 for n in range(300)]\n"
        "for name in ('binpack', 'greedy', 'first_fit', 'best_fit', 'exact'):\n"
        "    made = v.plan(lengths, v.PackingConfig(packing_length=1000, packing_strategy=name))\n"
        "    print(json.dumps([name, made.digest()]))\n"
    )
    done = with_numpy_only("-c", code)
    assert done.returncode == 0, done.stderr
    lengths = [1 + 37 * n % 400 for n in range(300)]
    printed = dict(map(json.loads, done.stdout.splitlines()))
    assert printed.pop("binpack"), (
        "which imports ms-swift where it is there, and is compared with it in test_strategies"
    )
    for name, digest in printed.items():
        config = swift_vlpack.PackingConfig(packing_length=1000, packing_strategy=name)
        assert swift_vlpack.plan(lengths, config).digest() == digest, "the plan is that of a full install"


def test_command_plans_on_numpy_alone(with_numpy_only):
    """PKG-3 PKG-4"""
    lengths = ROOT / "configs" / "example_lengths.json"
    for more in ((), ("--json",)):
        done = with_numpy_only(
            "-m", "swift_vlpack", "plan", "--lengths", str(lengths), "--packing_length", "8192", *more
        )
        assert done.returncode == 0, done.stderr
        assert ("num_packs" if more else "lower bound") in done.stdout


def test_what_needs_more_says_which_package_is_missing(with_numpy_only):
    """PKG-3"""
    done = with_numpy_only("-c", "import swift_vlpack; swift_vlpack.Collator")
    assert f"ImportError: Collator needs torch, which {INSTALL} brings" in done.stderr
    for command in ("sft", "pt", "plan"):
        done = with_numpy_only("-m", "swift_vlpack", command, "--model", "some", "--dataset", "some.jsonl")
        assert done.returncode == 2
        assert done.stderr.startswith(f"vlpack {command}: ms-swift is not installed; `pip install .` in a checkout")
        assert len(done.stderr.splitlines()) == 1


def test_command_that_needs_a_package_says_which(with_numpy_only, tmp_path):
    """PKG-3"""
    train(tmp_path, range(1, 3), 1)
    done = with_numpy_only("-m", "swift_vlpack", "inspect", "--run", str(tmp_path), "--step", "1")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert re.match(r"vlpack inspect: needs \w+, which is not installed; `pip install .` in a checkout", done.stderr)
    done = with_numpy_only("-m", "swift_vlpack", "report", str(tmp_path))
    assert "2 packs, 4 samples" in done.stdout, done.stderr
    done = with_numpy_only("-m", "swift_vlpack", "report", str(tmp_path), "--html", str(tmp_path / "report.html"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").read_text().count("<figure") == 2, "fill and speed; no loss was logged"


def test_nobody_is_sent_to_a_name_on_an_index_that_is_not_ours():
    """PKG-6: the package is not published, so anybody could register it."""
    folders = ("swift_vlpack", "docs", "configs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")] + [ROOT / "README.md"]
    files = [path for path in files if path.suffix in (".py", ".md", ".yaml")]
    advice = re.compile(r"pip install[^`\n]*(?<![\w./-])swift[-_]vlpack(?!\S*\.whl)")
    assert len(files) > 200
    assert [str(path) for path in files if advice.search(path.read_text())] == []


def test_machine_without_ms_swift_is_looked_at_all_the_same(with_numpy_only, tmp_path):
    """PKG-3 CLI-18 CLI-19"""
    done = with_numpy_only("-m", "swift_vlpack", "doctor", "--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["packages"]["ms-swift"] == {"version": None, "wanted": "<4.7,>=4.5.3", "fits": False}
    assert report["packages"]["numpy"]["fits"] is None, "nobody can tell without `packaging`"
    assert "ms-swift" in report["advice"][0]
    assert [advice for advice in report["advice"] if "supported range" in advice] == []
    done = with_numpy_only("-m", "swift_vlpack", "doctor")
    assert "ms-swift is missing (<4.7,>=4.5.3)" in done.stdout
    done = with_numpy_only("-m", "swift_vlpack", "cache", "list", "--packing_cache_dir", str(tmp_path))
    assert done.stdout.strip() == f"{tmp_path}: no cached lengths"


@pytest.fixture(scope="module")
def distributed(tmp_path_factory):
    """The wheel and the sdist, as `uv build` makes them of a copy of the folder for an index."""
    folder = tmp_path_factory.mktemp("distributed")
    shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(*NOT_SOURCE))
    tool = ["-m", "uv", "build", "--offline"] if find_spec("uv") else ["-m", "build"]
    run_here(*tool, "--no-build-isolation" if find_spec("uv") else "--no-isolation", cwd=folder / "source")
    return sorted((folder / "source" / "dist").glob("swift_vlpack-*"))


def run_here(*arguments, cwd):
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.telling
def test_an_index_would_take_what_is_built(distributed, tmp_path):
    """PKG-5: and the wheel that is made of the sdist is the wheel."""
    wheel, sdist = distributed
    assert (wheel.suffix, sdist.suffixes[-2:]) == (".whl", [".tar", ".gz"])
    said = run_here("-m", "twine", "check", "--strict", str(wheel), str(sdist), cwd=tmp_path)
    assert said.count("PASSED") == 2, said
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("swift_vlpack-*")
    made = run_here("-W", "ignore", "-c", BUILD, "wheel", str(tmp_path), cwd=source).splitlines()[-1]
    assert content_of(tmp_path / made) == content_of(wheel)


def content_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("RECORD")}


@pytest.mark.slow
@pytest.mark.telling
def test_wheel_works_outside_of_the_repository(distributed, tmp_path):
    """PKG-5: installed into an empty environment, beside the packages of this one."""
    venv.create(tmp_path / "env", symlinks=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    python = tmp_path / "env" / "bin" / "python"
    installer = ["-m", "uv", "pip", "install", "--offline"] if find_spec("uv") else ["-m", "pip", "install"]
    target = ["--python", str(python)] if find_spec("uv") else ["--target", str(site)]
    run_here(*installer, *target, "--no-deps", str(distributed[0]), cwd=tmp_path)
    # What it requires, without a download of gigabytes; an editable install of ours is not followed from here.
    (site / "others.pth").write_text(str(Path(numpy.__file__).parent.parent) + "\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLPACK_"))}

    def run(*command):
        return subprocess.run(list(map(str, command)), cwd=tmp_path, env=clean, capture_output=True, text=True)

    where = run(python, "-c", "import swift_vlpack; print(swift_vlpack.__file__)").stdout
    assert Path(where.strip()).is_relative_to(site)
    vlpack = tmp_path / "env" / "bin" / "vlpack"
    assert run(vlpack, "--version").stdout == f"vlpack {swift_vlpack.__version__}\n"
    lengths = ROOT / "configs" / "example_lengths.json"
    assert "lower bound" in run(vlpack, "plan", "--lengths", lengths, "--packing_length", "8192").stdout
    assert Path(run(vlpack, "plugin-path").stdout.strip()).is_relative_to(site)
    assert json.loads(run(vlpack, "schema").stdout)["properties"]["packing_length"]
    done = run(vlpack, "doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["imported"]["swift_problem"] is None
