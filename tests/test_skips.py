"""What CI makes of skipped tests, in a pytest of its own."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.doc_blocks import ROOT
from tests.skips import LIST, allowed, is_checked

CONFTEST = "from tests import skips\n\ndef pytest_configure(config):\n    skips.register(config)\n"
NEEDS = """import pytest

@pytest.mark.skipif(True, reason={reason!r})
def test_needs_something(): pass

@pytest.mark.xfail(reason="known")
def test_is_known_to_fail(): assert False

def test_runs(): pass
"""
WHOLE_FILE = "import pytest\npytest.importorskip('no_such_package', reason={reason!r})\n"


def run(folder, *flags, ci):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CI": ci}
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", folder, "-p", "no:cacheprovider"]
    return subprocess.run([*command, *flags, folder], env=environ, capture_output=True, text=True, check=False)


def write(folder, reason):
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_one.py").write_text(NEEDS.format(reason=reason))
    (folder / "test_two.py").write_text(WHOLE_FILE.format(reason=reason))


@pytest.mark.parametrize("flags", [(), ("-n", "2")], ids=["alone", "two workers"])
def test_skip_for_another_reason_fails_ci_and_nobody_else(flags, tmp_path):
    """ARCH-10: of a test and of a whole file; an expected failure is none."""
    write(tmp_path, "there is no gizmo")
    failed = run(tmp_path, *flags, ci="true")
    assert failed.returncode == pytest.ExitCode.TESTS_FAILED, failed.stdout + failed.stderr
    assert failed.stdout.count("was skipped: there is no gizmo. CI allows it for the reasons of") == 2
    assert run(tmp_path, *flags, ci="").returncode == pytest.ExitCode.OK


def test_reason_of_the_list_passes(tmp_path):
    """ARCH-10"""
    reason = next(iter(allowed(LIST.read_text())))
    write(tmp_path, f"{reason}: errno 1")
    done = run(tmp_path, ci="true")
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert "was skipped" not in done.stdout


def test_list_gives_a_reason_for_every_line():
    """ARCH-10"""
    assert allowed(LIST.read_text())
    with pytest.raises(ValueError, match="is not 'REASON"):
        allowed("there is no gizmo\n")
    assert [is_checked({"CI": value}) for value in ("true", "1", "false", "")] == [True, True, False, False]
    assert not is_checked({})


def test_ci_installs_the_programs_that_tests_ask_for(tmp_path):
    """ARCH-10: those that no system brings; where they cannot be had it says so before a test runs."""
    script = (ROOT / ".ci" / "run").read_text()
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    asked = set(re.findall(r'shutil\.which\("([\w-]+)"\)', sources)) - {"bash", "unshare"}
    listed = re.search(r"^PROGRAMS=\((.*)\)$", script, flags=re.M)[1].split()
    assert {*asked, "chromium"} == set(listed)
    assert "export CI=true" in script
    # On a system without any of these, and without apt-get: nothing on the path but what the script itself is of.
    for name in ("bash", "env", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name))
    environ = {"PATH": str(tmp_path)}
    done = subprocess.run([ROOT / ".ci" / "run"], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert (
        done.stderr
        == f"{' '.join(listed)}: not installed, and there is no apt-get here to install them: install them by hand\n"
    )
