import logging
import random
from types import SimpleNamespace

import pytest
from datasets import Dataset

from swift_vlpack.data.fusion import RowSource
from swift_vlpack.data.lengths import size_of
from swift_vlpack.host import lengths
from swift_vlpack.host.headers import HeaderImage, NoPixels, pixel_free
from swift_vlpack.host.lengths import measured
from tests.images import BROKEN, GOOD, make, photo
from tests.rows import image_row, text_row

ARGS = SimpleNamespace(dataset_num_proc=1, strict=False)
BROKEN_BEHIND_ITS_HEADER = {"truncated.jpg", "broken.png"}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    rng = random.Random(0)
    sizes = [(rng.randint(1, 900), rng.randint(1, 900)) for _ in range(60)]
    odd = {**make(folder / "good", GOOD), **make(folder / "broken", BROKEN)}
    return {**odd, **{f"{w}x{h}": photo(folder, f"{n}", w, h, seed=n) for n, (w, h) in enumerate(sizes)}}


def dataset(rows):
    """As ms-swift loads it: every row has every column."""
    return Dataset.from_list([{"images": [], **row} for row in rows])


def outcome(template, row):
    try:
        return size_of(template.encode(row, return_length=True))
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_headers_give_the_length_that_encoding_gives(family, tiny, images):
    """LEN-1"""
    template = tiny(family).template
    quick = pixel_free(template)
    for name, path in images.items():
        row = image_row([path])
        if name in BROKEN_BEHIND_ITS_HEADER:
            assert isinstance(outcome(template, row), str)
            assert outcome(quick, row).length > 0
        else:
            assert outcome(quick, row) == outcome(template, row), name


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_headers_agree_on_odd_rows_too(family, tiny, images, monkeypatch):
    """LEN-1: more tags than images, fewer, several turns, bytes in the row, pixel limits."""
    template = tiny(family).template
    quick = pixel_free(template)
    path = images["photo.jpg"]
    with open(path, "rb") as file:
        content = file.read()
    rows = [
        text_row(),
        image_row([path, images["wide.jpg"]]),
        {**text_row("<image><image>two tags"), "images": [path]},
        {**text_row("<image>one tag"), "images": [path, path]},
        {**text_row("<image>in the row"), "images": [{"bytes": content, "path": None}]},
        {**text_row("<image>limited"), "images": [path], "chat_template_kwargs": {"max_pixels": 40000}},
        {**image_row([path]), "objects": {"ref": ["a"], "bbox": [[10, 10, 50, 50]]}},
    ]
    for max_pixels in (None, 30000):
        monkeypatch.setattr(template, "max_pixels", max_pixels)
        monkeypatch.setattr(quick, "max_pixels", max_pixels)
        for row in rows:
            assert outcome(quick, row) == outcome(template, row), row


def test_no_image_is_decoded(tiny, images, monkeypatch):
    """LEN-2: with the decoder of every image format gone, headers still give the sizes."""
    from PIL import ImageFile

    def no_decoder(self):
        raise AssertionError("an image was decoded")

    template = tiny("qwen2_5_vl").template
    rows = dataset([image_row([images["photo.jpg"]]), text_row()])
    monkeypatch.setattr(lengths, "NUM_TRIED", 0)
    monkeypatch.setattr(lengths, "NUM_EXTREMES", 0)
    monkeypatch.setattr(ImageFile.ImageFile, "load", no_decoder)
    sizes = measured(RowSource(name="rows", rows=rows), template, ARGS).sizes
    assert (sizes.lengths > 0).all()
    assert sizes.images.tolist() == [1, 0]


def test_asking_for_pixels_is_an_error():
    """LEN-2"""
    with pytest.raises(NoPixels):
        HeaderImage((4, 4)).load()
    assert HeaderImage((4, 4)).resize((8, 6)).size == (8, 6)


def test_trusted_sizes_equal_the_encoded_ones_row_by_row(tiny, images, caplog):
    """LEN-1 LEN-3"""
    template = tiny("qwen2_5_vl").template
    rows = dataset([image_row([path]) for path in images.values()])
    with caplog.at_level(logging.WARNING):
        sizes = measured(RowSource(name="rows", rows=rows), template, ARGS).sizes
    for index, name in enumerate(images):
        full = outcome(template, rows[index])
        if isinstance(full, str) and name not in BROKEN_BEHIND_ITS_HEADER:
            assert sizes.lengths[index] == 0
            assert sizes.failures[index]
        elif not isinstance(full, str):
            assert tuple(sizes.columns[:, index]) == tuple(full), name


@pytest.mark.parametrize("where", ["drawn", "extremes"])
def test_one_difference_sends_the_source_through_the_full_encoding(where, tiny, images, monkeypatch):
    """LEN-3: an image processor that counts patches otherwise than the header arithmetic says."""
    template = tiny("qwen2_5_vl").template
    rows = dataset([text_row(), image_row([images["photo.jpg"]]), image_row([images["wide.jpg"]])])
    right = [outcome(template, row).length for row in rows]
    said = []
    monkeypatch.setattr(lengths.logger, "warning", said.append)
    if where == "extremes":
        monkeypatch.setattr(lengths, "NUM_TRIED", 0)
    monkeypatch.setattr("swift_vlpack.host.headers._header_of", lambda image, load_images: HeaderImage((64, 64)))
    sizes = measured(RowSource(name="rows", rows=rows), template, ARGS).sizes
    assert sizes.lengths.tolist() == right
    assert "every row is encoded" in said[0]
    assert "rows:1" in said[0] or "rows:2" in said[0]
    assert str(right[1]) in said[0] or str(right[2]) in said[0]
