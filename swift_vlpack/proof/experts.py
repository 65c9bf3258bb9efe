"""See which experts each token is sent to.

Rounding may send a token to another expert, and then all that follows differs a lot for this token. Such a token says
nothing about isolation, so it is left out of a comparison and counted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

_ROUTER = re.compile(r"(^|\.)(gate|router)$")


def has_experts(model: torch.nn.Module) -> bool:
    """Tell whether a model routes tokens to experts."""
    return any("expert" in name for name, _ in model.named_modules())


class Routes:
    """The choices of all routers of one forward, in the order of the layers."""

    def __init__(self) -> None:
        self.choices: list[torch.Tensor] = []

    def note(self, module: Any, args: Any, kwargs: Any, made: Any) -> None:
        """Keep the numbers of the experts that a router chose; of a router that gives scores, the two best."""
        if torch._C._current_graph_task_id() != -1:  # a layer that is run again in the backward
            return
        tensors = [one for one in (made if isinstance(made, tuple) else (made,)) if isinstance(one, torch.Tensor)]
        chosen = next((one for one in tensors if not one.is_floating_point()), None)
        if chosen is None and tensors:
            scores = tensors[0].detach()
            chosen = scores.topk(min(2, scores.shape[-1]), dim=-1).indices
        if chosen is not None and chosen.dim() > 1:
            self.choices.append(chosen.detach().flatten(0, -2).sort(-1).values)

    def together(self, shape: Sequence[int]) -> torch.Tensor | None:
        """Return all choices of each token, as (batch_size, num_tokens, choices); None if there are none."""
        num_tokens = shape[0] * shape[1]
        fitting = [one for one in self.choices if len(one) == num_tokens]
        return torch.cat(fitting, dim=-1).reshape(*shape, -1) if fitting else None


def routers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that choose experts."""
    return [module for name, module in model.named_modules() if _ROUTER.search(name)] if has_experts(model) else []
