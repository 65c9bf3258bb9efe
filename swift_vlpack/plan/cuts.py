"""Record how far an epoch has come, so that another number of ranks can continue.

A plan is never saved, because it can be computed again. Its cuts are saved, one for each number of ranks that worked on
the epoch: how many ranks shared the packs, how many packs that made, and how many of them were trained.

>>> from swift_vlpack.config import PackingConfig
>>> from swift_vlpack.plan.planner import plan
>>> planned = plan([5, 5, 4, 6, 7, 3], PackingConfig(packing_length=10, packing_strategy="greedy"))
>>> two, cuts = share(planned, (), num_ranks=2)  # 3 packs become 4, for two steps of 2 ranks
>>> cuts
(Cut(num_ranks=2, num_packs=4, num_consumed=0),)
>>> cuts = with_consumed(cuts, 2)  # one step was trained
>>> one, cuts = share(planned, cuts, num_ranks=1)  # and one rank continues
>>> cuts
(Cut(num_ranks=2, num_packs=4, num_consumed=2), Cut(num_ranks=1, num_packs=2, num_consumed=0))
>>> sorted([*two[0], *two[1], *one[0], *one[1]])
[0, 1, 2, 3, 4, 5]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from swift_vlpack.plan.packs import Plan


class Cut(NamedTuple):
    """The part of an epoch that one number of ranks trained. The next cut shares the packs that were left."""

    num_ranks: int
    num_packs: int
    """Number of packs after they were shared among the ranks."""
    num_consumed: int
    """Number of packs that were trained, over all ranks."""


def share(plan: Plan, cuts: Sequence[Cut], num_ranks: int, *, least_packs: int = 0) -> tuple[Plan, tuple[Cut, ...]]:
    """Share the packs among `num_ranks`. Returns (packs, cuts), where the last cut belongs to these ranks.

    The same number of ranks as in the last cut continues it, with exactly the packs that would have come next. Another
    number of ranks shares the packs that the last cut has left. A new epoch, without cuts, gets at least `least_packs`.
    """
    if not cuts:
        cuts = [Cut(num_ranks, max(least_packs, _rounded_up(len(plan), num_ranks)), 0)]
    packs, last = replay(plan, cuts), cuts[-1]
    if last.num_ranks == num_ranks:
        return packs, tuple(cuts)
    left = packs.rest(last.num_consumed)
    cut = Cut(num_ranks, _rounded_up(len(left), num_ranks), 0)
    return _aligned(left, cut), (*cuts, cut)


def replay(plan: Plan, cuts: Sequence[Cut]) -> Plan:
    """Return the packs that the last cut refers to, without those that earlier cuts trained."""
    *past, last = cuts
    for cut in past:
        plan = _aligned(plan, cut).rest(cut.num_consumed)
    return _aligned(plan, last)


def with_consumed(cuts: Sequence[Cut], num_more: int) -> tuple[Cut, ...]:
    """Return the cuts after the present ranks have trained `num_more` more packs."""
    *past, last = cuts
    return (*past, last._replace(num_consumed=last.num_consumed + num_more))


def num_consumed(cuts: Sequence[Cut]) -> int:
    """Return how many packs of the epoch were trained, in all cuts together."""
    return sum(cut.num_consumed for cut in cuts)


def is_finished(cuts: Sequence[Cut]) -> bool:
    """Tell whether no pack of the epoch is left."""
    return bool(cuts) and cuts[-1].num_consumed == cuts[-1].num_packs


def _aligned(plan: Plan, cut: Cut) -> Plan:
    return plan.align(cut.num_ranks, num_packs=cut.num_packs)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
