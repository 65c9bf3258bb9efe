"""Every way in which a row can be unusable has one counted reason, and words for the log."""

import struct
import zlib
from pathlib import Path

import pytest
import torchvision
from qwen_vl_utils import vision_process

from swift_vlpack.host.headers import pixel_free
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.faults import fault_of, is_lasting
from swift_vlpack.rows.samples import SampleError, SampleId
from tests.data_rows import image_row, text_row
from tests.images import noise, photo
from tests.videos import video

FAMILY = "qwen2_5_vl"
PASTED = "the log says <|vision_start|><|image_pad|><|vision_end|>"


def bomb(path):
    """A PNG of 60 bytes that claims 50,000 x 50,000 pixels."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)), (b"IEND", b"")]
    data = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    ]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(data))


def bad_files(folder):
    """Files that are no images, by kind, with the reason."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("empty.jpg", b""), ("text.jpg", b"no image"), ("vector.svg", b"<svg></svg>")):
        (folder / name).write_bytes(content)
    for name, num_bytes in (
        ("head.png", 20),
        ("half-head.png", 30),
        ("head.jpg", 50),
        ("head.gif", 8),
        ("head.webp", 20),
    ):
        noise(40, 30).save(folder / name)
        (folder / name).write_bytes((folder / name).read_bytes()[:num_bytes])
    (folder / "folder.jpg").mkdir()
    bomb(folder / "bomb.png")
    noise(3000, 4).save(folder / "aspect.png")
    reasons = {
        "missing.jpg": "file_missing",
        "empty.jpg": "file_empty",
        "folder.jpg": "file_is_folder",
        "bomb.png": "image_too_large",
        "aspect.png": "aspect_ratio",
    }
    names = [path.name for path in sorted(folder.iterdir())]
    return {str(folder / name): reasons.get(name, "image_unreadable") for name in ["missing.jpg", *names]}


def bad_rows(folder):
    """Rows that cannot be encoded, each with its reason."""
    good = photo(folder, "good", 60, 40)
    malformed = ([None], [5], [{}], [{"bytes": None, "path": None}], [["a.jpg"]], [""], [good, None], 5, [[good]])
    return [
        *[
            (image_row([path], f"what is {Path(path).name}?"), reason)
            for path, reason in bad_files(folder / "bad").items()
        ],
        *[({**text_row("<image>" * 2), "images": images}, "images_malformed") for images in malformed],
        *[({"messages": messages}, "no_messages") for messages in ([], None)],
        ({"images": [good]}, "no_messages"),
        ({**text_row("<video>what?"), "videos": [str(folder / "gone.mp4")]}, "file_missing"),
        (image_row(["data:image/png;base64,AAAA"]), "image_unreadable"),
        (image_row([good, str(folder / "bad" / "text.jpg")]), "image_unreadable"),
        (text_row(answer="word " * 5000), "over_max_length"),
        ({"messages": "no list"}, "encode_failed"),
        (text_row(PASTED), "media_tokens"),
    ]


def failure(template, row):
    with pytest.raises(SampleError) as caught:
        RowEncoder(template).sample(row, SampleId("rows", 7))
    return caught.value


def test_image_of_which_nothing_is_left_has_one_reason_by_its_header_and_by_its_pixels(template, tmp_path, monkeypatch):
    """LEN-11: at some limits of pixels one side is resized to less than a patch."""
    monkeypatch.setattr(vision_process, "IMAGE_MAX_TOKEN_NUM", 64)
    noise(1900, 28).save(tmp_path / "thin.png")
    for one in (template, pixel_free(template)):
        assert failure(one, image_row([str(tmp_path / "thin.png")])).reason == "aspect_ratio"


def test_token_of_an_image_that_was_pasted_beside_an_image_has_none(template, tmp_path):
    """LEN-11"""
    error = failure(template, image_row([photo(tmp_path, "good", 60, 40)], f"what is this? {PASTED}"))
    assert error.reason == "media_tokens"


def test_malformed_entries_are_shown(template, tmp_path):
    """LEN-11"""
    error = failure(template, {**text_row("<image>"), "images": [photo(tmp_path, "good"), None, 5]})
    assert error.detail.endswith("; not a path, a URL or the content of an image: [None, 5]")


@pytest.fixture
def no_reader(monkeypatch):
    """As where neither decord nor torchcodec is installed, and torchvision has given reading up."""
    if hasattr(torchvision.io, "read_video"):
        pytest.skip("torchvision reads videos here")
    monkeypatch.setattr(vision_process, "FORCE_QWENVL_VIDEO_READER", "torchvision")
    monkeypatch.setattr("swift_vlpack.rows.faults.find_spec", lambda name: None)
    vision_process.get_video_reader_backend.cache_clear()
    yield
    vision_process.get_video_reader_backend.cache_clear()


def test_video_without_a_reader_says_what_to_install(template, tmp_path, no_reader):
    """LEN-2 LEN-11"""
    pytest.importorskip("av")
    error = failure(template, {**text_row("<video>what?"), "videos": [video(tmp_path / "film.mp4", 8, 64, 64)]})
    assert error.reason == "video_reader_missing"
    assert "to read videos, install torchcodec or decord" in error.detail
    assert "film.mp4" in error.detail
    assert not error.is_lasting


@pytest.mark.parametrize(
    ("error", "reason", "row", "lasting"),
    [
        (FileNotFoundError(2, "gone"), "file_missing", {}, False),
        (OSError(5, "Input/output error"), "encode_failed", {}, False),
        (OSError(5, "Input/output error"), "image_unreadable", {}, False),
        (OSError("image file is truncated"), "image_unreadable", {}, True),
        (MemoryError(), "encode_failed", {}, False),
        (ValueError("aspect ratio"), "aspect_ratio", {}, True),
        (ValueError("any"), "encode_failed", {}, True),
        (AttributeError("read_video"), "video_reader_missing", {}, False),
        (OSError("not an image"), "image_unreadable", {"images": ["http://host/a.jpg"]}, False),
    ],
)
def test_failures_that_may_be_gone_the_next_time_are_not_lasting(error, reason, row, lasting):
    """LEN-10"""
    assert is_lasting(error, reason, row) is lasting


def test_a_missing_path_that_could_be_base64_is_a_missing_file(template):
    """LEN-11: ms-swift decodes it, and the decoder complains of what came out."""
    for path in ("/photos/of/door.png", "/photos/of/gone"):
        error = failure(template, image_row([path]))
        assert error.reason == "file_missing"
        assert path in error.detail
    assert fault_of(ValueError("x"), image_row(["iVBORw0KGgo" * 9])).reason == "encode_failed", "content is no path"


def test_number_as_answer_is_named(template):
    """LEN-11: as a column of a .csv file gives it, which has nothing but numbers."""
    error = failure(template, text_row(answer=7))
    assert error.reason == "encode_failed"
    assert "a message is the number 7, not a text: write a .jsonl file, with it in quotes" in error.detail
