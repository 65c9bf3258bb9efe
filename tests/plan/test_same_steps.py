"""The laws of steps that keep their samples, over random lengths, batches and ranks."""

import random

import numpy as np
import pytest

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.plan.epoch import Recipe, pack_epoch, plan_epoch, saved_digest
from swift_vlpack.plan.mix import Mix, Source
from swift_vlpack.plan.same_steps import (
    IN_NO_STEP,
    KeptSteps,
    UnpackedRows,
    UnpackedStep,
    deal,
    kept_steps,
    pack_steps,
)

STRATEGIES = ("binpack", "greedy", "first_fit", "best_fit", "exact")


def in_order(num_samples, size):
    """The un-packed batch of each sample, if samples are taken in order."""
    return (np.arange(num_samples) // size.batch_size).astype(np.int32)


def config(**options):
    return PackingConfig(**{"packing_length": 100, "packing_batch": "samples", "packing_strategy": "exact", **options})


def random_epoch(rng):
    """Lengths, some of rows that cannot be encoded and some that are too long, and their un-packed batches."""
    size = UnpackedStep(rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 4))
    num = rng.randint(1, 120)
    lengths = np.array([rng.choice((0, 150, 100, rng.randint(1, 99), rng.randint(1, 30))) for _ in range(num)])
    batch = in_order(num, size)
    batch[num - rng.randint(0, min(2, num - 1)) :] = IN_NO_STEP
    return lengths, batch, size


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("balance", [True, False])
def test_every_sample_is_in_its_step_once(strategy, balance):
    """SAME-1 SAME-2"""
    rng = random.Random(strategy)
    for _ in range(150):
        lengths, batch, size = random_epoch(rng)
        images = np.array([rng.randint(0, 3) for _ in lengths])
        num_ranks = rng.randint(1, 5)
        caps = {} if strategy == "binpack" else {"packing_max_images": rng.choice((None, 4)), "packing_max_samples": 6}
        options = config(packing_strategy=strategy, packing_balance=balance, **caps)
        packs = pack_steps(lengths, batch, size, config=options, num_ranks=num_ranks, images=images)
        assert packs.batches is not None
        assert len(packs) == packs.batches.sum() * num_ranks
        num_steps = int(batch.max(initial=-1)) // size.num_batches + 1
        assert len(packs.batches) == num_steps
        assert (packs.batches >= 1).all()
        first = 0
        for step, num_batches in enumerate(packs.batches.tolist()):
            inside = packs[first : first + num_batches * num_ranks]
            first += num_batches * num_ranks
            trained = sorted(number for pack in inside for number in pack)
            assert (
                trained == np.flatnonzero((batch // size.num_batches == step) & (batch >= 0) & (lengths > 0)).tolist()
            )
            for pack in inside:
                if len(pack) > 1:
                    assert lengths[pack].sum() <= 100
                    assert len(pack) <= (caps.get("packing_max_samples") or 999)
                    assert images[pack].sum() <= (caps.get("packing_max_images") or 999)
        left_out = sorted(number for some in packs.dropped.values() for number in some.tolist())
        assert left_out == np.flatnonzero((batch < 0) & (lengths > 0)).tolist()


def test_a_step_takes_the_fewest_sequences_that_the_strategy_finds():
    """SAME-2: never more for many ranks than the step's packs shared out, and fewer samples never make more of them."""
    rng = random.Random(5)
    for _ in range(200):
        lengths, batch, size = random_epoch(rng)
        one = pack_steps(lengths, batch, size, config=config(), num_ranks=1)
        for num_ranks in (2, 3, 8):
            many = pack_steps(lengths, batch, size, config=config(), num_ranks=num_ranks)
            assert (many.batches == np.maximum(1, -(-one.batches // num_ranks))).all()


def test_ranks_of_a_step_are_balanced():
    """SAME-2: by the costs of samples. Steps of 64 captions on 8 ranks cost at most 3 % more than equal shares."""
    lengths = np.random.default_rng(0).integers(60, 444, 6400)
    size = UnpackedStep(8, 1, 8)
    batch = in_order(len(lengths), size)
    options = config(packing_length=8192)
    balanced = pack_steps(lengths, batch, size, config=options, num_ranks=8)
    assert balanced.balance.slowest_to_mean < 1.03
    as_it_comes = pack_steps(
        lengths, batch, size, config=config(packing_length=8192, packing_balance=False), num_ranks=8
    )
    assert as_it_comes.balance.slowest_to_mean > balanced.balance.slowest_to_mean


def test_steps_are_told_in_sequences_and_padding_saved():
    """SAME-6: by hand. One batch of two on each of two ranks: 10 + 30 padded to 60, 20 + 20; then 70 + 40 to 140."""
    size = UnpackedStep(2, 1, 2)
    lengths = np.array([10, 30, 20, 20, 70, 40])
    batch = in_order(6, size)
    packs = pack_steps(lengths, batch, size, config=config(), num_ranks=2)
    assert kept_steps(packs, batch, size) == (4, 2.0, round(1 - 190 / 240, 4))
    assert str(KeptSteps(1, 1.0, 0.0)).startswith("the same 1 sample as un-packed, in ")
    one_rank = pack_steps(lengths, batch, size, config=config(), num_ranks=1)
    assert kept_steps(one_rank, batch, size).num_sequences == 1.5, "one sequence of 80, then 70 and 40 in two"
    assert str(kept_steps(one_rank, batch, size)) == (
        "the same 4 samples as un-packed, in 1.5 sequences; padding saved: 20.8% of the tokens of padded batches"
    )


def test_dealing_gives_each_item_once_and_at_most_so_many_to_a_rank():
    """SAME-2"""
    rng = random.Random(1)
    for _ in range(300):
        num_ranks, num = rng.randint(1, 6), rng.randint(0, 30)
        most = -(-num // num_ranks) or None
        shares = deal(range(num), [rng.random() for _ in range(num)], num_ranks, most)
        assert sorted(item for share in shares for item in share) == list(range(num))
        assert len(shares) == num_ranks
        assert most is None or max(map(len, shares)) <= most


# -- in the plan of an epoch ------------------------------------------------------------------------------------------


def recipe(lengths, *, num_ranks, size, unpacked=None, **options):
    sizes = np.stack([lengths, np.zeros_like(lengths), np.zeros_like(lengths), lengths])
    mix = Mix(sources=(Source("captions", len(lengths)),), rows=(None,))
    return Recipe(sizes=(sizes,), mix=mix, config=config(**options), num_ranks=num_ranks, step=size, unpacked=unpacked)


def rows_in_steps(plan):
    """The rows of each step."""
    ends = np.cumsum(plan.packs.batches) * plan.num_ranks
    packs = list(plan.packs)
    return [
        sorted(plan.sample(at)[1] for pack in packs[first:end] for at in pack)
        for first, end in zip([0, *ends[:-1]], ends, strict=True)
    ]


def test_other_ranks_go_on_with_the_same_steps():
    """SAME-4: whatever ranks went on, and wherever, every step has the samples it had."""
    rng = random.Random(2)
    lengths = np.array([rng.randint(0, 60) for _ in range(83)])
    size = UnpackedStep(2, 2, 2)
    whole = plan_epoch(recipe(lengths, num_ranks=2, size=size), 1)
    assert len(rows_in_steps(whole)) == -(-(lengths > 0).sum() // 8) == whole.num_steps
    for num_steps in range(whole.num_steps + 1):
        consumed = int(whole.packs.batches[:num_steps].sum()) * 2
        cuts = (whole.cuts[0]._replace(num_consumed=consumed),)
        for num_ranks in (1, 2, 3):
            again = plan_epoch(recipe(lengths, num_ranks=num_ranks, size=size), 1, cuts)
            assert again.num_steps_consumed == num_steps
            assert rows_in_steps(again) == rows_in_steps(whole)
            assert again.is_finished == (num_steps == whole.num_steps)
            assert saved_digest(pack_epoch(recipe(lengths, num_ranks=num_ranks, size=size), 1), cuts) == whole.digest()


def test_rows_come_in_the_batches_of_the_unpacked_run():
    """SAME-1: rows that cannot be encoded take a place where nothing is deleted before, and none where they are."""
    lengths = np.array([5, 0, 7, 9, 4])

    def batches(epoch, lengths, size):
        order = np.roll(np.arange(len(lengths)), epoch)[: len(lengths) // 2 * 2]
        return order, in_order(len(order), size)

    size = UnpackedStep(2, 1, 1)
    for deletes, expected, left_out in ((False, [[0, 4], [2]], [3]), (True, [[0, 4], [2, 3]], [])):
        rows = UnpackedRows(
            source=np.zeros(5, dtype=np.int32),
            row=np.arange(5),
            batches=batches,
            is_deleted_if_failing=np.full(5, deletes),
            lengths_of_cache=np.zeros(5, dtype=np.int64),
        )
        plan = plan_epoch(recipe(lengths, num_ranks=1, size=size, unpacked=rows), 1)
        assert [sorted(rows) for rows in rows_in_steps(plan)] == expected
        dropped = plan.packs.dropped.get("unpacked_leaves_out", np.array([], dtype=int)).tolist()
        assert [plan.sample(at)[1] for at in dropped] == left_out
        assert len(plan.schedule) == 5, "every row is in the account"


def test_an_epoch_of_which_unpacked_training_has_no_batch_is_refused():
    """SAME-5: as with --dataloader_drop_last and fewer rows than a batch has."""
    rows = UnpackedRows(
        source=np.zeros(3, dtype=np.int32), row=np.arange(3), is_deleted_if_failing=np.full(3, False),
        lengths_of_cache=np.zeros(3, dtype=np.int64),
        batches=lambda epoch, lengths, size: (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)),
    )  # fmt: skip
    size = UnpackedStep(4, 1, 1)
    with pytest.raises(DataError, match=r"would train none of 3 rows \(batches of 4 on 1 rank"):
        plan_epoch(recipe(np.array([5, 6, 7]), num_ranks=1, size=size, unpacked=rows), 0)


def test_rows_packed_as_they_come_keep_no_steps():
    """SAME-5"""
    with pytest.raises(ConfigError, match="packing_mode=buffer packs rows as they come"):
        config(packing_mode="buffer")
