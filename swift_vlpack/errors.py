"""Define the errors that this package raises on purpose; `except VLPackError` catches all of them.

VLPackError
|-- ConfigError        an option is unknown, impossible, or contradicts another one
|-- DataError          an item, a length file or a source is invalid
|-- SourceError        a source of documents cannot be read (text/reading.py)
|-- PlanError          a plan cannot have the shape that was asked for
|-- StrategyError      a strategy of your own broke the rules (plan/registry.py)
|-- BoundaryError      positions or tokens disagree with the boundaries of samples
|-- AttentionError     a model needs attention that packing cannot provide, or boundaries are another sequence's
|-- StateMismatch      a saved state belongs to other data, another config or another version
|-- SampleError        a row cannot be encoded (rows/samples.py); becomes a counted reason
|-- TooManyFailures    so many rows failed that the data must be broken (rows/samples.py)
|-- IsolationError     samples of a pack see each other, or the proof cannot be made
|-- RanksDiffer        the ranks would train on different data (host/same_on_ranks.py)
|-- RankGone           the ranks cannot reach each other, mostly because one has ended (feed/waiting.py)
|-- StateNotSaved      the state of the data cannot be written into a checkpoint (host/state.py)
|-- WorkerDied         a dataloader worker was killed, or exited by itself (host/loader.py)
|-- PhaseFailed        a process of `vlpack bench` ended without a result (cli/bench.py)
`-- UnsupportedSwift   this ms-swift has moved something that packing relies on (host/seam.py)
"""

from typing import Any


class VLPackError(Exception):
    """Base of all errors of this package."""


class ConfigError(VLPackError, ValueError):
    """An option is unknown, impossible, or contradicts another one."""


class DataError(VLPackError, ValueError):
    """An item, a length file or a source is invalid."""


class SourceError(VLPackError, OSError):
    """A source of documents could not be read, not even after retries."""


class PlanError(VLPackError, ValueError):
    """A plan cannot have the shape that was asked for."""


class StrategyError(VLPackError, ValueError):
    """A strategy of your own failed, or returned groups that cannot be packs."""


class BoundaryError(VLPackError, ValueError):
    """Positions or tokens disagree with the boundaries of samples."""


class AttentionError(VLPackError):
    """A model needs attention that packing cannot provide, or the boundaries are another sequence's."""


class IsolationError(VLPackError):
    """Samples of a pack see each other, or the proof cannot be made; the message names the cause."""

    def __init__(self, message: str, *, cause: str = "", measured: Any = None) -> None:
        """Keep the cause and, as `measured`, the failed `proof.verdict.Proof`, if its numbers were measured."""
        super().__init__(message)
        self.cause = cause
        self.measured = measured


class StateMismatch(VLPackError, ValueError):
    """A saved state belongs to other data, another config or another version."""
