"""Which tokens of a sample are targets, beside what the template says: never its first, and EOS only where wanted.

It is said to the template, so that whoever encodes a row hears of it: the length pass, which counts targets, training
and evaluation. Labels change, shapes do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from swift_vlpack.config import PackingConfig
from swift_vlpack.rows.contents import NO_LABEL
from swift_vlpack.rows.media import with_plain_paths

ATTRIBUTE = "vlpack_targets"
"""Of the template; being one, it is part of the key of remembered lengths."""


@dataclass(frozen=True)
class Targets:
    """Labels that are taken out of a sample."""

    mask_boundary_loss: bool = True
    """The first token of a sample is no target: it would be predicted from the sample before it in the row."""
    untrained: int | None = None
    """A token that is no target anywhere: EOS, where it shall not be trained."""

    def labels(self, labels: Any) -> Any:
        """The labels that are trained; the given ones stay as they are.

        >>> Targets(untrained=9).labels([5, -100, 6, 9, 9])
        [-100, -100, 6, -100, -100]
        """
        if isinstance(labels, torch.Tensor):
            made = labels.clone()
            if self.untrained is not None:
                made[made == self.untrained] = NO_LABEL
            if self.mask_boundary_loss:
                made[:1] = NO_LABEL
            return made
        kept = [NO_LABEL if label == self.untrained else label for label in labels]
        return [NO_LABEL, *kept[1:]] if kept and self.mask_boundary_loss else kept


def choose_targets(template: Any, config: PackingConfig) -> None:
    """Tell a template which tokens of its samples are targets."""
    eos = getattr(getattr(template, "tokenizer", None), "eos_token_id", None)
    setattr(template, ATTRIBUTE, Targets(config.mask_boundary_loss, None if config.train_on_eos else eos))


def encoded(template: Any, row: Any, **options: Any) -> Any:
    """What the template makes of a row, with the labels that are trained."""
    made = template.encode(with_plain_paths(row) if isinstance(row, Mapping) else row, **options)
    targets: Targets | None = getattr(template, ATTRIBUTE, None)
    if targets is not None and isinstance(made, dict) and made.get("labels") is not None:
        made["labels"] = targets.labels(made["labels"])
    return made
