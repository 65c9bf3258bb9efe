"""`packing_share=media` on real ranks: killed, and resumed on others."""

import random
from collections import Counter

import pytest

from tests.data_rows import rows_about_images, write_jsonl
from tests.e2e.ranks import Run, last_complete, step_of, trained
from tests.host.runs import SMALL_VOCABULARY, argv

FAMILY = "qwen2_5_vl"
NUM_IMAGES, ROWS_AN_IMAGE = 20, 6
ENVIRONMENT = {
    "packing_share": "media", "packing_strategy": "exact", "packing_length": "512", "record_packs": "true",
    "packing_share_max": "4",
}  # fmt: skip


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vqa")
    rows = [row for rows in rows_about_images(folder, NUM_IMAGES, ROWS_AN_IMAGE, seed=7) for row in rows]
    random.Random(7).shuffle(rows)
    return write_jsonl(folder / "train.jsonl", rows)


@pytest.mark.slow
@pytest.mark.telling
def test_two_ranks_are_killed_and_another_goes_on(small_folder, dataset, tmp_path):
    """SHARE-10: every row of both epochs is trained once, before and after; some share in both."""

    def flags(output, **of_run):
        return argv(
            small_folder(FAMILY), FAMILY, output, dataset=dataset, external_plugins=[SMALL_VOCABULARY],
            **{
                "packing": "true", "split_dataset_ratio": 0, "save_strategy": "steps", "save_steps": 1,
                "save_total_limit": 3, "gradient_accumulation_steps": 1, "learning_rate": 1e-4, "num_train_epochs": 2,
                **of_run,
            },
        )  # fmt: skip

    def is_past(output, step):
        return bool(done := trained(output)) and done[-1]["step"] >= step

    first = Run(flags(tmp_path / "first"), tmp_path / "first.txt", num_ranks=2, **ENVIRONMENT)
    first.until(lambda: is_past(tmp_path / "first", 3))
    first.end()
    first.wait()
    checkpoint = last_complete(tmp_path / "first")
    again = Run(
        flags(tmp_path / "then", resume_from_checkpoint=checkpoint), tmp_path / "then.txt", num_ranks=1, **ENVIRONMENT,
    )  # fmt: skip
    assert again.wait() == 0, again.output[-3000:]
    before, after = trained(tmp_path / "first", up_to_step=step_of(checkpoint)), trained(tmp_path / "then")
    for epoch in (0, 1):
        rows = Counter(row for line in (*before, *after) if line["epoch"] == epoch for row in line["ids"])
        assert set(rows.values()) == {1}
        assert len(rows) == NUM_IMAGES * ROWS_AN_IMAGE
    assert all(any(line.get("shared") for line in lines) for lines in (before, after))
