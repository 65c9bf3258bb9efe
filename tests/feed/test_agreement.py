"""The order in which a rank fetches, votes and trains; votes of real processes are in tests/host/training."""

import pytest

from swift_vlpack.feed.agreement import AnotherRankFailed, Vote, in_step


class Noting:
    """Ranks that note every vote; what comes of the n-th is given, or is what this rank has."""

    def __init__(self, events, outcomes=()):
        self.events = events
        self.outcomes = list(outcomes)

    def vote(self, mine):
        number = sum(event.startswith("vote") for event in self.events)
        self.events.append(f"vote {number}: {mine.name}")
        return lambda: self.events.append(f"read {number}") or (self.outcomes.pop(0) if self.outcomes else mine)


def fetched(events, num_packs):
    for number in range(num_packs):
        events.append(f"fetch {number}")
        yield number


def test_vote_is_under_way_while_the_step_trains():
    """STREAM-3: the next pack is fetched and voted on before the step trains, and the outcome is read behind it."""
    events = []
    steps = in_step(fetched(events, 2), lambda: "empty", Noting(events))
    events.extend(f"train {pack}" for pack in steps)
    assert events == [
        *("fetch 0", "vote 0: PACK", "read 0"),
        *("fetch 1", "vote 1: PACK", "train 0", "read 1"),
        *("vote 2: DRY", "train 1", "read 2"),
    ]


def test_rank_that_ran_dry_trains_empty_packs_while_others_have_some():
    """STREAM-3"""
    outcomes = [Vote.PACK, Vote.PACK, Vote.PACK, Vote.DRY]
    assert list(in_step(iter([7]), lambda: "empty", Noting([], outcomes))) == [7, "empty", "empty"]


def test_failure_of_another_rank_stops_behind_what_was_agreed_on():
    """STREAM-5"""
    steps = in_step(iter("abc"), lambda: "empty", Noting([], [Vote.PACK, Vote.FAILED]))
    assert next(steps) == "a"
    with pytest.raises(AnotherRankFailed, match="another rank"):
        next(steps)
