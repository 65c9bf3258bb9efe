"""Share the rows of a stream among readers: every worker of every rank can compute its rows by itself.

Two ranks with two workers each share ten rows:

>>> for rank in range(2):
...     for worker in range(2):
...         share = share_of(rank, 2, worker, 2)
...         print(rank, worker, [share.row(index) for index in range(3) if share.row(index) < 10])
0 0 [0, 4, 8]
0 1 [2, 6]
1 0 [1, 5, 9]
1 1 [3, 7]
"""

from __future__ import annotations

from typing import NamedTuple


class Share(NamedTuple):
    """A share of the rows: every `num_shares`-th one, from row `number` on."""

    number: int = 0
    num_shares: int = 1

    def row(self, index: int) -> int:
        """Return the number of the `index`-th row of the share."""
        return self.number + index * self.num_shares


EVERYTHING = Share()


def share_of(rank: int, num_ranks: int, worker: int, num_workers: int) -> Share:
    """Return the share of one worker of one rank. Neighbouring shares are of different ranks, to spread a remainder."""
    return Share(worker * num_ranks + rank, num_ranks * num_workers)
