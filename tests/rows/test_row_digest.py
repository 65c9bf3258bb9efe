"""What tells one row from another, for lengths and for checkpoints."""

import pytest

from swift_vlpack.feed.saved_rows import row_digests
from swift_vlpack.lengths.cache import LengthCache, fingerprint
from swift_vlpack.rows.source import RowSource, row_bytes

ASKED = [{"role": "user", "content": "h\u00e9"}]
ROW = {"messages": ASKED, "tools": [{"name": "b", "a": 1}], "dataset": "x.jsonl"}
LOADED_IN_ANOTHER_ORDER = {"tools": [{"a": 1, "name": "b"}], "messages": ASKED, "dataset": "y.jsonl"}
WITH_BYTES = {"images": [{"bytes": b"123", "path": None}], "messages": []}


def test_keys_and_digests_are_those_of_earlier_versions(tmp_path):
    """LEN-7 STATE-2: literal ones, or caches would be measured again and checkpoints refused."""
    rows = [ROW, LOADED_IN_ANOTHER_ORDER, WITH_BYTES]
    cache = LengthCache(tmp_path / "rows.lengths", "context")
    assert [key.tobytes().hex() for key in cache.keys(rows)] == [
        "566fac07cac2d85a338ce9db34bcf7d4",
        "c199cad5c2407b1e2e212a6cce2f33f3",
        "199276a7da44765f76dbed8040cfa3b3",
    ]
    assert fingerprint(rows) == "634a0c352afec956"
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
