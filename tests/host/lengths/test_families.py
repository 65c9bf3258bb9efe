"""Lengths of families whose image processor resizes by itself, or works on arrays."""

import pytest
import torch
from datasets import Dataset

from swift_vlpack.host.headers import NoPixels, pixel_free
from swift_vlpack.rows.source import RowSource
from tests.data_rows import image_row, text_row
from tests.families import load_template
from tests.host.lengths.support import ARGS, warnings_of, with_lengths
from tests.images import photo

SIZES = [(640, 480), (336, 336), (100, 700), (1500, 300), (31, 17), (900, 1200)]


@pytest.fixture(scope="module", params=["llava1_5_hf", "llava1_6_mistral_hf"])
def template(request, tmp_path_factory):
    return load_template(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    paths = [photo(folder, f"{width}x{height}", width, height) for width, height in SIZES]
    return [text_row(), *[image_row([path]) for path in paths], image_row(paths[:2])]


def test_processor_that_needs_pixels_sends_the_source_through_the_full_encoding(template, rows, tmp_path, monkeypatch):
    """LEN-3"""

    process = type(template.processor.image_processor).__call__

    def needs_pixels(self, images, *args, **options):
        if isinstance(images[0], torch.Tensor):
            raise TypeError("this one works on arrays")
        return process(self, images, *args, **options)

    monkeypatch.setattr(type(template.processor.image_processor), "__call__", needs_pixels)
    said = warnings_of(monkeypatch)
    dataset = Dataset.from_list([{"images": [], **row} for row in rows])
    sizes = with_lengths(RowSource(name="rows", rows=dataset), template, ARGS, str(tmp_path)).sizes
    assert sizes.lengths.tolist() == [template.encode(row, return_length=True)["length"] for row in rows]
    assert "every row is encoded" in said[0]
    assert "works on arrays" in said[0]


def test_images_of_another_kind_are_refused(template):
    """LEN-2: a template that decodes by itself is not imitated."""
    processor = pixel_free(template).processor.image_processor
    with pytest.raises(NoPixels, match="something else than its images"):
        processor([torch.zeros(3, 4, 4)])
