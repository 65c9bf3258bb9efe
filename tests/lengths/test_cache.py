"""What lengths are remembered under, and what is found again."""

import os
from pathlib import Path

import numpy as np
import pytest

from swift_vlpack.lengths.cache import Details, KnownSizes, LengthCache
from swift_vlpack.lengths.length_file import DIFFERS, KEY, KEYED_SIZE, NO_KEY
from swift_vlpack.plan.parts import Part
from swift_vlpack.rows.faults import Fault
from tests.data_rows import image_row, text_row
from tests.lengths.test_length_file import filled, found, keys, sizes


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows.lengths"


def test_of_two_records_with_one_key_the_later_counts(path):
    """LEN-6 LEN-13"""
    filled(path)
    LengthCache(path, "context").append(keys(5, 6), sizes(1, 2))
    LengthCache(path, "context").append(keys(5), sizes(3))
    assert (found(path)[5], found(path)[6]) == (3, 2)


def test_keys_that_agree_in_one_half_are_told_apart():
    """LEN-6"""
    known = KnownSizes(np.array([((7, 1), (10, 0, 0, 0, 0, 0, 0))], KEYED_SIZE))
    is_known, _ = known.of(np.array([(7, 1), (7, 2), (8, 1), (0, 0)], KEY))
    assert is_known.tolist() == [True, False, False, False]


def test_row_without_a_key_is_not_remembered(path):
    """LEN-7: nothing tells one object from another."""
    cache = LengthCache(path, "context")
    assert cache.key({"images": [object()]}) == NO_KEY
    cache.append(np.array([NO_KEY], KEY), sizes(5))
    assert not path.exists()
    assert not cache.load().of(np.array([NO_KEY], KEY))[0].any()


def test_key_is_the_row_its_files_and_the_context(path, tmp_path):
    """LEN-7"""
    photo = tmp_path / "a.jpg"
    photo.write_bytes(b"1234")
    os.utime(photo, (1, 1))
    cache, row = LengthCache(path, "context"), image_row([str(photo)])
    first = cache.key(row)
    assert cache.key(dict(row)) == first
    others = [
        LengthCache(path, "another").key(row),
        cache.key({**row, "channel": "web"}),
        cache.key({**row, "images": [{"bytes": b"1234", "path": str(photo)}]}),
        cache.key({**row, "images": [{"bytes": b"1235", "path": str(photo)}]}),
        cache.key(text_row()),
    ]
    os.utime(photo, (1, 2))
    others.append(cache.key(row))
    photo.write_bytes(b"12345")
    os.utime(photo, (1, 1))
    others.append(cache.key(row))
    photo.unlink()
    others.append(cache.key(row))
    assert len({key.tobytes() for key in [first, *others]}) == 9


def test_order_inside_a_row_is_part_of_its_key(path):
    """LEN-7: a template writes the schema of a tool as it stands in the row."""
    one = {"name": "look", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}
    other = {"parameters": {"properties": {"b": {}, "a": {}}, "type": "object"}, "name": "look"}
    cache = LengthCache(path, "context")
    assert one == other
    keys = {cache.key({**text_row(), "tools": [tool]}).tobytes() for tool in (one, other)}
    keys |= {cache.key({**text_row(), "objects": tool}).tobytes() for tool in (one, other)}
    assert len(keys) == 4


def test_equal_names_sizes_and_times_in_two_folders_are_two_keys(path, tmp_path, monkeypatch):
    """LEN-7: from another working directory, below another ROOT_IMAGE_DIR, behind a link that was switched."""
    for name in ("one", "two"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "a.jpg").write_bytes(name.encode())
        os.utime(tmp_path / name / "sub" / "a.jpg", (1, 1))
    row, link = image_row(["sub/a.jpg"]), tmp_path / "link"

    def key(row=row):
        return LengthCache(path, "context").key(row).tobytes()

    keys = {"neither": key()}
    for name in ("one", "two"):
        monkeypatch.chdir(tmp_path / name)
        keys[name] = key()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("ROOT_IMAGE_DIR", str(tmp_path / name))
        assert key() == keys[name], "the same file under the same name"
        monkeypatch.delenv("ROOT_IMAGE_DIR")
        for target, named in ((tmp_path / name, "link/sub/a.jpg"), (tmp_path / name / "sub" / "a.jpg", "link")):
            link.symlink_to(target)
            keys[name, named] = key(image_row([named]))
            link.unlink()
    assert len(set(keys.values())) == len(keys) == 7


def test_details_are_kept_and_a_line_cut_off_costs_no_other(path):
    """LEN-17"""
    faults = [Fault("file_empty", 'a "b"\n\u00e9', ("/a", "/b")), Fault("encode_failed", "why", ())]
    details = [Details(faults[0]), Details(faults[1], (Part(0, 0, 5), Part(1, 5, 9, 0, 1, 20)))]
    cache = LengthCache(path, "context")
    cache.append_details(keys(1, 2), details)
    cache.append_details(np.array([NO_KEY], KEY), details[:1])
    assert cache.load_details() == {key.tobytes(): one for key, one in zip(keys(1, 2), details, strict=True)}
    other = LengthCache(path, "context", "other rules")
    assert other.load_details() == {keys(1)[0].tobytes(): details[0]}, "parts are those of one way to cut"
    file = path.with_suffix(".details")
    file.write_bytes(file.read_bytes()[:-5])
    assert set(cache.load_details()) == {keys(1)[0].tobytes()}


@pytest.mark.parametrize(
    "row",
    [
        {"videos": ["PATH"]},
        {"videos": [["PATH", "other.png"]]},
        {"audios": "PATH"},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "PATH"}}]}]},
        {"messages": [{"role": "user", "content": "<img>PATH</img> what?"}]},
        {"images": ["a.jpg"], "ROOT_IMAGE_DIR": "FOLDER"},
    ],
)
def test_files_are_found_wherever_a_row_names_them(row, path, tmp_path, monkeypatch):
    """LEN-7"""
    photo = tmp_path / "a.jpg"
    if folder := row.pop("ROOT_IMAGE_DIR", None):
        monkeypatch.setenv("ROOT_IMAGE_DIR", folder.replace("FOLDER", str(tmp_path)))
    row = eval(repr(row).replace("PATH", str(photo)))
    cache = LengthCache(path, "context")
    before = cache.key(row)
    photo.write_bytes(b"1234")
    assert cache.key(row) != before


@pytest.mark.parametrize("messages", [None, 5, "text", [None], [5], [{"content": 5}], [{"content": [None, 5]}]])
@pytest.mark.parametrize("images", [None, 5, [None], [5], [{}], [{"bytes": None, "path": None}], [["a.jpg"]], ["a\0b"]])
def test_malformed_rows_have_a_key(messages, images, path):
    """LEN-11"""
    assert LengthCache(path, "context").key({"messages": messages, "images": images}) != NO_KEY


def test_difference_is_remembered_even_under_another_record(path):
    """LEN-5"""
    cache = LengthCache(path, "context")
    assert cache.load().num_differing == 0
    differing = sizes(10)
    differing["proof"] = DIFFERS
    cache.append(keys(1), differing)
    cache.append(keys(1), sizes(11))
    assert LengthCache(Path(path), "context").load().num_differing == 1
