"""The summary before the first step."""

import pytest

from swift_vlpack.runlog.summary import MAX_LINES, WIDTH, start_text

STEP = {
    "num_packs": 128,
    "num_samples": 2633.0,
    "num_supervised_tokens": 348046.0,
    "num_samples_unpacked": 128,
    "num_supervised_tokens_unpacked": 16919.0,
    "accumulation_as_unpacked": 1,
    "num_samples_then": 165.0,
}
PLAN = {
    "num_packs": 1038,
    "lower_bound": 1038,
    "packing_length": 8192,
    "method": "exact",
    "mean_fill": 0.9996,
    "num_samples": 21394,
    "single_long": 3,
    "balance": 1.004,
    "num_dropped": 9,
    "dropped": {"oversize": 9},
    "steps_per_epoch": 9,
    "step": STEP,
}
KEPT = {"num_samples": 128, "num_sequences": 9.6, "padding_saved": 0.6}
LENGTHS = {"min": 38, "median": 233, "p95": 1632, "p99": 1782, "max": 1816, "mean": 397.3}


def source(share):
    return {"rows": 8000, "asked_ratio": 0.5, "share_of_samples": share, "share_of_tokens": 0.2}


def facts(num_sources=2, name="captions", **others):
    data = {
        "rows": 24200,
        "sources": {f"{name}{n}": source(1 / num_sources) for n in range(num_sources)},
        "unreadable": {"file_empty": 1, "file_missing": 2},
        "rows_without_target": 0,
        "lengths": LENGTHS,
        "share_of_rows_with_image": 0.299,
        "share_of_vision_tokens": 0.559,
        "num_remembered": 24000,
        "ratio_by": "rows",
    }
    return {
        "output_dir": "output/v0-20260101-120000", "checkpoint": None, "step": 0, "num_steps": 27, "epoch": 0,
        "num_ranks": 8, "gradient_accumulation_steps": 16, "plan": PLAN, "data": data,
        "attention": "attention vlpack: varlen 1.2 ms, the quickest (others ...)",
        "proof": "isolation verified: max difference 0.0 over 5 samples, attention vlpack (packed equals ...)",
        **others,
    }  # fmt: skip


def test_summary_says_what_is_trained():
    """REPORT-4 TRAIN-21"""
    text = " ".join(start_text(facts()).split())
    for said in (
        "packing: before step 1 of 27, 8 ranks",
        "24200 rows in 2 sources, 3 rows unreadable (file_empty 1, file_missing 2), 9 left out (oversize 9)",
        "captions1: 8000 rows, ratio 0.5 by rows, 50.0% of samples, 20.0% of tokens",
        "min 38, median 233, p95 1632, p99 1782, max 1816, mean 397.3 tokens",
        "24000 remembered from earlier runs, 200 measured now",
        "29.9% of the rows have one, 55.9% of the tokens are vision",
        "epoch 0: 1038 packs of 8192 tokens by exact (lower bound 1038), mean fill 99.96%, 20.6 samples "
        "a pack, 3 single-long",
        "27, 9 an epoch; 8 ranks x 16 packs a step",
        "one step 128 packs with about 2633 samples and 348046 supervised tokens",
        "vlpack: varlen 1.2 ms, the quickest proof",
        "isolation verified: max difference 0.0 over 5 samples, attention vlpack left out listed in",
        "vlpack report output/v0-20260101-120000",
    ):
        assert said in text


@pytest.mark.parametrize(
    "given",
    [
        facts(),
        facts(num_sources=40, name="a/very/long/name/of/a/source/" * 9, checkpoint="/somewhere/" * 30 + "checkpoint-9"),
        facts(attention="attention " + "word " * 99, proof="isolation " * 99, output_dir="out/" * 99),
        facts(plan=None, data=None, proof=None),
    ],
    ids=["usual", "long names", "long lines", "stream"],
)
def test_summary_fits_a_screen(given):
    """REPORT-4: and its last line is there and whole, which says where to look."""
    lines = f"[INFO:swift] {start_text(given)}".splitlines()
    assert len(lines) <= MAX_LINES == 24
    assert max(map(len, lines[:-1])) <= WIDTH == 100
    assert lines[-1].strip() == f"look: vlpack report {given['output_dir']}"


def test_resumed_run_and_stream_say_so():
    """REPORT-4"""
    text = start_text(facts(checkpoint="out/checkpoint-9", step=9, plan=None, data=None, proof=None))
    assert "resumes after step 9 of 27" in text
    assert "out/checkpoint-9" in text
    assert "a stream: rows are packed as they come" in text
    assert "none, packing_verify is false" in text
    assert "128 packs; un-packed it would be as many samples" in text


def test_summary_of_steps_that_keep_their_samples_says_what_packing_gains():
    """SAME-6"""
    plan = {**{name: value for name, value in PLAN.items() if name != "step"}, "kept_steps": KEPT}
    text = " ".join(start_text(facts(plan=plan)).split())
    assert "27, 9 an epoch, as many as un-packed" in text
    assert "the same 128 samples as un-packed, in 9.6 sequences; padding saved: 60.0% of the tokens" in text
