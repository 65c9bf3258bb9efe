"""`packing_share=media` in runs of streams: rows that wait together and begin alike are one unit."""

import json
import logging
import random

import pytest

from tests.data_rows import image_row, rows_about_images, sentence, text_row, write_jsonl
from tests.host.runs import epoch_report, packed_argv, train
from tests.host.same_steps import curve, largest_differences, largest_gap, weights
from tests.marks import telling

FAMILY = "qwen2_5_vl"
NUM_IMAGES, ROWS_AN_IMAGE = 6, 4
NUM_ROWS = NUM_IMAGES * (ROWS_AN_IMAGE + 3)

pytestmark = pytest.mark.usefixtures("options")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Rows about images, one image after the other; after each, a text, and two rows with another image beside it."""
    folder = tmp_path_factory.mktemp("vqa")
    rng = random.Random(5)
    rows = []
    for of_image in rows_about_images(folder, NUM_IMAGES, ROWS_AN_IMAGE, seed=5):
        rows += [*of_image, text_row(sentence(rng, 2, 9), sentence(rng, 1, 12))]
        both = [*of_image[0]["images"], *rows[0]["images"]]
        rows += [image_row(both, sentence(rng, 2, 9), sentence(rng, 1, 12)) for _ in range(2)]
    return write_jsonl(folder / "train.jsonl", rows)


def run(folder, dataset, output, **more):
    flags = packed_argv(
        folder, FAMILY, output,
        **{
            "dataset": dataset, "streaming": "true", "dataset_shuffle": "false", "learning_rate": 1e-4,
            "save_strategy": "steps", "save_steps": 1000, **more,
        },
    )  # fmt: skip
    return train(flags)


def packs_of(output):
    lines = [json.loads(line) for line in (output / "vlpack" / "packs_rank0.jsonl").read_text().splitlines()]
    return [(line["epoch"], line["ids"], line.get("shared")) for line in lines]


@pytest.mark.parametrize("form", ["stream", telling("sized")])
def test_every_row_is_trained_once_and_both_proofs_see_the_units(
    form, dataset, small_folder, tmp_path, options, caplog
):
    """SHARE-11 SHARE-64: with workers; the packs before training and the first batch are proved with branches."""
    options(packing_share="media", packing_length=1024, packing_buffer=12, record_packs="true", packing_verify="true")
    if form == "sized":
        options(packing_mode="buffer")
    with caplog.at_level(logging.INFO):
        run(
            small_folder(FAMILY), dataset, tmp_path, max_steps=14, dataloader_num_workers=1,
            streaming=str(form == "stream").lower(),
        )  # fmt: skip
    for epoch in (0, 1):
        ids = [one for number, ids, _ in packs_of(tmp_path) for one in ids if number == epoch]
        assert sorted(ids) == sorted({*ids})
        assert len(ids) == NUM_ROWS
        report = epoch_report(tmp_path, epoch)
        assert (report["num_samples"], report["is_closed"], report["num_dropped"]) == (NUM_ROWS, True, {})
        assert 2 * NUM_IMAGES <= report["num_images"] < (ROWS_AN_IMAGE + 2 * 2) * NUM_IMAGES, (
            "less than those of all rows"
        )
        shared = report["shared"]
        assert shared["num_in_units"] + shared["num_alone"] == NUM_ROWS
        assert shared["num_tokens_alone"] - shared["num_shared_tokens"] == report["num_tokens"]
        # Sized data is shuffled, so fewer rows of an image wait together.
        assert shared["num_shared_tokens"] > (0.4 if form == "stream" else 0.1) * shared["num_tokens_alone"]
    said = [record.getMessage() for record in caplog.records]
    assert sum("branches" in line and "isolation" in line for line in said) >= 2, said
    assert any("shared       rows that wait for a pack together and begin alike" in line for line in said)


def test_an_epoch_in_one_step_is_that_of_a_stream_without_sharing(dataset, small_folder, tmp_path, options):
    """SHARE-9 SHARE-11: all rows in one step, whichever packs they are in: loss, gradient norm and weights."""
    options(packing_length=1024, packing_buffer=12, packing_drop_last="false", record_packs="true")
    made = {}
    for share in ("none", "media"):
        options(packing_share=share)
        output = tmp_path / share
        result = run(
            small_folder(FAMILY), dataset, output, max_steps=3, gradient_accumulation_steps=12, freeze_vit="false"
        )
        (last,) = output.glob("checkpoint-*")
        made[share] = curve(result["log_history"]), weights(last), epoch_report(output)
    (plain, trained, account), (shared, same_trained, other) = made["none"], made["media"]
    assert len(plain) == 3
    loss, norm, rate = largest_differences(plain, shared)
    assert loss < 1e-5
    assert norm < 1e-5
    assert rate == 0
    assert largest_gap(trained, same_trained) < 1e-5
    assert account["num_samples"] == other["num_samples"] == NUM_ROWS
    assert other["num_tokens"] < 0.7 * account["num_tokens"]


@pytest.mark.parametrize("workers", [0, telling(2)])
def test_resumed_stream_goes_on_within_its_units(workers, dataset, small_folder, tmp_path, options):
    """SHARE-11 STREAM-9: packs, prefixes, losses and the account are those of the run that was never stopped."""
    options(packing_share="media", packing_length=400, packing_buffer=6, record_packs="true", packing_verify="false")
    flags = {"max_steps": 6, "save_steps": 1, "tuner_type": "lora", "dataloader_num_workers": workers}
    whole = tmp_path / "whole"
    expected = curve(run(small_folder(FAMILY), dataset, whole, **flags)["log_history"])
    state = json.loads((whole / "checkpoint-2" / "vlpack_state_rank0.json").read_text())
    assert any("units" in worker for worker in state["state"]["workers"]), "a unit waits in the checkpoint"
    again = tmp_path / "again"
    resumed = run(
        small_folder(FAMILY), dataset, again, resume_from_checkpoint=whole / "checkpoint-2", **flags
    )  # fmt: skip
    assert largest_differences(expected, curve(resumed["log_history"]))[0] < 1e-6
    assert packs_of(again) == packs_of(whole)[2:]
    assert epoch_report(again) == epoch_report(whole)


def test_rows_that_share_an_image_but_not_the_tokens_before_it_are_named_and_counted(
    small_folder, tmp_path, options, caplog
):
    """SHARE-12: `media` never does nothing in silence."""
    rng = random.Random(2)
    rows = []
    for of_image in rows_about_images(tmp_path, 5, 4, seed=1):
        rows += [
            {**image_row(row["images"], "x", "yes"), "messages": text_row(f"{sentence(rng, 2, 5)} <image>")["messages"]}
            for row in of_image
        ]
    data = write_jsonl(tmp_path / "late.jsonl", rows)
    options(packing_share="media", packing_length=1024, packing_buffer=12, packing_verify="false")
    with caplog.at_level(logging.WARNING):
        run(small_folder(FAMILY), data, tmp_path / "run", max_steps=4)
    report = epoch_report(tmp_path / "run")
    assert report["shared"]["num_units"] == 0
    ((cause, num),) = report["shared"]["alone_because"].items()
    assert cause == "have other tokens before the medium"
    assert 10 <= num <= 20
    said = [record.getMessage() for record in caplog.records]
    assert sum("trained alone" in line and "put <image> first" in line for line in said) == 1
    assert any("epoch 0: packing_share=media saved nothing" in line for line in said)
