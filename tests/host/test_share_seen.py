"""What people see of a run whose rows share their images: before it, while it trains, and after it."""

import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from swift_vlpack.cli.inspect import inspect_text
from swift_vlpack.cli.inspect_run import InspectRequest, look
from swift_vlpack.cli.plan import training_report
from swift_vlpack.cli.trained_steps import trained_step
from swift_vlpack.host.run import run_of
from swift_vlpack.pages.report import sections
from swift_vlpack.pages.report_page import report_page
from swift_vlpack.runlog.folder import find_run
from swift_vlpack.runlog.plan_text import plan_text
from swift_vlpack.runlog.report import run_report
from tests.data_rows import image_row, sentence, text_row, write_jsonl
from tests.environment import packing_options, packing_variables, restored_environment
from tests.host.runs import log_lines, packed_argv, train
from tests.images import photo

FAMILY = "qwen2_5_vl"
OPTIONS = {
    "VLPACK_PACKING_SHARE": "media",
    "VLPACK_PACKING_STRATEGY": "exact",
    "VLPACK_PACKING_VERIFY": "false",
    "VLPACK_PACKING_DROP_LAST": "false",
    "VLPACK_RECORD_PACKS": "true",
}
QUESTIONS = (1, 3, 5, 4)
"""Rows of each image."""
NUM_PARTIAL = 2
"""Rows that bring another image after that of another row: each of the three is whole."""
IN_UNITS = 3 + 5 + 3


@pytest.fixture(scope="module", autouse=True)
def environment():
    with restored_environment():
        packing_options()
        yield


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows about four images, one of which asks before it shows the image; and texts."""
    folder, rng = tmp_path_factory.mktemp("images"), random.Random(0)
    found = [text_row(sentence(rng, 4, 9), sentence(rng, 9, 30)) for _ in range(4)]
    for number, num_questions in enumerate(QUESTIONS):
        image = photo(folder, f"image{number}", 140 + 40 * number, 200, seed=number)
        found += [image_row([image], sentence(rng, 3, 9), sentence(rng, 2, 9)) for _ in range(num_questions)]
    found[-1]["messages"][0]["content"] = "What is here? <image>"
    shared, *others = (photo(folder, f"several{number}", 112, 84, seed=20 + number) for number in range(3))
    assert len(others) == NUM_PARTIAL
    found += [image_row([shared, other], sentence(rng, 3, 9), sentence(rng, 2, 9)) for other in others]
    return [image_row([shared], sentence(rng, 3, 9), sentence(rng, 2, 9)), *found]


@pytest.fixture(scope="module")
def flags(rows, small_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return packed_argv(
        small_folder(FAMILY), FAMILY, folder / "out", dataset=write_jsonl(folder / "vqa.jsonl", rows), max_length=400,
        split_dataset_ratio=0, num_train_epochs=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def output(flags, tmp_path_factory):
    """A run that was trained."""
    with restored_environment():
        packing_variables(OPTIONS)
        train(flags)
    return find_run(Path(flags[flags.index("--output_dir") + 1]))


@pytest.fixture
def sharing(monkeypatch):
    for name, value in OPTIONS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def planned(flags, sharing, tmp_path):
    def made(*more, **variables):
        os.environ.update(variables)
        return training_report([*flags, *more], num_ranks=1, failures_file=tmp_path / "failures.jsonl")

    with restored_environment():
        yield made


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def tokens_of(sequence):
    return len(sequence["input_ids"])


def test_plan_says_what_sharing_saves(planned, rows):
    """SHARE-80 SHARE-81: against the same plan without sharing, and counted by hand."""
    shared = planned()
    report = shared["share"]
    assert (report["num_units"], report["num_in_units"], report["num_alone"]) == (3, IN_UNITS, len(rows) - IN_UNITS)
    assert report["rows_per_prefix"] == {"num_prefixes": 3, "median": 3, "p95": 5, "max": 5}
    num_whole = 1 + 2 * NUM_PARTIAL
    assert report["num_images"] == 3 + 2 + num_whole
    assert report["num_images_alone"] == sum(QUESTIONS) + num_whole
    (media, alone_by_media), (tokens, alone) = report["alone"].items()
    assert (alone_by_media["num_rows"], media) == (1 + NUM_PARTIAL, "share some of their media only")
    assert (alone["num_rows"], tokens) == (1, "have other tokens before the medium")
    assert f"vqa.jsonl:{len(rows) - NUM_PARTIAL}" in alone["example"]
    text = plan_text(shared)
    assert f"{IN_UNITS} rows in 3 units, {len(rows) - IN_UNITS} rows alone: {report['num_tokens']} of " in text
    assert "rows an image: median 3, p95 5, of 3 prefixes that rows share" in text
    assert "put <image> first in the question" in text
    none = planned(VLPACK_PACKING_SHARE="none")
    assert "share" not in none
    assert none["num_tokens"] == report["num_tokens_alone"] > 1.5 * report["num_tokens"]
    assert shared["num_tokens"] == report["num_tokens"]


def test_plan_of_kept_steps_says_how_little_they_share(planned):
    """SHARE-81"""
    batch = ("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "1")
    anywhere = planned()["share"]["num_tokens"]
    del os.environ["VLPACK_PACKING_DROP_LAST"]
    kept = planned(*batch, VLPACK_PACKING_BATCH="samples")
    assert kept["share"]["num_tokens_anywhere"] == anywhere < kept["share"]["num_tokens"]
    assert f"packing_batch=packs would compute about {anywhere} tokens" in plan_text(kept)


def test_log_lines_say_what_sharing_saved_since_the_line_before(output):
    """SHARE-82: as the run log counts it, which is written with every line."""
    said = [line["pack/sharing_saved"] for line in log_lines(output.path) if "grad_norm" in line]
    steps = [event for event in lines(output.path / "vlpack" / "run.jsonl") if event["event"] == "steps"]
    shared = [event.get("num_shared_tokens", 0) for event in steps]
    tokens = [event["num_tokens"] for event in steps]
    expected = [num / (num + computed) for num, computed in zip(shared, tokens, strict=True)]
    assert said == pytest.approx(expected, abs=1e-6)
    assert max(said) > 0.3, "most tokens are those of images"


def test_run_counts_what_was_planned(planned, output, rows):
    """SHARE-82: epoch report, run log, report for a reader; and what was really built."""
    plan = planned()["share"]
    epoch = json.loads((output.path / "vlpack" / "epoch_0.json").read_text())
    assert epoch["num_tokens"] == plan["num_tokens"]
    assert epoch["num_images"] == plan["num_images"]
    shared = epoch["shared"]
    assert shared["num_apart"] == 0
    assert {name: shared[name] for name in ("num_units", "num_in_units", "num_alone", "num_tokens_alone")} == {
        name: plan[name] for name in ("num_units", "num_in_units", "num_alone", "num_tokens_alone")
    }
    assert epoch["num_samples"] == shared["num_in_units"] + shared["num_alone"] == len(rows)
    recorded = [line for line in lines(output.path / "vlpack" / "packs_rank0.jsonl") if "shared" in line]
    assert sum(sum(line["shared"]) for line in recorded) == shared["num_shared_tokens"]
    report = run_report(output)
    assert report["trained"]["shared"] == shared
    assert report["unpacked"]["num_padding_saved"] == 0, "batches of one have no padding, and sharing is none"
    said = dict(next(one for one in sections(report) if one.title == "Trained").lines)
    padding = dict(next(one for one in sections(report) if one.title == "Padding saved").lines)
    assert padding["tokens"].endswith("un-packed, and packs have as many, before what samples share")
    assert f"<b>{shared['num_shared_tokens']:,}</b>tokens saved by sharing" in report_page(report)
    assert said["shared"] == f"{IN_UNITS} samples in 3 units, {len(rows) - IN_UNITS} alone"


def test_packs_and_steps_are_shown_with_their_prefixes(output, flags, rows):
    """SHARE-83: every row with its own tokens, every image once; and from the log back to them."""
    with restored_environment():
        os.environ.update(OPTIONS)
        with run_of(flags, num_ranks=1) as run:
            result = look(run, InspectRequest(html=output.path / "packs.html"))
            packs = [pack.as_json() for pack in result.packs]
            step = next(number + 1 for number, pack in enumerate(packs) if pack["prefixes"])  # one pack a step
            of_step = look(run, InspectRequest(step=step))
            text = "".join(inspect_text(of_step, 110, is_colourful=False))
    shown = Counter()
    for pack in packs:
        row = pack["row"]
        ends = [*zip(row["cu_seqlens"], row["cu_seqlens"][1:], strict=False)]
        prefixes = pack["prefixes"]
        pieces = [*prefixes, *pack["members"]]
        assert sorted((one["start"], one["start"] + one["num_tokens"]) for one in pieces) == ends
        assert pack["num_tokens"] == tokens_of(row) == sum(one["num_tokens"] for one in pieces)
        assert pack["num_vision"] == sum(one["num_vision"] for one in pieces)
        for prefix in prefixes:
            assert len(prefix["pictures"]) == 1
            assert all(piece["kind"] != "supervised" for piece in prefix["pieces"])
            for at in prefix["members"]:
                branch = pack["members"][at]
                assert branch["positions"]["token"][0] == prefix["num_tokens"]
                assert (branch["pictures"], branch["num_vision"]) == ([], 0)
                assert not any(piece["text"].startswith("[image ") for piece in branch["pieces"])
        for member in pack["members"]:
            shown[member["id"]] += 1
            goes_on = {start for (start, _), parent in zip(ends, row["parents"], strict=False) if parent != -1}
            assert (member["prefix"] is not None) == (member["start"] in goes_on)
            answer = rows[int(member["id"].partition(":")[2])]["messages"][1]["content"]
            assert answer in "".join(piece["text"] for piece in member["pieces"] if piece["kind"] == "supervised")
    assert (len(shown), set(shown.values())) == (len(rows), {1})
    assert sum(len(pack["prefixes"]) for pack in packs) == 3
    assert any(any(pack.shared) for pack in trained_step(output.path, step).packs), "and from the log"
    assert "prefix of" in text
