"""Find out which packages are installed, in which versions, and whether these are supported."""

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
_NAME = re.compile(r"[\w.-]+")


def version_of(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def packages() -> dict[str, Any]:
    """Return every required package with its version, range and whether it fits, and every optional one."""
    required = {
        name: {"version": (version := version_of(name)), "wanted": wanted, "fits": fits(version, wanted)}
        for name, wanted in requirements().items()
    }
    optional = {package.name: {"version": version_of(package.name), "use": package.use} for package in OPTIONAL}
    return {"required": required, "optional": optional}


def requirements() -> dict[str, str]:
    """Return the range of versions of every package that an install brings; empty if this copy was not installed."""
    try:
        return ranges(metadata.requires(OURS) or [])
    except metadata.PackageNotFoundError:
        return {}


def ranges(lines: Iterable[str]) -> dict[str, str]:
    """Split requirements as metadata writes them into name and range; leave out what an extra adds.

    >>> ranges(["ms-swift<4.7,>=4.5.3", "torchvision", "pytest>=8; extra == 'test'"])
    {'ms-swift': '<4.7,>=4.5.3', 'torchvision': ''}
    """
    found = {}
    for line in lines:
        requirement, _, marker = line.partition(";")
        if "extra ==" not in marker and (name := _NAME.match(requirement)):
            found[name[0]] = requirement[name.end() :].strip()
    return found


def fits(version: str | None, wanted: str) -> bool | None:
    """Tell whether a version is in a range; None if `packaging`, which knows the rules, is not installed.

    >>> fits("4.6.0", ">=4.5.3,<4.7"), fits("4.7.0", ">=4.5.3,<4.7"), fits(None, ""), fits("2.15.0+cpu", ">=2.4")
    (True, False, False, True)
    >>> fits("1.30", "~=1.26"), fits("2.0", "~=1.26")
    (True, False)
    """
    if version is None:
        return False
    try:
        # Not at the top: `vlpack doctor` has to answer where nothing but numpy is installed.
        from packaging.specifiers import SpecifierSet
    except ModuleNotFoundError:
        return None
    # A nightly build of a later version is in the range: its user knows that it is one.
    return SpecifierSet(wanted).contains(version, prereleases=True)
