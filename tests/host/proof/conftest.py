"""Tiny real models as they train, and samples for them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from swift_vlpack.attention import attention
from swift_vlpack.attention.linear_attention import RESTARTED, restart_at_boundaries
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.samples import SampleId
from tests.conftest import Tiny, load_tiny
from tests.data_rows import image_row, mixed_and_wordy_data, text_row
from tests.host.proof.runners import template_model
from tests.images import photo


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Rows to train in runs that the proof looks at."""
    return mixed_and_wordy_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def small(small_folder):
    """A family with its template, by ms-swift's own loading, with our attention and a small vocabulary."""
    return cache(lambda family: load_tiny(small_folder(family), family))


@pytest.fixture
def training(small):
    """A family as it trains: with ms-swift's hook on the model, which puts images into the embeddings."""
    made = []

    def load(family: str) -> Tiny:
        loaded: Tiny = small(family)
        loaded.template.packing = loaded.template.padding_free = False
        loaded.template.register_post_encode_hook([loaded.model])
        loaded.model.eval()
        made.append(loaded)
        return loaded

    yield load
    for loaded in made:
        loaded.template.remove_post_encode_hook()
        as_loaded(loaded.model)


def as_loaded(model: Any) -> None:
    """Take away what a test has put on a model that other tests share."""
    restart_at_boundaries(model, leave=RESTARTED)
    model.set_attn_implementation(attention.NAME)
    model.zero_grad()
    model.eval()


@pytest.fixture
def proof_model(training):
    """What the proof looks at, of a family."""
    return lambda family: template_model(training(family))


@pytest.fixture(scope="session")
def rows(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """Rows of every kind."""
    return rows_in(tmp_path_factory.mktemp("pictures"))


def rows_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Rows of every kind, with their images in a folder. `wide` and `tall` have as many patches, and other grids."""
    sizes = [(160, 90), (70, 140), (64, 64), (168, 84), (84, 168), (160, 90)]
    one, two, three, wide, tall, like = (photo(folder, str(n), *size, seed=n) for n, size in enumerate(sizes))
    frames = [photo(folder, f"frame{n}", 96, 64, seed=10 + n) for n in range(4)]
    return {
        "image": image_row([one], "what is it", "a noisy picture of many colours"),
        "images": image_row([two, three], "compare them", "the first is larger"),
        "like": image_row([like], "what is it", "another picture of one size"),
        "wide": image_row([wide], "how wide", "as wide as that"),
        "tall": image_row([tall], "how tall", "as tall as that"),
        "text": text_row("how are you today?", "fine, thanks a lot"),
        "words": text_row("tell me more of it", "there is nothing more to tell, so I stop here and now"),
        "video": {**text_row("<video>what happens", "nothing much"), "videos": [frames[:2]]},
        "film": {**text_row("<video>and then", "the end"), "videos": [frames[2:]]},
        "action": text_row("what next?", "Thought: look\nAction: open\nAction Input: door"),
    }


@pytest.fixture
def encoded(rows):
    """Rows of these kinds, encoded by a template."""
    return lambda template, kinds: [
        RowEncoder(template).sample(rows[kind], SampleId(kind, number), strict=True)
        for number, kind in enumerate(kinds)
    ]
