"""Real `swift sft` and `swift pt` runs on tiny models, in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swift_vlpack.host.launch import plugin_path
from tests.environment import restored_environment

SMALL_VOCABULARY = Path(__file__).parent.parent / "plugins" / "small_vocabulary.py"
"""For `--external_plugins` of a process of its own that trains a model of `small_folder`."""
OFFLINE = {
    "torch_dtype": "float32",
    "report_to": "none",
    "use_hf": "true",
    "check_model": "false",
    "save_strategy": "no",
    "add_version": "false",
    "tuner_type": "full",
    "logging_steps": "1",
    "dataloader_pin_memory": "false",
    "dataloader_num_workers": "0",
    "fp16": "false",
    "bf16": "false",
}


def argv(model: Path, family: str, output: Path, **options: Any) -> list[str]:
    """Flags of a small run; `options` win."""
    merged = {
        "model": model,
        "model_type": family,
        "template": family,
        "output_dir": output,
        "max_length": 512,
        "gradient_accumulation_steps": 1,
        "learning_rate": "1e-3",
        **OFFLINE,
        **options,
    }
    if str(merged["dataloader_num_workers"]) == "0":
        # Because ms-swift 4.5 keeps its default of persistent workers without any worker, which torch refuses.
        merged.setdefault("dataloader_persistent_workers", "false")
    flags: list[str] = []
    for name, value in merged.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        flags += [f"--{name}", *map(str, values)]
    return flags


def packed_argv(model: Path, family: str, output: Path, **options: Any) -> list[str]:
    """The same with the plugin and packing."""
    return argv(model, family, output, **{"external_plugins": plugin_path(), "packing": "true", **options})


def train(flags: list[str], command: str = "sft") -> dict[str, Any]:
    """Run it; ms-swift's own result, with `log_history`."""
    import torch.utils.data._utils as of_loaders
    from swift.pipelines import pretrain_main, sft_main

    of_loaders.MP_STATUS_CHECK_INTERVAL = 0.5  # seconds; at 5 every loader with workers waits so long for its end
    with restored_environment():  # also where a fixture trains for a whole module
        result: dict[str, Any] = {"sft": sft_main, "pt": pretrain_main}[command](flags)
    return result


def log_lines(output: Path) -> list[dict[str, Any]]:
    """What ms-swift wrote to logging.jsonl."""
    return [json.loads(line) for line in (output / "logging.jsonl").read_text().splitlines()]


def epoch_report(output: Path, epoch: int = 0) -> dict[str, Any]:
    """What we wrote at the end of an epoch."""
    report: dict[str, Any] = json.loads((output / "vlpack" / f"epoch_{epoch}.json").read_text())
    return report


@contextmanager
def gradients_of_steps() -> Iterator[list[dict[str, Any]]]:
    """Register the callback `gradients`, which keeps what every optimizer step is taken with, by name of parameter."""
    from swift.callbacks import TrainerCallback, callbacks_map

    found: list[dict[str, Any]] = []

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            found.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})

    callbacks_map["gradients"] = Gradients
    yield found
    del callbacks_map["gradients"]


def assert_same_gradients(found: Mapping[str, Any], expected: Mapping[str, Any], rtol: float = 1e-5) -> None:
    """Of every parameter, up to rounding of the largest."""
    import torch

    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=rtol, atol=1e-5 * largest), name
