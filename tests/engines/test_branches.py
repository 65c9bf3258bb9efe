"""`packing_share=media` where parameters are sharded: the same steps as without, and no rank waits for the other."""

import json
import random
from collections import defaultdict

import pytest

from tests.data_rows import rows_about_images, sentence, text_row, write_jsonl
from tests.e2e.ranks import trained
from tests.engines.launcher import Training, assert_same_steps, train_all
from tests.engines.runs_of_engines import FULL, TWICE

pytestmark = pytest.mark.engines
FAMILY = "qwen2_5_vl"
NUM_STEPS, ROWS_A_STEP = 5, 8
OPTIONS = {"packing_strategy": "exact", "packing_length": 160, "packing_batch": "samples", "record_packs": "true"}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Of the eight rows of a step four ask about one image, and four have none."""
    folder, rng = tmp_path_factory.mktemp("vqa"), random.Random(11)
    made = []
    for of_image in rows_about_images(folder, NUM_STEPS, ROWS_A_STEP // 2, seed=11):
        made += [*of_image, *(text_row(sentence(rng, 3, 9), sentence(rng, 9, 20)) for _ in of_image)]
    return write_jsonl(folder / "rows.jsonl", made)


def packs_of_ranks(output):
    """For each step and rank, how many tokens the samples of each pack share."""
    found = defaultdict(lambda: defaultdict(list))
    for rank in (0, 1):
        for line in (output / "vlpack" / f"packs_rank{rank}.jsonl").read_text().splitlines():
            pack = json.loads(line)
            found[pack["step"]][rank].append(sum(pack.get("shared", ())))
    return found


@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_steps_are_those_without_sharing(engine, rows, small_folder, tmp_path):
    """SHARE-9 RANKS-4: also where one rank has units in a step, and the other has none, or no image at all."""
    flags = {
        "dataset": rows, "split_dataset_ratio": 0, "max_steps": NUM_STEPS, "per_device_train_batch_size": 2,
        "dataset_shuffle": "false", "train_dataloader_shuffle": "false", **FULL, **TWICE,
    }  # fmt: skip
    runs = [
        Training(share, small_folder(FAMILY), FAMILY, flags, {**OPTIONS, "packing_share": share})
        for share in ("none", "media")
    ]
    made = train_all(engine, runs, tmp_path)
    assert len(made["media"].steps) == NUM_STEPS
    assert_same_steps(made["media"].steps, made["none"].steps)
    ids = [
        sorted((pack["step"], name) for pack in trained(made[share].output) for name in pack["ids"]) for share in made
    ]
    assert ids[0] == ids[1], "other rows"
    shared = packs_of_ranks(made["media"].output)
    with_units = [{rank for rank, packs in of_ranks.items() if any(packs)} for of_ranks in shared.values()]
    assert all(with_units), "no unit in a step"
    assert any(len(ranks) == 1 for ranks in with_units), "both ranks had units in every step"
