"""What a length pass is given: ways to encode a row, and what earlier starts and other sources found out."""

from __future__ import annotations

from dataclasses import dataclass, field

from swift_vlpack.lengths.cache import LengthCache
from swift_vlpack.lengths.environment import Reads
from swift_vlpack.lengths.trust import Trust
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.urls import Urls


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoders:
    """How rows are encoded, and by how many processes of each rank."""

    by_header: RowEncoder | None
    """Encodes without pixels; None where headers are not to be trusted."""
    in_full: RowEncoder
    is_strict: bool = False
    """Whether the first row that cannot be encoded ends the run."""
    num_processes: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What is remembered, to be read and added to."""

    cache: LengthCache
    trust: Trust
    """Kinds of rows whose headers proved right."""
    urls: Urls | None = None
    """What both encoders read from; None where no URL is read ahead."""
    reads: Reads = field(default_factory=Reads)
    """Environment variables that were read while rows were encoded."""
