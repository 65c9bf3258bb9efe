"""What follows from the measurements of `vlpack bench`."""

import copy

import pytest

from swift_vlpack.cli.bench_report import advice_on, alone_per_second, bench_text, limit_of, speed_of, start_of

GB = 2**30


def rows(*seconds, tokens=1000, samples=10):
    return [{"tokens": tokens, "samples": samples, "seconds": each} for each in seconds]


def loader(workers, samples):
    tokens = None if samples is None else 100.0 * samples
    return {"workers": workers, "samples_per_second": samples, "tokens_per_second": tokens, "first_batch_seconds": 0.5}


def training(speed):
    return {"speed": speed._asdict(), "between": 0.1, "memory": {"peak": 48 * GB, "total": 80 * GB}, "problem": None}


@pytest.fixture
def report():
    """A run of which everything is as it should be: it trains 10 samples a second and reads 20."""
    return {
        "model": "m",
        "device": "cuda:0",
        "cores": 4,
        "length_pass": {"rows": 500, "rows_per_second": 800.0, "processes": 4, "seconds": 0.6},
        "plan": {
            "packing_length": 8192, "suggested_length": 8192, "packs": 50, "mean_fill": 0.99, "mean_length": 400.0,
            "longest": 5000, "patches_per_pack": {"median": 4000, "p95": 5000, "max": 5500}, "has_caps": False,
        },
        "loader": [loader(0, 8.0), loader(1, 11.0), loader(2, 20.0), loader(4, 30.0)],
        "workers_of_run": 2,
        "start": {
            "seconds": 12.5, "parts": {"imports": 6.0, "lengths": 1.0, "proof": 5.5},
            "rows_of_run": 40_000, "lengths_of_run": 50.0,
        },
        "limit": "step",
        "packed": training(speed_of(rows(1.0, 1.0, 1.0, 1.1))),
        "padded": training(speed_of(rows(2.0, 2.0, 2.0, 2.1))),
        "ratio": 2.0,
        "seconds": 90.0,
        "seconds_measured": 30.0,
    }  # fmt: skip


def changed(report, path, value):
    made = copy.deepcopy(report)
    *above, last = path.split("/")
    at = made
    for name in above:
        at = at[name]
    at[last] = value
    return made


def test_speed_is_a_median_with_its_spread():
    """CLI-22: one row that took ten times as long changes neither."""
    speed = speed_of(rows(1.0, 1.0, 1.0, 1.0, 10.0))
    assert (speed.tokens_per_second, speed.samples_per_second, speed.spread) == (1000.0, 10.0, 0.0)
    assert speed_of(rows(1.0, 2.0, 4.0)).spread > 0.3
    assert speed_of([]) is None


def test_what_is_right_is_left_alone(report):
    """CLI-22"""
    (only,) = advice_on(report)
    assert only["advice"] == "leave dataloader_num_workers at 2"
    assert only["because"].startswith("training takes 10.0 samples a second, and the loader gives 20.0")


@pytest.mark.parametrize(
    ("path", "value", "advice", "because"),
    [
        (
            "workers_of_run",
            0,
            "set dataloader_num_workers to 2 (it is 0)",
            "with 2 workers the loader gives 20.0, with 0",
        ),
        ("loader", [loader(0, 4.0), loader(1, 6.0)], "to 1, and expect to wait for data", "gives 6.0 at most"),
        ("plan/suggested_length", 4096, "packing_length 4096 is enough (it is 8192)", "longest of the rows has 5000"),
        ("plan/mean_fill", 0.7, "would leave less of a sequence empty", "packs are 70.0% full"),
        (
            "plan/patches_per_pack",
            {"median": 1000, "p95": 3000, "max": 9000},
            "packing_max_patches 3000",
            "9000 at most",
        ),
        ("packed/memory", {"peak": 78 * GB, "total": 80 * GB}, "lower packing_length", "took 78 GB of 80 GB"),
        ("packed/memory", {"peak": 10 * GB, "total": 80 * GB}, "a packing_length of 16384 may fit", "took 10 GB of 80"),
        ("padded/speed", speed_of(rows(1.0, 2.0, 4.0))._asdict(), "take the padded speed as a rough one", "apart"),
        ("packed/speed", speed_of(rows(1.0))._asdict(), "take the packed speed as a rough one", "its 1 measurements"),
    ],
)
def test_each_advice_names_the_measurement_it_comes_from(path, value, advice, because, report):
    """CLI-22"""
    found = advice_on(changed(report, path, value))
    assert any(advice in one["advice"] and because in one["because"] for one in found), found


def test_advice_about_length_does_not_contradict_itself(report):
    """CLI-22: where a shorter pack is enough, a longer one is not proposed for its room or its memory."""
    made = changed(changed(report, "plan/suggested_length", 4096), "plan/mean_fill", 0.7)
    found = [one["advice"] for one in advice_on(changed(made, "packed/memory", {"peak": 10 * GB, "total": 80 * GB}))]
    assert [advice for advice in found if "packing_length" in advice] == [
        "packing_length 4096 is enough (it is 8192): shorter sequences, less memory"
    ]


def test_padding_free_batches_stand_beside_the_others_where_they_were_measured(report):
    """SAME-6"""
    assert "padding_free" not in bench_text({**report, "advice": []})
    measured = {"padding_free": training(speed_of(rows(1.0, 2.0, 4.0))), "ratio_padding_free": 1.4, "advice": []}
    said = bench_text({**report, **measured})
    assert "padding_free 500 tokens a second" in said
    assert "2.00 times the tokens a second, packed to padded (of medians); padding_free to padded 1.40" in said
    assert any("take the padding_free speed as a rough one" in one["advice"] for one in advice_on(said_of(report)))


def said_of(report):
    return {**report, "padding_free": training(speed_of(rows(1.0, 2.0, 4.0)))}


def test_start_is_of_the_rows_that_were_looked_at(report):
    """CLI-39: with the first batch of the run's own workers, and what lengths of all rows would take."""
    packed = {**report, "start": {"imports": 6.0, "proof": 5.5}, "rows_of_run": 40_000}
    assert start_of(packed) == {
        "seconds": 12.0,
        "parts": {"imports": 6.0, "proof": 5.5, "first batch": 0.5},
        "rows_of_run": 40_000,
        "lengths_of_run": 50.0,
    }
    said = bench_text({**report, "advice": []})
    assert "start        12.5 s to step 1, with 500 rows: imports 6.0, lengths 1.0, proof 5.5" in said
    assert "lengths of all 40000 rows: 50 s at a first start; later starts remember them" in said
    said = bench_text({**changed(report, "start/rows_of_run", 500), "advice": []})
    assert "lengths of all" not in said


@pytest.mark.parametrize(
    ("workers", "loaders", "limit", "said"),
    [
        (2, [loader(2, 20.0)], "step", "the step is the limit, the loader is not: the loader delivers 20.0 samples"),
        (1, [loader(1, 6.0)], "loader", "the loader is the limit: the loader delivers 6.0 samples a second (1 worker)"),
        (0, [loader(0, 6.0)], "loader", "6.0 samples a second (the main process), the step takes 10.0"),
        (1, [loader(1, None)], None, "not known"),
        (3, [loader(1, 6.0)], None, "not known"),
    ],
)
def test_limit_is_what_the_run_waits_for(workers, loaders, limit, said, report):
    """CLI-39"""
    made = {**report, "workers_of_run": workers, "loader": loaders}
    assert limit_of(made) == limit
    assert said in bench_text({**made, "limit": limit, "advice": []})


def test_report_for_a_reader(report):
    """CLI-22"""
    said = bench_text({**report, "advice": advice_on(report)})
    for part in (
        "length pass  800 rows a second in 4 processes (500 rows, as at a first start)",
        "2       20.0     2000.0       0.50 s  <- the run's",
        "packed       1000 tokens a second, 10.0 samples (forward and backward, median of 4,",
        "ratio        2.00 times the tokens a second",
        "advice       leave dataloader_num_workers at 2: training takes",
    ):
        assert part in said
    failed = {"speed": None, "between": None, "memory": None, "problem": "the padded run ended with code 1"}
    said = bench_text({**report, "padded": failed, "ratio": None, "loader": [loader(0, None)], "advice": []})
    assert "padded       could not be measured: the padded run ended with code 1" in said
    assert "ratio" not in said
    assert "-: too few packs to say" in said


def test_sharing_is_compared_by_the_tokens_of_the_rows_alone(report):
    """SHARE-85: shared prefixes are computed once, so tokens a second would say that sharing gains nothing."""
    report["advice"] = []
    share = {"share": {"num_tokens": 1000, "num_tokens_alone": 3000}}
    shared = {**report, "plan": report["plan"] | share, "ratio_sharing": 3.0, "unshared": report["packed"]}
    assert "unshared" not in bench_text(report)
    assert "sharing" not in bench_text(report)
    text = bench_text(shared)
    assert "2.00 times the tokens a second of the rows alone, packed to padded" in text
    assert "3.00 times the tokens a second of the rows alone, packing_share media to none" in text
    assert "1000 of 3000 tokens of these rows are computed" in text
    assert "packing_share=none could not be measured" in bench_text({**shared, "ratio_sharing": None})
    assert "packing_share" not in str(advice_on(shared))
    (found, *_) = advice_on({**shared, "ratio_sharing": 0.9})
    assert found["advice"].startswith("leave packing_share out")
    assert alone_per_second([{"tokens": 1000, "tokens_alone": 3000, "seconds": 1.0}]) == 3000
