"""What `--json` prints: its keys, and of a plan and of packs that are looked at every number.

Commands about a run are called in this process, by the adapter; slow tests call all of them as they are typed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.data_rows import mixed_rows, text_row, write_jsonl
from tests.environment import packing_options, restored_environment
from tests.host.runs import SMALL_VOCABULARY, argv, packed_argv, train
from tests.marks import TELLING, telling
from tests.pinned import pins
from tests.pinned.adapter import of_a_run, vlpack

ROOT = Path(__file__).parents[2]
FAMILY = "qwen2_5_vl"
OPTIONS = {"packing_strategy": "exact", "packing_drop_last": "false"}
FLAGS = {"max_steps": 3, "max_length": 200, "gradient_accumulation_steps": 2}
LENGTHS = pins.read("lengths")
OF_A_RUN = {
    "plan": {},
    "inspect": {},
    "inspect --pack": {"pack": 1},
    "inspect --step": {"step": 2},
    "inspect --sample": {"sample": "photos:3"},
    "verify": {},
}


def keys_in(value: Any, path: str = "") -> set[str]:
    """The paths of all keys of a JSON value; numbers and ids as keys are all one, and so are the places of a list."""
    if isinstance(value, list):
        return {key for one in value for key in keys_in(one, f"{path}[]")}
    if not isinstance(value, dict):
        return set()
    found = set()
    for key, inside in value.items():
        here = f"{path}/{key if re.fullmatch(r'[A-Za-z_]+[0-9]*', key) else '*'}"
        found |= {here} | keys_in(inside, here)
    return found


def without_clock(value: Any) -> Any:
    """The same without what says how long something took, or where it lies; a digest of all options has that, too."""
    if isinstance(value, list):
        return [without_clock(one) for one in value]
    if not isinstance(value, dict):
        return value
    left_out = ("seconds", "model", "failures_file", "config_digest")
    return {key: without_clock(one) for key, one in value.items() if not key.startswith(left_out)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    photos = mixed_rows(folder / "images", 14, seed=5, largest=130)
    chat = [text_row(f"question {n}", "word " * (5 * n + 1)) for n in range(9)]
    (folder / "broken.jpg").write_text("no image")
    photos[6] = {**photos[6], "images": [str(folder / "broken.jpg")]} | {"messages": text_row("<image>a")["messages"]}
    return [write_jsonl(folder / f"{name}.jsonl", rows) for name, rows in (("photos", photos), ("chat", chat))]


@pytest.fixture
def flags(small_folder, data, tmp_path):
    packing_options(packing_cache_dir=str(tmp_path / "lengths"), **OPTIONS)
    return packed_argv(small_folder(FAMILY), FAMILY, tmp_path / "out", dataset=data, **FLAGS)


@pytest.fixture(scope="module")
def trained(small_folder, data, tmp_path_factory):
    """The folder of a run, and that of the lengths that it remembers."""
    folder = tmp_path_factory.mktemp("trained")
    with restored_environment():
        packing_options(packing_cache_dir=str(folder / "lengths"), **OPTIONS)
        more = {**FLAGS, "save_strategy": "steps", "save_steps": 2}
        train(packed_argv(small_folder(FAMILY), FAMILY, folder / "out", dataset=data, **more))
    return folder


@pytest.mark.parametrize("name", [pytest.param(n, marks=TELLING) if n == "verify" else n for n in OF_A_RUN])
def test_keys_of_a_command_about_a_run_are_as_pinned(name, flags, tmp_path):
    report = of_a_run(name.split()[0], flags, tmp_path, **OF_A_RUN[name])
    pins.check_keys(name, keys_in(report))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_plan_of_a_run_is_as_pinned(num_ranks, flags, tmp_path):
    report = of_a_run("plan", flags, tmp_path, num_ranks=num_ranks)
    left_out = [json.loads(line) for line in (tmp_path / "left_out.jsonl").read_text().splitlines()]
    ids = sorted([line["id"], line["reason"]] for line in left_out)
    pins.check("reports", f"plan of a run, {num_ranks} ranks", {**without_clock(report), "ids left out": ids})


@pytest.mark.parametrize("family", ["qwen2_5_vl", telling("qwen3_vl")])
def test_tensors_of_packs_are_as_pinned(family, small_folder, data, tmp_path):
    """Tokens, labels, positions and boundaries, as they go to the model."""
    packing_options(packing_cache_dir=str(tmp_path / "lengths"), **OPTIONS)
    flags = packed_argv(small_folder(family), family, tmp_path / "out", dataset=data, **FLAGS)
    num_packs = of_a_run("inspect", flags, tmp_path)["overview"]["num_packs"]
    packs = [of_a_run("inspect", flags, tmp_path, pack=number)["packs"][0] for number in range(num_packs)]
    tensors = ("input_ids", "labels", "position_ids", "cu_seqlens")
    value = [[pack["number"], {name: pins.digest(pack["row"][name]) for name in tensors}] for pack in packs]
    pins.check("reports", f"tensors of {family}", value)


@pytest.mark.parametrize("strategy", ["binpack", "exact", "best_fit"])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_plan_of_lengths_is_as_pinned(strategy, num_ranks, tmp_path):
    """`vlpack plan --lengths`: every number of the report."""
    packing_options()
    rows = [{"length": length, "images": n % 3, "patches": 4 * n} for n, length in enumerate(LENGTHS["mixed"])]
    path = write_jsonl(tmp_path / "lengths.jsonl", rows)
    flags = {"packing_length": 1024, "packing_strategy": strategy, "num_ranks": num_ranks, "seed": 3}
    report = vlpack("plan", "--lengths", path, *(f"--{name}={value}" for name, value in flags.items()), "--json")
    pins.check("reports", f"plan of lengths by {strategy}, {num_ranks} ranks", without_clock(report))
    if num_ranks == 1:
        pins.check_keys(f"plan --lengths, {strategy}", keys_in(report))


def test_keys_of_the_report_of_a_run_are_as_pinned(trained):
    pins.check_keys("report", keys_in(vlpack("report", trained / "out", "--json")))


def test_keys_of_the_list_of_lengths_are_as_pinned(trained):
    report = vlpack("cache", "list", "--packing_cache_dir", trained / "lengths", "--json")
    pins.check_keys("cache list", keys_in(report))
    value = sorted([one["source"], one["rows"], one["template"]] for one in report["entries"])
    pins.check("reports", "cache list", value)


@pytest.mark.slow
@pytest.mark.telling
def test_keys_of_the_doctor_are_as_pinned():
    """But for those of packages: which are there is no decision of ours."""
    keys = {key for key in keys_in(vlpack("doctor", "--json")) if not key.startswith("/packages/")}
    pins.check_keys("doctor", keys)


def test_keys_of_a_look_at_blocks_are_as_pinned(tmp_path):
    from datasets import Dataset

    from swift_vlpack.text import block_tokenize

    made = block_tokenize({"text": ["abc" * n for n in range(40)]}, tokenizer="byte", max_length=64)
    Dataset.from_dict(made).save_to_disk(tmp_path / "blocks")
    report = vlpack("inspect", "--dataset", tmp_path / "blocks", "--tokenizer", "byte", "--json")
    pins.check_keys("inspect --dataset", keys_in(report))


@pytest.mark.slow
@pytest.mark.telling
@pytest.mark.parametrize("name", OF_A_RUN)
def test_command_as_it_is_typed_prints_the_pinned_keys(name, small_folder, data, tmp_path):
    flags = argv(
        small_folder(FAMILY), FAMILY, tmp_path / "out", dataset=data, external_plugins=SMALL_VOCABULARY, max_length=200
    )
    command, *own = name.split()
    for flag, value in OF_A_RUN[name].items():
        own = [f"--{flag}", *([] if value is True else [str(value)])] + [one for one in own if one != f"--{flag}"]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("VLPACK_")}
    more = [
        part
        for flag, value in {**FLAGS, **OPTIONS}.items()
        if flag != "max_length"
        for part in (f"--{flag}", str(value))
    ]
    done = subprocess.run(
        [sys.executable, "-m", "swift_vlpack", command, *own, *flags, *more, "--json"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**clean, "PYTHONPATH": str(ROOT), "VLPACK_PACKING_CACHE_DIR": str(tmp_path / "lengths")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    pins.check_keys(name, keys_in(json.loads(done.stdout)))
