"""One progress bar for a pass over all sources, whatever number of stages each of them takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tqdm import tqdm


class _Bar:
    """Rows looked at, of those of all sources; what a stage looks at once more is added to them."""

    def __init__(self, num_rows: int, *, is_shown: bool) -> None:
        is_hidden = not (is_shown and num_rows)
        self._line: tqdm[Any] = tqdm(total=num_rows, unit="row", dynamic_ncols=True, disable=is_hidden)
        self._num_foreseen = num_rows

    @contextmanager
    def stage(self, text: str, num_rows: int) -> Iterator[tqdm[Any]]:
        # Rows that were counted in at first are not added again; only what a stage looks at once more is.
        foreseen = min(num_rows, self._num_foreseen)
        self._num_foreseen -= foreseen
        self._line.total += num_rows - foreseen
        if num_rows:
            self._line.set_description(text)
        yield self._line

    def close(self) -> None:
        self._line.total = self._line.n  # a stage may stop before its end, where a row shows that it is in vain
        self._line.close()


_bar_of_pass: ContextVar[_Bar | None] = ContextVar("bar_of_pass", default=None)


@contextmanager
def one_bar(num_rows: int, *, is_shown: bool) -> Iterator[None]:
    """Every stage in here goes on in the same bar, which is as long as so many rows at first."""
    bar = _Bar(num_rows, is_shown=is_shown)
    token = _bar_of_pass.set(bar)
    try:
        yield
    finally:
        _bar_of_pass.reset(token)
        bar.close()


@contextmanager
def stage(text: str, num_rows: int, *, is_shown: bool) -> Iterator[tqdm[Any]]:
    """A part of the pass; its bar is the one of the pass, or its own where there is none."""
    bar = _bar_of_pass.get()
    if bar is not None:
        with bar.stage(text, num_rows) as line:
            yield line
        return
    options = {"unit": "row", "dynamic_ncols": True, "disable": not (is_shown and num_rows)}
    with tqdm(desc=text, total=num_rows, **options) as line:
        yield line
