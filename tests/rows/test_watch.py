"""A read that never ends is a counted reason, in the length pass and when packs are loaded."""

import fcntl
import os
import signal
import time

import pytest

from swift_vlpack.config import PackingConfig
from swift_vlpack.feed import reader
from swift_vlpack.feed.dataset import PackingDataset
from swift_vlpack.lengths.cache import LengthCache
from swift_vlpack.lengths.measure import measure
from swift_vlpack.lengths.rows_work import Encoders
from swift_vlpack.rows import watch
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.samples import LeftOut, SampleId
from swift_vlpack.rows.source import RowSource
from swift_vlpack.rows.watch import ReadStuck, watched
from tests.data_rows import image_row, text_row
from tests.images import photo
from tests.plain_template import PlainTemplate

F_SETLEASE, SECONDS = 1024, 1.0


@pytest.fixture
def template():
    return PlainTemplate()


@pytest.fixture
def short_limit(monkeypatch):
    monkeypatch.setattr(watch, "READ_SECONDS", SECONDS)
    monkeypatch.setattr(watch, "_num_abandoned", 0)


@pytest.fixture
def stuck():
    """`stuck(path)`: whoever opens the file waits, as for a network mount that is gone: another process has a lease."""
    holders = []

    def hold(path):
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGIO, signal.SIG_IGN)
            try:
                fcntl.fcntl(os.open(path, os.O_RDONLY), F_SETLEASE, fcntl.F_WRLCK)
                os.write(writing, b"y")
            except OSError:
                os.write(writing, b"n")
            time.sleep(600)
            os._exit(0)
        holders.append(pid)
        if os.read(reading, 1) != b"y":
            pytest.skip("this file system has no leases")

    yield hold
    for pid in holders:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def some_rows(folder):
    return [*(image_row([photo(folder, str(n), 60 + n, 60)]) for n in range(6)), text_row()]


def measured(rows, template, path, num_processes=1, is_strict=False):
    caches = LengthCache(path, "context")
    encoder = RowEncoder(template)
    encoders = Encoders(by_header=encoder, in_full=encoder, is_strict=is_strict, num_processes=num_processes)
    return measure(RowSource(name="data", rows=rows), caches, encoders)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_file_that_nobody_answers_for_is_left_out_and_tried_again(
    num_processes, template, tmp_path, stuck, short_limit
):
    """LEN-19"""
    rows = some_rows(tmp_path)
    right = measured(rows, template, tmp_path / "right")
    stuck(rows[2]["images"][0])
    sizes = measured(rows, template, tmp_path / "lengths", num_processes)
    assert sizes.failures == {2: "file_timeout"}
    assert sizes.faults[2].files == tuple(rows[2]["images"])
    assert sizes.faults[2].error == f"nothing was read for {SECONDS:g} seconds (files: {rows[2]['images'][0]})"
    others = [0, 1, 3, 4, 5, 6]
    assert sizes.lengths[others].tolist() == right.lengths[others].tolist()
    (tmp_path / "2.jpg").rename(tmp_path / "held.jpg")  # the lease is on the file, not on its name
    photo(tmp_path, "2", 62, 60)
    assert measured(rows, template, tmp_path / "lengths").failures == {}


@pytest.mark.parametrize("num_threads", [1, 3])
def test_pack_is_loaded_without_it(num_threads, template, tmp_path, stuck, short_limit, monkeypatch):
    """LEN-19"""
    rows = some_rows(tmp_path)
    source = RowSource(name="data", rows=rows, sizes=measured(rows, template, tmp_path / "lengths"))
    data = FusionCaptionDataset([source], template, shuffle=False)
    packs = PackingDataset(data, template, PackingConfig(packing_length=2000, packing_drop_last=False))
    stuck(rows[2]["images"][0])
    monkeypatch.setattr(reader, "threads_per_worker", lambda: num_threads)
    pack = packs[0]
    assert [left_out.sample_id for left_out in pack.record.left_out] == [SampleId("data", 2)]
    assert (
        pack.record.left_out[0][1:]
        == LeftOut(
            SampleId("data", 2),
            "file_timeout",
            f"nothing was read for {SECONDS:g} seconds (files: {rows[2]['images'][0]})",
            tuple(rows[2]["images"]),
        )[1:]
    )
    assert len(pack) == len(rows) - 1


class Clock:
    """Time in which every wait of the watch lasts as long as it asked for, with one pause in the second."""

    def __init__(self, share_of_work, pause=0.0):
        self.share_of_work = share_of_work
        self.pause = pause
        self.num_looks = 0

    def monotonic(self):
        self.num_looks += 1
        return 0.01 * self.num_looks + self.pause * (self.num_looks > 3)

    def process_time(self):
        return 0.005 * self.share_of_work * self.num_looks


def ends_after(clock, num_looks):
    """Work that goes on until it was looked at so often."""

    def work():
        while clock.num_looks < num_looks:
            time.sleep(0.001)
        return "done"

    return work


@pytest.mark.parametrize(
    ("share_of_work", "num_places", "pause", "num_looks", "is_given_up"),
    [
        (0.5, 1, 0, 60, False),
        (0.0, 40, 0, 60, False),
        (0.0, 1, 0, 60, True),
        (0.05, 1, 0, 60, True),
        (0.0, 1, 62, 12, False),
    ],
    ids=["computes", "comes along", "waits", "hardly computes", "was stopped"],
)
def test_only_work_that_waits_is_given_up(share_of_work, num_places, pause, num_looks, is_given_up, monkeypatch):
    """LEN-19: two looks are a tenth of the limit."""
    clock = Clock(share_of_work, pause)
    monkeypatch.setattr(watch, "READ_SECONDS", 0.1)
    monkeypatch.setattr(watch, "_num_abandoned", 0)
    monkeypatch.setattr(watch, "time", clock)
    work, where = ends_after(clock, num_looks), lambda: clock.num_looks * num_places // 40
    if is_given_up:
        with pytest.raises(ReadStuck, match=r"nothing was read for 0\.1 seconds"):
            watched(work, where)
        clock.num_looks = num_looks  # lets the abandoned thread end
    else:
        assert watched(work, where) == "done"


def test_row_is_read_although_the_process_is_stopped_for_longer_than_the_limit(short_limit):
    """LEN-19: the row waits 0.5 s of its second, and the process is stopped for two."""
    if (pid := os.fork()) == 0:
        try:
            watched(lambda: [time.sleep(0.05) for _ in range(10)])
            os._exit(0)
        finally:
            os._exit(1)
    time.sleep(0.1)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * SECONDS)
    os.kill(pid, signal.SIGCONT)
    assert os.waitpid(pid, 0)[1] == 0


def test_row_is_read_although_it_hardly_gets_to_run(short_limit):
    """LEN-19: a process of lowest priority beside a busy one gets a hundredth of a processor."""

    def child(work):
        if (pid := os.fork()) == 0:
            try:
                os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
                work()
                os._exit(0)
            finally:
                os._exit(1)
        return pid

    def reads():
        os.nice(19)
        begin = time.monotonic()
        watched(lambda: computes(0.02))
        assert time.monotonic() - begin > SECONDS  # otherwise nothing was tested

    busy = child(lambda: computes(600))
    reader = child(reads)
    state = os.waitpid(reader, 0)[1]
    os.kill(busy, signal.SIGKILL)
    os.waitpid(busy, 0)
    assert state == 0


def computes(seconds):
    """Compute for this time of a processor."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_error_of_the_work_is_raised():
    """LEN-19"""
    with pytest.raises(KeyError, match="mine"):
        watched(lambda: {}["mine"])


def test_each_read_given_up_shortens_the_next(monkeypatch):
    """LEN-19: a thousand files of one mount."""
    seconds = []
    for number in range(8):
        monkeypatch.setattr(watch, "_num_abandoned", number)
        seconds.append(watch.seconds_to_wait())
    assert seconds == [60, 30, 15, 7.5, 3.75, 2, 2, 2]


def answers_the_second_time(monkeypatch, method):
    """Let the first read of the third row wait for ever, as on a mount that is gone for a minute."""
    whole, seen = getattr(RowEncoder, method), []

    def encode(self, row, *args, **kwargs):
        if "2.jpg" in str(row.get("images")) and not seen:
            seen.append(row)
            time.sleep(3600)
        return whole(self, row, *args, **kwargs)

    monkeypatch.setattr(RowEncoder, method, encode)


def test_pass_reads_it_once_more_at_its_end(template, tmp_path, short_limit, monkeypatch):
    """LEN-19: the row is good after all, and later reads have the whole limit again."""
    rows = some_rows(tmp_path)
    right = measured(rows, template, tmp_path / "right")
    answers_the_second_time(monkeypatch, "sample")
    sizes = measured(rows, template, tmp_path / "lengths")
    assert sizes.failures == {}
    assert sizes.lengths.tolist() == right.lengths.tolist()
    assert watch._num_abandoned == 0


def test_pack_reads_it_once_more(template, tmp_path, short_limit, monkeypatch):
    """LEN-19"""
    row = some_rows(tmp_path)[2]
    answers_the_second_time(monkeypatch, "_encoded")
    assert RowEncoder(template).sample(row, SampleId("data", 2))["length"] > 0
    assert watch._num_abandoned == 0
