"""The referee on models after `prepare_model`, whose hook hands them embeddings, with this package's own collator."""

from functools import partial

import pytest

from swift_vlpack import Collator, prepare_model, verify
from swift_vlpack.attention import prepare
from swift_vlpack.errors import IsolationError
from swift_vlpack.feed.collate import batch_of
from tests.host.proof.conftest import as_loaded

KINDS = ("image", "text", "images", "words")


@pytest.fixture
def prepared(small):
    """A family, prepared for a trainer of one's own, with its collator of lists of samples."""
    made = []

    def load(family):
        loaded = small(family)
        loaded.template.packing = loaded.template.padding_free = False
        loaded.template.remove_post_encode_hook()
        made.append(loaded)
        return prepare_model(loaded.model, loaded.template).train(), loaded.template

    yield load
    for loaded in made:
        for handle in prepare._hooks.pop(loaded.model, ()):
            handle.remove()
        as_loaded(loaded.model)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_5"])
def test_images_of_a_prepared_model_are_verified_with_our_collator(prepared, encoded, family):
    """REF-2: positions on three axes, which the model makes of grids only where it is given tokens."""
    model, template = prepared(family)
    collator = Collator(template)
    samples = encoded(template, KINDS)
    said = verify(model, lambda some: collator([some]), samples)
    assert said.startswith("isolation verified: max difference 0.0 over 4 samples, attention vlpack")
    with pytest.raises(IsolationError, match=r"positions of image:0 .*\(time\)"):
        verify(model, partial(with_running_positions, collator), samples)


def with_running_positions(collator, samples):
    """The collator, but for positions that run on over the row."""
    made = collator([samples])
    positions = made["position_ids"].clone()
    positions[..., :] = positions.new_tensor(range(positions.shape[-1]))
    return batch_of({**made, "position_ids": positions}, made.record, made.beside)
