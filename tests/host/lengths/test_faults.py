"""Every form of a row in ms-swift's documentation, by its own loader, with every fault: reason, file and words."""

import base64
import os
import socket
from pathlib import Path

import pytest
from datasets import Dataset
from swift.dataset import load_dataset

from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.samples import SampleError, SampleId
from tests.data_rows import text_row, write_jsonl
from tests.host.rows.test_faults import bomb
from tests.images import photo

FAMILY = "qwen2_5_vl"
ANSWER = {"role": "assistant", "content": "a picture"}


def asked(content, **columns):
    return {"messages": [{"role": "user", "content": content}, ANSWER], **columns}


BY_PATH = {
    "images": lambda path: asked("<image>what?", images=[path]),
    "image": lambda path: asked("<image>what?", image=path),
    "images of one": lambda path: asked("<image>what?", images=path),
    "path": lambda path: asked("<image>what?", images=[{"path": path, "bytes": None}]),
    "query": lambda path: {"query": "<image>what?", "response": "a picture", "images": [path]},
    "alpaca": lambda path: {"instruction": "<image>what?", "input": "say", "output": "a picture", "images": [path]},
    "sharegpt": lambda path: {
        "conversations": [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "a picture"}],
        "images": [path],
    },
    "image_url": lambda path: asked([{"type": "image_url", "image_url": {"url": path}}, {"type": "text", "text": "?"}]),
    "image_url as text": lambda path: asked([{"type": "text", "text": "?"}, {"type": "image_url", "image_url": path}]),
    "image in content": lambda path: asked([{"type": "image", "image": path}]),
    "boxes": lambda path: asked(
        "<image>where is <ref-object>? <bbox>",
        images=[path],
        objects={"ref": ["it"], "bbox": [[1, 2, 30, 40]]},
    ),
}
BY_CONTENT = {
    "bytes": lambda content: asked("<image>what?", images=[{"bytes": content, "path": None}]),
    "bytes with a name": lambda content: asked("<image>what?", images=[{"bytes": content, "path": "name.jpg"}]),
    "base64": lambda content: asked("<image>what?", images=[base64.b64encode(content).decode()]),
    "data URL": lambda content: asked(
        "<image>what?", images=[f"data:image/png;base64,{base64.b64encode(content).decode()}"]
    ),
}
VIDEOS = {
    "videos": lambda path: asked("<video>what?", videos=[path]),
    "video": lambda path: asked("<video>what?", video=path),
    "video in content": lambda path: asked([{"type": "video", "video": path}, {"type": "text", "text": "?"}]),
    "video_url": lambda path: asked([{"type": "video_url", "video_url": {"url": path}}]),
}
FAULTS = {
    "gone.jpg": ("file_missing", "no such file: {}"),
    "base64gone": ("file_missing", "no such file: {}"),
    "empty.jpg": ("file_empty", "{} is empty"),
    "folder.jpg": ("file_is_folder", "{} is a folder"),
    "text.jpg": ("image_unreadable", "UnidentifiedImageError: cannot identify image file {}"),
    "cut.jpg": ("image_unreadable", "OSError: image file is truncated"),
    "bomb.png": ("image_too_large", "DecompressionBombError: Image size (2500000000 pixels) exceeds limit"),
    "fifo.jpg": ("file_unreadable", "{} is no regular file, and is not opened"),
    "socket.jpg": ("file_unreadable", "{} is no regular file, and is not opened"),
    "zero.jpg": ("file_unreadable", "is no regular file, and is not opened"),
}
OF_CONTENT = ("text.jpg", "cut.jpg", "bomb.png")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A good image, and one file of each fault."""
    made = tmp_path_factory.mktemp("files")
    content = Path(photo(made, "good")).read_bytes()
    (made / "cut.jpg").write_bytes(content[: len(content) // 2])
    (made / "empty.jpg").write_bytes(b"")
    (made / "text.jpg").write_text("no image, but a text that is long enough to be one" * 4)
    (made / "folder.jpg").mkdir()
    bomb(made / "bomb.png")
    os.mkfifo(made / "fifo.jpg")
    at = os.getcwd()
    os.chdir(made)  # the name of a socket has a limit
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket.jpg")
    os.chdir(at)
    (made / "zero.jpg").symlink_to("/dev/zero")
    return made


def loaded(rows, path):
    """By ms-swift's loader, from a file as users have it."""
    if any(isinstance(image, dict) for row in rows for image in row.get("images") or ()):
        Dataset.from_list(rows).to_parquet(f"{path}.parquet")
        file = f"{path}.parquet"
    else:
        file = write_jsonl(path.with_suffix(".jsonl"), rows)
    dataset, _ = load_dataset([file], split_dataset_ratio=0.0)
    assert len(dataset) == len(rows)
    return list(dataset)


def failure(template, row):
    with pytest.raises(SampleError) as caught:
        RowEncoder(template).sample(row, SampleId("rows", 7))
    return caught.value


@pytest.mark.parametrize("shape", BY_PATH)
def test_fault_of_a_file_is_told_in_every_form_of_a_row(shape, template, folder, tmp_path):
    """LEN-11 LEN-17"""
    paths = [str(folder / name) for name in FAULTS]
    rows = loaded([BY_PATH[shape](path) for path in [*paths, str(folder / "good.jpg")]], tmp_path / "rows")
    for row, path, (reason, words) in zip(rows, paths, FAULTS.values(), strict=False):
        error = failure(template, row)
        assert (error.reason, error.files) == (reason, (path,)), error.detail
        assert words.format(path) in error.detail
        assert path in error.detail
        assert "BytesIO" not in error.detail
    assert RowEncoder(template).sample(rows[-1], SampleId("rows", 7))["length"] > 20


@pytest.mark.parametrize("shape", BY_CONTENT)
def test_fault_of_content_in_the_row_is_none_of_a_file(shape, template, folder, tmp_path):
    """LEN-11 LEN-17: as data sets in parquet have their images."""
    contents = [(folder / name).read_bytes() for name in [*OF_CONTENT, "good.jpg"]]
    rows = loaded([BY_CONTENT[shape](content) for content in contents], tmp_path / "rows")
    for row, name in zip(rows, OF_CONTENT, strict=False):
        error = failure(template, row)
        reason, words = FAULTS[name]
        assert (error.reason, error.files) == (reason, ()), error.detail
        assert words.format("the content of images[0]") in error.detail
        assert "the content of images[0]" in error.detail
        assert len(error.detail) < 400
    assert RowEncoder(template).sample(rows[-1], SampleId("rows", 7))["length"] > 20


@pytest.mark.parametrize("shape", VIDEOS)
def test_fault_of_a_video_is_told(shape, template, folder, tmp_path):
    """LEN-11 LEN-17"""
    names = [name for name in FAULTS if name not in OF_CONTENT]
    paths = [str(folder / name) for name in names]
    rows = loaded([VIDEOS[shape](path) for path in [*paths, str(folder / "text.jpg")]], tmp_path / "rows")
    for row, path, name in zip(rows, paths, names, strict=False):
        error = failure(template, row)
        assert (error.reason, error.files) == (FAULTS[name][0], (path,)), error.detail
        assert FAULTS[name][1].format(path) in error.detail
    broken = failure(template, rows[-1])
    assert broken.files == (str(folder / "text.jpg"),)
    assert str(folder / "text.jpg") in broken.detail


def test_of_several_images_the_bad_ones_are_named(template, folder, tmp_path):
    """LEN-17"""
    good = str(folder / "good.jpg")
    for names, reason in ((("text.jpg",), "image_unreadable"), (("gone.jpg", "other.jpg"), "file_missing")):
        bad = [str(folder / name) for name in names]
        (row,) = loaded([asked("<image>" * 4, images=[good, *bad, good, good][:4])], tmp_path / names[0])
        error = failure(template, row)
        assert (error.reason, error.files) == (reason, tuple(bad))
        assert good not in error.detail


def test_file_is_named_where_it_was_looked_for(template, folder, tmp_path, monkeypatch):
    """LEN-17: relative to the working directory, or below ROOT_IMAGE_DIR."""
    monkeypatch.chdir(tmp_path)
    (row,) = loaded([asked("<image>what?", images=["sub/a.jpg"])], tmp_path / "rows")
    error = failure(template, row)
    assert error.files == (str(tmp_path / "sub" / "a.jpg"),)
    monkeypatch.setenv("ROOT_IMAGE_DIR", str(folder))
    error = failure(template, row)
    assert error.files == (str(folder / "sub" / "a.jpg"),)
    assert f"(images[0] is 'sub/a.jpg', ROOT_IMAGE_DIR {folder})" in error.detail
    (row,) = loaded([asked("<image>what?", images=["text.jpg"])], tmp_path / "rows")
    assert failure(template, row).files == (str(folder / "text.jpg"),)


def test_image_in_a_tag_is_what_ms_swift_takes_it_for(template, folder):
    """LEN-17: it takes a path only where a file is, and warns; so a file that is not there is no fault."""
    error = failure(template, text_row(f"<img>{folder / 'text.jpg'}</img>what?"))
    assert (error.reason, error.files) == ("image_unreadable", (str(folder / "text.jpg"),))
    for name in ("gone.jpg", "fifo.jpg"):
        assert (
            RowEncoder(template).sample(text_row(f"<img>{folder / name}</img>what?"), SampleId("rows", 7))["length"] > 9
        )
