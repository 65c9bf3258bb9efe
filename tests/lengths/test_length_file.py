"""The file of lengths: killed, damaged, shared and full, it keeps what stands before the damage."""

import fcntl
import logging
import multiprocessing
import os
import random

import numpy as np
import pytest

from swift_vlpack.lengths.cache import LengthCache
from swift_vlpack.lengths.length_file import KEY, MAGIC, SIZE


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


def test_file_cut_anywhere_keeps_every_whole_block_and_goes_on(path, caplog):
    """LEN-8: as a killed process leaves it; one line says what is lost."""
    records, ends = filled(path)
    content = path.read_bytes()
    for cut in range(len(content) + 1):
        num_kept = 3 * (sum(end <= cut for end in ends) - 1)
        kept = {number: length for number, length in records.items() if number <= num_kept}
        path.write_bytes(content[:cut])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert found(path) == kept
        assert len(caplog.records) == (cut not in (0, *ends))
        LengthCache(path, "context").append(keys(99), sizes(990))
        assert found(path) == {**kept, 99: 990}
    assert len(list(path.parent.iterdir())) == 1


def test_flipped_byte_anywhere_cuts_the_file_at_its_block(path, caplog):
    """LEN-9: what stands before it is kept, and the file goes on."""
    records, ends = filled(path, num_blocks=2, num_rows=2)
    content = path.read_bytes()
    rng = random.Random(0)
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= rng.randint(1, 255)
        path.write_bytes(damaged)
        num_kept = 2 * max(0, sum(end <= at for end in ends) - 1)
        kept = {number: length for number, length in records.items() if number <= num_kept}
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert found(path) == kept
        assert f"cache of lengths {path}: its last " in caplog.text
        LengthCache(path, "context").append(keys(99), sizes(990))
        assert found(path) == {**kept, 99: 990}


@pytest.mark.parametrize(
    "tail", [bytes(1), bytes(11), bytes(16), bytes(4096), b"garbage", random.Random(0).randbytes(500)]
)
def test_anything_else_at_the_end_is_cut_off(tail, path, caplog):
    """LEN-9"""
    records, _ = filled(path)
    content = path.read_bytes()
    path.write_bytes(content + tail)
    with caplog.at_level(logging.WARNING):
        assert found(path) == records
    assert path.read_bytes() == content
    assert "cut off" in caplog.text


@pytest.mark.parametrize("content", [b"", b"vlpack len", MAGIC, b"vlpack lengths 3\n and what 0.2.0 wrote"])
def test_file_that_was_only_begun_or_is_of_another_version_is_begun_anew(content, path):
    """LEN-8"""
    path.write_bytes(content)
    assert found(path) == {}
    records, _ = filled(path)
    assert found(path) == records


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


def test_file_that_another_process_replaced_is_followed(path):
    """LEN-9: removed by one, while another is in the middle of its pass; also if the new file has the old inode."""
    filled(path)
    mine = LengthCache(path, "context")
    mine.load()
    other = path.with_suffix(".other")
    filled(other, num_blocks=3, num_rows=7)
    assert other.stat().st_size > path.stat().st_size
    path.write_bytes(other.read_bytes())
    mine.append(keys(99), sizes(990))
    assert len(found(path)) == 22
    path.unlink()
    mine.append(keys(99), sizes(990))
    assert found(path) == {99: 990}


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
    assert "Set packing_cache_dir to another folder" in caplog.text


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
