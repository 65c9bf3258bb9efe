"""Load the weights of a checkpoint that transformers saved under other names than the model has.

transformers saves some models under older names (Qwen2.5-VL: `model.layers.0...`, where the model itself has
`model.language_model.layers.0...`). `from_pretrained` translates the names, but transformers' trainer does not when a
run resumes: it warns, skips unknown names, and continues from the initial weights. (Seen with transformers 5.19, on a
tiny Qwen2.5-VL: 0 of 56 tensors of the checkpoint were loaded, in plain `swift sft` too. Adapters are not affected.)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from swift.utils import get_logger
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from swift_vlpack.errors import StateMismatch

logger = get_logger()


def load_renamed(model: Any, checkpoint: Path) -> None:
    """Load the weights if the checkpoint has names that the model lacks. Raises `StateMismatch` if any is left over."""
    if not isinstance(model, PreTrainedModel):  # a model with adapters has other files
        return
    saved = names_in(checkpoint)
    if saved <= set(model.state_dict()):
        return
    logger.info(f"packing: {checkpoint} has its weights under names of earlier versions, which are translated")
    loaded = type(model).from_pretrained(checkpoint, dtype=model.dtype)
    problem = model.load_state_dict(loaded.state_dict(), strict=False)
    if problem.missing_keys or problem.unexpected_keys:
        raise StateMismatch(
            f"the weights of {checkpoint} are not those of this model: the checkpoint lacks "
            f"{problem.missing_keys[:3]}, and also has {problem.unexpected_keys[:3]}"
        )


def names_in(checkpoint: Path) -> set[str]:
    """Return the names of the weights in the safetensors files of a checkpoint; none if it has no such file."""
    if (index := checkpoint / SAFE_WEIGHTS_INDEX_NAME).is_file():
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    if not (file := checkpoint / SAFE_WEIGHTS_NAME).is_file():
        return set()
    with safe_open(file, "pt") as weights:
        return set(weights.keys())
