"""Sizes are remembered, and measured again when something changed that they depend on."""

import pytest

from tests.data_rows import image_row
from tests.host.lengths.support import (
    ARGS,
    FAMILY,
    context_of,
    dataset,
    odd_rows,
    outcome,
    source,
    variant,
    with_lengths,
)
from tests.images import photo

pytestmark = pytest.mark.usefixtures("never_again")


def test_encoding_rows_does_not_change_what_they_are_remembered_under(tiny, tmp_path):
    """LEN-7: a template fills caches of its own while it works."""
    template = variant(tiny, "qwen3_vl", loss_scale="hermes")
    before = context_of(template)
    template.encode(odd_rows(tmp_path)["tools"])
    assert context_of(template) == before


OF_A_SOURCE = {"source system": {"default_system": "Be brief."}, "source max_pixels": {"max_pixels": 30_000}}
PATCHED = {
    "constants": ("qwen_vl_utils.vision_process.IMAGE_MAX_TOKEN_NUM", 64),
    "version": ("importlib.metadata.version", lambda name: "99"),
}
OF_THE_PROCESSOR = {"processor": ("image_processor", "merge_size", 4), "tokenizer": ("tokenizer", "chat_template", "x")}


@pytest.mark.parametrize("change", [*OF_A_SOURCE, *PATCHED, *OF_THE_PROCESSOR])
def test_what_changes_lengths_computes_them_again(change, tiny, tmp_path, monkeypatch, encoded):
    """LEN-7: what no flag of a run says, or a source says for itself."""
    rows = dataset([image_row([photo(tmp_path, "photo", 300, 200)])])
    template = variant(tiny, FAMILY)
    with_lengths(source(rows), template, ARGS, str(tmp_path))
    encoded.clear()
    with_lengths(source(rows), variant(tiny, FAMILY), ARGS, str(tmp_path))
    assert encoded == []
    settings = OF_A_SOURCE.get(change, {})
    if change in PATCHED:
        monkeypatch.setattr(*PATCHED[change])
    elif change in OF_THE_PROCESSOR:
        part, name, value = OF_THE_PROCESSOR[change]
        monkeypatch.setattr(getattr(template.processor, part), name, value)
    of_source = {name.removeprefix("default_"): value for name, value in settings.items()}
    sizes = with_lengths(source(rows, **of_source), template, ARGS, str(tmp_path)).sizes
    assert encoded
    if settings or change == "constants":
        assert sizes.lengths[0] == outcome(variant(tiny, FAMILY, **settings), rows[0]).length
