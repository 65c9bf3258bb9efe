"""Sizes are remembered, and measured again when something changed that they depend on."""

import os
from pathlib import Path

import pytest

from tests.data_rows import image_row, text_row
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
from tests.images import noise, photo
from tests.marks import telling

pytestmark = pytest.mark.usefixtures("never_again")


def test_encoding_rows_does_not_change_what_they_are_remembered_under(tiny, tmp_path):
    """LEN-7: a template fills caches of its own while it works."""
    template = variant(tiny, "qwen3_vl", loss_scale="hermes")
    before = context_of(template)
    template.encode(odd_rows(tmp_path)["tools"])
    assert context_of(template) == before


@pytest.mark.parametrize(
    "change",
    ["size", "time", "max_length", "truncation", "default_system", "max_pixels", "source system", "source max_pixels",
     "environment", "constants", "version", telling("template"), "thinking", "agent", "processor", "tokenizer",
     "tagged file"],
)  # fmt: skip
def test_what_changes_lengths_computes_them_again(change, tiny, tmp_path, monkeypatch, encoded):
    """LEN-7"""
    path = Path(photo(tmp_path, "photo", 300, 200))
    row = text_row(f"<img>{path}</img>what") if change == "tagged file" else image_row([str(path)])
    rows = dataset([row])
    template, options = variant(tiny, FAMILY), {}
    with_lengths(source(rows), template, ARGS, str(tmp_path))
    encoded.clear()
    with_lengths(source(rows), variant(tiny, FAMILY), ARGS, str(tmp_path))
    assert encoded == []
    if change in ("size", "tagged file"):
        noise(500, 300).save(path)
    elif change == "time":
        os.utime(path, ns=(0, 0))
    elif change in ("max_length", "truncation", "default_system", "max_pixels", "thinking", "agent"):
        value = {
            "max_length": {"max_length": 2000}, "truncation": {"truncation_strategy": "left"},
            "default_system": {"default_system": "Be brief."}, "max_pixels": {"max_pixels": 30_000},
            "thinking": {"response_prefix": "<think>"}, "agent": {"agent_template": "react_en"},
        }[change]  # fmt: skip
        template = variant(tiny, FAMILY, **value)
    elif change == "template":
        template = variant(tiny, "qwen2_vl")
    elif change.startswith("source"):
        options = {"source system": {"system": "Be brief."}, "source max_pixels": {"max_pixels": 30_000}}[change]
    elif change == "environment":
        monkeypatch.setenv("QWENVL_BBOX_FORMAT", "new")
    elif change == "constants":
        monkeypatch.setattr("qwen_vl_utils.vision_process.IMAGE_MAX_TOKEN_NUM", 64)
    elif change == "version":
        monkeypatch.setattr("importlib.metadata.version", lambda name: "99")
    elif change == "processor":
        monkeypatch.setattr(template.processor.image_processor, "merge_size", 4)
    else:
        monkeypatch.setattr(template.tokenizer, "chat_template", "another")
    sizes = with_lengths(source(rows, **options), template, ARGS, str(tmp_path)).sizes
    assert len(encoded) > 0
    if change in (
        "size",
        "tagged file",
        "max_pixels",
        "default_system",
        "source system",
        "source max_pixels",
        "constants",
    ):
        full = template if not options else variant(tiny, FAMILY, default_system=options.get("system"),
                                                    max_pixels=options.get("max_pixels"))  # fmt: skip
        assert sizes.lengths[0] == outcome(full, rows[0]).length
