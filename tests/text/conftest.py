"""What the tests of documents share."""

from __future__ import annotations

from typing import Any

import pytest

from tests.text.vocabularies import words


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Whole words, with BOS and EOS."""
    return words()
