"""Pack vision-language samples for ms-swift: start packing at once, lose no sample silently, prove isolation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from swift_vlpack.config import PackingConfig
from swift_vlpack.plan.boundaries import Boundaries
from swift_vlpack.plan.items import Item, Pack
from swift_vlpack.plan.mix import schedule
from swift_vlpack.plan.packer import Packer
from swift_vlpack.plan.packs import Plan
from swift_vlpack.plan.planner import plan
from swift_vlpack.plan.registry import register_strategy
from swift_vlpack.words import INSTALL

if TYPE_CHECKING:  # for type checkers and editors only: these names need torch, so `__getattr__` loads them on demand
    from swift_vlpack.attention.prepare import prepare_model
    from swift_vlpack.feed.choose_attention import choose_attention
    from swift_vlpack.feed.collate import Collator
    from swift_vlpack.feed.dataset import PackingDataset
    from swift_vlpack.proof.prove import prove
    from swift_vlpack.proof.verify import verify
    from swift_vlpack.rows.fusion import FusionCaptionDataset
    from swift_vlpack.rows.sizes import LengthIndex
    from swift_vlpack.rows.source import RowSource

__version__ = "0.2.0"
__all__ = [
    "Boundaries",
    "Collator",
    "FusionCaptionDataset",
    "Item",
    "LengthIndex",
    "Pack",
    "Packer",
    "PackingConfig",
    "PackingDataset",
    "Plan",
    "RowSource",
    "choose_attention",
    "plan",
    "prepare_model",
    "prove",
    "register_strategy",
    "schedule",
    "verify",
]

_NEED_TORCH = {
    "Collator": "swift_vlpack.feed.collate",
    "FusionCaptionDataset": "swift_vlpack.rows.fusion",
    "LengthIndex": "swift_vlpack.rows.sizes",
    "PackingDataset": "swift_vlpack.feed.dataset",
    "RowSource": "swift_vlpack.rows.source",
    "choose_attention": "swift_vlpack.feed.choose_attention",
    "prepare_model": "swift_vlpack.attention.prepare",
    "prove": "swift_vlpack.proof.prove",
    "verify": "swift_vlpack.proof.verify",
}


def __getattr__(name: str) -> Any:
    """Load a public name that needs torch when it is first used. Raises `ImportError` if torch is missing."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_NEED_TORCH[name]), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} needs {error.name}, which {INSTALL} brings") from error


def __dir__() -> list[str]:
    """List all public names, also those that are not loaded yet, so that shells complete them."""
    return sorted({*globals(), *__all__})
