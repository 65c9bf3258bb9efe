"""What is left of a run that is stopped: nothing."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.data_rows import mixed_rows, write_jsonl
from tests.e2e.ranks import free_port
from tests.host.runs import argv

FAMILY = "qwen2_5_vl"
SECONDS = 240


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return write_jsonl(folder / "rows.jsonl", mixed_rows(folder, 12, largest=120))


def processes_of(mark):
    """Numbers of the processes that have the mark in their environment, as every child of a run has."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if f"TEST_RUN={mark}".encode() in environ_of(path)]


def environ_of(process):
    try:
        return (process / "environ").read_bytes()
    except OSError:  # ended, or another user's
        return b""


def until(condition, what):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.5)


def started(command, tmp_path, **environ):
    """The process, in a group of its own as a terminal would start it, with its output in files."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("VLPACK_")}
    folder = tempfile.mkdtemp()  # not below tmp_path: sockets are made in it, whose names cannot be that long
    (tmp_path / "temporary").symlink_to(folder)
    environ = {**clean, "TEST_RUN": str(tmp_path), "TMPDIR": folder, **environ}
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        command = [sys.executable, "-m", "swift_vlpack", *map(str, command)]
        return subprocess.Popen(command, stdout=out, stderr=err, env=environ, start_new_session=True)


def output(tmp_path):
    return (tmp_path / "out").read_text() + (tmp_path / "err").read_text()


def own_files(tmp_path):
    return [path.name for path in (tmp_path / "temporary").iterdir() if path.name.startswith("vlpack")]


def training_file(tiny_folder, dataset, tmp_path, **more):
    flags = argv(
        tiny_folder(FAMILY), FAMILY, tmp_path / "run", dataset=dataset, max_steps=100000, packing_verify="false",
        dataloader_num_workers=1, **more,
    )  # fmt: skip
    flags = {flags[at][2:]: str(flags[at + 1]) for at in range(0, len(flags), 2)}
    path = tmp_path / "train.yaml"
    path.write_text("".join(f"{name}: {value!r}\n" for name, value in flags.items()))
    return path


def trains(tmp_path):
    log = tmp_path / "run" / "logging.jsonl"
    return log.is_file() and '"loss"' in log.read_text()


@contextmanager
def stopped(command, tmp_path, is_under_way, **environ):
    """Wait until it is under way, let the caller stop it, and see that nothing of it is left."""
    run = started(command, tmp_path, **environ)
    try:
        until(lambda: is_under_way() or run.poll() is not None, "it never got under way")
        assert run.poll() is None, output(tmp_path)[-3000:]
        yield run
        until(lambda: not processes_of(tmp_path), "a process of it is left")
        assert own_files(tmp_path) == []
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()


def tracebacks(text):
    """But for that of torch's thread in a dataloader worker, which was handing over a batch when its reader ended."""
    found = text.split("Traceback (most recent call last)")[1:]
    return [one for one in found if "multiprocessing/resource_sharer.py" not in one]


@pytest.mark.slow
@pytest.mark.telling
def test_kill_of_the_number_that_was_started_ends_the_training(tiny_folder, dataset, tmp_path):
    """CLI-10"""
    with stopped(["sft", training_file(tiny_folder, dataset, tmp_path)], tmp_path, lambda: trains(tmp_path)) as run:
        assert len(processes_of(tmp_path)) == 2, "the training process and its dataloader worker, and nobody who waits"
        run.send_signal(signal.SIGTERM)
        assert run.wait(SECONDS) == -signal.SIGTERM
    assert tracebacks(output(tmp_path)) == []


@pytest.mark.slow
def test_interrupt_from_the_terminal_is_quiet(tiny_folder, dataset, tmp_path):
    """CLI-10: Ctrl-C goes to every process of the group."""
    with stopped(["sft", training_file(tiny_folder, dataset, tmp_path)], tmp_path, lambda: trains(tmp_path)) as run:
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(SECONDS) == -signal.SIGINT, "as the trainer itself ends by an interrupt"
    assert tracebacks(output(tmp_path)) == []


@pytest.mark.slow
@pytest.mark.telling
def test_kill_ends_all_ranks(tiny_folder, dataset, tmp_path):
    """CLI-10: the process is torchrun, which hands the signal on."""
    path = training_file(tiny_folder, dataset, tmp_path, ddp_backend="gloo", use_cpu="true")
    ranks = {"NPROC_PER_NODE": "2", "MASTER_PORT": str(free_port())}
    with stopped(["sft", path], tmp_path, lambda: trains(tmp_path), **ranks) as run:
        run.send_signal(signal.SIGTERM)
        assert run.wait(SECONDS) != 0
    assert "swift_vlpack/cli" not in output(tmp_path), "no traceback of ours"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_plan_that_is_stopped_leaves_nothing(number, tiny_folder, tmp_path):
    """CLI-10: in the middle of the length pass, of enough rows for it to last."""
    rows = mixed_rows(tmp_path, 4, largest=120) * 20000
    dataset = write_jsonl(tmp_path / "many.jsonl", rows)
    path = training_file(tiny_folder, dataset, tmp_path, packing_cache_dir=tmp_path / "lengths", dataset_num_proc=2)
    is_measuring = partial(re.search, r"ength")
    command = ["plan", "--config", path]
    with stopped(command, tmp_path, lambda: is_measuring((tmp_path / "err").read_text())) as run:
        os.killpg(run.pid, number) if number == signal.SIGINT else run.send_signal(number)
        assert run.wait(SECONDS) == 128 + number
    assert (tmp_path / "out").read_text() == ""
    assert "Traceback" not in (tmp_path / "err").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_bench_that_is_stopped_ends_the_process_that_measures(number, tiny_folder, dataset, tmp_path):
    """CLI-10 CLI-22"""
    path = training_file(tiny_folder, dataset, tmp_path, use_cpu="true")
    command = ["bench", "--config", path, "--steps", 1000]
    with stopped(command, tmp_path, lambda: "training, packs" in (tmp_path / "err").read_text()) as run:
        os.killpg(run.pid, number) if number == signal.SIGINT else run.send_signal(number)
        assert run.wait(SECONDS) == 128 + number
    assert (tmp_path / "out").read_text() == ""
    assert "Traceback" not in (tmp_path / "err").read_text()
