"""Encode some rows and observe what their lengths depend on that reading source code (`context.py`) cannot find.

Two kinds of input are observed: environment variables that are read in any way, and the user's own modules whose code
runs, however it was loaded. The key then has the module's functions as they are loaded, and the plain values that they
name: such a value may have come from an environment variable when the module was imported.

Findings are saved for each source, under the digest of everything that reading source code finds. They are only ever
added to, because a start that has nothing to measure observes nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import numpy as np

from swift_vlpack import json_lines
from swift_vlpack.lengths.context import digest_of, is_of_length, is_plain, plain
from swift_vlpack.lengths.environment import Reads, has_whole_environment, noted_reads
from swift_vlpack.lengths.rank_rows import kinds_of
from swift_vlpack.lengths.rows_work import Encoders
from swift_vlpack.lengths.source_code import (
    digest_of_files,
    functions_of_module,
    is_installed,
    names_in,
    parts_of_function,
)
from swift_vlpack.rows.media import image_urls
from swift_vlpack.rows.source import Row, RowSource, rows_at, with_system
from swift_vlpack.rows.watch import ReadStuck, watched

_NUM_ROWS_LOOKED_AT, _NUM_ROWS_OBSERVED = 64, 8
"""Rows, spread over a source, among which to look for kinds; and most rows to observe, one of each kind.

Variables that only other rows read are recorded later, when those rows are measured (`length_pass.py`).
"""


_MISSING = object()


@dataclass(frozen=True, slots=True)
class Observed:
    """Names of the observed inputs. Their values are looked up at every start (`dependencies_in`)."""

    variables: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()
    """The user's modules whose code ran and that were loaded before any row was encoded."""
    files: frozenset[str] = frozenset()
    """Source files of code that ran outside of `modules`: loaded later, or not as a module."""
    changing: frozenset[str] = frozenset()
    """`module.name` of values that encoding makes or changes. They are results and no settings, so not in the key."""

    @classmethod
    def united(cls, some: Iterable[Observed]) -> Observed:
        """Return the union of all names."""
        some = tuple(some)
        return cls(*(frozenset().union(*(getattr(one, each.name) for one in some)) for each in fields(cls)))


class ObservedFile:
    """Read and append a `.observed` file. Sources for which reading source code finds the same share one file."""

    def __init__(self, path: Path, source: str) -> None:
        self._path = path
        self._source = source

    def load(self) -> Observed | None:
        """Return what earlier starts observed for this source, or None if nothing was written yet."""
        found = []
        for line in json_lines.read(self._path):
            with suppress(AttributeError, TypeError):
                if line.pop("source") == self._source:
                    found.append(Observed(**{name: frozenset(map(str, names)) for name, names in line.items()}))
        return Observed.united(found) if found else None

    def add(self, observed: Observed) -> None:
        """Append findings for this source."""
        line = {name: sorted(names) for name, names in asdict(observed).items()}
        with suppress(OSError):  # the cache of lengths, in the same folder, reports it
            json_lines.append(self._path, [{"source": self._source, **line}])


def dependencies_in(observed: Observed, but: Container[str] = ()) -> dict[str, Any]:
    """Return the current values of all observed inputs, without the variables in `but`; empty if there are none."""
    variables = sorted(name for name in observed.variables if is_of_length(name) and name not in but)
    modules = [sys.modules[name] for name in sorted(observed.modules) if name in sys.modules]
    found = {
        "variables": {name: os.environ.get(name) for name in variables},
        # Without module names, because they depend on the folder of a plugin.
        "modules": sorted(digest_of(_parts_of_module(module, observed.changing), 16) for module in modules),
        "files": digest_of_files(filter(os.path.isfile, observed.files)) if observed.files else None,
    }
    return {name: value for name, value in found.items() if value}


def observe(source: RowSource, encoders: Encoders) -> tuple[Observed, Reads]:
    """Encode some rows, by their headers if possible. Returns what the encoding used, and its environment reads."""
    loaded = [name for name, module in tuple(sys.modules.items()) if name not in _late and _is_own_module(module)]
    before = {name: (dict(vars(sys.modules[name])), _settings_of(sys.modules[name])) for name in loaded}
    codes: dict[int, tuple[CodeType, Any]] = {}
    with noted_reads() as reads:
        for row in _some_rows(source):
            # Ignore errors: the row is measured in a moment, and its error is reported then.
            with suppress(Exception, ReadStuck):
                watched(_profiled(codes, _encoding(source, encoders, row)), lambda: "")
    own = [(code, names) for code, names in codes.values() if _is_own(code, names)]
    modules = frozenset(str(names.get("__name__")) for _, names in own) & frozenset(loaded)
    files = frozenset(code.co_filename for code, _ in own if os.path.isfile(code.co_filename))
    of_modules = {getattr(sys.modules[name], "__file__", None) for name in modules}
    before = {name: known for name, known in before.items() if name in sys.modules}
    changing = frozenset(f"{name}.{key}" for name in before for key in _changed(name, *before[name]))
    reads.whole |= {place for name in modules for place in _copies_of_environment(sys.modules[name])}
    return Observed(frozenset(reads.names), modules, files - of_modules, changing), reads


def _changed(name: str, values: dict[str, Any], settings: dict[str, str]) -> Iterator[str]:
    """Yield the names in a module that are new, or have another value, since `values` and `settings` were taken."""
    module = sys.modules[name]
    for key, setting in _settings_of(module).items():
        if key in settings and settings[key] != setting:
            yield key
    # Identity is enough, because `values` keeps the old objects alive.
    yield from (key for key, value in tuple(vars(module).items()) if values.get(key, _MISSING) is not value)


def _encoding(source: RowSource, encoders: Encoders, row: Row) -> Callable[[], Any]:
    """Return a function that encodes the row: by its header, or in full if that fails."""

    def encode() -> None:
        for encoder in filter(None, (encoders.by_header, encoders.in_full)):
            with suppress(Exception):
                encoder.sample(row, source.sample_id(0), is_watched=True)
                return

    return encode


def _some_rows(source: RowSource) -> Iterator[Row]:
    """Yield rows of different kinds, without rows that need the network."""
    spread = np.unique(np.linspace(0, max(0, len(source.rows) - 1), _NUM_ROWS_LOOKED_AT).astype(np.int64))
    seen: set[tuple[str, ...]] = set()
    for row in rows_at(source.rows, spread.tolist()) if len(source.rows) else ():
        if (kind := kinds_of(row, 0, ())) not in seen and len(seen) < _NUM_ROWS_OBSERVED:
            seen.add(kind)
            if next(image_urls(row), None) is None:
                yield with_system(row, source.system)


def _profiled(codes: dict[int, tuple[CodeType, Any]], work: Callable[[], Any]) -> Callable[[], Any]:
    """Return `work`, wrapped to note in `codes` all code that runs, also in threads that it starts."""

    is_over = False

    def note(frame: FrameType, event: str, _: Any) -> None:
        if is_over:  # in a thread that `work` started and that outlives it
            sys.setprofile(None)
            return
        # Compare by `id`, because `==` compares the whole content of code objects. `codes` keeps them alive, so no id
        # is reused.
        if event == "call" and id(frame.f_code) not in codes:
            codes[id(frame.f_code)] = frame.f_code, frame.f_globals

    def profiled() -> Any:
        nonlocal is_over
        before = sys.getprofile(), threading.getprofile()  # the user may run a profiler
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            return work()
        finally:
            is_over = True
            sys.setprofile(before[0])
            threading.setprofile(before[1])

    return profiled


_late: set[str] = set()
"""Modules that encoding imported. They are not compared, because the next start has not loaded them yet."""


@contextmanager
def late_imports() -> Iterator[None]:
    """Add the modules that are imported inside this block to `_late`."""
    before = set(sys.modules)
    try:
        yield
    finally:
        _late.update(set(sys.modules) - before)


def _is_own(code: CodeType, names: Any) -> bool:
    if os.path.isfile(code.co_filename):
        return not is_installed(code.co_filename)
    # Code from a string, as by `exec`, has no file: the module that it runs in decides.
    return not code.co_filename.startswith("<frozen") and _is_own_module(sys.modules.get(str(names.get("__name__"))))


def _is_own_module(module: ModuleType | None) -> bool:
    if not isinstance(module, ModuleType):  # a program may put anything there
        return False
    file = getattr(module, "__file__", None)
    # A module without a file is a notebook or was made by a program, unless it has a `__spec__`, as built-in ones do.
    return getattr(module, "__spec__", None) is None if file is None else not is_installed(file)


def _parts_of_module(module: ModuleType, changing: frozenset[str]) -> Any:
    """Return the functions of a module as they are loaded, and digests of the plain values that they name."""
    is_changing = {name.removeprefix(f"{module.__name__}.") for name in changing}
    functions = list(functions_of_module(module, is_changing))
    names = set().union(*(names_in(function.__code__) for function in functions))
    settings = {name: value for name, value in _settings_of(module).items() if name in names}
    # Add values that it uses from the user's other modules: `import settings`, then `settings.WORDS`.
    for other in (vars(module).get(name) for name in names):
        if isinstance(other, ModuleType) and other is not module and _is_own_module(other):
            inner = _settings_of(other)
            settings |= {f"{other.__name__}.{name}": inner[name] for name in names & set(inner)}
    kept = {name: value for name, value in settings.items() if name not in is_changing}
    return sorted(repr(parts_of_function(function)) for function in functions), kept


def _copies_of_environment(module: ModuleType) -> list[str]:
    copies = [name for name, value in tuple(vars(module).items()) if has_whole_environment(value)]
    return [f"{getattr(module, '__file__', None) or module.__name__}:{name}" for name in copies]


def _settings_of(module: ModuleType) -> dict[str, str]:
    """Return digests of the plain values of a module, and of the plain attributes of its classes and objects.

    Copies of the whole environment are skipped: nothing tells which variables are meant, and most differ at each start.
    """
    found = {}
    for name, value in tuple(vars(module).items()):
        if name[:2] == "__" or has_whole_environment(value):
            continue
        kind = value if isinstance(value, type) else type(value)
        if is_plain(value) or _is_own_module(sys.modules.get(kind.__module__)):
            with suppress(Exception):  # looking at a value may raise
                found[name] = digest_of(value if is_plain(value) else plain(value), 8)
    return found
