"""What `make test` leaves to `make test-telling`, which CI runs behind it."""

from collections.abc import Container, Iterable
from typing import Any

import pytest

TELLING = (pytest.mark.slow, pytest.mark.telling)


def telling(*values: Any, **options: Any) -> Any:
    """A case of `parametrize` that only CI runs."""
    return pytest.param(*values, marks=TELLING, **options)


def quick_only(quick: Container[Any], every: Iterable[Any]) -> list[Any]:
    """All cases, of which these few are in every run of the suite."""
    return [value if value in quick else telling(value) for value in every]
