"""A resumed run trains the pinned rest: after a checkpoint of its own, and after one that the pinned package wrote.

Texts only: what data a state belongs to is told by its content, and paths of images are part of that.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.data_rows import text_row, write_jsonl
from tests.environment import packing_options, restored_environment
from tests.host.runs import packed_argv, train
from tests.marks import quick_only
from tests.pinned import pins
from tests.pinned.adapter import packs_trained, put_state, states_in

FAMILY = "qwen2_5_vl"
COMMON = {"packing_verify": "false", "packing_drop_last": "false", "record_packs": "true"}
BUFFER = {"packing_buffer": "4", "packing_strategy": "best_fit"}
STREAM = {"streaming": "true"}
STATES = pins.FOLDER / "states"

RUNS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "planned": ({"packing_strategy": "exact"}, {}),
    "planned, second epoch": ({"packing_strategy": "binpack"}, {"at": 6}),
    "parts": ({"packing_overflow": "split", "packing_stride": "6"}, {"packing_length": 60, "max_length": 300}),
    "two sources": ({"packing_strategy": "exact"}, {"ratios": (0.5, 1.5)}),
    "buffer": ({**BUFFER, "packing_mode": "buffer"}, {}),
    "buffer, second epoch": ({**BUFFER, "packing_mode": "buffer"}, {"at": 6}),
    "stream": (BUFFER, STREAM),
    "stream, second epoch": (BUFFER, {**STREAM, "at": 6}),
    "stream, two workers": (BUFFER, {**STREAM, "dataloader_num_workers": 2}),
}
CASES = quick_only(("planned", "stream"), RUNS)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    few = [text_row(f"question {n}", "word " * (n * 11 % 50 + 1)) for n in range(16)]
    more = [text_row(f"another {n}", "red house " * (n * 5 % 23 + 1)) for n in range(8)]
    return [write_jsonl(folder / f"{name}.jsonl", rows) for name, rows in (("few", few), ("more", more))]


@pytest.fixture
def trained(small_folder, data, tmp_path):
    """`trained(name, "out")`: the packs of a run of 8 steps, which saves the step at which it is resumed."""

    def run(name, output, is_replaced=False, **more):
        options, flags = RUNS[name]
        options = {**options, **({"resume_files": "replaced"} if is_replaced else {})}
        flags = {"max_steps": 8, "max_length": 128, "gradient_accumulation_steps": 2, "dataset": data,
                 "num_train_epochs": 3, "save_strategy": "steps", "tuner_type": "lora", **flags}  # fmt: skip
        flags["save_steps"] = flags.pop("at", 3)
        with restored_environment():
            if ratios := flags.pop("ratios", None):
                lines = (f"- {{dataset: {one}, ratio: {ratio}}}" for one, ratio in zip(data, ratios, strict=True))
                (tmp_path / "mix.yaml").write_text("sources:\n" + "".join(f"  {line}\n" for line in lines))
                options = {**options, "fusion_config": str(tmp_path / "mix.yaml")}
                del flags["dataset"]
            packing_options(packing_cache_dir=str(tmp_path / "lengths"), **COMMON, **options)
            train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path / output, **flags, **more))
        return packs_trained(tmp_path / output)

    return run


def checkpoint_of(name: str, output: Path) -> Path:
    return output / f"checkpoint-{RUNS[name][1].get('at', 3)}"


@pytest.mark.parametrize("name", CASES)
def test_resumed_run_trains_the_pinned_rest(name, trained, tmp_path):
    """Its own checkpoint, then the same with the state that the pinned package saved."""
    whole = trained(name, "whole")
    checkpoint = checkpoint_of(name, tmp_path / "whole")
    rest = trained(name, "rest", resume_from_checkpoint=checkpoint)
    assert rest == [pack for pack in whole if pack[0] > RUNS[name][1].get("at", 3)]
    pins.check("resume", name, {"whole": whole, "rest": rest})
    state = STATES / name.replace(", ", "_").replace(" ", "_")
    pins.keep(state, states_in(checkpoint))
    saved = shutil.copytree(checkpoint, tmp_path / "saved" / checkpoint.name)
    put_state(state, saved)
    assert trained(name, "again", is_replaced=True, resume_from_checkpoint=saved) == rest
