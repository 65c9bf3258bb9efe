"""What to do about what `vlpack doctor` saw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from swift_vlpack.words import INSTALL

STOP, WARN, NOTE = "stop", "warn", "note"
"""Training would not start, or not go on; it may fail or be slow; good to know."""
MB, GB = 2**20, 2**30
ENOUGH_SHARED = 2 * GB
"""The batch of one worker with a few large images is some 50 MB, and every worker has two under way."""
ENOUGH_FILES = 4096
LEAST_DISK = GB


class Advice(NamedTuple):
    """What is the matter, and the way out."""

    level: str
    text: str


def advice_on(facts: Mapping[str, Any]) -> list[Advice]:
    """The gravest first."""
    order = {STOP: 0, WARN: 1, NOTE: 2}
    found = (*_on_packages(facts), *_on_swift(facts), *_on_devices(facts), *_on_machine(facts))
    return sorted(found, key=lambda one: order[one.level])


def _on_packages(facts: Mapping[str, Any]) -> Iterator[Advice]:
    if facts["python"] < [3, 10]:
        yield Advice(STOP, "Python 3.10 or newer is needed; make another environment")
    required = facts["packages"]["required"]
    if missing := [name for name, package in required.items() if package["version"] is None]:
        yield Advice(STOP, f"{', '.join(missing)} not installed; {INSTALL} brings all that trains")
    for name, package in required.items():
        if package["version"] is not None and package["fits"] is False:
            wanted = f"{name}{package['wanted']}"
            yield Advice(STOP, f"{name} {package['version']} is not in the supported range; `pip install '{wanted}'`")
    optional = facts["packages"]["optional"]
    if not any(optional[name]["version"] for name in ("decord", "torchcodec")):
        yield Advice(NOTE, "videos cannot be read; `pip install decord` or `pip install torchcodec`, if you have some")


def _on_swift(facts: Mapping[str, Any]) -> Iterator[Advice]:
    looked_at = facts["imported"]
    if looked_at.get("torch_problem"):
        yield Advice(STOP, f"torch cannot be imported: {looked_at['torch_problem']}")
    if looked_at.get("swift_problem"):
        yield Advice(STOP, f"ms-swift does not work with packing here: {looked_at['swift_problem']}")


def _on_devices(facts: Mapping[str, Any]) -> Iterator[Advice]:
    looked_at = facts["imported"]
    if "torch" not in looked_at or looked_at["devices"]:
        return
    if looked_at["cuda"]:
        yield Advice(
            WARN,
            f"torch is built for CUDA {looked_at['cuda']} and sees no GPU: look at `nvidia-smi`, the driver and "
            "CUDA_VISIBLE_DEVICES; in a container, start it with its GPUs (`--gpus all`)",
        )
    else:
        yield Advice(NOTE, "no GPU, and torch is built without one: this trains on the processor, which is slow")


def _on_machine(facts: Mapping[str, Any]) -> Iterator[Advice]:
    machine = facts["machine"]
    shared = machine["shared_memory"]
    if shared is not None and shared["free"] < ENOUGH_SHARED:
        yield Advice(
            WARN,
            f"/dev/shm has {size(shared['free'])} free: dataloader workers hand over images in it, and what does not "
            "fit goes through pipes, which is slower; give the container more (`docker run --shm-size=16g` or "
            "`--ipc=host`)",
        )
    files = machine["open_files"]["soft"]
    if files is not None and files < ENOUGH_FILES:
        yield Advice(
            WARN,
            f"a process may open {files} files; with many dataloader workers that can be too few (`Too many open "
            f"files`): `ulimit -n {min(65536, machine['open_files']['hard'] or 65536)}` before the run",
        )
    if not machine["is_cache_writable"]:
        yield Advice(
            WARN,
            f"{machine['cache']['folder']} cannot be written: lengths are measured again at every start; name another "
            "folder with packing_cache_dir",
        )
    disk = machine["cache"]["disk"]
    if disk is not None and disk["free"] < LEAST_DISK:
        yield Advice(WARN, f"the disk of {machine['cache']['folder']} has {size(disk['free'])} left; make room there")


def size(num_bytes: float) -> str:
    """Bytes for a reader.

    >>> size(64 * MB), size(1536 * MB), size(12), size(0)
    ('64 MB', '1.5 GB', '12 bytes', '0 bytes')
    """
    for unit, name in ((GB * 1024, "TB"), (GB, "GB"), (MB, "MB"), (1024, "KB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f}".removesuffix(".0") + f" {name}"
    return f"{num_bytes:g} bytes"
