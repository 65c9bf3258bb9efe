"""Define the errors that this package raises on purpose; `except VLPackError` catches all of them.

VLPackError
|-- ConfigError        an option is unknown, impossible, or contradicts another one
|-- DataError          an item, a length file or a source cannot be what it claims to be
|-- SourceError        a source of documents cannot be read (text/reading.py)
|-- PlanError          a plan cannot be given the shape that was asked for
|-- StrategyError      a strategy of your own broke the rules (plan/registry.py)
|-- BoundaryError      positions or tokens disagree with where samples start
|-- AttentionError     a model asks of attention what packing does not know, or boundaries are another sequence's
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
    """An item, a length file or a source cannot be what it claims to be."""


class SourceError(VLPackError, OSError):
    """A source of documents could not be read, however often it was tried."""


class PlanError(VLPackError, ValueError):
    """A plan cannot be given the shape that was asked for."""


class StrategyError(VLPackError, ValueError):
    """A strategy of your own failed, or returned groups that cannot be packs."""


class BoundaryError(VLPackError, ValueError):
    """Positions or tokens disagree with where samples start."""


class AttentionError(VLPackError):
    """A model asks of attention what packing does not know how to give, or the boundaries are another sequence's."""


class IsolationError(VLPackError):
    """Samples of a pack see each other, or the proof cannot be made; the message names the cause."""

    def __init__(self, message: str, *, cause: str = "", measured: Any = None) -> None:
        """Take as `measured` the `proof.verdict.Proof` that failed, if it failed after its numbers were measured."""
        super().__init__(message)
        self.cause = cause
        self.measured = measured


class StateMismatch(VLPackError, ValueError):
    """A saved state belongs to other data, another config or another version."""
