"""`vlpack bench`: what is made of the runs of each way, and how one run is measured."""

import json
import re
import warnings
from types import SimpleNamespace

import pytest
import torch

from swift_vlpack.cli import bench
from swift_vlpack.cli.bench import PhaseFailed, bench_page, bench_report, bench_text, demo_rows
from swift_vlpack.config import PackingConfig
from swift_vlpack.host.launch import train_launch
from swift_vlpack.rows.source import RowSource
from tests.cli.in_process import run_here
from tests.data_rows import text_row, write_jsonl
from tests.environment import packing_options
from tests.host.runs import packed_argv

FAMILY = "qwen2_5_vl"
GB = 2**30
ABOUT = {
    "versions": {"swift_vlpack": "0.2.0", "swift": "4.6.0", "python": "3.11.7"},
    "device": {"name": "NVIDIA A100", "bytes": 80 * GB},
    "model": {"type": FAMILY, "parameters": 6_236_224, "dtype": "bfloat16", "attention": "vlpack"},
    "rows": 80,
    "options": {"max_length": 1024, "packing_strategy": "exact"},
    "kernels": {"varlen": {"bfloat16": 0.0031, "float32": "needs 16 bits"}, "flex": {"bfloat16": "is not here"}},
    "proofs": ["attention vlpack: varlen, equal to the reference", "isolation verified: max difference 0.0"],
}


def one(tokens, seconds=2.0, **more):
    found = {"tokens": tokens, "samples": 10, "seconds": seconds, "steps": 20, "peak_bytes": 3 * GB}
    return {**found, "seconds_to_step_1": 12.34, "seconds_loading": seconds / 4, "host_waits": 7, **more}


@pytest.fixture
def runs():
    """Three turns of four ways; rows share nothing."""
    return {
        "packs": [one(2000, about=ABOUT), one(3000, about=ABOUT), one(20000, about=ABOUT)],
        "samples": [one(2000)] * 3,
        "share=media": [{"did_not_run": "no two rows share media"}],
        "padded": [one(1000), one(2000, seconds=4.0), one(900)],
        "padding_free": [{"did_not_run": "the padding_free run ended with code 1; what it said is above"}],
    }


def report_of(runs):
    return bench_report(runs, is_demo=True, num_steps=20, seconds=90.0)


def test_numbers_are_medians_of_turns(runs):
    """CLI-22: a turn that was ten times as fast changes nothing."""
    ways = report_of(runs)["ways"]
    assert ways["packs"]["tokens_per_second"] == 1500.0
    assert [turn["tokens_per_second"] for turn in ways["packs"]["turns"]] == [1000.0, 1500.0, 10000.0]
    assert ways["padded"]["tokens_per_second"] == 500.0
    assert (ways["padded"]["samples_per_second"], ways["padded"]["peak_bytes"]) == (5.0, 3 * GB)
    assert ways["share=media"] == {"did_not_run": "no two rows share media"}


def test_screen_begins_with_versions_and_device(runs):
    """CLI-39 SHARE-85"""
    lines = bench_text(report_of(runs)).splitlines()
    assert lines[0] == "versions     swift_vlpack 0.2.0, swift 4.6.0, python 3.11.7"
    assert re.fullmatch(r"device       NVIDIA A100 with 80 GB, \d+ cores?", lines[1])
    assert lines[2] == "model        qwen2_5_vl, 6,236,224 parameters, bfloat16, attention vlpack"
    assert lines[4] == "options      max_length=1024, packing_strategy=exact"
    (packs,) = [line.split() for line in lines if line.startswith("packs")]
    assert packs == ["packs", "1500", "5.0", "3.00", "3", "GB", "12.3", "s", "25%", "7", "3"]
    assert lines[5] == "kernels      varlen 3e-03 in bfloat16, needs 16 bits; flex is not here"
    assert lines[6:8] == [f"{label:13}{said}" for label, said in zip(("proofs", ""), ABOUT["proofs"], strict=True)]
    assert any(re.fullmatch(r"share=media +did not run: no two rows share media", line) for line in lines)
    assert len(lines) <= 24
    assert all(len(line) <= 120 for line in lines)


def test_page_is_the_screen_and_every_number(runs):
    """CLI-39"""
    report = report_of(runs)
    page = bench_page(report)
    assert page.startswith(f"# vlpack bench: {FAMILY} on NVIDIA A100\n\n```text\n{bench_text(report)}\n```\n")
    assert json.loads(page.partition("```json\n")[2].partition("```")[0]) == report


def test_without_a_padded_run_there_is_no_ratio(runs):
    """CLI-22"""
    runs["padded"] = [{"did_not_run": "the padded run ended with code 1; what it said is above"}]
    assert re.search(r"^packs +1500 +5\.0 +- ", bench_text(report_of(runs)), flags=re.M)


# -- turns ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def turns(monkeypatch):
    """Which ways were run, where each run takes so many seconds."""
    now, tried = [1000.0], []

    def run(*, seconds=10.0, turns=3, minutes=10, broken=()):
        def measured(argv, way, share):
            tried.append(way)
            now[0] += seconds
            if way in broken:
                raise PhaseFailed(way)
            return one(1000)

        monkeypatch.setattr(bench, "measured_apart", measured)
        monkeypatch.setattr(bench.time, "time", lambda: now[0])
        bench._in_turns(SimpleNamespace(argv=[], turns=turns, minutes=minutes), now[0])
        return tried

    return run


def test_ways_take_turns(turns):
    """CLI-22"""
    assert turns() == [*bench.WAYS] * 3


def test_turn_that_would_end_too_late_is_not_begun(turns):
    """CLI-22: five runs of 50 s are 250 s, and a third turn would end after 750 s."""
    assert turns(seconds=50.0) == [*bench.WAYS] * 2


def test_way_that_does_not_run_is_tried_once(turns):
    """CLI-22"""
    assert turns(broken=("padded",), turns=2).count("padded") == 1


def test_without_packs_there_is_no_report(turns):
    """CLI-22"""
    with pytest.raises(PhaseFailed, match="packs"):
        turns(broken=("packs",))


@pytest.mark.parametrize("way", bench.WAYS)
def test_options_of_one_way_do_not_stop_another(way):
    """CLI-22 SHARE-85: an option that is for shared media, or for packs alone, is refused elsewhere."""
    own = (
        "--packing_length",
        "64",
        "--packing_share",
        "media",
        "--packing_share_max",
        "8",
        "--packing_drop_last",
        "false",
    )
    made = train_launch(["--model", "m", *own, *bench.WAYS[way]], {}).config
    assert made.shares_media == (way == "share=media")
    assert made.packing_share_max == (8 if made.shares_media else 16)


# -- one run ----------------------------------------------------------------------------------------------------------


class Trainer:
    """As much of a trainer as a clock looks at."""

    def __init__(self):
        self.callbacks = []
        self.add_callback = self.callbacks.append

    def training_step(self, model, inputs):
        return "loss"

    def get_batch_samples(self, batches):
        return batches


def batch(*lengths):
    width = max(lengths)
    mask = torch.tensor([[1] * length + [0] * (width - length) for length in lengths])
    return {"input_ids": torch.zeros_like(mask), "attention_mask": mask}


@pytest.fixture
def clocked(monkeypatch):
    """What a clock measured of steps of two batches that take a second each, and how many it let the run train."""
    from swift_vlpack.cli import bench_run

    def run(*, until, num_steps=6, device="cpu"):
        now, trainer = [100.0], Trainer()
        monkeypatch.setattr(bench_run.time, "time", lambda: now[0])
        take, modes = trainer.get_batch_samples, ["default"]
        monkeypatch.setattr(
            trainer, "get_batch_samples", lambda of_step: (now.insert(0, now[0] + 0.25), take(of_step))[1]
        )
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
        clock, control = bench_run.Clock(trainer, until), SimpleNamespace(should_training_stop=False)
        args, state = SimpleNamespace(device=torch.device(device)), SimpleNamespace(max_steps=num_steps)
        taken = 0
        while taken < num_steps and not control.should_training_stop:
            for one in trainer.get_batch_samples([batch(3, 5), batch(4)]):
                assert trainer.training_step(None, one) == "loss"
            if modes[-1] == "warn":
                for said in ("called a synchronizing CUDA operation", "another warning") * 3:
                    warnings.warn(said, stacklevel=1)
            now[0] += 0.75
            taken += 1
            clock.on_step_end(args, state, control)
        assert (modes[-1], trainer.first_batches) == ("default", None)
        return clock.measured(95.0), taken

    return run


def test_steps_that_warm_up_are_not_measured(clocked):
    """CLI-22"""
    measured, _ = clocked(until=1000.0)
    of_data = {"tokens": 48, "samples": 12, "seconds_loading": 1.0}
    assert measured == {"seconds_to_step_1": 6.0, "steps": 4, "seconds": 4.0, "host_waits": None, **of_data}


def test_waits_for_the_device_are_counted_in_the_second_step(clocked):
    """CLI-22: as PyTorch warns of them on a GPU."""
    assert clocked(until=1000.0, device="cuda")[0]["host_waits"] == 3


def test_late_run_measures_one_step_at_least(clocked):
    """CLI-22"""
    assert clocked(until=50.0)[1] == 3
    assert clocked(until=104.5)[1] == 5


def test_tokens_are_counted_as_the_rows_have_them_alone():
    """SHARE-85: what the lengths of a record say, and not the tokens of its sequence."""
    from swift_vlpack.cli.bench_run import sizes_of

    packed = SimpleNamespace(record=SimpleNamespace(lengths=(30, 40), num_tokens=50))
    assert sizes_of(packed) == (70, 2)
    flat = {"input_ids": torch.zeros(1, 7), "text_position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]])}
    assert tuple(map(int, sizes_of(flat))) == (7, 2)


def alone(lengths, capacity):
    return [[at] for at in range(len(lengths))]


def test_paths_and_names_are_not_published():
    """CLI-39"""
    from swift_vlpack.cli.bench_run import options_to_publish

    config = PackingConfig(
        packing_length=64, packing_strategy=f"{__name__}:alone", packing_cache_dir="/home/me", packing_overflow="split"
    )
    assert options_to_publish(config) == {"packing_length": 64, "packing_overflow": "split"}


def test_rows_are_taken_from_all_over_in_groups_of_neighbours():
    """CLI-22 SHARE-85"""
    from swift_vlpack.cli.bench_run import some_of

    source = RowSource(name="x", rows=list(range(1000)))
    assert some_of(source, 40).rows == [*range(20), *range(980, 1000)]
    assert some_of(source, 3).rows == [0, 1, 2]
    assert some_of(source, 1000) is source
    assert len(some_of(source, 990).rows) == 990


def test_demo_has_rows_that_share_an_image_and_texts(tmp_path, monkeypatch):
    """CLI-22"""
    monkeypatch.setattr(bench, "DEMO_IMAGES", 10)
    rows = list(demo_rows(tmp_path))
    images = [row["images"][0] for row in rows if "images" in row]
    assert len(set(images)) == len(list(tmp_path.glob("*.jpg"))) == 10 < len(images)
    assert sum("images" not in row for row in rows) == 10
    assert json.dumps(rows) == json.dumps(list(demo_rows(tmp_path)))


@pytest.mark.parametrize(
    ("flags", "part"), [({"streaming": "true", "max_steps": 3}, "--streaming true"), ({"packing": "false"}, "no packs")]
)
def test_what_has_no_packs_to_measure_is_refused(flags, part, small_folder, tmp_path, capfd):
    """CLI-22"""
    packing_options()
    data = write_jsonl(tmp_path / "rows.jsonl", [text_row()])
    argv = packed_argv(small_folder(FAMILY), FAMILY, tmp_path / "out", dataset=data, max_length=200, **flags)
    code = run_here(["bench", *argv, "--phase", "packs"])
    said = capfd.readouterr()
    assert (code, said.out) == (2, "")
    assert part in said.err
