"""`vlpack plan` and `vlpack sft` of one file, as they are typed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.data_rows import image_row, mixed_rows, write_jsonl
from tests.e2e.ranks import free_port
from tests.e2e.test_command_line import options
from tests.host.runs import epoch_report, log_lines
from tests.images import BROKEN

FAMILY = "qwen2_5_vl"
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def config(tiny_folder, tmp_path_factory):
    """A training file for two ranks, with an ENV block, and one row in the data that is no image."""
    folder = tmp_path_factory.mktemp("run")
    broken = folder / "text.jpg"
    BROKEN["text.jpg"](broken)
    dataset = write_jsonl(folder / "rows.jsonl", [*mixed_rows(folder, 14, largest=160), image_row([str(broken)])])
    flags = options(tiny_folder(FAMILY), folder / "out", dataset=dataset, num_train_epochs=2, max_length=200)
    content = {
        **{name: str(value) for name, value in flags.items()},
        "gradient_accumulation_steps": 2,
        "packing_verify": False,
        "ddp_backend": "gloo",
        "use_cpu": True,
        "ENV": {
            "NPROC_PER_NODE": 2,
            "MASTER_PORT": free_port(),
            "OMP_NUM_THREADS": 1,
            "VLPACK_PACKING_STRATEGY": "exact",
            "MAX_PIXELS": 12544,
        },
    }
    (folder / "train.yaml").write_text(yaml.safe_dump(content))
    return folder / "train.yaml"


def run(*argv, cwd):
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("VLPACK_", "MAX_PIXELS"))}
    done = subprocess.run(
        [Path(sys.executable).with_name("vlpack"), *map(str, argv)],
        cwd=cwd, capture_output=True, text=True, env=clean, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.mark.slow
@pytest.mark.telling
def test_plan_of_a_file_is_what_two_ranks_train(config, tmp_path):
    """CLI-6 CLI-7 CLI-8 CLI-9 CLI-34 SEE-1 SEE-3 SEE-8 SEE-15 REPORT-6"""
    done = run("plan", "--config", config, "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    listed = tmp_path / "vlpack_failures.jsonl"
    assert (report["num_ranks"], report["num_epochs"], report["rows"]) == (2, 2, 15)
    assert report["packing_strategy"] == "exact"
    assert (report["unreadable"], report["failures_file"]) == ({"image_unreadable": 1}, listed.name)
    left_out = [json.loads(line) for line in listed.read_text().splitlines()]
    [failed] = [row for row in left_out if row["reason"] == "image_unreadable"]
    assert (failed["id"], failed["files"]) == ("rows:14", [str(config.parent / "text.jpg")])
    assert len(left_out) == 1 + report["num_dropped"], "rows that fit no pack are listed too"
    assert list(tmp_path.iterdir()) == [listed], "CLI-34: here, and not beside the file"
    assert not (config.parent / "vlpack_failures.jsonl").exists()
    assert not (config.parent / "out").exists(), "a plan leaves no output folder"

    run("sft", config, cwd=tmp_path)
    steps = [line for line in log_lines(config.parent / "out") if "loss" in line]
    assert len(steps) == report["num_steps"]
    assert steps[0]["global_step/max_steps"] == f"1/{report['num_steps']}"
    trained = epoch_report(config.parent / "out")
    assert trained["num_packs"] == report["packs_per_epoch"] - report["packs_empty"]
    assert trained["num_tokens"] == report["num_tokens"]
    look_at(config, tmp_path, report["num_steps"])


def look_at(config, folder, num_steps):
    """Inspect and report in text, JSON and as a page; what libraries print is no part of them."""
    output = config.parent / "out"
    [step] = json.loads(run("inspect", "--run", output, "--step", 1, "--json", cwd=folder).stdout)["steps"]
    packs = json.loads(run("inspect", "--config", config, "--step", 1, "--json", cwd=folder).stdout)["packs"]
    assert step["loss"] > 0
    assert [(pack["rank"], pack["ids"]) for pack in step["packs"]] == [
        (pack["rank"], [member["id"] for member in pack["members"]]) for pack in packs
    ]
    done = run("inspect", "--config", config, "--html", folder / "packs.html", cwd=folder)
    assert done.stdout == f"{folder / 'packs.html'}: {counted_on(folder / 'packs.html')}\n"
    noise = ("trust_remote_code", "FutureWarning", "torch_dtype", "Map (num_proc")
    assert [word for word in noise if word in done.stderr] == []
    loud = run("inspect", "--config", config, "--pack", 0, "--verbose", cwd=folder)
    assert "trust_remote_code" in loud.stderr
    assert "\x1b" not in loud.stdout
    assert f"ended at step {num_steps} of {num_steps}" in run("report", output, cwd=folder).stdout


def counted_on(page):
    return re.search(r"on this page: (\d+ packs)", page.read_text())[1]


@pytest.mark.slow
@pytest.mark.telling
def test_report_for_a_reader_from_flags(config, tmp_path):
    """CLI-2 CLI-6: flags win over the file, and logs are no part of the report."""
    done = run("plan", "--config", config, "--num_ranks", "3", "--failures", "bad.jsonl", cwd=tmp_path)
    for part in (
        "data         15 rows in 1 source\n",
        "lengths      min ",
        "images  ",
        "steps  ",
        "ranks        3: ",
    ):
        assert part in done.stdout
    assert "image_unreadable 1), listed in bad.jsonl" in done.stdout
    assert "[" not in done.stdout, "no line of a log"
    assert (tmp_path / "bad.jsonl").exists()
    shown = re.search(r"```text\n(data .*?)```", (ROOT / "docs" / "planning.md").read_text(), flags=re.S).group(1)
    assert labels(done.stdout) == labels(shown), "the example in docs/planning.md is of another version"


def labels(report):
    return [name for line in report.splitlines() if (name := line[:12].strip())]
