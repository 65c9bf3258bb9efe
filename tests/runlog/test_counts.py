"""Counts of what happened to every sample: they add up in any order, and they close."""

import json
import random
from collections import Counter
from dataclasses import replace

from swift_vlpack.runlog.account import account_json, account_line, law_in_words, shared_json
from swift_vlpack.runlog.counts import NUMBERS, Counts, padded


def step_counts(*packs, batch_size=1, length=100, **numbers):
    """Counts of a step in which a rank trained packs of `(source, length)` samples."""
    counts = Counts(packing_length=length)
    for samples in packs:
        counts.packed(samples, **numbers)
    counts.num_tokens_unpacked = padded([tokens for samples in packs for _, tokens in samples], batch_size)
    return counts


def steps_event(*packs_of_ranks):
    """What the first rank notes after a step of two seconds in which each rank trained a pack."""
    ranks = [step_counts(samples) for samples in packs_of_ranks]
    total = added(ranks)
    total.num_steps, total.milliseconds = 1, 2000
    total.num_tokens_slowest = max(counts.num_tokens for counts in ranks)
    return total.as_event()


def random_counts(seed):
    rng = random.Random(seed)
    counts = Counts(packing_length=100, num_steps=rng.randint(0, 3), milliseconds=rng.randint(0, 999))
    for _ in range(rng.randint(1, 20)):
        samples = [(rng.choice("ab"), rng.randint(1, 40)) for _ in range(rng.randint(1, 3))]
        for source, _ in samples:
            counts.read(source)
        numbers = {name: rng.randint(0, 9) for name in ("num_images", "num_vision_tokens", "num_padding")}
        counts.packed(samples, **numbers, single_long=rng.random() < 0.1)
        if rng.random() < 0.3:
            counts.shared([0, *(rng.choice((0, 7)) for _ in samples[1:])], num_apart=rng.randint(0, 1))
        if rng.random() < 0.5:
            counts.read("a", num_further=1)
            lost = {"num_tokens": rng.randint(0, 9), "num_images": 1, "is_further": True}
            counts.dropped("a", rng.choice(["oversize", "encode_failed"]), **lost)
    return counts


def added(parts, length=100):
    total = Counts(packing_length=length)
    for part in parts:
        total.merge(part)
    return total


def saved(counts):
    """The account of an epoch, which a checkpoint saves; steps, time and vision are in the run log."""
    return replace(counts, num_steps=0, milliseconds=0, num_vision_tokens=0)


def test_counts_go_on_from_a_saved_state():
    """STAT-1 RESUME-8"""
    for seed in range(20):
        counts = saved(random_counts(seed))
        again = Counts.from_state(json.loads(json.dumps(counts.state())))
        assert again == counts
        assert added([again, random_counts(99)]) == added([counts, random_counts(99)])


def test_adding_up_gives_the_same_in_any_order_and_grouping():
    """STAT-1: over workers, ranks, steps and epochs."""
    parts = [random_counts(seed) for seed in range(5)]
    total = added(parts)
    assert total == added(reversed(parts))
    assert total == added([added(parts[:2]), added(parts[2:])])
    assert total == added([*parts, Counts(packing_length=100)])
    assert total.num_packs == sum(part.num_packs for part in parts)
    assert total.num_read == sum(part.num_read for part in parts)
    assert all(getattr(total, name) == sum(getattr(part, name) for part in parts) for name in NUMBERS)


def test_events_of_steps_add_up_to_what_was_trained():
    """REPORT-2: through the JSON of the run log; what is trained is closed by itself."""
    parts = [random_counts(seed) for seed in range(5)]
    events = [json.loads(json.dumps(part.as_event())) for part in parts]
    total, trained = added(Counts.from_event(event, 100) for event in events), added(parts)
    assert total.as_event() == trained.as_event()
    assert (total.num_packed, total.fill_mean) == (trained.num_packed, trained.fill_mean)
    assert total.is_closed


def test_padded_batches_are_as_wide_as_their_longest():
    """REPORT-3: batches of two in the order of training, the last one may be smaller."""
    assert padded([30, 50, 20, 120], 2) == 2 * 50 + 2 * 120
    assert padded([30, 50, 20], 2) == 2 * 50 + 20
    assert padded([30, 50, 20], 1) == 100, "a batch of one has no padding"
    assert padded([], 4) == padded([], 1) == 0


def test_padding_saved_is_that_of_batches_less_that_of_packs():
    """REPORT-3: batches of one have none to save, and beside them sequences of a fixed shape have more, not less."""
    samples = [("a", 30), ("a", 50), ("b", 20)]
    assert step_counts(samples, batch_size=3).num_padding_saved == 50
    assert step_counts(samples, batch_size=1).num_padding_saved == 0
    assert step_counts(samples, batch_size=3, num_padding=28).num_padding_saved == 150 - 100 - 28
    assert step_counts(samples, batch_size=1, num_padding=28).num_padding_saved == -28


def test_accounting_closes_only_when_nothing_is_held():
    """STAT-2: and a report says it in words for a stranger."""
    stats = Counts(packing_length=100)
    stats.read("a", 3)
    stats.packed([("a", 60), ("a", 30)])
    assert (stats.num_held, stats.is_closed) == (1, False)
    assert law_in_words(stats) == "counts add up: 3 read = 2 packed + 0 left out + 1 not reached"
    stats.dropped("a", "underfilled")
    assert (stats.num_held, stats.is_closed) == (0, True)
    assert account_json(stats)["account"] == "counts add up: 3 read = 2 packed + 1 left out + 0 not reached"
    assert account_line(stats, epoch=0).endswith(law_in_words(stats))
    stats.dropped("a", "underfilled")
    assert law_in_words(stats).startswith("counts do not add up: 3 read = "), "a sample was counted twice"


def test_counts_are_those_of_a_tally_kept_beside_them():
    """STAT-2: what comes in, goes into packs and is left out, counted by hand."""
    for seed in range(20):
        rng, tally, stats = random.Random(seed), Counter(), Counts(packing_length=100)
        for _ in range(60):
            source, what = rng.choice("ab"), rng.choice(("read", "packed", "oversize", "file_missing"))
            tally[source, what] += 1
            if what == "read":
                stats.read(source)
            elif what == "packed":
                stats.packed([(source, 30)])
            else:
                stats.dropped(source, what)
        for source, counts in stats.sources.items():
            assert counts.num_read == tally[source, "read"]
            assert (counts.num_packed, counts.num_tokens) == (tally[source, "packed"], 30 * tally[source, "packed"])
            assert dict(counts.num_dropped) == {
                what: tally[source, what] for what in ("oversize", "file_missing") if tally[source, what]
            }
        num_out = sum(number for (_, what), number in tally.items() if what != "read")
        assert stats.num_held == sum(tally[source, "read"] for source in "ab") - num_out
        assert stats.is_closed == all(
            sum(tally[source, what] for what in ("packed", "oversize", "file_missing")) == tally[source, "read"]
            for source in "ab"
        )


def test_fill_leaves_single_long_packs_out():
    """STAT-3"""
    stats = Counts(packing_length=100)
    for length in (100, 90, 80, 70):
        stats.read("a")
        stats.packed([("a", length)])
    stats.read("a")
    stats.packed([("a", 900)], single_long=True)
    assert stats.fill_mean == 0.85
    assert [stats.fill_percentile(p) for p in (5, 50, 95)] == [70, 80, 100]
    assert stats.num_single_long == 1
    assert sum(stats.fill_histogram) == 4


def test_histogram_of_a_report_has_only_what_occurred():
    """STAT-6: a saved state keeps all of it."""
    stats = Counts(packing_length=100)
    for length in (100, 70, 70):
        stats.packed([("a", length)])
    assert account_json(stats)["fill_histogram"] == {"70": 2, "100": 1}
    assert Counts.from_state(json.loads(json.dumps(stats.state()))) == stats


def test_one_of_anything_is_singular():
    """STAT-4"""
    stats = Counts(packing_length=100)
    stats.packed([("a", 1)])
    assert "epoch 0: 1 pack, 1 sample, 1 token, " in account_line(stats, epoch=0)


def test_report_is_plain_json_and_one_readable_line():
    """STAT-4"""
    stats = random_counts(1)
    report = account_json(stats, epoch=2)
    assert json.loads(json.dumps(report)) == report
    assert report["epoch"] == 2
    for name in ("num_packs", "num_samples", "num_tokens", "fill_mean", "fill_p5", "num_single_long", "num_dropped"):
        assert name in report
    assert report["sources"]["a"]["num_read"] > 0
    assert "\n" not in account_line(stats, epoch=2)
    assert account_line(stats, epoch=2).startswith("epoch 2: ")


def test_nothing_read_is_a_report_too():
    """STAT-4"""
    assert account_json(Counts(packing_length=8))["fill_mean"] == 0.0
    assert "0 packs" in account_line(Counts(packing_length=8), epoch=0)


def test_padding_is_counted_and_fills_nothing():
    """PAD-4"""
    stats = Counts(packing_length=100)
    stats.packed([("a", 60)], num_padding=40)
    stats.packed([("a", 130)], num_padding=70, single_long=True)
    assert (account_json(stats)["num_padding"], stats.fill_mean) == (110, 0.6)
    assert "190 tokens, 110 of padding, fill 60.0%" in account_line(stats, epoch=0)
    assert "padding" not in account_line(Counts(packing_length=100), epoch=0)


def test_units_are_counted_by_hand_and_close():
    """SHARE-82: two units and two samples alone; a state or an event without any has no field of them."""
    stats = Counts(packing_length=100)
    assert not {"num_units", "num_shared_tokens"} & {*stats.state(), *stats.as_event()}
    stats.packed([("a", 40), ("a", 5), ("a", 6), ("b", 9), ("a", 20), ("a", 4)])
    stats.shared((0, 30, 30, 0, 0, 11))
    stats.packed([("b", 50)])
    stats.shared((), num_apart=1)
    assert (stats.num_units, stats.num_in_units, stats.num_alone) == (2, 5, 2)
    assert stats.num_packed == stats.num_in_units + stats.num_alone
    assert (stats.num_tokens, stats.num_tokens_alone) == (134, 134 + 30 + 30 + 11)
    stats.num_tokens_unpacked = 300
    assert stats.num_padding_saved == 300 - 205, "what is shared is no padding"
    report = account_json(stats, epoch=0)
    assert report["shared"] == shared_json(stats)
    assert report["shared"]["num_apart"] == 1
    line = "shared: 7 samples = 5 in 2 units + 2 alone, 1 of them planned to share, 134 of 205 tokens computed"
    assert line in account_line(stats, epoch=0)
    assert "shared" not in account_json(Counts(packing_length=100))
