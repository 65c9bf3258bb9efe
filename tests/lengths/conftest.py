"""Fixtures of the tests of the length pass."""

import numpy as np
import pytest

from swift_vlpack.lengths.measured_sizes import MeasuredSizes


@pytest.fixture
def never_again(monkeypatch):
    """No remembered row is looked at again, for tests that count what is encoded."""
    monkeypatch.setattr(MeasuredSizes, "to_look_at_again", lambda sizes: np.zeros(0, np.int64))
