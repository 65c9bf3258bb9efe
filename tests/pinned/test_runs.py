"""Short runs are those of the pinned package: which samples in which step, what is left out, losses and gradients."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.data_rows import image_row, mixed_rows, text_row, write_jsonl
from tests.environment import packing_options, restored_environment
from tests.host.runs import epoch_report, log_lines, packed_argv, train
from tests.images import photo
from tests.marks import TELLING
from tests.pinned import pins
from tests.pinned.adapter import lengths_of, packs_trained

NOT_DECIDED = re.compile(
    r".*(second|time|speed|memory|elapsed|remaining|flos|_per_|wait|share_of_time|mfu).*|last_model_checkpoint|best_.*"
    r"|.*checkpoint.*|global_step/max_steps|percentage|account"
)
"""Keys of logs and reports that say how quick a run was, or say in words what others say: not what it trained."""
COMMON = {"packing_verify": "false", "packing_strategy": "exact", "packing_drop_last": "false", "record_packs": "true"}
SHORT = {"num_train_epochs": 1, "max_steps": 3, "gradient_accumulation_steps": 2, "max_length": 256, "logging_steps": 1}


def run(
    data: str = "mixed", family: str = "qwen2_5_vl", command: str = "sft", options: Any = None, **flags: Any
) -> Any:
    return data, family, command, options or {}, flags


RUNS: dict[str, tuple[str, str, str, dict[str, str], dict[str, Any]]] = {
    "defaults": run(options={"packing_strategy": "binpack", "packing_drop_last": "true", "packing_verify": "true"}),
    "qwen2_vl": run(family="qwen2_vl"),
    "qwen3_vl": run(family="qwen3_vl"),
    "qwen3_5": run("texts", family="qwen3_5"),
    "text model": run("texts", family="qwen2", template="qwen2_5"),
    "two epochs": run("texts", max_steps=-1, num_train_epochs=2),
    "lora": run(tuner_type="lora", lora_dropout=0.1),
    "loss scale": run(loss_scale="last_round+ignore_empty_think", options={"packing_loss": "sample"}),
    "by the root": run("texts", options={"packing_loss": "sqrt", "train_on_eos": "false"}),
    "channels and evaluation": run("channels", enable_channel_loss="true", loss_type="cross_entropy",
                                   val_dataset="channels", eval_strategy="steps", eval_steps=3,
                                   options={"eval_packing": "true"}),
    "padded evaluation": run("texts", val_dataset="texts", eval_strategy="steps", eval_steps=3,
                             per_device_eval_batch_size=2),
    "two sources": run(("mixed", "texts"), options={"fusion": "0.5 1.5"}),
    "in order": run(("mixed", "texts"), dataset_shuffle="false", train_dataloader_shuffle="false",
                    options={"packing_strategy": "greedy"}),
    "buffer": run(options={"packing_mode": "buffer", "packing_buffer": "5", "packing_strategy": "best_fit"}),
    "stream": run(("mixed", "texts"), streaming="true",
                  options={"packing_buffer": "5", "packing_strategy": "best_fit"}),
    "stream, two workers": run(("mixed", "texts"), streaming="true", dataloader_num_workers=2,
                               options={"packing_buffer": "5", "packing_strategy": "best_fit"}),
    "parts": run("documents", command="pt", packing_length=96, max_length=400,
                 options={"packing_overflow": "split", "packing_stride": "4", "packing_min_len": "3"}),
    "truncated": run("documents", command="pt", packing_length=96, max_length=400,
                     options={"packing_overflow": "truncate"}),
    "padded": run(options={"packing_pad_to": "64", "packing_max_images": "2"}),
}  # fmt: skip
SLOW = {"qwen2_vl", "two epochs", "by the root", "in order", "stream, two workers", "truncated", "padded"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    mixed = mixed_rows(folder / "images", 20, seed=3, largest=150)
    (folder / "broken.jpg").write_text("no image")
    mixed[4:4] = [image_row([str(folder / "broken.jpg")]), text_row("too long", "word " * 400)]
    texts = [text_row(f"question {n}", "word " * (n * 7 % 60 + 1)) for n in range(24)]
    channels = [{**row, "channel": "ab"[n % 2]} for n, row in enumerate(texts)]
    documents = [page(folder, number, number % 4, 6 + 3 * number) for number in range(7)]
    documents[1]["images"] = [photo(folder, "large", 336, 448)]  # of 12 x 16 tokens: more than a pack has room for
    rows = {"mixed": mixed, "texts": texts, "channels": channels, "documents": documents}
    return {name: write_jsonl(folder / f"{name}.jsonl", some) for name, some in rows.items()}


def page(folder: Path, number: int, num_images: int, num_words: int) -> dict[str, Any]:
    images = [photo(folder, f"{number}_{k}", 84, 56 + 28 * k, seed=k) for k in range(num_images)]
    text = "<image>".join("the small red house " * num_words for _ in range(num_images + 1))
    return {"messages": [{"role": "assistant", "content": text}], "images": images}


@pytest.fixture
def flags_of(small_folder, text_folder, data, tmp_path):
    """`flags_of("defaults", output)`: sets the options of a run, and returns its command and flags."""

    def flags(name, output):
        rows, family, command, options, more = RUNS[name]
        options = {**COMMON, **options}
        names = (rows,) if isinstance(rows, str) else rows
        given: dict[str, Any] = {**SHORT, "dataset": [data[one] for one in names], **more}
        if "val_dataset" in given:
            given["val_dataset"] = f"{data[given['val_dataset']]}#7"
        if ratios := options.pop("fusion", None):
            del given["dataset"]
            lines = [
                f"- {{dataset: {data[one]}, ratio: {ratio}}}" for one, ratio in zip(names, ratios.split(), strict=True)
            ]
            (tmp_path / "mix.yaml").write_text("sources:\n" + "".join(f"  {line}\n" for line in lines))
            options["fusion_config"] = str(tmp_path / "mix.yaml")
        packing_options(packing_cache_dir=str(tmp_path / "lengths"), **options)
        folder = text_folder if family == "qwen2" else small_folder(family)
        return command, packed_argv(folder, family, output, **given)

    return flags


@pytest.fixture
def gradients(monkeypatch):
    """The norm of the gradient of every parameter, at the first optimizer step."""
    from swift.callbacks import TrainerCallback, callbacks_map

    found: dict[str, float] = {}

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            if not found:
                named = ((name, one.grad) for name, one in model.named_parameters() if one.grad is not None)
                found.update({name: float(gradient.double().norm()) for name, gradient in named})

    monkeypatch.setitem(callbacks_map, "gradients", Gradients)
    return found


def decided(line: dict[str, Any]) -> dict[str, Any]:
    """Of a line of a log or a report what does not depend on how quick the machine is."""
    kept = {key: value for key, value in line.items() if not NOT_DECIDED.fullmatch(key)}
    return {key: decided(value) if isinstance(value, dict) else value for key, value in kept.items()}


def outcome(output: Path) -> dict[str, Any]:
    """What a run decided and computed, from the files that it left."""
    left_out = output / "vlpack" / "left_out.jsonl"
    lines = [json.loads(line) for line in left_out.read_text().splitlines()] if left_out.exists() else []
    reports = sorted((output / "vlpack").glob("epoch_*.json"))
    return {
        "packs": packs_trained(output),
        "left_out": sorted([line["id"], line["reason"], line["epoch"]] for line in lines),
        "log": [decided(line) for line in log_lines(output) if "loss" in line or "eval_loss" in line],
        "epochs": [decided(epoch_report(output, number)) for number in range(len(reports))],
    }


@pytest.mark.parametrize("name", [pytest.param(name, marks=TELLING) if name in SLOW else name for name in RUNS])
def test_run_is_as_pinned(name, flags_of, gradients, tmp_path):
    with restored_environment():
        command, flags = flags_of(name, tmp_path / "out")
        train([*flags, "--callbacks", "gradients"], command)
        assert max(gradients.values()) > 0
        pins.check("runs", name, outcome(tmp_path / "out"))
        pins.check("gradients", name, gradients)


@pytest.mark.parametrize("name", ["defaults", "qwen3_vl", "two sources", "parts"])
def test_lengths_are_as_pinned(name, flags_of, tmp_path):
    """Tokens, images, patches and targets of each row; a row that cannot be used has none."""
    with restored_environment():
        command, flags = flags_of(name, tmp_path / "out")
        pins.check("lengths_of_rows", name, lengths_of(flags, command))
