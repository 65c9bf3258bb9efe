"""Which families are packed: ms-swift's own rule, and the way past it for a run that proves its rows."""

from __future__ import annotations

import logging
from typing import Any

from swift_vlpack.errors import ConfigError

logger = logging.getLogger(__name__)


def is_packed(template: Any) -> bool:
    """Whether ms-swift packs it: a template says yes, no, or nothing; then the text models are packed, no others."""
    said = template.support_padding_free
    return bool(not template.model_meta.is_multimodal if said is None else said)


def let_through(template: Any, *, any_family: bool, way_in: str) -> None:
    """Refuse a template that ms-swift does not pack, unless `any_family` lets it through.

    A no to media has a reason that the proof might not see and stays; that of a text model (gpt-oss) is about kernels
    without sinks.
    """
    if is_packed(template):
        return
    name = template.template_meta.template_type
    if template.support_padding_free is not None and template.model_meta.is_multimodal:
        raise ConfigError(f"ms-swift does not pack the template {name!r} and says that it cannot be; leave packing out")
    if not any_family:
        raise ConfigError(
            f"ms-swift does not pack the template {name!r}; leave packing out, or let the proof decide: {way_in}"
        )
    template.support_padding_free = True
    logger.warning("ms-swift does not pack the template %r; the proof says whether its packs are right", name)
