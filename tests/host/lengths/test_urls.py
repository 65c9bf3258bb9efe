"""Rows whose images are behind URLs."""

from collections import Counter
from types import SimpleNamespace

import pytest
from swift.template import vision_utils

from swift_vlpack.host.headers import reading_urls
from swift_vlpack.host.pipeline import urls_in_training
from swift_vlpack.lengths.measured_sizes import MeasuredSizes
from swift_vlpack.rows import urls as module
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.samples import Address, SampleError
from swift_vlpack.rows.source import RowSource
from swift_vlpack.rows.urls import NUM_AT_A_TIME, NUM_FAILURES
from tests.data_rows import image_row, text_row
from tests.host.lengths.support import ARGS, outcome, unchecked, warnings_of, with_lengths
from tests.rows.test_urls import Web, black_hole, jpeg, refused


@pytest.fixture
def web():
    made = Web()
    yield made
    made.close()


@pytest.fixture
def asked(monkeypatch):
    """How often each URL is asked for in this process, and never by ms-swift's own requests with their retries."""
    counts, real = Counter(), module._content
    monkeypatch.setattr(module, "_content", lambda url, *args: counts.update([url]) or real(url, *args))
    monkeypatch.setattr(vision_utils.requests.Session, "get", None)
    monkeypatch.setenv("SWIFT_TIMEOUT", "0.5")
    return counts


def rows_of(web, num_good, dead=()):
    """Every form in which a row can name a URL."""
    good = [web.give(f"{n}.jpg", jpeg(60 + 30 * (n % 5), 90, n)) for n in range(num_good)]
    rows = [image_row([url], f"good {n}") for n, url in enumerate(good)]
    rows += [{**text_row("<image>in a dict"), "images": [{"bytes": None, "path": good[0]}]}]
    return rows + [image_row([url], f"dead {n}") for n, url in enumerate(dead)] + [text_row()]


def sizes_of(rows, template, folder, **args):
    return with_lengths(
        RowSource(name="rows", rows=rows), template, SimpleNamespace(**{**vars(ARGS), **args}), str(folder)
    ).sizes


def test_lengths_of_urls_are_right_and_each_is_asked_for_once(template, web, asked, tmp_path, monkeypatch):
    """LEN-20: but for those that are encoded both ways, twice."""
    rows = rows_of(web, 30)
    sizes = sizes_of(rows, template, tmp_path)
    assert sizes.failures == {}
    assert set(asked.values()) <= {1, 2, 3}
    assert sum(number > 1 for number in asked.values()) <= 12
    asked.clear()
    assert sizes_of(rows, template, tmp_path).lengths.tolist() == sizes.lengths.tolist()
    assert not asked
    monkeypatch.undo()
    assert [outcome(template, row).length for row in rows] == sizes.lengths.tolist()


def test_dead_links_cost_a_few_requests_a_host(template, web, asked, tmp_path, monkeypatch):
    """LEN-20: refused, silent and missing ones; it is said how many and why."""
    unchecked(monkeypatch)
    said = warnings_of(monkeypatch)
    with black_hole() as (hole, _):
        closed = refused()
        dead = [f"{host}/{n}.jpg" for host in (hole, closed) for n in range(40)]
        dead += [web.url(f"gone{n}.jpg") for n in range(10)]
        rows = rows_of(web, 8, dead)
        sizes = sizes_of(rows, template, tmp_path)
        assert Counter(sizes.failures.values()) == {"url_unreachable": 90}
        by_host = Counter(url.rsplit("/", 1)[0] for url in asked.elements())
        assert max(by_host[hole], by_host[closed]) < NUM_FAILURES + NUM_AT_A_TIME
        assert max(asked.values()) == 1
        assert "90 rows left out, because an image behind a URL could not be fetched" in said[-1]
        assert "SWIFT_TIMEOUT" in said[-1]


def test_each_process_leaves_a_dead_host_alone(template, web, tmp_path, monkeypatch):
    """LEN-20: through all chunks that it measures."""
    monkeypatch.setenv("SWIFT_TIMEOUT", "0.5")
    unchecked(monkeypatch)
    with black_hole() as (hole, taken):
        rows = rows_of(web, 8, [f"{hole}/{n}.jpg" for n in range(300)])
        sizes = sizes_of(rows, template, tmp_path, dataset_num_proc=2)
        assert Counter(sizes.failures.values()) == {"url_unreachable": 300}
        assert len(taken) < 2 * (NUM_FAILURES + NUM_AT_A_TIME)


def test_source_that_is_encoded_in_full_asks_once_too(template, web, asked, tmp_path, monkeypatch):
    """LEN-20"""
    rows = rows_of(web, 6, [web.url("gone.jpg")])
    unchecked(monkeypatch)
    monkeypatch.setattr(MeasuredSizes, "look_up", lambda sizes, **options: True)  # an earlier start found a difference
    sizes = sizes_of(rows, template, tmp_path)
    assert sizes.failures == {7: "url_unreachable"}
    assert set(asked.values()) == {1}


def test_loading_asks_a_dead_link_twice_and_not_again(template, web, asked, monkeypatch):
    """LEN-20: not in each of ms-swift's three tries."""
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    closed = refused()
    rows = rows_of(web, 2, [f"{closed}/{n}.jpg" for n in range(5)] + [web.url("gone.jpg")])
    data = FusionCaptionDataset([RowSource(name="rows", rows=rows)], reading_urls(template, urls_in_training()))
    loaded = [data.sample_or_error(Address(0, index)) for index in range(len(rows))]
    failed = [one.reason for one in loaded if isinstance(one, SampleError)]
    assert failed == ["url_unreachable"] * 6
    assert loaded[0]["length"] == outcome(reading_urls(template, urls_in_training()), rows[0]).length
    by_host = Counter(url.rsplit("/", 1)[0] for url in asked.elements())
    assert by_host[closed] == 2 * NUM_FAILURES
    assert asked[web.url("gone.jpg")] == 1
