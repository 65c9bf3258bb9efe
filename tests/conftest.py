"""What the tests of the data and host layers share: tiny real models, built once a session."""

from __future__ import annotations

import gc
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import skips
from tests.environment import packing_options, restored_environment
from tests.forks import keep_freed_memory, maps_in_this_process

# One thread: two that share a busy machine with others wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("USE_HF", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Lengths are remembered; tests must not remember those of other runs.
os.environ.setdefault("MODELSCOPE_CACHE", tempfile.mkdtemp(prefix="vlpack-cache-"))

keep_freed_memory()

ORDER = ("e2e", "host", "cli")
HOSTED = ("host", "cli", "pinned")
"""Folders of tests that run ms-swift in this process."""


def _folder(path: Path) -> str:
    """The folder of `tests/` that a file is in."""
    return path.relative_to(Path(__file__).parent).parts[0]


def pytest_configure(config: pytest.Config) -> None:
    """In CI a test may be skipped for the listed reasons only."""
    skips.register(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, so that no process idles at the end while the other one still trains."""
    rank = {folder: number for number, folder in enumerate(ORDER)}
    items.sort(key=lambda item: rank.get(_folder(item.path), len(ORDER)))


def pytest_collection_finish() -> None:
    """What the imports made stays to the end; the collector, which transformers calls often, need not look at it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """At exit torch's bindings would be told to have leaked."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Every test leaves the environment as it was."""
    with restored_environment():
        yield


@pytest.fixture(scope="module", autouse=True)
def _environment_of_module() -> Iterator[None]:
    """And so does every file with what its fixtures set."""
    with restored_environment():
        yield


@pytest.fixture(scope="module", autouse=True)
def _maps(request: pytest.FixtureRequest) -> Iterator[None]:
    """Rows are mapped in this process, but where a test asks for `forked_maps`."""
    with maps_in_this_process() if _folder(request.path) in HOSTED else nullcontext():
        yield


@pytest.fixture
def forked_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are mapped in other processes, as in every run of a user."""
    from datasets import Dataset

    monkeypatch.setattr(Dataset, "map", Dataset.map.__wrapped__)


@pytest.fixture
def never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No remembered row is looked at again, in tests that count what is encoded."""
    import numpy as np

    from swift_vlpack.lengths.measured_sizes import MeasuredSizes

    none = np.zeros(0, np.int64)
    monkeypatch.setattr(MeasuredSizes, "to_look_at_again", lambda sizes: (none, none))


def _is_first(record: logging.LogRecord) -> bool:
    """Not a line of a room without ms-swift that ms-swift's log was handed and that the root hears again."""
    is_handed_on = record.name != "swift_vlpack" and not record.name.startswith("swift_vlpack.")
    return not (is_handed_on and re.search(r"/swift_vlpack/(?!(host|cli)/)", record.pathname))


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Also the lines of this package once they go to ms-swift's log instead of the root, and those once."""
    ours = logging.getLogger("swift_vlpack")
    rooms = [logging.getLogger(f"swift_vlpack.{room}") for room in ("rows", "lengths", "feed", "attention", "proof")]
    before = ours.propagate, ours.level, [room.level for room in rooms]
    ours.propagate = False
    ours.setLevel(logging.NOTSET)
    for room in rooms:
        room.setLevel(logging.NOTSET)
    ours.addHandler(caplog.handler)
    caplog.handler.addFilter(_is_first)
    yield caplog
    caplog.handler.removeFilter(_is_first)
    ours.removeHandler(caplog.handler)
    ours.propagate = before[0]
    ours.setLevel(before[1])
    for room, level in zip(rooms, before[2], strict=True):
        room.setLevel(level)


@pytest.fixture
def options() -> Callable[..., None]:
    """`options(packing_strategy="exact")` sets a packing option for the runs of this test; others are not set."""
    packing_options()

    def add(**values: Any) -> None:
        os.environ.update({f"VLPACK_{name.upper()}": str(value) for name, value in values.items()})

    return add


@pytest.fixture
def no_other_bars() -> None:
    """Bars that a test before has left open would move these to other lines."""
    from tqdm import tqdm

    instances = list(getattr(tqdm, "_instances", ()))
    for bar in instances:
        bar.close()


class Tiny(NamedTuple):
    """A model, ms-swift's template for it, and the folder both were loaded from."""

    family: str
    folder: Path
    model: Any
    template: Any


def load_tiny(folder: Path, family: str) -> Tiny:
    """The model of a folder with its template, by ms-swift's own loading, with our attention."""
    import torch
    from swift.model import get_model_processor
    from swift.template import get_template

    from swift_vlpack.attention import attention

    attention.register()
    model, processor = get_model_processor(
        str(folder), model_type=family, torch_dtype=torch.float32, attn_impl=attention.NAME, use_hf=True
    )
    template = get_template(processor, template_type=family, max_length=2048)
    template.set_mode("train")
    template.model = model
    return Tiny(family, folder, model, template)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model of a family, written on first use."""
    from tests.tiny import save_model

    root = tmp_path_factory.mktemp("tiny")
    return cache(lambda family: save_model(root / family, family))


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The same with 4,000 tokens instead of 152,000: trains ten times as fast, in this process only."""
    from tests.tiny import save_model, use_ids_of_tokenizer

    use_ids_of_tokenizer()
    root = tmp_path_factory.mktemp("small")
    return cache(lambda family: save_model(root / family, family, is_small=True))


@pytest.fixture(scope="session")
def tiny(small_folder: Callable[[str], Path]) -> Callable[[str], Tiny]:
    """A tiny model with its template, by ms-swift's own loading, with our attention; fresh modes, shared weights.

    It has the small vocabulary, because a step computes logits of all tokens, and a start of the length pass reads all
    tokens for its key.
    """

    load = cache(lambda family: load_tiny(small_folder(family), family))

    def fresh(family: str) -> Tiny:
        made = load(family)
        made.template.packing = made.template.padding_free = False
        made.model.eval()
        made.model.zero_grad()
        return made

    return fresh


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with the small vocabulary."""
    from tests.tiny import save_text_model

    return save_text_model(tmp_path_factory.mktemp("text") / "model")
