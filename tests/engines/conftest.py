"""Every engine is trained once a session, and many tests look at what it left behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.engines.runs_of_engines import Runs


@pytest.fixture(scope="session")
def runs(small_folder, tmp_path_factory) -> Callable[[str], Runs]:
    """`runs("zero3")`: what an engine trains, when it is asked for."""
    folder = tmp_path_factory.mktemp("engines")
    return cache(lambda engine: Runs(engine, folder, small_folder))
