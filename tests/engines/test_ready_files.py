"""The ready file of each engine: trained as it is typed, killed, and resumed to the end."""

import shutil

import pytest

from swift_vlpack.host.launch import plugin_path
from tests.data_rows import mixed_rows, write_jsonl
from tests.e2e.ranks import Run, ids, last_complete, step_of, trained
from tests.engines.launcher import ENGINES, PLUGIN, Outcome, engine_variables
from tests.host.runs import SMALL_VOCABULARY, epoch_report
from tests.host.test_configs import CONFIGS, SHORT

pytestmark = pytest.mark.engines
NUM_ROWS = 24
FAMILY = "qwen2_5_vl"


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with configs/ and the data that they name."""
    shutil.copytree(CONFIGS, tmp_path / "configs")
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "captions.jsonl", mixed_rows(tmp_path / "data" / "images", NUM_ROWS, largest=120))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(engine, model, output, **more):
    """The file, and flags that shorten the run and bring it to two CPUs."""
    plugins = [plugin_path(), SMALL_VOCABULARY, PLUGIN]
    flags = {**SHORT, "model": model, "output_dir": output, "max_steps": -1, "packing_length": 320}
    flags |= {
        "external_plugins": plugins,
        "callbacks": "engine_notes",
        "save_strategy": "steps",
        "save_steps": 2,
        **more,
    }
    parts = [f"configs/{engine}.yaml"]
    for name, value in flags.items():
        parts += [f"--{name}", *(value if isinstance(value, list) else [value])]
    return parts


@pytest.mark.parametrize("engine", ENGINES)
def test_ready_file_is_trained_killed_and_resumed(engine, workplace, small_folder, monkeypatch):
    """DOC-4 RANKS-5 RANKS-17: each sample once, and the engine of the file is in force."""
    for name, value in engine_variables(engine).items():
        monkeypatch.setenv(name, value)
    model, first, second = small_folder(FAMILY), workplace / "first", workplace / "second"
    run = Run(typed(engine, model, first), workplace / "first.txt", record_packs="true")
    run.until(lambda: bool(list(first.glob("checkpoint-*/vlpack_state.json"))))
    run.kill_rank(1)
    assert run.wait(120) != 0
    checkpoint = last_complete(first)
    again = Run(
        typed(engine, model, second, resume_from_checkpoint=checkpoint), workplace / "second.txt", record_packs="true"
    )
    assert again.wait() == 0, again.output[-4000:]
    assert Outcome(engine, second, 2).notes
    assert "isolation" in run.output
    packs = trained(first, up_to_step=step_of(checkpoint)) + trained(second)
    assert len(ids(packs)) == len(set(ids(packs))) == epoch_report(second)["num_samples"]
    assert epoch_report(second)["is_closed"]
