"""Data sets of one's own: they mix, shuffle and encode by themselves, as projects around ms-swift do."""

from __future__ import annotations

import random
from typing import Any

from torch.utils.data import Dataset


def encoded(num_tokens: int, name: str = "", **fields: Any) -> dict[str, Any]:
    """A sample that is encoded already, with a column of one's own."""
    ids = [10 + n % 80 for n in range(num_tokens)]
    return {"input_ids": ids, "labels": [-100, *ids[1:]], "name": name, **fields}


def lengths_of(name: str, num_rows: int, most: int = 60) -> list[int]:
    """The tokens of the rows of a pool."""
    rng = random.Random(name)
    return [rng.randint(8, most) for _ in range(num_rows)]


class Mixed(Dataset):
    """Draws its rows by ratios, anew in every epoch, and shuffles them; `data[i]` encodes the i-th."""

    def __init__(self, ratios: dict[str, float], num_rows: int = 40, seed: int = 7) -> None:
        self.pools = {name: lengths_of(name, num_rows) for name in ratios}
        self.ratios = ratios
        self.seed = seed
        self.told: list[int] = []
        """Every epoch that it was told, in order."""
        self.num_encoded = 0
        self.order = self.drawn(0)

    def drawn(self, epoch: int) -> list[tuple[str, int]]:
        """The rows of an epoch, in order: the class's own schedule."""
        rng, order = random.Random(f"{self.seed} {epoch}"), []
        for name, pool in self.pools.items():
            whole, rest = divmod(round(len(pool) * self.ratios[name]), len(pool))
            order += [(name, row) for row in [*range(len(pool))] * whole + rng.sample(range(len(pool)), rest)]
        rng.shuffle(order)
        return order

    def names(self, epoch: int) -> list[str]:
        """The names of an epoch's rows, sorted."""
        return sorted(f"{name}-{row}" for name, row in self.drawn(epoch))

    def set_epoch(self, epoch: int) -> None:
        """Draw anew."""
        self.told.append(epoch)
        self.order = self.drawn(epoch)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.num_encoded += 1
        name, row = self.order[index]
        return encoded(self.pools[name][row], f"{name}-{row}")


class Declared(Mixed):
    """The same, and knows how long its rows are."""

    def length(self, index: int) -> int:
        """Tokens of a row, without encoding it."""
        name, row = self.order[index]
        return self.pools[name][row]
