"""An image of which only the header is known says what the header says, and refuses everything else."""

import copy
import pickle
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from PIL import Image, ImageOps
from swift.template import Template

from swift_vlpack.host import headers
from swift_vlpack.host.headers import HeaderImage, NoPixels, pixel_free
from swift_vlpack.rows.source import RowSource
from tests.data_rows import image_row
from tests.host.lengths.support import ARGS, outcome, unchecked, with_lengths
from tests.images import noise, photo

FAMILY = "qwen2_5_vl"
ORIENTATION = 274
ANSWERED = {
    *("size", "width", "height", "mode", "getbands", "format", "format_description", "info", "getexif"),
    *("convert", "resize", "copy", "tell", "close"),
}


def opened(path):
    return Image.open(BytesIO(Path(path).read_bytes()))


def header(path):
    """As the header template loads it, before it is made RGB."""
    with open(path, "rb") as file, Image.open(file) as opened:
        opened.load = headers._refuse_to_decode
        return HeaderImage.of(opened)


def turned(folder, name, orientation=6, **options):
    path = str(Path(folder) / name)
    image = noise(300, 200)
    exif = image.getexif()
    exif[ORIENTATION] = orientation
    image.save(path, exif=exif, **options)
    return path


# -- what is answered and what is refused ------------------------------------------------------------------------------


def test_all_that_pillow_can_do_is_answered_or_refused():
    """LEN-2: nothing acts in silence on an image without pixels; what a later Pillow adds is refused as well."""
    names = {name for name in [*dir(Image.Image), *vars(Image.Image())] if not name.startswith("_")}
    assert names >= ANSWERED
    arguments = {"getchannel": (0,), "reduce": (2,), "thumbnail": ((4, 4),), "getpixel": ((0, 0),), "save": ("x.png",)}
    for name in sorted(names - ANSWERED):
        image = HeaderImage((40, 30))
        with pytest.raises(NoPixels, match=name):
            getattr(image, name)(*arguments.get(name, ()))
        assert image.size == (40, 30)


def test_arrays_comparisons_and_pickles_are_refused():
    """LEN-2"""
    image = HeaderImage((4, 4))
    for work in (
        lambda: np.asarray(image),
        lambda: np.array(image),
        lambda: np.stack([image, image]),
        lambda: image == HeaderImage((4, 4)),
        lambda: pickle.dumps(image),
        lambda: image.tobytes(),
        lambda: image._repr_png_(),
        lambda: image.__arrow_c_array__(),
        lambda: image.palette,
        lambda: image.im,
        lambda: ImageOps.grayscale(image).getbbox(),
    ):
        with pytest.raises(NoPixels):
            work()


def test_header_says_what_the_file_says(tmp_path):
    """LEN-2: format, mode, info and EXIF data, as Pillow has them before it decodes."""
    noise(40, 30).save(tmp_path / "a.jpg", dpi=(300, 300), comment=b"by nobody")
    noise(40, 30, mode="P").save(tmp_path / "a.gif")
    noise(40, 30, mode="L").save(tmp_path / "a.png", dpi=(72, 72))
    turned(tmp_path, "turned.jpg")
    turned(tmp_path, "turned.png")
    for path in sorted(tmp_path.iterdir()):
        image, real = header(path), opened(path)
        assert (image.format, image.mode, image.size) == (real.format, real.mode, real.size)
        assert image.format_description == real.format_description
        assert image.info == real.info
        if path.stem == "turned":
            assert image.getexif()[ORIENTATION] == real.getexif()[ORIENTATION] == 6
        made, truly = image.convert("RGB").resize((8, 6)), real.convert("RGB").resize((8, 6))
        assert (made.format, made.mode, made.size) == (truly.format, truly.mode, truly.size) == (None, "RGB", (8, 6))
        if path.suffix == ".jpg":
            assert made.info == truly.info
            assert dict(made.getexif()) == dict(truly.getexif())
        else:
            with pytest.raises(NoPixels):
                print(made.info)


def test_what_only_a_decoded_file_can_say_is_refused_and_what_is_nowhere_is_missing(tmp_path):
    """LEN-2: a `getattr` with a default must not hide the difference."""
    noise(40, 30).save(tmp_path / "a.png")
    image = header(tmp_path / "a.png")
    with pytest.raises(NoPixels):
        image.getexif()  # may be behind the pixels
    for name in ("text", "n_frames", "filename"):
        with pytest.raises(NoPixels):
            getattr(image, name, None)
    assert getattr(image, "nowhere", 5) == 5
    assert not hasattr(image.convert("RGB"), "n_frames")
    assert not hasattr(opened(tmp_path / "a.png").convert("RGB"), "n_frames")
    assert copy.copy(image).size == copy.deepcopy(image).size == (40, 30)


# -- templates that look at it -----------------------------------------------------------------------------------------


def of_class(template, **methods):
    """The template with methods of one's own, as a user's plugin would register it."""
    own = copy.copy(template)
    own.__class__ = type("Own", (type(template),), methods)
    return own


def _upright(image):
    """Of a width of 140, which makes as many tokens as it is high."""
    image = ImageOps.exif_transpose(image)
    return image.resize((140, image.height * 140 // image.width))


def _turn_as_loaded(image, load_images):
    return _upright(Template._load_image(image, load_images))


def _turn_before_encoding(self, inputs):
    super(type(self), self)._preprocess_inputs(inputs)
    inputs.images = [_upright(image) for image in inputs.images]


def _halve_some(self, inputs):
    """By what the header says of density and format; arithmetic of sizes alone."""
    super(type(self), self)._preprocess_inputs(inputs)
    inputs.images = [
        image.resize((image.width // 2, image.height // 2))
        if image.format == "JPEG" and image.info.get("dpi", (0, 0))[0] > 250
        else image
        for image in inputs.images
    ]


def _cut_border(self, inputs):
    super(type(self), self)._preprocess_inputs(inputs)
    inputs.images = [image.crop((0, 0, image.width // 2, image.height)) for image in inputs.images]


def rows_with_few_others(folder, num_rows=200):
    """One in a hundred is turned and dense; nobody draws them all."""
    plain = photo(folder, "plain", 300, 90)
    opened(turned(folder, "one.jpg")).resize((300, 90)).save(
        folder / "turned.jpg", dpi=(300, 300), exif=opened(folder / "one.jpg").getexif()
    )
    return Dataset.from_list(
        [image_row([str(folder / "turned.jpg") if n % 100 == 37 else plain], f"question {n}") for n in range(num_rows)]
    )


@pytest.mark.parametrize(
    "methods",
    [
        {"_load_image": staticmethod(_turn_as_loaded)},
        {"_preprocess_inputs": _turn_before_encoding},
        {"_preprocess_inputs": _halve_some},
        {"_preprocess_inputs": _cut_border},
    ],
    ids=["load", "turn", "halve", "cut"],
)
def test_template_that_reads_the_header_has_the_right_lengths(methods, template, tmp_path, monkeypatch):
    """LEN-2: although no row that it treats in another way is compared."""
    rows = rows_with_few_others(tmp_path)
    own = of_class(template, **methods)
    unchecked(monkeypatch)
    sizes = with_lengths(RowSource(name="rows", rows=rows), own, ARGS, str(tmp_path / "cache")).sizes
    for index in (0, 37, 100, 137):
        assert tuple(sizes.columns[:, index]) == tuple(outcome(own, rows[index]))
    assert outcome(own, rows[37]) != outcome(template, rows[37]), "it treats the row as every other"


@pytest.mark.parametrize("where", ["swift.template.base.load_image", "swift.template.Template._load_image"])
def test_loading_that_a_plugin_put_in_place_of_ms_swifts_is_the_one_that_counts(where, template, tmp_path, monkeypatch):
    """LEN-2"""
    from swift.template import base

    real = base.load_image

    def load(image, load_images=True):
        return ImageOps.exif_transpose(real(image))

    monkeypatch.setattr(where, staticmethod(load) if "Template" in where else load)
    row = image_row([turned(tmp_path, "turned.jpg")])
    quick = pixel_free(template).encode(row, return_length=True)
    assert quick["image_grid_thw"].tolist() == template.encode(row, return_length=True)["image_grid_thw"].tolist()
