"""`vlpack report` on a real run that is stopped and goes on, against a recount of its rows by the template alone."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from swift_vlpack.cli import main
from tests.browser import measured, needs_chromium
from tests.data_rows import image_row, mixed_rows, text_row, write_jsonl
from tests.environment import packing_variables
from tests.host.runs import log_lines, packed_argv, train
from tests.images import photo

FAMILY = "qwen2_5_vl"
OPTIONS = {
    "VLPACK_RECORD_PACKS": "true",
    "VLPACK_PACKING_STRATEGY": "exact",
    "VLPACK_PACKING_VERIFY": "false",
    "VLPACK_PACKING_DROP_LAST": "false",
    "VLPACK_PACKING_MAX_FAILED_SHARE": "1",
}
CAPACITY, BATCH_SIZE, ACCUMULATION = 256, 2, 1
NUM_CAPTIONS, NUM_SCANS = 15, 8


class Stopped(Exception):
    """As if the run were killed: nothing is closed, reported or saved."""


class Run(NamedTuple):
    rows: dict[str, dict]
    stopped: Path
    """The folder as the run was stopped in its second epoch, with half a line at the end of its notes."""
    whole: Path
    """The folder after it was resumed from a checkpoint before that, and ended."""
    listed: dict[int, list[str]]
    """Rows that were listed as left out when a step was taken."""
    gone: set[str]
    """Rows whose pictures were deleted between the epochs."""


@pytest.fixture(scope="module")
def run(small_folder, tmp_path_factory):
    from swift_vlpack.host.callback import PackingCallback

    folder = tmp_path_factory.mktemp("report")
    captions = [*mixed_rows(folder / "a", NUM_CAPTIONS - 1, largest=120), image_row(["/nowhere/x.jpg"])]
    scans = [image_row([photo(folder, f"scan_{n}", 90, 60, seed=n)], answer="word " * 40) for n in range(NUM_SCANS - 1)]
    scans.append(text_row("long", "word " * 300))
    files = {name: write_jsonl(folder / f"{name}.jsonl", rows) for name, rows in (("a", captions), ("b", scans))}
    (folder / "mix.yaml").write_text(
        f"sources:\n  - {{dataset: {files['a']}, name: captions}}\n"
        f"  - {{dataset: {files['b']}, name: scans, ratio: 2}}\n"
    )
    rows = {f"captions:{n}": row for n, row in enumerate(captions)} | {f"scans:{n}": r for n, r in enumerate(scans)}
    output, listed, stop_at = folder / "out", {}, []
    count = PackingCallback.on_optimizer_step

    def on_optimizer_step(self, args, state, control, **kwargs):
        count(self, args, state, control, **kwargs)
        step = state.global_step + 1
        listed[step] = [line["id"] for line in lines(output / "vlpack" / "left_out.jsonl")]
        if self.trainer.feed.epoch == 0 and step == steps_of_epoch(self.trainer):
            for path in folder.glob("scan_*"):
                path.unlink()
            stop_at.append(step + 5)
        if stop_at and step == stop_at[0]:
            raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackingCallback, "on_optimizer_step", on_optimizer_step)
        packing_variables({**OPTIONS, "VLPACK_FUSION_CONFIG": str(folder / "mix.yaml")})
        with pytest.raises(Stopped):
            train(flags(small_folder, output))
        stopped = Path(shutil.copytree(output, folder / "stopped"))
        with (stopped / "vlpack" / "run.jsonl").open("a") as file:
            file.write('{"event": "steps", "when": "20')
        stop_at[:] = []
        checkpoint = output / f"checkpoint-{3 * ((max(listed) - 2) // 3)}"
        train(flags(small_folder, output, resume_from_checkpoint=checkpoint, dataloader_num_workers=0))
    packing_variables({})
    gone = {f"scans:{n}" for n in range(NUM_SCANS - 1)}
    return Run(rows, stopped, output, listed, gone)


def steps_of_epoch(trainer):
    return -(-len(trainer.feed.epoch_plan) // trainer.args.gradient_accumulation_steps)


def flags(small_folder, output, **options):
    return packed_argv(
        small_folder(FAMILY), FAMILY, output,
        **{"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3, "logging_steps": 2, "max_length": 1024,
           "packing_length": CAPACITY, "per_device_train_batch_size": BATCH_SIZE, "split_dataset_ratio": 0,
           "gradient_accumulation_steps": ACCUMULATION, "dataloader_num_workers": 2, **options},
    )  # fmt: skip


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Pack(NamedTuple):
    step: int
    epoch: int
    ids: list[str]


class Size(NamedTuple):
    length: int
    vision: int
    images: int


@pytest.fixture(scope="module")
def sizes(run, small_folder):
    """Tokens, tokens of vision and images of every row, by the template alone; pictures that went are made again."""
    from swift.model import get_processor
    from swift.template import get_template

    for n in range(NUM_SCANS - 1):
        photo(run.whole.parent, f"scan_{n}", 90, 60, seed=n)
    template = get_template(get_processor(str(small_folder(FAMILY)), model_type=FAMILY), template_type=FAMILY)
    template.set_mode("train")
    found = {}
    for name, row in run.rows.items():
        if "/nowhere/x.jpg" not in row.get("images", ()):
            ids = template.encode(row)["input_ids"]
            found[name] = Size(len(ids), ids.count(template.image_token_id), len(row.get("images", ())))
    return found


def trained(folder, *, up_to=None, since=0):
    """Packs on record, in their order; of a segment that was stopped up to where the next one goes on."""
    packs = [Pack(line["step"], line["epoch"], line["ids"]) for line in lines(folder / "vlpack" / "packs_rank0.jsonl")]
    return [pack for pack in packs if since < pack.step and (up_to is None or pack.step <= up_to)]


def kept(run):
    """The packs that became a part of the model: the first segment up to the checkpoint, then the second."""
    first = trained(run.stopped)
    second = trained(run.whole)[len(first) :]
    resumed = second[0].step - 1
    assert first[-1].step > resumed, "some steps were lost"
    return [pack for pack in first if pack.step <= resumed] + second, resumed


def unpacked(packs, sizes):
    """Batches of two over the samples of each step, each as wide as its longest."""
    total = 0
    for step in sorted({pack.step for pack in packs}):
        lengths = [sizes[sample].length for pack in packs if pack.step == step for sample in pack.ids]
        while lengths:
            batch, lengths = lengths[:BATCH_SIZE], lengths[BATCH_SIZE:]
            total += max(batch) * len(batch)
    return total


def report_of(folder, capsys, *flags):
    assert main(["report", str(folder), "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def assert_counts(report, packs, sizes):
    """Every number of what was trained, by another way."""
    ids = [sample for pack in packs for sample in pack.ids]
    packs = [pack for pack in packs if pack.ids]
    tokens, vision = sum(sizes[one].length for one in ids), sum(sizes[one].vision for one in ids)
    alone = [pack for pack in packs if len(pack.ids) == 1 and sizes[pack.ids[0]].length >= CAPACITY]
    filled = [sum(sizes[one].length for one in pack.ids) / CAPACITY for pack in packs if pack not in alone]
    assert alone, "the long row stands alone"
    found = report["trained"]
    assert (found["num_packs"], found["num_samples"], found["num_tokens"]) == (len(packs), len(ids), tokens)
    assert found["num_images"] == sum(sizes[one].images for one in ids)
    assert found["num_vision_tokens"] == vision > 0
    assert found["vision_share"] == pytest.approx(vision / tokens, abs=1e-4)
    assert found["num_single_long"] == len(alone)
    assert found["fill_mean"] == pytest.approx(sum(filled) / len(filled), abs=1e-4)
    assert found["tokens_per_second"] == pytest.approx(tokens / found["seconds"], rel=0.1)
    padded = unpacked(packs, sizes)
    assert report["unpacked"]["num_tokens"] == padded > tokens
    assert report["unpacked"]["batch_size"] == BATCH_SIZE
    assert report["unpacked"]["padding_saved"] == pytest.approx(1 - tokens / padded, abs=1e-4)
    of_source = Counter(one.split(":")[0] for one in ids)
    assert {name: source["num_samples"] for name, source in report["sources"].items()} == of_source
    assert sum(source["share_of_tokens"] for source in report["sources"].values()) == pytest.approx(1, abs=1e-3)


def test_run_that_went_on_counts_every_step_once(run, sizes, capsys):
    """REPORT-2 REPORT-3 REPORT-7: steps behind the checkpoint were trained again."""
    report = report_of(run.whole, capsys)
    packs, resumed = kept(run)
    assert_counts(report, packs, sizes)
    assert report["run"]["has_ended"] is True
    assert report["run"]["step"] == report["run"]["num_steps"] == max(pack.step for pack in packs)
    assert report["trained"]["num_steps"] == report["run"]["step"]
    (note,) = report["notes"]
    assert f"was resumed from step {resumed}" in note
    assert {name: source["asked_share"] for name, source in report["sources"].items()} == {
        "captions": pytest.approx(NUM_CAPTIONS / (NUM_CAPTIONS + 2 * NUM_SCANS), abs=1e-4),
        "scans": pytest.approx(2 * NUM_SCANS / (NUM_CAPTIONS + 2 * NUM_SCANS), abs=1e-4),
    }
    assert [epoch["is_finished"] for epoch in report["epochs"]] == [True, True]
    assert sum(epoch["num_tokens"] for epoch in report["epochs"]) == report["trained"]["num_tokens"]


def test_run_that_was_stopped_is_reported_as_far_as_it_noted(run, sizes, capsys):
    """REPORT-6 REPORT-1: no report of its epoch, half a line at the end; what is on record adds up all the same."""
    report = report_of(run.stopped, capsys)
    assert not (run.stopped / "vlpack" / "epoch_1.json").exists()
    noted = max(point["step"] for point in report["series"])
    last = trained(run.stopped)[-1].step
    assert last - 2 <= noted <= last, "the last line of the log, or checkpoint"
    assert_counts(report, trained(run.stopped, up_to=noted), sizes)
    assert report["run"]["has_ended"] is False
    epochs = {epoch["epoch"]: epoch for epoch in report["epochs"]}
    assert (epochs[0]["is_finished"], epochs[1]["is_finished"]) == (True, False)
    assert epochs[1]["as_of"] == f"step {noted}"
    of_epoch = [pack for pack in trained(run.stopped, up_to=noted) if pack.epoch == 1]
    assert epochs[1]["num_samples"] == sum(len(pack.ids) for pack in of_epoch)


def test_lengths_that_were_remembered_are_counted(run):
    """REPORT-4: the second segment remembers all captions, whose pictures are there but for one that never was."""
    begins = [line for line in lines(run.whole / "vlpack" / "run.jsonl") if "num_remembered" in line]
    assert [line["event"] for line in begins] == ["start", "resume"]
    assert begins[0]["num_remembered"] == 0
    assert NUM_CAPTIONS - 1 <= begins[1]["num_remembered"] <= NUM_CAPTIONS + 1


def test_losses_and_speed_are_those_of_the_log(run, capsys):
    """REPORT-6 REPORT-7: of steps that were trained twice the later line counts."""
    series = report_of(run.whole, capsys)["series"]
    logged = {step_of(line): line["loss"] for line in log_lines(run.whole) if "loss" in line}
    found = {point["step"]: point["loss"] for point in series if point["loss"] is not None}
    assert found.items() <= logged.items()
    assert len(found) >= len(logged) - 1, "but for a line of a step that was lost"
    steps = [point["step"] for point in series]
    assert steps == sorted(set(steps))
    assert all(point["tokens_per_second"] > 0 for point in series)


def step_of(line):
    return int(line["global_step/max_steps"].split("/")[0])


def test_rows_are_listed_as_they_are_left_out(run, capsys):
    """REPORT-5 REPORT-8: found by the length pass when the epoch begins, by a worker when the step is taken."""
    missing = f"captions:{NUM_CAPTIONS - 1}"
    assert run.listed[1] == [missing]
    stopped = trained(run.stopped)
    second = [pack for pack in stopped if pack.epoch == 1]
    at_end = {line["id"] for line in left_out(run.stopped)}
    last_of_first = max(pack.step for pack in stopped if pack.epoch == 0)
    assert run.listed[last_of_first] == [missing]
    assert at_end - {missing}, "pictures that are gone since were met, and their rows listed before the epoch ended"
    assert at_end - {missing} <= run.gone
    assert not {sample for pack in second for sample in pack.ids} & run.gone
    report = report_of(run.whole, capsys)["left_out"]
    assert report["file"] == str(run.whole / "vlpack" / "left_out.jsonl")
    assert report["not_listed"] == {}
    assert {line["id"] for line in left_out(run.whole)} == {missing, *run.gone}
    assert report["reasons"]["file_missing"]["num_rows"] == report["num_rows"] == 1 + len(run.gone)
    assert report["sources"] == {"captions": 1, "scans": len(run.gone)}


def left_out(folder):
    return lines(folder / "vlpack" / "left_out.jsonl")


SHAPE = """({
  wide: [root.scrollWidth, view.innerWidth],
  lines: [...root.querySelectorAll("svg[role=img] path.values")].map(path => path.getTotalLength()),
  tables: [...root.querySelectorAll(".scroll")].map(one => one.scrollWidth > one.clientWidth),
  letters: Math.min(...[...root.querySelectorAll("svg[role=img] text")].map(text =>
    text.getBoundingClientRect().height)),
  colours: ["background-color", "color"].map(name => view.getComputedStyle(root.querySelector("body"))[name]),
  text: root.querySelector("main").innerText,
  asked: view.performance.getEntriesByType("resource").length,
})"""


@needs_chromium
def test_page_is_readable_in_light_dark_and_on_a_phone(run, tmp_path, capsys):
    """REPORT-10: as Chromium lays it out."""
    report = report_of(run.whole, capsys, "--html", str(tmp_path / "report.html"))
    page = (tmp_path / "report.html").read_text()
    looks = [
        measured(page, SHAPE, width=width, theme=theme)
        for width, theme in ((1280, "light"), (390, "light"), (390, "dark"))
    ]
    for look in looks:
        assert look["wide"][0] <= look["wide"][1], "nothing sticks out"
        assert len(look["lines"]) == 3
        assert min(look["lines"]) > 300, "from the first step to the last"
        assert look["letters"] >= 10, "pixels"
        assert look["asked"] == 0
        assert f"{report['trained']['num_tokens']:,}" in look["text"]
        assert f"{run.whole.name}/vlpack/left_out.jsonl" in look["text"]
        assert str(run.whole.parent) not in look["text"], "REPORT-12"
        assert look["tables"]
        assert "was resumed from step" in look["text"]
    assert any(looks[1]["tables"]), "which scrolls by itself on a phone"
    light, dark = looks[1]["colours"], looks[2]["colours"]
    assert light[0] != dark[0]
    assert light[1] != dark[1]
