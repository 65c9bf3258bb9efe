"""`vlpack pt` from a YAML file over pages longer than a pack, on two ranks: killed, resumed, each part trained once."""

import json
import random

import pytest
import yaml

from tests.data_rows import sentence, write_jsonl
from tests.e2e.ranks import Run, ids, last_complete, step_of, trained
from tests.e2e.test_command_line import options
from tests.e2e.test_plan import run as run_command
from tests.host.runs import SMALL_VOCABULARY
from tests.images import photo

FAMILY = "qwen2_5_vl"
NUM_ROWS = 10


@pytest.fixture(scope="module")
def config(small_folder, tmp_path_factory):
    """Interleaved pages of one to six images, most of them longer than a pack."""
    folder, draw = tmp_path_factory.mktemp("pages"), random.Random(5)
    rows = []
    for number in range(NUM_ROWS):
        images = [
            photo(folder, f"{number}_{k}", draw.randint(60, 190), draw.randint(60, 190), seed=k)
            for k in range(number % 7)
        ]
        text = "<image>".join(sentence(draw, 10, 70) for _ in range(len(images) + 1))
        rows.append({"messages": [{"role": "assistant", "content": text}], "images": images})
    flags = options(small_folder(FAMILY), folder / "out", dataset=write_jsonl(folder / "train.jsonl", rows))
    content = {
        **{name: str(value) for name, value in flags.items()},
        "external_plugins": [str(SMALL_VOCABULARY)],
        "max_length": 100,
        "packing_length": 100,
        "packing_strategy": "exact",
        "packing_drop_last": False,
        "packing_overflow": "split",
        "packing_stride": 8,
        "num_train_epochs": 1,
        "freeze_vit": "false",
        "save_strategy": "steps",
        "save_steps": 1,
        "split_dataset_ratio": 0,
    }
    (folder / "pages.yaml").write_text(yaml.safe_dump(content))
    return folder / "pages.yaml"


@pytest.mark.slow
@pytest.mark.telling
def test_every_part_is_trained_once_over_a_kill_and_a_resume(config, tmp_path):
    """CUT-11 CUT-13 CLI-8 RANKS-5: as the plan said it, on two ranks of `vlpack pt`."""
    report = run_command("plan", "pt", "--config", config, "--num_ranks", 2, "--json", cwd=tmp_path).stdout
    planned = json.loads(report[report.index("{") :])
    output = config.parent / "out"
    first = Run([config], tmp_path / "first.txt", command="pt", record_packs="true")
    first.until(lambda: bool(trained(output)) and trained(output)[-1]["step"] >= 3)
    first.kill_rank(1)
    assert first.wait(120) != 0
    checkpoint = last_complete(output)
    packs = trained(output, up_to_step=step_of(checkpoint))
    for path in (output / "vlpack").glob("packs_rank*.jsonl"):
        path.unlink()
    again = Run(
        [config, "--resume_from_checkpoint", checkpoint], tmp_path / "again.txt", command="pt", record_packs="true"
    )
    assert again.wait() == 0, again.output[-3000:]
    behind, ahead = ids(packs), ids(trained(output))
    assert len(behind) + len(ahead) == len({*behind, *ahead}) == planned["num_samples"]
    rows = {}
    for key in (*behind, *ahead):
        row, _, part = key.partition("/")
        rows.setdefault(row, []).append(part)
    assert len(rows) == NUM_ROWS
    assert sum(len(parts) > 2 for parts in rows.values()) > 3
    for parts in rows.values():
        assert parts == [""] or sorted(map(int, parts)) == list(range(len(parts)))
    halves = [{key.partition("/")[0] for key in some} for some in (behind, ahead)]
    assert halves[0] & halves[1], "some row was half trained"
    made = json.loads((output / "vlpack" / "epoch_0.json").read_text())
    assert made["is_closed"]
    assert made["rows"] == planned["cut"]["rows"]
    assert "isolation verified" in first.output
