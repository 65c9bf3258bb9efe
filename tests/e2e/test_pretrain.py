"""`vlpack pt` from YAML: interleaved documents in parts, on two ranks, of which one is killed; one ends the run."""

import json

import pytest

from tests.data_rows import write_jsonl
from tests.e2e.ranks import Run, ids, last_complete, step_of, trained
from tests.environment import packing_options
from tests.host.parts.test_runs import page
from tests.host.runs import OFFLINE, SMALL_VOCABULARY, epoch_report, packed_argv, train

FAMILY = "qwen3_vl"
PACKING = {"packing_strategy": "exact", "packing_overflow": "split", "packing_drop_last": False, "packing_pad_to": 32}


@pytest.mark.slow
@pytest.mark.telling
def test_documents_in_parts_are_trained_once_through_a_kill_and_a_resume(small_folder, tmp_path):
    """CUT-11 PAD-1 TRAIN-27: every part of every page once, on two ranks, then on one."""
    pages = [page(tmp_path, number, number % 3, 6 + 5 * number) for number in range(9)]
    options = {
        "model": str(small_folder(FAMILY)), "model_type": FAMILY, "template": FAMILY,
        "output_dir": str(tmp_path / "out"), "dataset": [write_jsonl(tmp_path / "pages.jsonl", pages)],
        "num_train_epochs": 1, "packing_length": 96, "max_length": 128, "gradient_accumulation_steps": 1,
        "save_steps": 1, "tuner_type": "lora", "learning_rate": 1e-3,
    }  # fmt: skip
    config = tmp_path / "run.yaml"
    both = {**OFFLINE, **options, "save_strategy": "steps", "external_plugins": [str(SMALL_VOCABULARY)], **PACKING}
    config.write_text(json.dumps(both))  # which is YAML, too
    run = Run([config], tmp_path / "log", command="pt", record_packs="true")
    run.until(lambda: bool(trained(tmp_path / "out")) and trained(tmp_path / "out")[-1]["step"] >= 4)
    run.kill_rank(1)
    assert run.wait(120) != 0
    assert "isolation verified: max difference 0.0" in run.output
    checkpoint = last_complete(tmp_path / "out")
    done = trained(tmp_path / "out", up_to_step=step_of(checkpoint))
    assert len({pack["rank"] for pack in done}) == 2
    packing_options(
        packing_strategy="exact", packing_overflow="split", packing_drop_last="false", packing_pad_to="32",
        packing_verify="false", record_packs="true",
    )  # fmt: skip
    options = {name: value for name, value in options.items() if name not in ("model", "model_type", "output_dir")}
    rest = packed_argv(small_folder(FAMILY), FAMILY, tmp_path / "rest", **options, resume_from_checkpoint=checkpoint)
    train(rest, "pt")
    both_runs = [*done, *trained(tmp_path / "rest")]
    parts = ids(both_runs)
    assert len(parts) == len(set(parts)), "none twice"
    rows = {key.partition("/")[0] for key in parts}
    assert rows == {f"pages:{number}" for number in range(9)}
    for row in rows:
        numbers = sorted(int(key.partition("/")[2] or 0) for key in parts if key.partition("/")[0] == row)
        assert numbers == list(range(len(numbers))), "and none left out"
    report = epoch_report(tmp_path / "rest")
    assert report["is_closed"]
    assert report["num_samples"] == len(parts)
    assert report["num_padding"] > 0
