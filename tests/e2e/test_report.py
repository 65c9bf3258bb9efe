"""What two real ranks note while they train, as a kill leaves it."""

import json

import pytest

from swift_vlpack.runlog.folder import find_run
from swift_vlpack.runlog.report import run_report
from tests.data_rows import image_row, text_row, write_jsonl
from tests.e2e.ranks import Run, trained
from tests.host.runs import SMALL_VOCABULARY, argv

FAMILY = "qwen2_5_vl"
NUM_ROWS = 200


@pytest.mark.slow
@pytest.mark.telling
def test_ranks_list_what_they_leave_out_while_they_train(small_folder, tmp_path):
    """REPORT-5 REPORT-6: each reads a file of its own, of which every third row has no picture."""
    rows = [image_row([f"/nowhere/{n}.jpg"]) if n % 3 == 0 else text_row(f"question {n}") for n in range(NUM_ROWS)]
    files = [write_jsonl(tmp_path / f"{n}.jsonl", rows) for n in range(2)]
    output = tmp_path / "out"
    flags = argv(
        small_folder(FAMILY), FAMILY, output, dataset=files, external_plugins=SMALL_VOCABULARY, streaming="true",
        max_steps=10000, dataset_shuffle="false", max_length=256, dataloader_num_workers=1,
    )  # fmt: skip
    options = {"packing_buffer": 4, "packing_max_samples": 1, "packing_verify": "false", "record_packs": "true"}
    run = Run(flags, tmp_path / "log.txt", packing_strategy="best_fit", packing_max_failed_share=1, **options)
    run.until(lambda: {number_of(line) % 2 for line in left_out(output)} == {0, 1} and len(trained(output)) > 8)
    run.kill_rank(1)
    assert run.wait(120) != 0
    assert not list((output / "vlpack").glob("epoch_*.json")), "no epoch was finished"
    lines = left_out(output)
    assert {line["reason"] for line in lines} == {"file_missing"}
    assert len({line["id"] for line in lines}) == len(lines), "each once"
    assert all((number_of(line) // 2) % 3 == 0 for line in lines), "rows of the two files, in turn"
    report = run_report(find_run(output))
    assert (report["run"]["has_ended"], report["run"]["num_ranks"], report["run"]["mode"]) == (False, [2], "buffer")
    assert report["left_out"]["num_rows"] == len(lines)
    packs = [pack for pack in trained(output, up_to_step=report["trained"]["num_steps"]) if pack["ids"]]
    assert report["trained"]["num_packs"] == len(packs)


def left_out(output):
    path = output / "vlpack" / "left_out.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def number_of(line):
    return int(line["id"].split(":")[1])
