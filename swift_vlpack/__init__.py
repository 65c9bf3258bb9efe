"""Pack vision-language samples for ms-swift: pack at once, lose nothing, prove it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from swift_vlpack.core.config import PackingConfig
from swift_vlpack.core.epoch.mix import schedule
from swift_vlpack.core.epoch.plan import Plan
from swift_vlpack.core.epoch.planner import plan
from swift_vlpack.core.packing.boundaries import Boundaries
from swift_vlpack.core.packing.packer import Packer
from swift_vlpack.core.packing.records import Item, Pack
from swift_vlpack.core.packing.registry import register_strategy
from swift_vlpack.core.words import INSTALL

if TYPE_CHECKING:  # for type checkers and editors; all of it needs torch, and is loaded when it is first asked for
    from swift_vlpack.data.feeds.dataset import PackingDataset
    from swift_vlpack.data.lengths.sizes import LengthIndex
    from swift_vlpack.data.model.choose_attention import choose_attention
    from swift_vlpack.data.model.collate import Collator
    from swift_vlpack.data.model.prepare import prepare_model
    from swift_vlpack.data.proof.prove import prove
    from swift_vlpack.data.proof.verify import verify
    from swift_vlpack.data.rows.fusion import FusionCaptionDataset, RowSource

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
    "Collator": "swift_vlpack.data.model.collate",
    "FusionCaptionDataset": "swift_vlpack.data.rows.fusion",
    "LengthIndex": "swift_vlpack.data.lengths.sizes",
    "PackingDataset": "swift_vlpack.data.feeds.dataset",
    "RowSource": "swift_vlpack.data.rows.fusion",
    "choose_attention": "swift_vlpack.data.model.choose_attention",
    "prepare_model": "swift_vlpack.data.model.prepare",
    "prove": "swift_vlpack.data.proof.prove",
    "verify": "swift_vlpack.data.proof.verify",
}


def __getattr__(name: str) -> Any:
    """Load what needs torch when it is first asked for."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_NEED_TORCH[name]), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} needs {error.name}, which {INSTALL} brings") from error


def __dir__() -> list[str]:
    """Name what is loaded later too, so that a shell completes it."""
    return sorted({*globals(), *__all__})
