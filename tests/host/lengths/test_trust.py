"""What it takes to trust image headers: a small share of the pixels, once for every kind of row and image."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from swift.template import Template

from swift_vlpack.host import headers
from swift_vlpack.host.headers import HeaderImage
from swift_vlpack.lengths import measure
from swift_vlpack.rows.source import RowSource
from tests.data_rows import image_row
from tests.host.lengths.support import ARGS, dataset, outcome, texts, warnings_of, with_lengths
from tests.images import noise, photo
from tests.marks import quick_only


@pytest.fixture
def full(monkeypatch, tmp_path):
    """The questions of rows that were encoded in full, in whatever process, and in which."""
    path, encode = tmp_path / "full", Template.encode

    def noted(self, row, **options):
        if not isinstance(row, headers._Row):
            with path.open("a") as file:
                file.write(json.dumps([row["messages"][0]["content"], os.getpid()]) + "\n")
        return encode(self, row, **options)

    monkeypatch.setattr(Template, "encode", noted)

    def taken():
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]

    return taken


def photos(folder, num_rows, width=300, height=200, name="photo", question="question"):
    """One file stands for all."""
    path = folder / f"{name}.jpg"
    path = str(path) if path.exists() else photo(folder, name, width, height)
    return [image_row([path], f"{question} {number:03}") for number in range(num_rows)]


def sizes_of(rows, template, folder, name="rows", num_processes=1):
    args = SimpleNamespace(**{**vars(ARGS), "dataset_num_proc": num_processes})
    return with_lengths(RowSource(name=name, rows=dataset(rows)), template, args, str(folder / "cache")).sizes


def lying_about(monkeypatch, is_one):
    """Headers that lie about some images."""
    real = headers._header_of

    def lie(image, load_images):
        found = real(image, load_images)
        return HeaderImage((64, 64), opened=found.opened) if is_one(found.opened) else found

    monkeypatch.setattr(headers, "_header_of", lie)


def test_comparing_takes_a_small_share_of_the_pixels(template, full, tmp_path):
    """LEN-3: a hundred images of one kind; 64 texts cost nothing beside them."""
    sizes_of(photos(tmp_path, 100), template, tmp_path)
    assert 1 <= len(full()) <= 6
    sizes_of(photos(tmp_path, 400, question="many"), template, tmp_path, "many")
    assert 400 / 64 - 2 <= len(full()) <= 400 / 64 + 6
    sizes_of(texts(200), template, tmp_path, "texts")
    assert len(full()) >= 64


@pytest.mark.parametrize("kind", quick_only(("format", "size"), ["format", "mode", "size", "aspect"]))
def test_one_row_of_a_kind_of_its_own_is_enough_to_find_a_lie(kind, template, tmp_path, monkeypatch):
    """LEN-3: the last of 200, which no draw would find; nor is it an extreme."""
    path = str(tmp_path / "odd.png")
    size = {"size": (520, 410), "aspect": (900, 100)}.get(kind, (300, 200))
    noise(*size, mode="L" if kind == "mode" else "RGB").save(path, format="JPEG" if kind != "format" else "PNG")
    larger = [image_row([photo(tmp_path, "long", 2000, 60)]), image_row([photo(tmp_path, "large", 900, 900)])]
    smaller = [image_row([photo(tmp_path, "small", 60, 60)])]
    rows = [*photos(tmp_path, 200), *larger, *smaller, image_row([path])]
    lying_about(monkeypatch, lambda opened: (opened.size, opened.format, opened.mode) == _form_of(path))
    said = warnings_of(monkeypatch)
    sizes = sizes_of(rows, template, tmp_path)
    assert "rows:203 has " in said[0]
    assert sizes.lengths[203] == outcome(template, rows[203]).length


def _form_of(path):
    from PIL import Image

    with Image.open(path) as opened:
        return opened.size, opened.format, opened.mode


def test_a_broken_image_proves_nothing(template, full, tmp_path):
    """LEN-3: good headers before bad pixels are no evidence; a later row of the kind is compared."""
    broken = Path(photo(tmp_path, "broken"))
    broken.write_bytes(broken.read_bytes()[:3000])
    rows = [image_row([str(broken)], f"broken {n}") for n in range(3)]
    sizes_of([*rows, *photos(tmp_path, 200, 320, 240, "good")], template, tmp_path)
    assert any("question" in question for question, _ in full())


def test_rows_are_compared_in_the_processes_that_measure(template, full, tmp_path, monkeypatch):
    """LEN-3: none in the process that waits for them, before any is measured."""
    monkeypatch.setattr(measure, "extremes", lambda sizes: np.zeros(0, np.int64))
    rows = [*photos(tmp_path, 300), *photos(tmp_path, 300, 90, 70, "small", "small")]
    sizes = sizes_of(rows, template, tmp_path, num_processes=2)
    where = {process for _, process in full()}
    assert where
    assert os.getpid() not in where
    assert sizes.lengths.tolist() == sizes_of(rows, template, tmp_path / "alone").lengths.tolist()
