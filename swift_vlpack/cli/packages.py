"""Which packages are installed, in which versions, and whether these are supported."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import metadata
from typing import Any, NamedTuple

OURS = "swift-vlpack"


class Optional(NamedTuple):
    """A package that training can do without."""

    name: str
    use: str


OPTIONAL = (
    Optional("flash-attn", "--attn_impl flash_attn; packing needs it for nothing else"),
    Optional("liger-kernel", "--use_liger_kernel true"),
    Optional("decord", "reading videos"),
    Optional("torchcodec", "reading videos"),
    Optional("deepspeed", "--deepspeed"),
    Optional("bitsandbytes", "--quant_method bnb"),
    Optional("flash-linear-attention", "quick linear attention, as of Qwen3.5 and Qwen3-Next"),
    Optional("causal-conv1d", "quick linear attention, as of Qwen3.5 and Qwen3-Next"),
    Optional("tensorboard", "--report_to tensorboard"),
    Optional("wandb", "--report_to wandb"),
)
"""What a run may ask for, and by what."""
_REQUIREMENT = re.compile(r"([\w.-]+)\s*\(?([^;)]*)\)?\s*(;.*)?")
_CLAUSE = re.compile(r"(>=|<=|==|!=|<|>|~=)\s*([\w.]+)")


def version_of(package: str) -> str | None:
    """Its version; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def packages() -> dict[str, Any]:
    """What this package requires, with what is wrong with it, and what is optional."""
    required = {
        name: {"version": (version := version_of(name)), "wanted": wanted, "fits": fits(version, wanted)}
        for name, wanted in requirements().items()
    }
    optional = {package.name: {"version": version_of(package.name), "use": package.use} for package in OPTIONAL}
    return {"required": required, "optional": optional}


def requirements() -> dict[str, str]:
    """Name and range of versions of all that an install brings; empty where this copy was not installed."""
    try:
        return ranges(metadata.requires(OURS) or [])
    except metadata.PackageNotFoundError:
        return {}


def ranges(lines: Iterable[str]) -> dict[str, str]:
    """Of requirements as metadata has them; what an extra adds is left out.

    >>> ranges(["ms-swift<4.7,>=4.5.3", "torchvision", "pytest>=8; extra == 'test'"])
    {'ms-swift': '<4.7,>=4.5.3', 'torchvision': ''}
    """
    found = (_REQUIREMENT.fullmatch(line.strip()) for line in lines)
    return {match[1]: match[2].strip() for match in found if match and "extra ==" not in (match[3] or "")}


def fits(version: str | None, wanted: str) -> bool:
    """Whether a version is in a range.

    >>> fits("4.6.0", ">=4.5.3,<4.7"), fits("4.7.0", ">=4.5.3,<4.7"), fits(None, ""), fits("2.15.0+cpu", ">=2.4")
    (True, False, False, True)
    """
    if version is None:
        return False
    return all(_holds(numbers(version), relation, numbers(other)) for relation, other in _CLAUSE.findall(wanted))


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a release, without what is behind them.

    >>> numbers("2.15.0a1+cu128"), numbers("4.7")
    ((2, 15), (4, 7))
    """
    found = re.match(r"\d+(\.\d+)*", version)
    parts = [int(part) for part in found[0].split(".")] if found else []
    while parts and not parts[-1]:  # 4.7 is 4.7.0
        parts.pop()
    return tuple(parts)


def _holds(version: tuple[int, ...], relation: str, other: tuple[int, ...]) -> bool:
    return {
        ">=": version >= other,
        "<=": version <= other,
        ">": version > other,
        "<": version < other,
        "==": version == other,
        "!=": version != other,
        "~=": version >= other,
    }[relation]
