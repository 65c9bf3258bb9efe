import json
import random
from collections import Counter

from swift_vlpack.runlog.telemetry import Telemetry


def random_counts(seed):
    rng = random.Random(seed)
    stats = Telemetry(packing_length=100)
    for _ in range(rng.randint(1, 20)):
        samples = [(rng.choice("ab"), rng.randint(1, 40)) for _ in range(rng.randint(1, 3))]
        for source, _ in samples:
            stats.read(source)
        numbers = {"num_images": rng.randint(0, 3), "num_padding": rng.randint(0, 9)}
        stats.packed(samples, **numbers, single_long=rng.random() < 0.1)
        if rng.random() < 0.5:
            stats.read("a")
            stats.dropped("a", rng.choice(["oversize", "encode_failed"]))
    return stats


def merged(parts):
    total = Telemetry(packing_length=100)
    for part in parts:
        total.merge(part)
    return total.as_json()


def test_counts_go_on_from_a_saved_state():
    """STAT-1 RESUME-8"""
    for seed in range(20):
        stats = random_counts(seed)
        saved = json.loads(json.dumps(stats.state()))
        assert Telemetry.from_state(saved) == stats
        assert merged([Telemetry.from_state(saved), random_counts(99)]) == merged([stats, random_counts(99)])


def test_merge_is_addition_in_any_order():
    """STAT-1"""
    parts = [random_counts(seed) for seed in range(5)]
    assert merged(parts) == merged(reversed(parts))
    assert merged(parts)["num_packs"] == sum(part.num_packs for part in parts)
    nested = Telemetry(packing_length=100)
    nested.merge(parts[0])
    nested.merge(parts[1])
    assert merged([nested, *parts[2:]]) == merged(parts)


def test_accounting_closes_only_when_nothing_is_held():
    """STAT-2: and a report says it in words for a stranger."""
    stats = Telemetry(packing_length=100)
    stats.read("a", 3)
    stats.packed([("a", 60), ("a", 30)])
    assert (stats.num_held, stats.is_closed) == (1, False)
    assert stats.account == "counts add up: 3 read = 2 packed + 0 left out + 1 not reached"
    stats.dropped("a", "underfilled")
    assert (stats.num_held, stats.is_closed) == (0, True)
    assert stats.as_json()["account"] == "counts add up: 3 read = 2 packed + 1 left out + 0 not reached"
    assert stats.line(epoch=0).endswith(stats.account)
    stats.dropped("a", "underfilled")
    assert stats.account.startswith("counts do not add up: 3 read = "), "a sample was counted twice"


def test_counts_are_those_of_a_tally_kept_beside_them():
    """STAT-2: what comes in, goes into packs and is left out, counted by hand."""
    for seed in range(20):
        rng, tally, stats = random.Random(seed), Counter(), Telemetry(packing_length=100)
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
    stats = Telemetry(packing_length=100)
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
    stats = Telemetry(packing_length=100)
    for length in (100, 70, 70):
        stats.packed([("a", length)])
    assert stats.as_json()["fill_histogram"] == {"70": 2, "100": 1}
    assert Telemetry.from_state(json.loads(json.dumps(stats.state()))) == stats


def test_one_of_anything_is_singular():
    """STAT-4"""
    stats = Telemetry(packing_length=100)
    stats.packed([("a", 1)])
    assert "epoch 0: 1 pack, 1 sample, 1 token, " in stats.line(epoch=0)


def test_report_is_plain_json_and_one_readable_line():
    """STAT-4"""
    stats = random_counts(1)
    report = stats.as_json(epoch=2)
    assert json.loads(json.dumps(report)) == report
    assert report["epoch"] == 2
    for name in ("num_packs", "num_samples", "num_tokens", "fill_mean", "fill_p5", "num_single_long", "num_dropped"):
        assert name in report
    assert report["sources"]["a"]["num_read"] > 0
    assert "\n" not in stats.line(epoch=2)
    assert stats.line(epoch=2).startswith("epoch 2: ")


def test_nothing_read_is_a_report_too():
    """STAT-4"""
    assert Telemetry(packing_length=8).as_json()["fill_mean"] == 0.0
    assert "0 packs" in Telemetry(packing_length=8).line(epoch=0)


def test_padding_is_counted_and_fills_nothing():
    """PAD-4"""
    stats = Telemetry(packing_length=100)
    stats.packed([("a", 60)], num_padding=40)
    stats.packed([("a", 130)], num_padding=70, single_long=True)
    assert (stats.as_json()["num_padding"], stats.fill_mean) == (110, 0.6)
    assert "190 tokens, 110 of padding, fill 60.0%" in stats.line(epoch=0)
    assert "padding" not in Telemetry(packing_length=100).line(epoch=0)
