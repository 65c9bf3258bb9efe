"""Decide which sizes from image headers to trust, by encoding some rows of every kind in full as well.

A kind is a property that a template may treat in a special way (`rank_rows.kinds_of`). While a source is measured,
`Checks` chooses the rows to encode both ways: the first rows of every kind that is not trusted yet, and some drawn by a
seed. The `extremes` in size follow. `Unconfirmed` keeps measured sizes out of the cache until their checks pass.
`Trust` saves the kinds that agreed, in a file for each context (template and settings), so that the next source need
not compare them again. A single row that differs ends this trust for all sources.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack import json_lines
from swift_vlpack.lengths.length_file import BY_HEADER, VOUCHED, Sizes
from swift_vlpack.lengths.rank_rows import Chunk, HeaderFacts, Positions

logger = logging.getLogger(__name__)

NUM_PER_KIND = 2
"""Matches needed before a kind is trusted; a single match may be a rounding coincidence."""
NUM_ROWS_DRAWN = 64
"""Rows of a source to draw and compare, whatever their kinds. If a tenth of all rows were wrong, 64 drawn rows would
miss that in one of a thousand cases (0.9 ** 64)."""
NUM_AT_EACH_END = 1
"""Rows to compare at either end of length, patches and aspect, because the limits of a template take effect there."""
SHARE_COMPARED = 1 / 64
"""Share of all pixels that may be decoded for rows beyond the first of every kind. The pass exists to avoid decoding; a
sixty-fourth of all decoding hardly counts."""
_NUM_SPARE = 8
"""Rows of each kind that are kept to replace broken ones. A kind with that many broken rows is not proved."""
_AGREED, _DIFFERS = b'{"agreed": {', b'{"differs": '  # the beginnings of lines in the file


class Trust:
    """Count the rows of each kind whose two sizes were equal, over all sources of the same context."""

    def __init__(self, path: Path | None = None) -> None:
        """Load the counts from the file `path`; without a path nothing is saved."""
        self.path = path
        self.is_revoked = False
        """True if headers of some source were wrong: then only comparisons of this run count."""
        self._remembered: Counter[str] = Counter()
        self._new: Counter[str] = Counter()
        try:
            self._load(path.read_bytes() if path is not None else b"")
        except (ValueError, RecursionError):
            self._set_aside()
        except OSError:
            pass  # no file yet; if the folder cannot be read, the length cache next to it says so
        # Trust no source, not only the one that differed: a rule that was wrong once may be wrong elsewhere.
        if self.is_revoked:
            self._remembered.clear()

    def _load(self, content: bytes) -> None:
        """Load saved lines; raises `ValueError` at a line that this class did not write."""
        for line in content.splitlines():
            if _begins(line, _AGREED):
                # Ignore a line that a killed process left unfinished.
                with suppress(json.JSONDecodeError):
                    self._remembered.update(_checked(json.loads(line)["agreed"]))
            elif _begins(line, _DIFFERS):
                self.is_revoked = True
            else:
                raise ValueError

    def _set_aside(self) -> None:
        """Rename a damaged file and trust no kind, because the file may have said that headers are wrong."""
        assert self.path is not None
        self._remembered.clear()
        self.is_revoked = False
        aside = self.path.with_suffix(f".damaged-{os.getpid()}")
        # Several ranks may find the damage at once: one renames the file, and the rename fails on the others.
        with suppress(OSError):
            os.replace(self.path, aside)
            logger.warning(
                "%s, the record of which kinds of rows were checked, is damaged; it is set aside as %s and rows are "
                "checked again",
                self.path, aside.name,
            )  # fmt: skip

    def is_remembered(self, kinds: Iterable[str]) -> bool:
        """Tell whether rows of all these kinds agreed at earlier starts or in other sources."""
        kinds = tuple(kinds)
        return bool(kinds) and all(self._remembered[kind] >= NUM_PER_KIND for kind in kinds)

    def remembered(self) -> Counter[str]:
        """Return how many rows agreed before, by kind."""
        return Counter(self._remembered)

    def add(self, kinds: Iterable[str]) -> None:
        """Count a compared row of these kinds whose sizes are equal."""
        self._new.update(kinds)

    def save(self) -> None:
        """Append the counts that were added since the last save to the file."""
        if self._new:
            self._append({"agreed": dict(self._new)})
            self._new.clear()

    def revoke(self, why: str) -> None:
        """Forget all trust, for every source, because a row was compared and differs."""
        self.is_revoked = True
        self._remembered.clear()
        self._new.clear()
        self._append({"differs": why})

    def _append(self, line: Mapping[str, Any]) -> None:
        if self.path is not None:
            with suppress(OSError):  # the length cache next to it reports the error
                json_lines.append(self.path, [line])


def _begins(line: bytes, start: bytes) -> bool:
    """Tell whether a line begins with `start`. A line that a killed process left unfinished may be shorter."""
    return line.startswith(start) or start.startswith(line)


def _checked(numbers: Any) -> dict[str, int]:
    """Return counts by kind that were read from the file. Raises `ValueError` if they are not counts."""
    if not isinstance(numbers, dict) or not all(type(number) is int and number > 0 for number in numbers.values()):
        raise ValueError
    return numbers


# -- rows to check ----------------------------------------------------------------------------------------------------


class Checks:
    """Choose the rows to encode both ways: the first row of every kind, and more as long as they cost few pixels."""

    def __init__(self, drawn: Positions, num_compared: Counter[str]) -> None:
        """Take the rows to compare whatever their kinds (`drawn`), and the number of rows that agreed, by kind."""
        self._drawn = set(drawn.tolist())
        self._first_drawn = int(drawn[0]) if len(drawn) else -1
        self._num_compared = num_compared
        self._num_pixels = self._num_pixels_compared = 0
        self._spare: dict[str, list[tuple[int, HeaderFacts]]] = {}
        self.kinds: dict[int, tuple[str, ...]] = {}
        """Kinds of the rows that were chosen, by position."""

    def choose(self, chunk: Chunk) -> list[int]:
        """Choose from rows that were just measured."""
        assert chunk.facts is not None
        self._num_pixels += sum(row.pixels for row in chunk.facts)
        is_from_header = np.isin(chunk.sizes["proof"], (BY_HEADER, VOUCHED)).tolist()
        chosen = []
        for position, row, by_header in zip(chunk.positions.tolist(), chunk.facts, is_from_header, strict=True):
            # A row whose header is silent was encoded in full anyway, so it is compared only if it was drawn.
            if not by_header and not (row.is_silent and position in self._drawn):
                continue
            if self._is_chosen(position, row):
                chosen.append(position)
            elif by_header:
                self._keep_spare(position, row)
        return chosen

    def replace(self, position: int) -> list[int]:
        """Choose other rows of the same kinds for a chosen row that cannot be encoded in full."""
        kinds = self.kinds.get(position, ())
        self._num_compared.subtract(kinds)
        chosen = []
        for kind in kinds:
            while self._num_compared[kind] < 1 and self._spare.get(kind):
                other, row = self._spare[kind].pop(0)
                if other not in self.kinds and self._is_chosen(other, row):
                    chosen.append(other)
        return chosen

    def _keep_spare(self, position: int, row: HeaderFacts) -> None:
        for kind in row.kinds:
            spare = self._spare.setdefault(kind, [])
            if len(spare) < _NUM_SPARE:
                spare.append((position, row))

    def _is_chosen(self, position: int, row: HeaderFacts) -> bool:
        least = min((self._num_compared[kind] for kind in row.kinds), default=NUM_PER_KIND)
        is_wanted = least < NUM_PER_KIND
        # Compare the first row of a kind and the first drawn row at any cost, other rows only if they are cheap.
        is_due = position == self._first_drawn or (is_wanted and least == 0)
        is_cheap = self._num_pixels_compared + row.pixels <= SHARE_COMPARED * self._num_pixels
        if not is_due and not (is_cheap and (is_wanted or position in self._drawn)):
            return False
        self._num_pixels_compared += row.pixels
        self._num_compared.update(row.kinds)
        self.kinds[position] = row.kinds
        return True


class Unconfirmed:
    """Buffer measured rows until their spot checks pass, and only then release them to be saved.

    If sizes were saved earlier, a pass that is killed in between would leave sizes that the next one takes for checked.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[list[Chunk], set[int]]] = []  # chunks, and the rows in them that are still to compare

    def add(self, chunk: Chunk, chosen: list[int]) -> list[Chunk]:
        """Add a measured chunk, whose rows `chosen` will be compared. Returns the chunks that can be saved now."""
        self._entries.append(([chunk], set(chosen)))
        return self._ready()

    def confirm(self, chunk: Chunk, instead: list[int]) -> list[Chunk]:
        """Add a chunk of compared rows. The rows `instead` will be compared in place of those that failed.

        Returns the chunks that can be saved now.
        """
        positions = set(chunk.positions.tolist())
        for chunks, missing in self._entries:
            if missing & positions:
                chunks.append(chunk)  # after the measured one, because the later of two records counts
                missing -= positions
                missing |= set(instead)
        return self._ready()

    def all(self) -> list[Chunk]:
        """Return all waiting chunks."""
        return [chunk for chunks, _ in self._entries for chunk in chunks]

    def _ready(self) -> list[Chunk]:
        ready = [chunk for chunks, missing in self._entries if not missing for chunk in chunks]
        self._entries = [entry for entry in self._entries if entry[1]]
        return ready


def extremes(sizes: Sizes) -> NDArray[np.int64]:
    """Find the rows at both ends of length, patches and aspect.

    >>> sizes = np.zeros(4, [("length", int), ("patches", int), ("aspect", float)])
    >>> sizes["length"] = [30, 10, 0, 20]  # the third cannot be encoded
    >>> extremes(sizes).tolist()
    [0, 1]
    """
    usable = np.flatnonzero(sizes["length"])

    def ends() -> Iterator[NDArray[np.int64]]:
        for column in ("length", "patches", "aspect"):
            order = usable[np.argsort(sizes[column][usable], kind="stable")]
            # If all rows are equal in this column, none is extreme.
            if len(order) and sizes[column][order[0]] != sizes[column][order[-1]]:
                yield order[:NUM_AT_EACH_END]
                yield order[max(0, len(order) - NUM_AT_EACH_END) :]

    return np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *ends()]))
