"""Pack vision-language samples for ms-swift: pack at once, lose nothing, prove it."""

from swift_vlpack.core.boundaries import Boundaries
from swift_vlpack.core.config import PackingConfig
from swift_vlpack.core.fusion import schedule
from swift_vlpack.core.packer import Packer
from swift_vlpack.core.plan import Plan
from swift_vlpack.core.planner import plan
from swift_vlpack.core.records import Item, Pack

__version__ = "0.1.0"
__all__ = ["Boundaries", "Item", "Pack", "Packer", "PackingConfig", "Plan", "plan", "schedule"]
