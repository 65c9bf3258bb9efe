import random
from collections import Counter, defaultdict

import numpy as np
import pytest

from swift_vlpack import PackingConfig
from swift_vlpack.plan.epoch import Recipe, num_shared_anywhere, plan_epoch
from swift_vlpack.plan.mix import Mix, Source
from swift_vlpack.plan.report import plan_report, share_lines, sharing_report
from swift_vlpack.plan.same_steps import UnpackedStep
from swift_vlpack.plan.units import Prefixes, Units, stand_together


def cases(num_cases):
    return map(random.Random, range(num_cases))


def rows_about_images(rng, num_images, most_rows=7):
    """Rows of data: key of the image, tokens of the prefix, all tokens, images, patches; a few rows without."""
    rows = []
    for image in range(1, num_images + 1):
        prefix = rng.randint(20, 120)
        num_rows = rng.randint(1, most_rows)
        rows += [(image, prefix, prefix + rng.randint(2, 60), 1, prefix * 4) for _ in range(num_rows)]
    rows += [(0, 0, rng.randint(5, 150), 0, 0) for _ in range(rng.randint(0, 20))]
    rows += [(0, 0, 0, 0, 0) for _ in range(rng.randint(0, 3))]  # cannot be encoded
    rng.shuffle(rows)
    return np.array(rows, dtype=np.int64)


def recipe_of(rows, *, num_ranks=1, step=None, shuffle=True, seed=3, **options):
    config = PackingConfig(
        **{
            "packing_length": 400,
            "packing_strategy": "exact",
            "packing_share": "media",
            "packing_share_max": 4,
            **options,
        }
    )
    key, prefix, length, images, patches = rows.T
    has_other = np.bincount(key, minlength=1)[key] > 1
    prefixes = Prefixes(np.where(has_other, key, 0).astype(np.uint64), np.where(has_other, prefix, 0).astype(np.int32))
    return Recipe(
        sizes=(np.stack([length, images, patches, np.ones_like(length)]),),
        prefixes=(prefixes,) if config.shares_media else (),
        mix=Mix(sources=(Source("vqa", len(rows)),), rows=(None,), shuffle=shuffle, seed=seed),
        config=config,
        num_ranks=num_ranks,
        step=step,
    )


def sequences_of(plan):
    """Every sequence, laid out by hand: which rows it has, and how many tokens and patches a reader counts."""
    for number in range(len(plan.packs)):
        positions = plan.packs[number]
        shared = plan.packs.shared_in(number) or (0,) * len(positions)
        yield [plan.schedule[position][1] for position in positions], shared


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packing_strategy": "greedy"},
        {"packing_strategy": "binpack"},
        {"packing_max_images": 3},
        {"packing_max_samples": 3},
        {"packing_max_samples": 3, "packing_strategy": "greedy"},
    ],
)
def test_every_row_is_in_one_unit_of_its_image(options):
    """SHARE-3, SHARE-4: conservation, capacity and the tokens of sequences, counted row by row."""
    for rng in cases(25):
        rows = rows_about_images(rng, rng.randint(3, 30))
        recipe = recipe_of(rows, num_ranks=rng.randint(1, 3), packing_drop_last=False, **options)
        for epoch in range(2):
            plan = plan_epoch(recipe, epoch)
            seen = Counter()
            for (members, shared), num_tokens in zip(
                sequences_of(plan), plan.packs.num_tokens_per_pack.tolist(), strict=True
            ):
                seen.update(members)
                assert not shared or shared[0] == 0
                expected, in_unit, image_of_unit = 0, 0, None
                for member, num_shared in zip(members, shared, strict=True):
                    key, prefix, length = rows[member, :3].tolist()
                    if num_shared:
                        assert (key, num_shared) == (image_of_unit, prefix)
                        in_unit += 1
                    else:
                        image_of_unit, in_unit = key, 1
                    assert in_unit <= recipe.config.packing_share_max
                    expected += length - num_shared
                assert num_tokens == expected
                assert len(members) <= (recipe.config.packing_max_samples or len(members))
                assert num_tokens <= recipe.config.packing_length or len(members) == 1
            assert set(seen) == set(np.flatnonzero(rows[:, 2]).tolist())
            assert max(seen.values()) == 1


def test_sharing_saves_what_is_repeated():
    """SHARE-4: with packs as large as the data, every prefix is there once a unit."""
    for rng in cases(10):
        rows = rows_about_images(rng, 12)
        recipe = recipe_of(rows, packing_length=1_000_000, packing_share_max=10_000, packing_drop_last=False)
        plan = plan_epoch(recipe, 0)
        of_image = defaultdict(list)
        for key, prefix, length, *_ in rows.tolist():
            of_image[key].append((prefix, length))
        alone = sum(length for _, length in of_image.pop(0, []))
        expected = alone + sum(
            rows[0][0] + sum(length - prefix for prefix, length in rows) for rows in of_image.values()
        )
        assert plan.packs.num_tokens_per_pack.sum() == expected
        assert plan.packs.patches_of_members.sum() == sum(4 * rows[0][0] for rows in of_image.values())


def test_unit_counts_prefix_and_media_once():
    """SHARE-3: two units of 200 tokens and one image each fill a pack of 400 tokens and two images."""
    rows = np.array([(image, 100, 150, 1, 400) for image in (1, 1, 2, 2)])
    made = plan_epoch(recipe_of(rows, packing_length=400, packing_max_images=2), 0)
    assert [sorted(pack) for pack in made.packs] == [[0, 1, 2, 3]]


def test_units_are_drawn_anew_each_epoch_and_follow_from_the_seed():
    """SHARE-3"""
    for rng in cases(5):
        rows = rows_about_images(rng, 20, most_rows=12)
        first, again = (plan_epoch(recipe_of(rows), 0) for _ in range(2))
        assert first.digest() == again.digest()
        assert [*sequences_of(first)] == [*sequences_of(again)]

        def partners(plan):
            pairs = set()
            for members, shared in sequences_of(plan):
                pairs |= {
                    (min(a, b), max(a, b)) for a, b, s in zip(members, members[1:], shared[1:], strict=False) if s
                }
            return pairs

        assert partners(first) != partners(plan_epoch(recipe_of(rows), 1))


def test_large_units_come_anywhere_in_an_epoch():
    """SHARE-3: not at the front, where the first of many rows would be."""
    rows = np.array([(1 + n // 8, 50, 60, 1, 200) for n in range(800)] + [(0, 0, 60, 0, 0)] * 800)
    plan = plan_epoch(recipe_of(rows, packing_share_max=8, packing_strategy="greedy"), 0)
    shared = plan.shared > 0
    in_first_half = shared[: len(shared) // 2].mean() / shared.mean()
    assert 0.8 < in_first_half < 1.2


def test_steps_that_keep_their_samples_share_within_them():
    """SHARE-5: no sample leaves its step, and only samples of one step share."""
    for rng in cases(15):
        rows = rows_about_images(rng, rng.randint(5, 20))
        step = UnpackedStep(rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 2))
        options = {"step": step, "num_ranks": rng.randint(1, 2), "packing_batch": "samples"}
        none, shared = (
            plan_epoch(recipe_of(rows, packing_share=share, **SET[share], **options), 0) for share in ("none", "media")
        )

        def steps(plan):
            found, at = [], 0
            for num in plan.packs.batches.tolist():
                packs = range(at, at + num * plan.num_ranks)
                found.append(sorted(plan.schedule[p][1] for pack in packs for p in plan.packs[pack]))
                at += num * plan.num_ranks
            return found

        assert steps(none) == steps(shared)
        assert shared.packs.num_tokens_per_pack.sum() <= none.packs.num_tokens_per_pack.sum()


def test_packs_that_are_cut_for_the_ranks_repeat_the_prefix():
    """SHARE-4: any cut of a pack is two packs that hold their samples whole."""
    rows = np.array([(1, 50, 60, 1, 200)] * 4)
    plan = plan_epoch(recipe_of(rows, num_ranks=2), 0)
    assert sorted(map(len, plan.packs)) == [2, 2]
    assert plan.packs.num_tokens_per_pack.tolist() == [70, 70]


def test_units_follow_from_one_column():
    """SHARE-3: units of samples that stand together, by hand."""
    made = stand_together(
        np.array([5, 9, 5, 9, 5, 0]), np.array([4, 3, 4, 3, 4, 0]), np.array([6, 9, 5, 4, 4, 7]), capacity=100, most=2
    )
    assert made.order.tolist() == [0, 2, 1, 3, 4, 5]  # row 4 has nothing of its own, so it is alone
    assert made.shared.tolist() == [0, 4, 0, 3, 0, 0]
    units = Units.of(made.shared)
    assert units.counts.tolist() == [2, 2, 1, 1]
    assert units.samples(np.array([1])).tolist() == [2, 3]


@pytest.mark.parametrize("strategy", ["best_fit", "binpack", "exact", "greedy"])
def test_remainder_is_bounded_in_rows_of_units(strategy):
    """SHARE-4 PACK-4: a unit of 16 rows that fills no pack is no small remainder of 116 rows."""
    rows = np.array([(0, 0, 390, 0, 0)] * 100 + [(1, 16, 20, 1, 4)] * 16)
    packs = plan_epoch(recipe_of(rows, packing_strategy=strategy, packing_share_max=16), 0).packs
    assert packs.num_dropped == {}
    assert len(packs.members) == 116


def test_steps_keep_the_cap_of_samples():
    """SHARE-5"""
    rows = np.array([(1, 16, 20, 1, 4)] * 12)
    step = UnpackedStep(12, 1, 1)
    plan = plan_epoch(recipe_of(rows, packing_max_samples=4, packing_batch="samples", step=step, shuffle=False), 0)
    assert plan.packs.num_samples_per_pack.tolist() == [4, 4, 4]


def test_rows_that_share_nothing_are_planned_as_without_sharing():
    """SHARE-4"""
    for rng in cases(5):
        rows = rows_about_images(rng, 10, most_rows=1)
        none, shared = (
            plan_epoch(recipe_of(rows, packing_share=share, **SET[share]), 0) for share in ("none", "media")
        )
        assert [*sequences_of(none)] == [*sequences_of(shared)]


SET = {"none": {"packing_share_max": 16}, "media": {}}


def test_what_sharing_saves_is_counted_row_by_row():
    """SHARE-80: packs that are cut for the ranks included."""
    for rng in cases(15):
        rows = rows_about_images(rng, rng.randint(2, 12))
        plan = plan_epoch(recipe_of(rows, num_ranks=rng.randint(1, 3), packing_drop_last=False), 0)
        report, expected = sharing_report(plan.packs), Counter()
        for members, shared in sequences_of(plan):
            for at, (row, num_shared) in enumerate(zip(members, shared, strict=True)):
                _, _, length, images, patches = rows[row].tolist()
                is_first = not num_shared and at + 1 < len(shared) and shared[at + 1] > 0
                expected["num_units"] += is_first
                expected["num_in_units" if is_first or num_shared else "num_alone"] += 1
                of = {"num_tokens": (length - num_shared, length), "num_images": (images, images)}
                for name, (once, alone) in {**of, "num_patches": (patches, patches)}.items():
                    expected[f"{name}_alone"] += alone
                    expected[name] += once if name == "num_tokens" or not num_shared else 0
        assert report == dict(expected)
        said = plan_report(plan.unshared, plan.packs, num_rows=len(rows), seconds=0)
        assert said["num_tokens"] == report["num_tokens"]


def test_kept_steps_say_how_little_they_share():
    """SHARE-81: beside what the same rows share where units form anywhere."""
    rows = rows_about_images(random.Random(4), 20)
    alone = {"packing_drop_last": False}
    plan = plan_epoch(recipe_of(rows, step=UnpackedStep(2, 2, 1), packing_batch="samples"), 0)
    anywhere = plan_epoch(recipe_of(rows, packing_length=100_000, **alone), 0)
    recipe = recipe_of(rows, packing_length=100_000, **alone)
    saved = num_shared_anywhere(anywhere, recipe.prefixes, recipe.config)
    found = sharing_report(anywhere.packs)
    assert saved == found["num_tokens_alone"] - found["num_tokens"]
    report = sharing_report(plan.packs)
    assert report["num_tokens_alone"] - report["num_tokens"] < saved / 2
    of_plan = {"packing_share_max": 4, "rows_per_prefix": None, "alone": {}, "num_tokens_anywhere": 4321}
    (_, first), (_, second) = share_lines({**report, **of_plan})
    assert f"{report['num_tokens']} of {report['num_tokens_alone']} tokens" in first
    assert "rows share within a step only; packing_batch=packs would compute about 4321 tokens" in second


def test_sharing_that_saves_nothing_says_so():
    """SHARE-81: and each cause has its rows, an example and the way out."""
    plan = plan_epoch(recipe_of(rows_about_images(random.Random(0), 9, most_rows=1)), 0)
    cause = {"num_rows": 2, "example": "a.jsonl:3", "way_out": "put <image> first"}
    of_plan = {"packing_share_max": 4, "rows_per_prefix": None, "alone": {"have other tokens": cause}}
    lines = share_lines({**sharing_report(plan.packs), **of_plan})
    assert lines[1][1].startswith("PACKING_SHARE=MEDIA SAVES NOTHING: no two rows begin")
    assert lines[2] == ("alone", "2 rows, as rows have other tokens (such as a.jsonl:3): put <image> first")
