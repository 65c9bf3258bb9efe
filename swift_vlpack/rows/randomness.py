"""Draw random numbers that depend only on a name, such as that of a row.

Templates and processors may draw from the random states of the process (augmentation, random prompts). Without
protection, encoding in the training process would change the dropout of the model, and after a resume workers would
draw other numbers. Inside a `RandomStream` they draw the same numbers each time, and the states of the process do not
change.

>>> def drawn():
...     with RandomStream(7, "row", 3):
...         return random.random()
>>> drawn() == drawn()
True
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from swift_vlpack.plan.shuffle import sort_keys

States = tuple[Any, Any, torch.Tensor]


class RandomStream:
    """A context with its own random states of Python, numpy and torch (CPU). Entering it again continues them."""

    def __init__(self, *name: object) -> None:
        self._seed = int(sort_keys(1, *name)[0])
        self._states: States | None = None  # when it was left last

    def __enter__(self) -> RandomStream:
        self._outside = _states()
        if self._states is None:
            _begin(self._seed)
        else:
            _restore(self._states)
        return self

    def __exit__(self, *error: object) -> None:
        self._states = _states()
        _restore(self._outside)

    @property
    def has_drawn(self) -> bool:
        """Tell whether any random number was drawn inside. Ask after the stream was left."""
        if self._states is None:
            return False
        with RandomStream() as fresh:
            _begin(self._seed)
        # Compare with the states of a fresh stream: nothing else tells that code has drawn.
        assert fresh._states is not None
        python, (_, keys, at, *_), of_torch = self._states
        first_python, (_, first_keys, first_at, *_), first_of_torch = fresh._states
        is_unmoved = python == first_python and at == first_at and bool((keys == first_keys).all())
        return not (is_unmoved and torch.equal(of_torch, first_of_torch))


def _begin(seed: int) -> None:
    random.seed(seed)
    # numpy takes a seed of 32 bits, but the key has 64.
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed % 2**63)  # `torch.manual_seed` would also seed the GPUs


def own_generator() -> torch.Generator:
    """Make the generator of a dataloader, which would otherwise draw a seed from the states of the process."""
    return torch.Generator().manual_seed(0)


def _states() -> States:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _restore(states: States) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
