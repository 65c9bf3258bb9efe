"""From a step back to its packs, against a run that is lived through pack by pack."""

import random
from itertools import islice

import numpy as np
import pytest

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import ConfigError
from swift_vlpack.plan.cuts import with_consumed
from swift_vlpack.plan.epoch import Recipe, plan_epoch
from swift_vlpack.plan.mix import Mix, Source
from swift_vlpack.runlog.run_steps import EpochSpan, find_step, position_after, span_of_step, step_of_pack

NUM_EPOCHS = 3


def recipe(rng, num_ranks=1):
    num_rows = rng.randint(20, 60)
    sizes = np.zeros((4, num_rows), dtype=np.int32)
    sizes[0] = [rng.randint(5, 60) for _ in range(num_rows)]
    mix = Mix(sources=(Source("a", num_rows, 1.0),), rows=(None,), seed=rng.randint(0, 99), seeds={}, shuffle=True)
    config = PackingConfig(packing_length=64, packing_strategy="greedy", packing_drop_last=False)
    return Recipe(sizes=(sizes,), mix=mix, config=config, seed=7, num_ranks=num_ranks)


def shared(one, num_ranks):
    return Recipe(sizes=one.sizes, mix=one.mix, config=one.config, seed=one.seed, num_ranks=num_ranks)


def lived(one, rng):
    """A run that is interrupted and goes on with other ranks: its spans, and the samples of each step by rank."""
    spans, steps, checkpoints = [], {}, []
    step, epoch, cuts = 0, 0, ()
    while epoch < NUM_EPOCHS:
        num_ranks, accumulation = rng.choice((1, 2, 3)), rng.choice((1, 2, 3))
        stops_at = step + rng.randint(1, 9)
        while epoch < NUM_EPOCHS and step < stops_at:
            plan = plan_epoch(shared(one, num_ranks), epoch, cuts)
            spans.append(EpochSpan(step, epoch, num_ranks, accumulation, plan.cuts, plan.digest()))
            ranks = [iter(plan.numbers_left(rank)) for rank in range(num_ranks)]
            while step < stops_at and (taken := [list(islice(rank, accumulation)) for rank in ranks])[0]:
                step += 1
                steps[step] = [[sorted(plan.packs[number]) for number in numbers] for numbers in taken]
                cuts = with_consumed(
                    plan.cuts if not cuts or cuts[-1].num_ranks != num_ranks else cuts, sum(map(len, taken))
                )
                checkpoints.append((step, epoch, cuts))
            if step < stops_at:
                epoch, cuts = epoch + 1, ()
        if checkpoints and rng.random() < 0.5:  # killed: what was trained behind an earlier checkpoint is lost
            step, epoch, cuts = rng.choice(checkpoints[-4:])
            steps = {number: packs for number, packs in steps.items() if number <= step}
            checkpoints = [one for one in checkpoints if one[0] <= step]
    return spans, steps


@pytest.mark.parametrize("seed", range(40))
def test_every_step_leads_to_the_packs_that_were_trained(seed):
    """SEE-3: whatever ranks and accumulation, after any number of resumes, also where steps were trained again."""
    rng = random.Random(seed)
    one = recipe(rng)
    spans, steps = lived(one, rng)

    def plan_of(span):
        plan = plan_epoch(shared(one, span.num_ranks), span.epoch, span.cuts)
        assert span.digest in (None, plan.digest())
        return plan

    assert len(steps) > 3
    for step, packs in steps.items():
        found = find_step(step, spans, plan_of, num_epochs=NUM_EPOCHS)
        by_rank = [[] for _ in packs]
        for pack in found.packs:
            by_rank[pack.rank].append(sorted(found.plan.packs[pack.number]))
            assert step_of_pack(found.plan, found.span, pack.number) == (pack.rank, step)
        assert by_rank == packs
        num_packs = sum(len(numbers) for at in range(found.span.step, step) for numbers in steps[at + 1])
        there = found.plan.epoch, found.plan.num_consumed + num_packs
        assert position_after(found.span, step, plan_of) == there, "as the next checkpoint would say"
    with pytest.raises(ConfigError, match=f"the run has {max(steps)} steps; name one from 1 to {max(steps)}"):
        find_step(max(steps) + 1, spans, plan_of, num_epochs=NUM_EPOCHS)


def test_epochs_that_were_not_begun_are_computed_ahead():
    """SEE-3: a plan follows from numbers, so a run that has not started has steps too."""
    one = recipe(random.Random(1), num_ranks=2)

    def found(step):
        plan_of = lambda at: plan_epoch(one, at.epoch, at.cuts)  # noqa: E731
        packs = find_step(step, [EpochSpan(0, 0, 2, 2)], plan_of, num_epochs=NUM_EPOCHS)
        return [(packs.plan.epoch, pack.number) for pack in packs.packs]

    steps = [-(-plan_epoch(one, epoch).num_left_per_rank // 2) for epoch in range(NUM_EPOCHS)]
    everything = [(epoch, number) for epoch in range(NUM_EPOCHS) for number in range(len(plan_epoch(one, epoch)))]
    assert sorted(pack for step in range(sum(steps)) for pack in found(step + 1)) == everything


def test_steps_before_the_first_that_is_known_are_refused():
    """SEE-3"""
    spans = [EpochSpan(100, 2, 1, 1)]
    with pytest.raises(ConfigError, match=r"step 100: .* steps up to 100 were trained by the run that it resumed"):
        span_of_step(spans, 100)
    with pytest.raises(ConfigError, match="counted from 1"):
        find_step(0, spans, lambda span: None, num_epochs=1)
