"""Samples of like length as batches: what runs once for each of them runs once for a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

LEAST_SHARE = 0.8
"""Of a group's longest sample, in tokens: at most a fifth of a batch is padding, and so of the work on it."""


@dataclass(frozen=True, slots=True)
class Group:
    """Samples of a row that are computed together, padded on the right to the longest of them."""

    samples: tuple[tuple[int, int], ...]
    """First token, and the one behind the last, of each; the longest first."""
    tokens: torch.Tensor  # (num_samples, longest): the row's token at each place, its sample's last one where padded
    is_real: torch.Tensor  # (num_samples, longest)

    @property
    def is_full(self) -> bool:
        """Whether all are of one length."""
        return len({end - start for start, end in self.samples}) == 1


@dataclass(frozen=True, slots=True)
class Groups:
    """All samples of a row, each in one group."""

    groups: tuple[Group, ...]
    places: torch.Tensor  # (num_tokens,): where the groups' real tokens, end to end, have each token of the row

    def in_row_order(self, outputs: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """What each group's batch gave, (num_samples, longest, ...), as the row has it, with one row at `dim` 0."""
        real = [output[group.is_real] for group, output in zip(self.groups, outputs, strict=True)]
        return torch.cat(real).index_select(0, self.places).unsqueeze(dim)


@lru_cache(maxsize=8)  # the layers of a forward pass share them
def groups_of(ends: tuple[int, ...], device: torch.device, least_share: float = LEAST_SHARE) -> Groups:
    """Group the samples between these boundaries."""
    samples = sorted(pairwise(ends), key=lambda sample: (sample[0] - sample[1], sample[0]))
    parts: list[list[tuple[int, int]]] = []
    for start, end in samples:
        if parts and end - start >= least_share * (parts[-1][0][1] - parts[-1][0][0]):
            parts[-1].append((start, end))
        else:
            parts.append([(start, end)])
    groups = tuple(_group(part, device) for part in parts)
    tokens = torch.cat([group.tokens[group.is_real] for group in groups])
    return Groups(groups, torch.argsort(tokens))


def _group(samples: list[tuple[int, int]], device: torch.device) -> Group:
    longest = samples[0][1] - samples[0][0]
    starts = torch.tensor([start for start, _ in samples], device=device)[:, None]
    lengths = torch.tensor([end - start for start, end in samples], device=device)[:, None]
    place = torch.arange(longest, device=device)
    return Group(tuple(samples), starts + torch.minimum(place, lengths - 1), place < lengths)
