"""Headers give the length that `template.encode` gives, to the token, whatever the row and the settings."""

import pytest

from swift_vlpack.host import headers
from swift_vlpack.host.headers import HeaderImage, NoPixels, pixel_free
from tests.data_rows import image_row, text_row
from tests.host.lengths.support import (
    ARGS,
    FAMILY,
    dataset,
    odd_rows,
    outcome,
    source,
    texts,
    unchecked,
    variant,
    with_lengths,
)
from tests.images import KINDS, photo, wild
from tests.marks import quick_only
from tests.tiny import FAMILIES

QUICK = ("qwen2_5_vl",)


@pytest.fixture(scope="session")
def few_images(tmp_path_factory):
    return wild(tmp_path_factory.mktemp("few"), 4 * len(KINDS))


@pytest.fixture(scope="session")
def many_images(tmp_path_factory):
    return wild(tmp_path_factory.mktemp("many"), 20 * len(KINDS), seed=1)


def assert_headers_equal_encoding(template, paths):
    quick = pixel_free(template)
    outcomes = []
    for number, path in enumerate(paths):
        template.max_pixels = quick.max_pixels = (None, None, 20_000)[number % 3]
        full = outcome(template, image_row([path]))
        assert outcome(quick, image_row([path])) == full, path
        outcomes.append(full)
    assert sum(isinstance(one, str) for one in outcomes) < 0.1 * len(paths), "hardly any size was compared"
    assert len({one.length for one in outcomes if not isinstance(one, str)}) > 20


@pytest.mark.parametrize("family", quick_only(QUICK, FAMILIES))
def test_headers_give_the_length_that_encoding_gives(family, tiny, few_images):
    """LEN-1"""
    assert_headers_equal_encoding(variant(tiny, family, max_length=20_000), few_images)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.telling] * (family == "qwen2_5_vl")) for family in FAMILIES]
)
def test_headers_give_the_length_that_encoding_gives_for_1000_images(family, tiny, many_images):
    """LEN-1"""
    assert len(many_images) > 1000
    assert_headers_equal_encoding(variant(tiny, family, max_length=20_000), many_images)


VARIANTS = {
    "plain": {},
    "system": {"default_system": "You are a painter."},
    "delete": {"max_length": 150},
    "left": {"max_length": 150, "truncation_strategy": "left"},
    "right": {"max_length": 150, "truncation_strategy": "right"},
    "pixels": {"max_pixels": 30_000},
    "react": {"agent_template": "react_en"},
    "thinking": {"enable_thinking": True},
    "not thinking": {"enable_thinking": False},
    "no prefix": {"add_non_thinking_prefix": False},
    "prefix": {"response_prefix": "<think>\n"},
    "kept thoughts": {"preserve_thinking": True},
    "learned": {"loss_scale": "ignore_empty_think"},
    "weighted": {"loss_scale": "hermes", "is_binary_loss_scale": False},
    "all learned": {"loss_scale": "all"},
    "no chat": {"use_chat_template": False},
    "plain boxes": {"norm_bbox": "none"},
}


@pytest.mark.parametrize("family", quick_only(QUICK, FAMILIES))
def test_headers_agree_on_odd_rows_under_every_setting(family, tiny, tmp_path):
    """LEN-1 LEN-4: chat template, system prompt, tools, thinking, truncation, limits, forms of images."""
    rows = odd_rows(tmp_path)
    seen = {}
    for name, options in VARIANTS.items():
        template = variant(tiny, family, **options)
        quick = pixel_free(template)
        for kind, row in rows.items():
            full = outcome(template, row)
            assert outcome(quick, row) == full, (name, kind)
            seen[name, kind] = full
    failed = {kind for (name, kind), one in seen.items() if isinstance(one, str) and name == "plain"}
    assert failed <= {"missing", "missing, valid base64", "more tags", "special", "tag in answer"}, seen
    assert seen["delete", "long"] == "MaxLengthError"
    assert seen["left", "long"].length == seen["right", "long"].length == 150
    for changed, kind in [("system", "text"), ("pixels", "two"), ("react", "tools"), ("no chat", "text")]:
        assert seen[changed, kind] != seen["plain", kind], "a setting that changes nothing shows nothing"


@pytest.mark.parametrize("family", quick_only(QUICK, [FAMILY, "qwen3_vl"]))
def test_headers_follow_the_limits_that_the_environment_set(family, tiny, tmp_path, monkeypatch):
    """LEN-1: ms-swift writes MAX_PIXELS and IMAGE_MAX_TOKEN_NUM into qwen_vl_utils once in a process."""
    from qwen_vl_utils import vision_process

    row = image_row([photo(tmp_path, "large", 900, 600)])
    template = tiny(family).template
    before = outcome(template, row)
    monkeypatch.setattr(vision_process, "IMAGE_MAX_TOKEN_NUM", 64)
    monkeypatch.setattr(vision_process, "IMAGE_MIN_TOKEN_NUM", 4)
    assert outcome(pixel_free(template), row) == outcome(template, row)
    assert outcome(template, row).length < before.length - 100


def test_sources_have_a_system_prompt_and_a_pixel_limit_of_their_own(tiny, tmp_path):
    """LEN-1 LEN-4"""
    template = tiny(FAMILY).template
    rows = dataset([image_row([photo(tmp_path, "large", 900, 600)]), text_row()])
    plain, prompted, limited = (
        with_lengths(source(rows, name, **options), template, ARGS).sizes.lengths.tolist()
        for name, options in (
            ("plain", {}),
            ("prompted", {"system": "Be brief. " * 9}),
            ("limited", {"max_pixels": 50_000}),
        )
    )
    with_system = [
        {**row, "messages": [{"role": "system", "content": "Be brief. " * 9}, *row["messages"]]} for row in rows
    ]
    assert prompted == [outcome(template, row).length for row in with_system]
    assert prompted[0] > plain[0]
    assert limited[0] < plain[0]
    assert limited[1] == plain[1]


def test_no_image_is_decoded(template, images, monkeypatch):
    """LEN-2: with the decoder of every image format gone, headers still give the sizes."""
    from PIL import ImageFile

    decoded = []

    def no_decoder(self):
        decoded.append(self)
        raise AssertionError("an image was decoded")

    rows = dataset([image_row([images["photo.jpg"]]), text_row()])
    unchecked(monkeypatch)
    monkeypatch.setattr(ImageFile.ImageFile, "load", no_decoder)
    sizes = with_lengths(source(rows, "undecoded"), template, ARGS).sizes
    assert (sizes.lengths > 0).all()
    assert sizes.images.tolist() == [1, 0]
    assert not decoded


def test_frames_of_a_video_are_no_headers(template, tmp_path, monkeypatch):
    """LEN-2: a video of frames, which needs no reader; a header would lie."""
    frames = [photo(tmp_path, f"frame {n}", 200, 160, seed=n) for n in range(4)]
    rows = [{**text_row("<video>what?"), "videos": [frames]}, *texts(3)]
    monkeypatch.setattr(headers, "_header_of", lambda image, load_images: HeaderImage((64, 64)))
    sizes = with_lengths(source(rows), template, ARGS, str(tmp_path / "cache")).sizes
    assert tuple(sizes.columns[:, 0]) == tuple(outcome(template, rows[0]))
    assert sizes.patches[0] > 100


def test_asking_for_pixels_is_an_error():
    """LEN-2"""
    with pytest.raises(NoPixels):
        HeaderImage((4, 4)).load()
    assert HeaderImage((4, 4)).resize((8, 6)).size == (8, 6)
