"""`vlpack doctor`: what it sees, and what it advises."""

import json
import re
from pathlib import Path

import pytest

from swift_vlpack.cli import doctor, main
from swift_vlpack.cli.doctor import advice_on, doctor_text, fits, packages, ranges, requirements, version_of

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def facts():
    """Of this environment, and a process that imported an ms-swift that fits."""
    imported = {"torch": "2.15.0", "seam": 37, "swift_problem": None}
    return {"version": "0.1.0", "python": [3, 11, 7], "packages": packages(), "imported": imported}


def test_nothing_is_in_the_way_here(facts):
    """CLI-18"""
    assert list(advice_on(facts)) == []
    assert "in the way   nothing" in doctor_text({**facts, "advice": []})


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"python": [3, 9, 1]}, "Python 3.10"),
        ({"packages": {"ms-swift": {"version": None, "wanted": "", "fits": False}}}, "ms-swift not installed"),
        (
            {"packages": {"ms-swift": {"version": "4.9.0", "wanted": ">=4.5.3,<4.7", "fits": False}}},
            "pip install 'ms-swift>=4.5.3,<4.7'",
        ),
        ({"imported": {"swift_problem": "Template.encode is gone"}}, "Template.encode is gone"),
        ({"imported": {"torch_problem": "OSError: libcudart"}}, "torch cannot be imported: OSError: libcudart"),
    ],
)
def test_each_thing_in_the_way_is_said_with_its_way_out(changes, part, facts):
    """CLI-18"""
    (advice,) = advice_on({**facts, **changes})
    assert part in advice
    assert part in doctor_text({**facts, **changes, "advice": [advice]})


def test_what_is_required_is_what_the_project_says():
    """CLI-18: every line of it is understood, and what is installed here fits."""
    said = ranges(declared((ROOT / "pyproject.toml").read_text()))
    assert {"ms-swift": ">=4.5.3,<4.7", "torchvision": ""}.items() <= said.items()
    assert [name for name, wanted in said.items() if not fits(version_of(name), wanted)] == []
    assert "ms-swift" in requirements()
    assert all(package["fits"] for package in packages().values())


def declared(text):
    """Python 3.10 has no reader of TOML."""
    block = text.partition("\ndependencies = [")[2].partition("]")[0]
    lines = re.findall(r'"([^"]+)"', block)
    assert len(lines) > 5
    return lines


@pytest.mark.parametrize(
    ("version", "wanted", "is_in"),
    [
        ("2.0", "~=1.26", False),
        ("1.30", "~=1.26", True),
        ("4.7.0.dev0", ">=4.5.3,<4.7", False),
        ("2.15.0.dev20260101+cu128", ">=2.4", True),
        ("2.15.0a0+git", ">=2.4", True),
        ("unknown", ">=2", False),
        ("4.7", "!=4.7.0", False),
    ],
)
def test_ranges_mean_what_they_mean_to_installers(version, wanted, is_in):
    """CLI-18: builds of a later version count, the one that an upper limit leaves out does not."""
    assert fits(version, wanted) is is_in


@pytest.mark.parametrize("code", ["import sys; sys.exit('libtorch.so is broken')", "import os; os.abort()"])
def test_torch_that_takes_its_process_down_is_advice_and_no_crash(code, tmp_path, monkeypatch, capsys):
    """CLI-18"""
    (tmp_path / "broken_looker.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "IMPORTER", "broken_looker")
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert "torch cannot be imported: the process that imported it ended with code" in report["advice"][0]
