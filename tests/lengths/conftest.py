"""Fixtures of the tests of the length pass without ms-swift."""

import pytest

from swift_vlpack.lengths import measure


@pytest.fixture(autouse=True)
def _nothing_is_measured_again(monkeypatch):
    """Tests that count encodings count those of rows that were not known."""
    monkeypatch.setattr(measure, "_NUM_MEASURED_AGAIN", 0)
