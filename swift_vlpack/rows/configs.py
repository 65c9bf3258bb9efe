"""Where configs of transformers say what."""

from __future__ import annotations

from typing import Any


def text_config_of(config: Any) -> Any:
    """The part of a model's config that is the language model's: itself, or one level down, of an omni model two."""
    config = getattr(config, "thinker_config", config)
    return getattr(config, "text_config", config)
