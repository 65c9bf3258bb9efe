"""How many of the last rows could not be read: a few are an accident, many are a disk that is gone."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable

from swift_vlpack.reasons import is_failure
from swift_vlpack.rows.samples import LeftOut, TooManyFailures
from swift_vlpack.rows.source import RowSource
from swift_vlpack.words import by_reason

logger = logging.getLogger(__name__)

NUM_ROWS = 1000
"""The share is that of the last so many rows."""
FEWEST_ROWS = 100
"""Of fewer rows a share says little; between two epochs it is looked at all the same."""
FEWEST_ROWS_OF_EPOCH = 20
SHARE_WARNED_OF = 0.05


class FailedShare:
    """The share of failures in the last 1,000 rows that this rank trained or lost."""

    def __init__(self, most: float) -> None:
        self.most = most
        self._reasons: deque[str] = deque(maxlen=NUM_ROWS)  # empty for a row that was read
        self._last: LeftOut | None = None
        self._is_warned_of = False

    def count(self, num_read: int, left_out: Iterable[LeftOut] = ()) -> None:
        """Count the rows of a pack."""
        self._reasons.extend([""] * num_read)
        for one in left_out:
            # A row that is left out for its length is no sign of a broken disk.
            if is_failure(one.reason):
                self._reasons.append(one.reason)
                self._last = one

    def check(self, fewest_rows: int = FEWEST_ROWS) -> None:
        """Warn, or stop, where it is too large."""
        failed = [reason for reason in self._reasons if reason]
        if len(self._reasons) < fewest_rows or not failed:
            return
        share = len(failed) / len(self._reasons)
        found = (
            f"{len(failed)} of the last {len(self._reasons)} rows could not be read ({by_reason(_most_first(failed))})"
        )
        if share > self.most:
            raise TooManyFailures(f"{found}; the last is {_shown(self._last)}. {_way_out(self.most)}")
        if share > SHARE_WARNED_OF and not self._is_warned_of:
            logger.warning("%s; the last is %s. Above %.0f%% the run stops", found, _shown(self._last), 100 * self.most)
        # As long as it stays above, it is said once; when it has been below, once more.
        self._is_warned_of = share > SHARE_WARNED_OF


def check_measured(sources: Iterable[RowSource], most: float) -> None:
    """The same of the rows that are known to fail before training starts."""
    failed: list[str] = []
    num_rows = 0
    for source in sources:
        num_rows += len(source.rows)
        failed += [] if source.sizes is None else filter(is_failure, source.sizes.failures.values())
    if num_rows < FEWEST_ROWS or not failed:
        return
    found = f"{len(failed)} of {num_rows} rows cannot be read ({by_reason(_most_first(failed))})"
    if len(failed) / num_rows > most:
        raise TooManyFailures(f"{found}. {_way_out(most)}")
    if len(failed) / num_rows > SHARE_WARNED_OF:
        logger.warning("%s. Above %.0f%% the run would not start", found, 100 * most)


def _most_first(reasons: Iterable[str]) -> dict[str, int]:
    return dict(Counter(reasons).most_common())


def _shown(left_out: LeftOut | None) -> str:
    return "-" if left_out is None else f"{left_out.sample_id}: {left_out.reason}: {left_out.detail}"


def _way_out(most: float) -> str:
    return (
        f"packing_max_failed_share allows {100 * most:g}%. Is a disk or a network mount gone? All rows are listed in "
        "vlpack/left_out.jsonl in the output directory. Mend the data and resume from the last checkpoint, or raise "
        "packing_max_failed_share"
    )
