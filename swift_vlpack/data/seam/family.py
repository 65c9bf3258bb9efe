"""Which families are packed: ms-swift's own rule, and the way past it for a run that proves its rows."""

from __future__ import annotations

import logging
from typing import Any

from swift_vlpack.core.errors import ConfigError

logger = logging.getLogger(__name__)


def let_through(template: Any, *, any_family: bool, way_in: str) -> None:
    """Refuse a template that ms-swift does not pack, unless `any_family` lets it through.

    A template says yes, no, or nothing; then ms-swift packs the text models and refuses the others. A no to media has a
    reason that the proof might not see and stays; that of a text model (gpt-oss) is about kernels without sinks.
    """
    said = template.support_padding_free
    is_packed = said if said is not None else not template.model_meta.is_multimodal
    if is_packed:
        return
    name = template.template_meta.template_type
    if said is not None and template.model_meta.is_multimodal:
        raise ConfigError(f"ms-swift does not pack the template {name!r} and says that it cannot be; leave packing out")
    if not any_family:
        raise ConfigError(
            f"ms-swift does not pack the template {name!r}; leave packing out, or let the proof decide: {way_in}"
        )
    template.support_padding_free = True
    logger.warning("ms-swift does not pack the template %r; the proof says whether its packs are right", name)
