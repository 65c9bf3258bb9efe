"""Files of JSON lines that several processes append to and that killed ones leave half written."""

import json
import multiprocessing
import os

import pytest

from swift_vlpack import json_lines


def test_values_come_back_and_damaged_lines_cost_no_other(tmp_path):
    """DATA-16"""
    path = tmp_path / "folder" / "lines"
    assert list(json_lines.read(path)) == []
    json_lines.append(path, [])
    assert not path.exists(), "nothing to write is no file"
    json_lines.append(path, [{"a": "\u00e9\u2028\n"}, [1, None]], ensure_ascii=False)
    path.write_bytes(path.read_bytes() + b'\xff\xfe{"\n\n{"cut": ')
    json_lines.append(path, ["behind half a line"])
    assert list(json_lines.read(path)) == [{"a": "\u00e9\u2028\n"}, [1, None], "behind half a line"]


def test_half_a_character_is_written_as_json_has_it(tmp_path):
    """LEN-17: names of files are bytes, and some are no text."""
    path = tmp_path / "lines"
    name = os.fsdecode(b"caf\xe9.jpg")
    json_lines.append(path, [name, "caf\u00e9"], ensure_ascii=False)
    assert list(json_lines.read(path)) == [name, "caf\u00e9"]


def test_disk_that_fills_up_leaves_the_file_as_it_was(tmp_path):
    """LEN-9: /dev/full takes nothing; a limit on the size of files takes a part."""
    with pytest.raises(OSError, match="No space"):
        json_lines.append(tmp_path.joinpath("/dev/full"), ["x"])
    path = tmp_path / "lines"
    json_lines.append(path, ["before"])
    process = multiprocessing.get_context("fork").Process(target=_append_under_a_limit, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert path.read_bytes() == b'"before"\n'


def _append_under_a_limit(path):
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    try:
        json_lines.append(path, ["x" * 500])
    except OSError:
        os._exit(0)
    os._exit(1)


def _append(path, start):
    for number in range(start, start + 200):
        json_lines.append(path, [number, {"also": number}])


def test_processes_append_whole_lines(tmp_path):
    """DATA-16 LEN-9"""
    path = tmp_path / "lines"
    processes = [multiprocessing.get_context("fork").Process(target=_append, args=(path, 200 * n)) for n in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    values = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(value for value in values if isinstance(value, int)) == list(range(600))
    assert values[1::2] == [{"also": number} for number in values[::2]]
