"""Votes of real processes over gloo, without a model."""

import os
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from swift_vlpack.feed.agreement import AnotherRankFailed, Vote, in_step
from swift_vlpack.host.voting import Ranks


def run(function, num_ranks, folder, *args):
    """`function(rank, *args)` on every rank; what each returned."""
    mp.spawn(_rank, (function, num_ranks, str(folder), args), nprocs=num_ranks)
    return [eval((folder / f"rank{rank}").read_text()) for rank in range(num_ranks)]


def _rank(rank, function, num_ranks, folder, args):
    store = dist.FileStore(os.path.join(folder, "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    try:
        (Path(folder) / f"rank{rank}").write_text(repr(function(rank, *args)))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def stops_of(rank):
    def packs():
        yield "a"
        if rank == 1:
            raise OSError("the disk is gone")
        yield from "bcdef"

    steps = []
    try:
        for pack in in_step(packs(), lambda: "empty", Ranks()):
            dist.barrier()
            steps.append(pack)
    except (OSError, AnotherRankFailed) as error:
        return steps, type(error).__name__, str(error)
    return steps, None, None


@pytest.mark.slow
@pytest.mark.telling
def test_rank_that_fails_stops_all_after_what_they_had_agreed_on(tmp_path):
    """STREAM-5"""
    first, second = run(stops_of, 2, tmp_path)
    assert second == (["a"], "OSError", "the disk is gone")
    assert first == (["a"], "AnotherRankFailed", "another rank could not get its next pack; its log has the cause")


def test_without_other_ranks_nobody_is_asked():
    """STREAM-3"""
    assert list(in_step(iter("abc"), lambda: "empty", Ranks())) == ["a", "b", "c"]
    assert Ranks().vote(Vote.PACK)() is Vote.PACK
    with pytest.raises(OSError, match="gone"):
        list(in_step(map(_fail, "a"), lambda: "empty", Ranks()))


def _fail(_):
    raise OSError("gone")
