import random

from swift_vlpack.plan.typical import typical_row


def test_typical_row_fits_and_is_spread_as_the_samples_are():
    """ATTN-9"""
    rng = random.Random(0)
    for _ in range(200):
        lengths = [rng.choice((0, rng.randint(1, 50), rng.randint(1, 500))) for _ in range(rng.randint(1, 300))]
        capacity = rng.choice((60, 300, 4096))
        row = typical_row(lengths, capacity)
        assert row
        assert sum(row) <= capacity
        assert set(row) <= set(lengths) - {0} or not any(0 < length <= capacity for length in lengths)
    half = typical_row([10] * 500 + [90] * 500, 1000)
    assert (half.count(10), half.count(90)) == (10, 10)


def test_typical_row_where_no_length_is_known():
    """ATTN-9"""
    assert typical_row([], 1000) == typical_row([0, 5000], 1000) == (250,) * 4
    assert typical_row([], 1) == (1,) * 4
