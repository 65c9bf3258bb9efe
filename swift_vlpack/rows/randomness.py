"""Random numbers that belong to something: to a pack, a row, the reading of a stream.

Templates and processors draw from the random states of the process (augmentation, prompts at random). Whoever encodes
in the training process would move the dropout of the model by that, and a dataloader's workers would go on with other
numbers after a resume. Here they get numbers that depend on a name alone, and leave the states as they found them.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from swift_vlpack.plan.shuffle import sort_keys

States = tuple[Any, Any, torch.Tensor]


class RandomStream:
    """The random states of Python, numpy and torch (on the CPU) while inside; they go on where they were left."""

    def __init__(self, *name: object) -> None:
        outside = _states()
        random.seed(seed := int(sort_keys(1, *name)[0]))
        # numpy takes 32 bits of a seed; the key has 64.
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed % 2**63)  # torch.manual_seed would reach GPUs, too
        self._first = self._states = _states()
        _restore(outside)

    def __enter__(self) -> RandomStream:
        self._outside = _states()
        _restore(self._states)
        return self

    def __exit__(self, *error: object) -> None:
        self._states = _states()
        _restore(self._outside)

    @property
    def has_drawn(self) -> bool:
        """Whether anybody has drawn from it."""
        # States are compared and not counted: whoever draws need not tell us.
        python, (_, keys, at, *_), of_torch = self._states
        first_python, (_, first_keys, first_at, *_), first_of_torch = self._first
        is_unmoved = python == first_python and at == first_at and bool((keys == first_keys).all())
        return not (is_unmoved and torch.equal(of_torch, first_of_torch))


def own_generator() -> torch.Generator:
    """For a dataloader, which would draw the base seed of its workers from the states of the process."""
    return torch.Generator().manual_seed(0)


def _states() -> States:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _restore(states: States) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
