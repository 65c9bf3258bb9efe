import fcntl
import logging
import multiprocessing
import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest

from swift_vlpack.core.account.reasons import REASONS
from swift_vlpack.data.lengths.cache import KnownSizes, LengthCache
from swift_vlpack.data.lengths.length_file import DIFFERS, IN_FULL, KEY, KEYED_SIZE, MAGIC, NO_KEY, SIZE
from swift_vlpack.data.rows.faults import Fault
from tests.images import photo
from tests.rows import image_row, text_row


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows.lengths"


def keys(*numbers):
    return np.array([(number * 7919 % 1013, number) for number in numbers], KEY)


def sizes(*lengths):
    return np.array([(length, 1, 4, 2, 1.5, 0, 0) for length in lengths], SIZE)


def filled(path, num_blocks=4, num_rows=3):
    """A cache with a few blocks; what is in it, and the size of the file after each block."""
    cache, ends = LengthCache(path, "context"), [len(MAGIC)]
    cache.load()
    for block in range(num_blocks):
        numbers = range(block * num_rows + 1, (block + 1) * num_rows + 1)
        cache.append(keys(*numbers), sizes(*(10 * number for number in numbers)))
        ends.append(path.stat().st_size)
    return {number: 10 * number for number in range(1, num_blocks * num_rows + 1)}, ends


def found(path):
    known, there = LengthCache(path, "context").load().of(keys(*range(100)))
    return {number: int(there["length"][number]) for number in np.flatnonzero(known)}


def test_what_is_appended_is_found_again(path):
    """LEN-6"""
    records, _ = filled(path)
    assert found(path) == records


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


def test_failures_are_remembered_while_nothing_that_may_cure_them_changes(path):
    """LEN-10"""
    some = sizes(0, 0, 10)
    some["reason"] = [REASONS.index(reason) for reason in ("image_unreadable", "over_max_length", "")]
    LengthCache(path, "context", b"1" * 16).append(keys(1, 2, 3), some)

    def known(cures):
        return LengthCache(path, "context", cures).load().of(keys(1, 2, 3))

    assert known(b"1" * 16)[0].tolist() == [True, True, True]
    assert known(b"1" * 16)[1]["reason"].tolist() == some["reason"].tolist()
    assert known(b"2" * 16)[0].tolist() == [False, True, True]
    LengthCache(path, "context", b"2" * 16).append(keys(1), sizes(5))
    assert known(b"2" * 16)[1]["length"].tolist() == [5, 0, 10]
    LengthCache(path, "context", b"1" * 16).append(keys(1), some[:1])
    assert known(b"1" * 16)[1]["length"].tolist() == [0, 0, 10], "of the two the later counts"
    LengthCache(path, "context", b"1" * 16).append(keys(1), sizes(6))
    assert known(b"1" * 16)[1]["length"].tolist() == [6, 0, 10]


def test_words_of_failures_are_kept_and_a_line_cut_off_costs_no_other(path):
    """LEN-17"""
    faults = [Fault("file_empty", 'a "b"\n\u00e9', ("/a", "/b")), Fault("encode_failed", "why", ())]
    cache = LengthCache(path, "context")
    cache.tell(keys(1, 2), faults)
    cache.tell(np.array([NO_KEY], KEY), faults[:1])
    assert cache.told() == {key.tobytes(): fault for key, fault in zip(keys(1, 2), faults, strict=True)}
    file = path.with_suffix(".failures")
    file.write_bytes(file.read_bytes()[:-5])
    assert set(cache.told()) == {keys(1)[0].tobytes()}


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


def test_file_cut_anywhere_keeps_every_whole_block_and_goes_on(path, caplog):
    """LEN-8: as a killed process leaves it."""
    records, ends = filled(path)
    content = path.read_bytes()
    with caplog.at_level(logging.WARNING):
        for cut in range(len(content) + 1):
            path.write_bytes(content[:cut])
            num_kept = 3 * (sum(end <= cut for end in ends) - 1)
            kept = {number: length for number, length in records.items() if number <= num_kept}
            assert found(path) == kept
            path.write_bytes(content[:cut])
            LengthCache(path, "context").append(keys(99), sizes(990))
            assert found(path) == {**kept, 99: 990}
    assert caplog.text == ""
    assert len(list(path.parent.iterdir())) == 1


def test_flipped_byte_anywhere_sets_the_file_aside(path, caplog):
    """LEN-9"""
    records, _ = filled(path, num_blocks=2, num_rows=2)
    content = path.read_bytes()
    rng = random.Random(0)
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= rng.randint(1, 255)
        path.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert found(path) == {}
        assert f"cache of lengths {path} is damaged" in caplog.text
        (aside,) = path.parent.glob("*.damaged-*")
        assert aside.read_bytes() == damaged
        aside.unlink()
        filled(path, num_blocks=2, num_rows=2)
        assert found(path) == records


@pytest.mark.parametrize(
    "tail", [bytes(1), bytes(11), bytes(16), bytes(4096), b"garbage", random.Random(0).randbytes(500)]
)
def test_anything_else_at_the_end_sets_the_file_aside(tail, path, caplog):
    """LEN-9"""
    filled(path)
    path.write_bytes(path.read_bytes() + tail)
    with caplog.at_level(logging.WARNING):
        assert found(path) == {}
    assert "it is set aside as rows.damaged-" in caplog.text


@pytest.mark.parametrize("content", [b"", b"vlpack len", MAGIC])
def test_file_that_was_only_begun_is_gone_on_with(content, path, caplog):
    """LEN-8"""
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert found(path) == {}
        records, _ = filled(path)
        assert found(path) == records
    assert caplog.text == ""


def _write(path, first, seed):
    rng = random.Random(seed)
    cache = LengthCache(path, "context")
    cache.load()
    number = first
    while number < first + 300:
        block = range(number, min(first + 300, number + rng.randint(1, 20)))
        cache.append(np.array([(n, n) for n in block], KEY), sizes(*block))
        number = block.stop


def test_several_processes_at_once_lose_nothing(path):
    """LEN-9"""
    processes = [
        multiprocessing.get_context("fork").Process(target=_write, args=(path, 1000 * n + 1, n)) for n in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    numbers = [n for first in (1, 1001, 2001, 3001) for n in range(first, first + 300)]
    is_known, there = LengthCache(path, "context").load().of(np.array([(n, n) for n in numbers], KEY))
    assert is_known.all()
    assert there["length"].tolist() == numbers


def test_file_that_another_process_replaced_is_followed(path, caplog):
    """LEN-9: damaged, set aside by one, while another is in the middle of its pass."""
    filled(path)
    mine = LengthCache(path, "context")
    mine.load()
    path.write_bytes(path.read_bytes() + bytes(50))
    assert found(path) == {}  # set aside
    _, ends = filled(path, num_blocks=9)
    assert ends[-1] > ends[4]
    mine.append(keys(99), sizes(990))
    assert len(found(path)) == 28
    assert len(list(path.parent.glob("*.damaged-*"))) == 1


def test_file_replaced_while_waiting_for_it_is_opened_again(path):
    """LEN-9"""
    filled(path)
    with open(path, "r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = multiprocessing.get_context("fork").Process(target=_append_one, args=(path, held.fileno()))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive(), "it did not wait"
        os.replace(path, path.with_suffix(".aside"))
        fresh = LengthCache(path, "context")
        fresh.append(keys(1), sizes(10))
    waiting.join()
    assert found(path) == {1: 10, 99: 990}


def _append_one(path, inherited):
    os.close(inherited)  # or the lock would be this process's own as well
    LengthCache(path, "context").append(keys(99), sizes(990))


@pytest.mark.parametrize("where", ["/dev/full", "/proc/none/rows.lengths", "a file/rows.lengths"])
def test_file_that_cannot_be_written_costs_one_warning(where, tmp_path, caplog):
    """LEN-9"""
    (tmp_path / "a file").write_text("in the way")
    cache = LengthCache(tmp_path / where, "context")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert len(cache.load()) == 0
            cache.append(keys(1), sizes(10))
    assert caplog.text.count("cannot be used") == 1
    assert "packing_cache_dir names another directory" in caplog.text


def test_disk_that_fills_up_leaves_the_file_whole(path, monkeypatch, caplog):
    """LEN-9"""
    records, _ = filled(path)
    write = os.write
    cache = LengthCache(path, "context")
    cache.load()

    def full(file, content):
        if len(content) < 20:
            raise OSError(28, "No space left on device")
        return write(file, content[:20])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        cache.append(keys(20, 21, 22), sizes(1, 2, 3))
    assert "No space left on device" in caplog.text
    assert found(path) == records


def test_true_size_is_remembered_over_the_planned_one(path):
    """LEN-13: when the next run takes it over, and not before."""
    cache, row = LengthCache(path, "context"), text_row()
    cache.append(cache.keys([row]), sizes(10))
    cache.remember(row, (20, 0, 0, 0), 0.0)
    assert LengthCache(path, "context").load().of(cache.keys([row]))[1]["length"].tolist() == [10]
    LengthCache(path, "context").take_over_notes()
    assert not list(path.parent.glob("*.notes"))
    is_known, there = LengthCache(path, "context").load().of(cache.keys([row]))
    assert is_known.all()
    assert (there["length"][0], there["proof"][0]) == (20, IN_FULL)


def test_difference_is_remembered_even_under_another_record(path):
    """LEN-5"""
    cache = LengthCache(path, "context")
    assert cache.load().num_differing == 0
    differing = sizes(10)
    differing["proof"] = DIFFERS
    cache.append(keys(1), differing)
    cache.append(keys(1), sizes(11))
    assert LengthCache(Path(path), "context").load().num_differing == 1


def test_end_of_a_replaced_file_is_not_taken_for_an_unfinished_block(path):
    """LEN-9: what was seen of the old file is no place in the new one."""
    filled(path, num_blocks=4, num_rows=1)
    mine = LengthCache(path, "context")
    mine.load()
    path.rename(path.with_suffix(".aside"))
    LengthCache(path, "context").append(keys(1, 2, 3), sizes(10, 20, 30))
    last = sizes(40, 50)
    last["reason"][1], last["proof"][1] = b"ro"  # as a block begins, exactly where the old file ended
    LengthCache(path, "context").append(keys(4, 5), last)
    mine.append(keys(6), sizes(60))
    assert found(path) == {number: 10 * number for number in range(1, 7)}


def test_cache_goes_with_its_source_into_spawned_workers(path, tmp_path):
    """LEN-6"""
    photo(tmp_path, "one", 20, 20)
    row = image_row([str(tmp_path / "one.jpg")])
    cache = LengthCache(path, "context")
    key = cache.key(row)
    assert pickle.loads(pickle.dumps(cache)).key(row) == key
