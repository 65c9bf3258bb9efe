"""Real runs of several ranks in processes of their own, that can be watched and killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from swift_vlpack.host.state import FILE

ROOT = Path(__file__).parent.parent.parent
MARK = "TEST_RUN"
"""Variable by which the processes of a run are told from all others."""


class Processes:
    """A command that starts processes, all of which can be found."""

    def __init__(
        self, command: Iterable[Any], environ: Mapping[str, str], log: Path, *, folder: Path | None = None
    ) -> None:
        self.log = log
        self.mark = uuid.uuid4().hex
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [str(part) for part in command], stdout=file, stderr=file, start_new_session=True, cwd=folder,
                env={**environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: self.mark},
            )  # fmt: skip

    def wait(self, timeout_seconds: float = 400) -> int:
        """The exit code; a run that hangs is ended, and that is an error."""
        try:
            return self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"still running after {timeout_seconds} s:\n{self.output[-3000:]}") from None

    def until(self, happened: Callable[[], bool], timeout_seconds: float = 400) -> None:
        """Watch the run until something happened."""
        deadline = time.monotonic() + timeout_seconds
        while not happened():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise AssertionError(f"it did not happen; exit code {self.process.poll()}:\n{self.output[-3000:]}")
            time.sleep(0.05)

    def until_gone(self, timeout_seconds: float) -> None:
        """Wait until no process of the run is left."""
        deadline = time.monotonic() + timeout_seconds
        while left := self._processes():
            if time.monotonic() > deadline:
                self.end()
                raise AssertionError(f"left: {[pid for pid, _ in left]}")
            time.sleep(0.1)

    def kill_rank(self, rank: int) -> None:
        """`kill -9` one rank; not its dataloader workers, whose environment is the same."""
        pids = [pid for pid, environ in self._processes() if environ.get("RANK") == str(rank)]
        [pid] = [pid for pid in pids if _parent_of(pid) not in pids]
        os.kill(pid, signal.SIGKILL)

    def kill_worker(self) -> int:
        """`kill -9` a dataloader worker, which torch names so; its process id."""
        workers = [pid for pid, _ in self._processes() if Path(f"/proc/{pid}/comm").read_text() == "pt_data_worker\n"]
        os.kill(workers[0], signal.SIGKILL)
        return workers[0]

    def terminate(self) -> None:
        """SIGTERM to the launcher, as a scheduler sends it."""
        for pid, environ in self._processes():
            if "RANK" not in environ:
                os.kill(pid, signal.SIGTERM)

    def end(self) -> None:
        """Kill what is left of the run."""
        for pid, _ in self._processes():
            os.kill(pid, signal.SIGKILL)

    @property
    def output(self) -> str:
        """What it printed."""
        return self.log.read_text()

    def _processes(self) -> list[tuple[int, dict[str, str]]]:
        found = []
        for folder in Path("/proc").iterdir():
            try:
                text = (folder / "environ").read_text() if folder.name.isdigit() else ""
            except OSError:  # gone meanwhile, or not ours
                continue
            environ = dict(entry.partition("=")[::2] for entry in text.split("\0"))
            if environ.get(MARK) == self.mark:
                found.append((int(folder.name), environ))
        return found


class Run(Processes):
    """`vlpack sft`, or another command, on some ranks of this machine, over gloo."""

    def __init__(
        self, flags: Iterable[Any], log: Path, *, num_ranks: int = 2, command: str = "sft", **options: Any
    ) -> None:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("VLPACK_")}
        environ |= {f"VLPACK_{name.upper()}": str(value) for name, value in options.items()}
        if num_ranks > 1:
            environ |= {"NPROC_PER_NODE": str(num_ranks), "MASTER_PORT": str(free_port())}
            flags = [*flags, "--ddp_backend", "gloo", "--use_cpu", "true"]
        super().__init__([sys.executable, "-m", "swift_vlpack", command, *flags], environ, log)


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def trained(output: Path, *, up_to_step: int | None = None) -> list[dict[str, Any]]:
    """Every pack on record, of all ranks, in the order of steps."""
    lines = []
    for path in sorted((output / "vlpack").glob("packs_rank*.jsonl")):
        text = path.read_text()
        lines += [{"rank": path.stem, **json.loads(line)} for line in text[: text.rfind("\n") + 1].splitlines()]
    lines.sort(key=lambda line: line["step"])
    return [line for line in lines if up_to_step is None or line["step"] <= up_to_step]


def ids(packs: Iterable[dict[str, Any]], epoch: int = 0) -> list[str]:
    """Every sample that was trained in an epoch, as often as it was."""
    return sorted(sample_id for pack in packs if pack["epoch"] == epoch for sample_id in pack["ids"])


def last_complete(output: Path) -> Path:
    """The newest checkpoint that has its state."""
    complete = [path.parent for path in output.glob(f"checkpoint-*/{FILE}")]
    return max(complete, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The optimizer steps behind a checkpoint."""
    return int(checkpoint.name.split("-")[1])
