"""Assert in a test of your own that a collator and a model keep the samples of a batch apart.

    from swift_vlpack.testing import assert_isolated

    def test_packed_samples_do_not_see_each_other():
        assert_isolated(model, collator, samples)

This needs neither ms-swift nor a trainer. docs/referee.md has an example that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from swift_vlpack.errors import IsolationError
from swift_vlpack.proof.verify import verify


def assert_isolated(
    model: Any,
    collator: Callable[[list[Any]], Mapping[str, Any]],
    samples: Iterable[Mapping[str, Any]],
    *,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> str:
    """Assert that every sample of `collator(samples)` gives what it gives alone. Returns the result as a line.

    Takes the arguments of `swift_vlpack.verify`. The `AssertionError` names the likeliest cause.
    """
    __tracebackhide__ = True  # pytest shows the test, not this function
    try:
        return verify(model, collator, samples, forward_context=forward_context)
    except IsolationError as error:
        raise AssertionError(str(error)) from error
