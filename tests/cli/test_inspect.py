"""`vlpack inspect`, in process, on real runs: what is shown is what was trained, before the run and after it."""

import json
import os
from contextlib import contextmanager
from pathlib import Path

import pytest

from swift_vlpack.cli.inspect import write_packs_page
from swift_vlpack.cli.inspect_run import InspectRequest, look
from swift_vlpack.cli.trained_steps import trained_step
from swift_vlpack.errors import ConfigError
from swift_vlpack.host.run import run_of
from swift_vlpack.host.trainer import PackingTrainer
from tests.browser import measured, needs_chromium
from tests.data_rows import image_row, mixed_rows, text_row, write_jsonl
from tests.environment import packing_options, restored_environment
from tests.host.runs import log_lines, packed_argv, train
from tests.images import photo
from tests.pages.test_page import Elements

FAMILY = "qwen2_5_vl"
OPTIONS = {
    "VLPACK_PACKING_STRATEGY": "exact",
    "VLPACK_PACKING_VERIFY": "false",
    "VLPACK_TRAIN_ON_EOS": "false",
}
NUM_ROWS = 24
NASTY = "</script><img src=x onerror=alert(1)> \x1b[2J \u202eabc"


@pytest.fixture(scope="module", autouse=True)
def environment():
    with restored_environment():
        packing_options()
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = mixed_rows(folder / "images", NUM_ROWS - 2, largest=200)
    rows.append(image_row([photo(folder, "nasty", 64, 48)], "what", NASTY))
    two_turns = text_row("first", "not trained")["messages"]
    two_turns[1]["loss"] = False
    rows.append({"messages": [*two_turns, *text_row("second", "trained")["messages"]]})
    return write_jsonl(folder / "train.jsonl", rows)


def flags(small_folder, output, data, **options):
    return packed_argv(
        small_folder(FAMILY), FAMILY, output, dataset=data,
        **{"num_train_epochs": 2, "gradient_accumulation_steps": 2, "split_dataset_ratio": 0, "save_strategy": "steps",
           "save_steps": 2, **options},
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(small_folder, data, tmp_path_factory):
    """Two epochs; and every batch that was trained, by epoch and number of the pack."""
    output = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch, restored_environment():
        os.environ.update(OPTIONS)
        trained = recorded_by_hand(patch, PackingTrainer)
        train(flags(small_folder, output, data))
    return output, {(record.epoch, record.number): row for record, row in trained}


def recorded_by_hand(patch, trainer):
    """Fills with every pack when it is trained: its record, and its tensors as they go to the model."""
    trained, step = [], trainer.training_step

    def remembered(self, model, inputs, *args, **kwargs):
        row = {
            "input_ids": inputs["input_ids"][0].tolist(),
            "labels": inputs["labels"][0].tolist(),
            "position_ids": inputs["position_ids"].reshape(-1, inputs["input_ids"].shape[1]).tolist(),
            "cu_seqlens": inputs["cu_seq_lens_q"].tolist(),
            "parents": [],
        }
        trained.append((inputs.record, row))
        return step(self, model, inputs, *args, **kwargs)

    patch.setattr(trainer, "training_step", remembered)
    return trained


@contextmanager
def looking(argv, num_ranks=1, environ=()):
    """A function that shows what the command finds, as JSON, for many questions about one run."""
    with restored_environment():
        os.environ.update(environ)
        with run_of(argv, num_ranks=num_ranks) as run:
            yield lambda **flags: look(run, InspectRequest(**flags)).as_json()


def test_what_is_shown_are_the_tensors_that_were_trained(small_folder, run, data, tmp_path):
    """SEE-1"""
    _, batches = run
    shown = {}
    with looking(flags(small_folder, tmp_path, data), environ=OPTIONS) as seen:
        for epoch in (0, 1):
            for number in range(seen(epoch=epoch)["overview"]["num_packs"]):
                (pack,) = seen(pack=number, epoch=epoch)["packs"]
                shown[epoch, number] = pack["row"]
    assert len(batches) > 6
    assert shown == batches


def test_steps_of_a_run_lead_to_the_packs_that_were_trained(small_folder, run, data, tmp_path):
    """SEE-3: the steps on record are those of the plan, with file and line of every row, and the logged loss."""
    output, batches = run
    losses = {
        int(line["global_step/max_steps"].split("/")[0]): line["loss"] for line in log_lines(output) if "loss" in line
    }
    rows = Path(data).read_text().splitlines()
    with looking(flags(small_folder, tmp_path, data), environ=OPTIONS) as seen:
        for step, loss in losses.items():
            found = trained_step(output, step).as_json()
            shown = [
                (one["rank"], one["number"], [row["id"] for row in one["members"]]) for one in seen(step=step)["packs"]
            ]
            assert [(one["rank"], one["number"], one["ids"]) for one in found["packs"]] == shown
            assert found["loss"] == loss
            for pack in found["packs"]:
                assert (pack["epoch"], pack["number"]) in batches
                for name, where in zip(pack["ids"], pack["where"], strict=True):
                    line = int(where.removeprefix(f"{data}:"))
                    assert name == f"train:{line - 1}"
                    assert "messages" in json.loads(rows[line - 1])
        with pytest.raises(ConfigError, match=f"step 999: the run has {len(losses)} steps"):
            seen(step=999)
    with pytest.raises(ConfigError, match=f"step 999 is not on record, which has steps 1 to {len(losses)}"):
        trained_step(output, 999)


def test_members_say_what_is_trained_and_what_is_not(small_folder, data, tmp_path):
    """SEE-2"""
    with looking(flags(small_folder, tmp_path, data), environ=OPTIONS) as seen:
        (pack,) = seen(sample=f"train:{NUM_ROWS - 1}")["packs"]
        turns = next(one for one in pack["members"] if one["id"] == f"train:{NUM_ROWS - 1}")
        (pictured,) = seen(sample=f"train:{NUM_ROWS - 2}")["packs"]
        nasty = next(one for one in pictured["members"] if one["id"] == f"train:{NUM_ROWS - 2}")
        texts = [(piece["kind"], piece["text"]) for piece in turns["pieces"]]
        with pytest.raises(ConfigError, match="there are train, and a sample is named as train:0"):
            seen(sample="photos:1")
        with pytest.raises(ConfigError, match=r"--pack 99: epoch 0 has \d+ packs; name one from 0 to"):
            seen(pack=99)
        with pytest.raises(ConfigError, match="--epoch 2: the run has 2 epochs; name one from 0 to 1"):
            seen(epoch=2)
    # EOS of the answer is masked by train_on_eos, the whole first answer by its row.
    assert ("supervised", "trained") in texts
    assert [text for kind, text in texts if kind == "masked"] == ["not trained<|im_end|>\n", "<|im_end|>"], texts
    assert turns["num_supervised"] == sum(one["num_tokens"] for one in turns["pieces"] if one["kind"] == "supervised")
    assert ("vision", "[image 64x48 = 4 tokens]") in [(one["kind"], one["text"]) for one in nasty["pieces"]]
    assert nasty["pictures"][0]["width"] == 64
    assert nasty["num_vision"] == 4
    for member in pack["members"]:
        inside = slice(member["start"], member["start"] + member["num_tokens"])
        labels = pack["row"]["labels"][inside]
        assert sum(label != -100 for label in labels) == member["num_supervised"]


@pytest.mark.slow
@pytest.mark.telling
def test_choices_of_packs(small_folder, data, tmp_path):
    """SEE-2"""
    with looking(flags(small_folder, tmp_path, data), num_ranks=2, environ=OPTIONS) as seen:
        everything = seen()
        overview = everything["overview"]
        all_packs = [seen(pack=number)["packs"][0] for number in range(overview["num_packs"])]
        tokens = [pack["num_tokens"] for pack in all_packs]
        assert len(everything["packs"]) == 1
        assert overview["num_packs"] == len(all_packs)
        assert (overview["num_ranks"], len(all_packs) % 2) == (2, 0)
        assert tokens[overview["longest"]] == max(tokens)
        assert tokens[overview["emptiest"]] == min(tokens)
        packs = seen(step=1)["packs"]
        assert [(pack["rank"], pack["number"]) for pack in packs] == [(0, 0), (0, 2), (1, 1), (1, 3)]
        assert [pack["number"] for pack in all_packs if pack["step"] == 1] == [0, 1, 2, 3]


@needs_chromium
def test_page_of_a_run_has_thumbnails_and_hostile_captions_as_text(small_folder, data, tmp_path):
    """SEE-6 SEE-8"""
    request = InspectRequest(html=tmp_path / "packs.html")
    with restored_environment():
        os.environ.update(OPTIONS)
        with run_of(flags(small_folder, tmp_path, data), num_ranks=1) as run:
            said = write_packs_page(look(run, request), request)
    page = request.html.read_text()
    packs = json.loads(Elements(page).inside["data"])
    assert said == f"{request.html}: {len(packs)} packs\n"
    find = """((by) => {
      by('find').value = 'onerror';
      by('filters').dispatchEvent(new view.Event('input'));
      return [by('count').textContent, root.innerText, [...root.querySelectorAll('img')].map((one) => one.src)];
    })((id) => view.document.getElementById(id))"""
    count, text, sources = measured(page, find)
    assert count == f"1 of {len(packs)} packs"
    assert "</script><img src=x onerror=alert(1)>" in text
    assert sources
    assert all(source.startswith("data:image/jpeg;base64,") for source in sources)


@pytest.mark.slow
def test_parts_of_a_row_are_found_as_samples(small_folder, tmp_path):
    """SEE-2: where rows longer than a pack are split."""
    data = write_jsonl(tmp_path / "train.jsonl", [*[text_row()] * 4, text_row("long", "word " * 900)])
    with looking(flags(small_folder, tmp_path, data), environ={**OPTIONS, "VLPACK_PACKING_OVERFLOW": "split"}) as seen:
        names = [one["id"] for pack in seen(sample="train:4")["packs"] for one in pack["members"]]
    assert {"train:4/0", "train:4/1"} <= set(names)
