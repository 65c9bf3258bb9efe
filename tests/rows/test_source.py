"""A row of a source: its file and line, and its content as bytes, which tells it from other rows."""

import json
import os
from pathlib import Path

import pytest

from swift_vlpack.feed.saved_rows import row_digests
from swift_vlpack.lengths.cache import LengthCache, fingerprint
from swift_vlpack.rows.source import RowSource, place, row_bytes

ASKED = [{"role": "user", "content": "h\u00e9"}]
ROW = {"messages": ASKED, "tools": [{"name": "b", "a": 1}], "dataset": "x.jsonl"}
LOADED_IN_ANOTHER_ORDER = {"tools": [{"a": 1, "name": "b"}], "messages": ASKED, "dataset": "y.jsonl"}
WITH_BYTES = {"images": [{"bytes": b"123", "path": None}], "messages": []}


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_row_of_a_jsonl_file_is_a_line_and_blank_lines_are_no_rows(tmp_path):
    """DATA-12"""
    path = write(tmp_path / "rows.jsonl", '\n{"n": 0}\n{"n": 1}\n\n   \n\n{"n": 2}\n{"n": 3}')
    lines = Path(path).read_text().splitlines()
    for row in range(4):
        file, line = place(path, row).rsplit(":", 1)
        assert (file, json.loads(lines[int(line) - 1])["n"]) == (path, row)


def test_row_of_a_csv_file_is_the_line_where_it_starts(tmp_path):
    """DATA-12"""
    path = write(tmp_path / "rows.csv", 'query,response\nq0,"a ""word"", quoted"\n\nq1,r1\nq2,r2\n')
    lines = Path(path).read_text().splitlines()
    for row in range(3):
        line = int(place(path, row).rsplit(":", 1)[1])
        assert lines[line - 1].startswith(f"q{row},")
    write(tmp_path / "rows.csv", 'query,response\nq0,"two\nlines"\nq1,r1\n')
    os.utime(path, ns=(1, 1))
    assert place(path, 1) == f"{path} row 2", "a line break inside of quotes"


def test_row_of_a_text_file_is_a_line(tmp_path):
    """DATA-12: here a blank line is a row, by the loader of text files."""
    path = write(tmp_path / "rows.txt", "a\n\nb\n")
    assert place(path, 2) == f"{path}:3"


@pytest.mark.parametrize("name", ["rows.parquet", "rows.json", "owner/hub-name", "gone.jsonl"])
def test_row_of_anything_else_is_a_number(name, tmp_path):
    """DATA-12"""
    if name.endswith(("parquet", "json")):
        (tmp_path / name).write_bytes(b"x")
    assert place(str(tmp_path / name), 3) == f"{tmp_path / name} row 4"


def test_source_says_where_a_row_is_by_its_number_in_the_file(tmp_path):
    """DATA-12"""
    path = write(tmp_path / "rows.jsonl", '{"n": 0}\n\n{"n": 1}\n{"n": 2}\n')
    source = RowSource(name="rows", rows=[{}, {}], row_numbers=[0, 2], origin=path)
    assert [source.where(index) for index in range(2)] == [f"{path}:1", f"{path}:4"]
    assert RowSource(name="mine", rows=[{}]).where(0) == "mine row 1"


def test_line_is_looked_up_anew_when_the_file_has_changed(tmp_path):
    """DATA-12"""
    path = tmp_path / "rows.jsonl"
    write(path, "{}\n{}\n")
    assert place(str(path), 1) == f"{path}:2"
    write(path, "\n\n{}\n{}\n")
    os.utime(path, ns=(1, 1))
    assert place(str(path), 1) == f"{path}:4"


def test_keys_and_digests_are_those_of_earlier_versions(tmp_path):
    """LEN-7 STATE-2: literal ones, or caches would be measured again and checkpoints refused."""
    rows = [ROW, LOADED_IN_ANOTHER_ORDER, WITH_BYTES]
    cache = LengthCache(tmp_path / "rows.lengths", "context")
    assert [key.tobytes().hex() for key in cache.keys(rows)] == [
        "566fac07cac2d85a338ce9db34bcf7d4",
        "c199cad5c2407b1e2e212a6cce2f33f3",
        "199276a7da44765f76dbed8040cfa3b3",
    ]
    assert fingerprint(rows) == "e03d75685e8f4da3"
    digests = [2905353808028736707, 2905353808028736707, 10702894363854147306]
    assert row_digests(RowSource(name="rows", rows=rows)).tolist() == digests


@pytest.mark.parametrize("as_encoded", [True, False])
def test_other_content_is_another_row(as_encoded):
    """LEN-7 STATE-2: of bytes in every form that has them."""
    rows = [ROW, {**ROW, "messages": []}, {**ROW, "channel": "web"}]
    rows += [{"images": [form(content)]} for form in (bytes, bytearray, memoryview) for content in (b"123", b"124")]
    found = [row_bytes(row, as_encoded=as_encoded) for row in rows]
    assert len(set(found[:3])) == 3
    assert found[3] == found[5] == found[7] != found[4]
    assert found[4] == found[6] == found[8]


def test_object_is_its_class_for_a_checkpoint_and_nothing_for_a_length():
    """LEN-7: two objects of a class may be of two sizes."""
    assert row_bytes({"image": object()}) == b'{"image": "object"}'
    with pytest.raises(TypeError, match="object has no content"):
        row_bytes({"image": object()}, as_encoded=True)
