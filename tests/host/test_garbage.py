"""Garbage collection in a process that only trains."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swift_vlpack.host.launch import plugin_path

PROGRAM = """import gc
from swift.arguments import SftArguments
from swift.utils import import_external_file
import_external_file({plugin!r})
print(gc.get_freeze_count(), gc.isenabled())
"""


@pytest.mark.slow
@pytest.mark.telling
@pytest.mark.slow
@pytest.mark.telling
@pytest.mark.parametrize(("program", "passes_over"), [("swift/cli/sft.py", True), ("notebook/cell.py", False)])
def test_collections_of_a_process_that_only_trains_pass_over_what_is_imported(program, passes_over, tmp_path):
    """TRAIN-28: from where the plugin is loaded; in a notebook a former model has to be collected."""
    file = tmp_path / program
    file.parent.mkdir(parents=True)
    file.write_text(PROGRAM.format(plugin=str(plugin_path())))
    environ = {**os.environ, "PYTHONPATH": str(Path(plugin_path()).parents[2])}
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, env=environ, check=True)
    num_passed_over, is_enabled = done.stdout.splitlines()[-1].split()
    assert is_enabled == "True"
    assert int(num_passed_over) > 100_000 if passes_over else num_passed_over == "0"
