"""What the tests of the host share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def template(request: pytest.FixtureRequest, tiny: Any) -> Any:
    """ms-swift's template of the tiny model of the file's `FAMILY`, or of Qwen2.5-VL."""
    return tiny(getattr(request.module, "FAMILY", "qwen2_5_vl")).template
