"""The summary before the first step."""

from swift_vlpack import PackingConfig, plan
from swift_vlpack.plan.report import plan_report, step_size
from swift_vlpack.runlog.plan_text import run_lines
from swift_vlpack.runlog.summary import COLUMNS, start_text

SOURCE = {
    "rows": 3, "asked_ratio": 1, "asked_share": 1, "share_of_samples": 1, "share_of_tokens": 1,
    "num_deleted_by_loader": 0,
}  # fmt: skip
DATA = {
    "rows": 3, "sources": {"captions": SOURCE}, "ratio_by": "rows", "unreadable": {}, "rows_without_target": 1,
    "rows_with_surplus_tags": 0, "lengths": dict.fromkeys(("min", "median", "p95", "p99", "max", "mean"), 300),
    "share_of_rows_with_image": 0.5, "share_of_vision_tokens": None, "num_remembered": 2,
}  # fmt: skip


def facts(**others):
    made = plan([300, 200, 500], PackingConfig(packing_length=500, packing_strategy="exact"))
    step = step_size(num_packs=2, num_samples=3, num_supervised=100, accumulation=1, num_ranks=1)
    report = plan_report(made, made.align(1), num_rows=3, seconds=0)
    return {
        "output_dir": "out", "checkpoint": None, "step": 0, "num_steps": 5, "num_epochs": 2.5, "epoch": 1,
        "num_ranks": 1, "gradient_accumulation_steps": 1, "data": DATA,
        "plan": {**report, "packs_per_epoch": 2, "steps_per_epoch": 2, "step": step},
        "attention": "attention vlpack: varlen, as right on this device (others ...)",
        "proof": "isolation verified: max difference 0.0 over 5 samples, attention vlpack (packed equals ...)",
        **others,
    }  # fmt: skip


def test_summary_has_the_lines_of_the_plan_and_how_it_is_trained():
    """REPORT-4 TRAIN-21"""
    text = start_text(facts())
    said = " ".join(text.split())
    assert text.startswith("packing: before step 1 of 5, 1 rank\n")
    of_plan = {**facts(), **facts()["plan"], **DATA, "num_epochs": 3, "failures_file": "out/vlpack/left_out.jsonl"}
    for _, line in run_lines(of_plan):
        assert " ".join(line.split()) in said
    assert "3 rows in epoch 1" in said
    assert "1 row has no token to train" in said
    assert "2 lengths from earlier runs, 1 measured now" in said
    assert "attention vlpack: varlen, as right on this device proof isolation verified" in said
    assert text.endswith("look: vlpack report out")
    assert max(map(len, text.splitlines())) <= COLUMNS


def test_resumed_run_and_stream_say_so_and_no_path_is_cut():
    """REPORT-4"""
    checkpoint = "/somewhere/" * 30 + "checkpoint-3"
    text = start_text(facts(checkpoint=checkpoint, step=3, plan=None, data=None, proof=None))
    assert "resumes after step 3 of 5" in text
    assert checkpoint in text
    assert "a stream: rows are packed as they come" in text
    assert "none, packing_verify is false" in text
    assert "1 pack; un-packed it would be as many samples" in text
