"""Stop the run if too many rows cannot be read: a few are an accident, many mean that a disk is gone."""

from __future__ import annotations

import logging
import os
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from swift_vlpack.reasons import Reason, is_failure
from swift_vlpack.rows.samples import LeftOut, SampleError, TooManyFailures
from swift_vlpack.rows.source import RowSource
from swift_vlpack.words import by_reason, counted

logger = logging.getLogger(__name__)

NUM_ROWS = 1000
"""Number of rows, the last ones that this rank read, among which the share of failures is watched."""
FEWEST_ROWS = 100
"""Fewest rows to judge by within an epoch: a share of fewer rows says too little to stop a run."""
FEWEST_ROWS_OF_EPOCH = 20
"""Fewest rows to judge by between two epochs, because a small epoch has no more."""
SHARE_WARNED_OF = 0.05
"""Share of failures above which a warning is logged."""
MAX_FAILED_IN_SUCCESSION = 100
"""Most unreadable rows in succession. More mean that a disk is gone: even if 20 % of all rows failed by chance, which
would stop the run anyway, a hundred in succession has a probability of 1e-70."""


def counted_failure(error: SampleError, num_in_succession: int) -> LeftOut:
    """Log a row that cannot be encoded. Raises `TooManyFailures` after `MAX_FAILED_IN_SUCCESSION` of them."""
    logger.warning("%s: left out: %s: %s", error.sample_id, error.reason, error.detail)
    if num_in_succession > MAX_FAILED_IN_SUCCESSION:
        raise TooManyFailures(
            f"{num_in_succession} rows in succession could not be encoded, the last is {error}; repair the data, "
            "or bring the disk back"
        ) from error
    return LeftOut(error.sample_id, *error.fault)


class FailedShare:
    """Watch the share of failures in the last 1,000 rows that this rank trained or lost."""

    def __init__(self, most: float) -> None:
        self.most = most
        self._reasons: deque[str] = deque(maxlen=NUM_ROWS)  # for each row why it failed; "" if it was read
        self._last: LeftOut | None = None
        self._is_warned_of = False

    def count(self, num_read: int, left_out: Iterable[LeftOut] = ()) -> None:
        """Count rows that were read, and those of `left_out` that failed."""
        self._reasons.extend([""] * num_read)
        for one in left_out:
            # Do not count rows that were left out for their length: these are no sign of a broken disk.
            if is_failure(one.reason):
                self._reasons.append(one.reason)
                self._last = one

    def check(self, fewest_rows: int = FEWEST_ROWS) -> None:
        """Warn if the share is large. Raises `TooManyFailures` if it is above `packing_max_failed_share`."""
        failed = [reason for reason in self._reasons if reason]
        if len(self._reasons) < fewest_rows or not failed:
            return
        share = len(failed) / len(self._reasons)
        found = (
            f"{len(failed)} of the last {len(self._reasons)} rows could not be read ({by_reason(_most_first(failed))})"
        )
        if share > self.most:
            listed = "All rows are listed in vlpack/left_out.jsonl in the output directory"
            raise TooManyFailures(f"{found}; the last is {_shown(self._last)}. {listed}. {_way_out(self.most)}")
        if share > SHARE_WARNED_OF and not self._is_warned_of:
            logger.warning("%s; the last is %s. Above %.0f%% the run stops", found, _shown(self._last), 100 * self.most)
        # Warn once as long as the share stays above, and again after it has been below.
        self._is_warned_of = share > SHARE_WARNED_OF


def refuse_unreadable(sources: Sequence[RowSource]) -> None:
    """Raise `TooManyFailures` if the length pass could read no row at all, with the counts and the first row."""
    failed = [reason for source in sources if source.sizes is not None for reason in source.sizes.failures.values()]
    num_rows = sum(len(source.rows) for source in sources)
    if not failed or len(failed) < num_rows:
        return
    first = next(source for source in sources if len(source.rows))
    index = min(range(len(first.rows)), key=first.row_number)
    assert first.sizes is not None
    searched = os.environ.get("ROOT_IMAGE_DIR") or os.getcwd()
    looked_in = f"; relative paths are looked for in {searched}" if Reason.FILE_MISSING in failed else ""
    raise _refused(
        f"none of the {counted(num_rows, 'row')} can be packed ({by_reason(_most_first(failed))}); the first is "
        f"{first.where(index)}: {first.sizes.fault(index).error}{looked_in}",
        sources,
    )


def _refused(said: str, sources: Sequence[RowSource]) -> TooManyFailures:
    error = TooManyFailures(said)
    error.sources = sources
    return error


def check_measured(sources: Sequence[RowSource], most: float) -> None:
    """Warn or raise before training, by the share of rows that the length pass could not read."""
    failed: list[str] = []
    num_rows = 0
    for source in sources:
        num_rows += len(source.rows)
        failed += [] if source.sizes is None else filter(is_failure, source.sizes.failures.values())
    if num_rows < FEWEST_ROWS or not failed:
        return
    found = f"{len(failed)} of {num_rows} rows cannot be read ({by_reason(_most_first(failed))})"
    if len(failed) / num_rows > most:
        raise _refused(f"{found}. {_way_out(most)}", sources)
    if len(failed) / num_rows > SHARE_WARNED_OF:
        logger.warning("%s. Above %.0f%% the run would not start", found, 100 * most)


def _most_first(reasons: Iterable[str]) -> dict[str, int]:
    return dict(Counter(reasons).most_common())


def _shown(left_out: LeftOut | None) -> str:
    return "-" if left_out is None else f"{left_out.sample_id}: {left_out.reason}: {left_out.detail}"


def _way_out(most: float) -> str:
    return (
        f"packing_max_failed_share allows {100 * most:g}%. Is a disk or a network mount gone? Repair the data and "
        "resume from the last checkpoint, or raise packing_max_failed_share"
    )
