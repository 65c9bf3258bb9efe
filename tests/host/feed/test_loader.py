"""Batches of ms-swift's loader with our workers: bit for bit those that no worker made."""

import threading
from itertools import chain
from types import SimpleNamespace

import pytest
import torch

from swift_vlpack import PackingConfig
from swift_vlpack.feed import reader
from swift_vlpack.feed.reader import PackReader
from swift_vlpack.host.loader import PackLoader, collator_of
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.samples import Address, PackAddress
from swift_vlpack.rows.source import RowSource
from tests.conftest import load_tiny
from tests.data_rows import image_row, text_row
from tests.feeds import OneRank, planned_feed, streamed_feed
from tests.images import photo

FAMILY = "qwen2_5_vl"
EPOCHS = 2


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Texts, and rows of one and of two photos, whose pixels take 0.2 to 1.5 MB."""
    folder = tmp_path_factory.mktemp("photos")
    photos = [photo(folder, str(n), 100 + 20 * n, 200, seed=n) for n in range(10)]
    texts = [text_row(f"number {n}", "word " * 30) for n in range(10)]
    with_photos = [image_row(photos[n : n + 1 + n % 2], f"what is {n}?") for n in range(10)]
    return list(chain.from_iterable(zip(texts, with_photos, strict=True)))


@pytest.fixture
def template_of_spawned(tiny_folder):
    """With the whole vocabulary: in a process of its own, ms-swift's templates name the ids of that one."""
    return load_tiny(tiny_folder(FAMILY), FAMILY).template


def batches_of(make, rows, template, num_workers, **options):
    config = PackingConfig(packing_length=512, packing_buffer=8, packing_drop_last=False)
    more = {"num_workers": num_workers} if make is streamed_feed else {}
    feed = make(FusionCaptionDataset([RowSource(name="data", rows=rows)], template), template, config, **more)
    collate = collator_of(SimpleNamespace(tuner_type="full"), template, feed.seed)
    options |= {"persistent_workers": True} if num_workers else {}
    loader = feed.loader(0, PackLoader, ranks=OneRank, collate_fn=collate, num_workers=num_workers, **options)
    taken = []
    for epoch in range(EPOCHS):
        feed.begin(epoch)
        taken += [(batch.record.sample_ids, batch.record.lengths, dict(batch)) for batch in loader]
    return taken


@pytest.mark.parametrize(
    ("make", "num_workers", "context"),
    [
        (planned_feed, 1, "fork"),
        (planned_feed, 2, "fork"),
        (streamed_feed, 1, "fork"),
        pytest.param(planned_feed, 2, "spawn", marks=pytest.mark.slow),
    ],
)
def test_batches_of_workers_are_those_that_no_worker_made(make, num_workers, context, rows, request):
    """RANKS-9: over two epochs, kept to the end while the workers write on."""
    template = request.getfixturevalue("template_of_spawned" if context == "spawn" else "template")
    expected = batches_of(make, rows, template, 0)
    got = batches_of(make, rows, template, num_workers, multiprocessing_context=context)
    assert [taken[:2] for taken in got] == [taken[:2] for taken in expected]
    for (*_, batch), (*_, of_none) in zip(got, expected, strict=True):
        assert batch.keys() == of_none.keys()
        for name, value in of_none.items():
            if not isinstance(value, torch.Tensor):
                assert batch[name] == value, name
                continue
            assert batch[name].dtype is value.dtype, name
            assert torch.equal(batch[name], value), name
    assert sum(batch["pixel_values"].nbytes > 1e6 for *_, batch in got if "pixel_values" in batch) > EPOCHS


def recorded_threads(template, monkeypatch):
    """The thread in which each row was encoded, by its question."""
    threads, encode = {}, template.encode

    def encode_and_note(row, **options):
        threads[row["messages"][0]["content"]] = threading.current_thread().name
        return encode(row, **options)

    monkeypatch.setattr(template, "encode", encode_and_note)
    return threads


@pytest.mark.parametrize("num_photos", [0, 1, 4])
def test_threads_are_for_rows_with_media(num_photos, rows, template, monkeypatch):
    """LEN-15: texts hold Python's lock all the time, so threads would only pass it on."""
    monkeypatch.setattr(reader, "threads_per_worker", lambda: 2)
    monkeypatch.setattr("swift_vlpack.rows.encoder.watched", lambda work: work())  # which has a thread of its own
    data = FusionCaptionDataset([RowSource(name="data", rows=rows)], template)
    chosen = [Address(0, at) for at in (0, 2, 4, 2, *range(1, 2 * num_photos, 2))]  # one row twice
    address = PackAddress(0, 0, tuple(chosen), ((0, 0, 0, 0),) * len(chosen))
    packs = PackReader(data, PackingConfig(packing_length=4096), 0, 1)
    expected = [data.encode(where) for where in chosen]
    threads = recorded_threads(template, monkeypatch)
    encoded = packs.encoded(address)
    assert [sample["sample_id"] for sample in encoded] == [sample["sample_id"] for sample in expected]
    assert [sample["input_ids"] for sample in encoded] == [sample["input_ids"] for sample in expected]
    assert encoded[1] is not encoded[3]
    here = threading.current_thread().name
    assert {name for question, name in threads.items() if "number" in question} == {here}
    of_photos = {name for question, name in threads.items() if "<image>" in question}
    assert (here in of_photos) == (num_photos == 1)
