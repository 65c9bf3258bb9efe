"""Blocks as a person reads them: how many tokens and documents, which features, and the text of each document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.text.rows import Specials, has_boundaries, row_of
from swift_vlpack.words import counted

_LONGEST_TEXT = 400
_NUM_IDS = 24


def saved_blocks(folder: Path) -> Any:
    """Load a data set of blocks that `datasets.save_to_disk` wrote."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.name for path in folder.iterdir() if path.is_dir())
        raise ConfigError(f"{folder}: these are several data sets; name one of them: {', '.join(splits)}")
    if not (folder / "state.json").is_file():
        raise ConfigError(
            f"{folder} is no data set that `save_to_disk` wrote; name such a folder, or give the --model of the run "
            "whose packs you want to see"
        )
    from datasets import load_from_disk

    blocks = load_from_disk(str(folder))
    if "input_ids" not in blocks.column_names:
        raise DataError(
            f"{folder} has no blocks: there is no input_ids among its features ({', '.join(blocks.column_names)})"
        )
    return blocks


def examples_of(blocks: Any, num_examples: int, tokenizer: Any = None) -> list[dict[str, Any]]:
    """Describe the first blocks: tokens, features, and of every document its place and, with a tokenizer, its text."""
    return [_example(blocks[number], number, tokenizer) for number in range(min(num_examples, len(blocks)))]


def _example(block: Mapping[str, Any], number: int, tokenizer: Any) -> dict[str, Any]:
    row = row_of(block, f"block {number}", Specials(None, None, None), by_tokens=False)
    ends = [*row.documents.document_starts, len(row.tokens)]
    documents = []
    for start, end in pairwise(ends):
        ids = row.tokens[start:end].tolist()
        text = {} if tokenizer is None else {"text": tokenizer.decode(ids)}
        documents.append({"start": start, "end": end, "input_ids": ids, **text})
    return {
        "block": number,
        "tokens": len(row.tokens),
        "features": [name for name, value in block.items() if value is not None],
        "has_boundaries": has_boundaries(block),
        "documents": documents,
    }


def text_of_examples(examples: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a terminal."""
    for example in examples:
        documents = example["documents"]
        yield (
            f"------------- {example['block']} Tokens: {example['tokens']}, Documents: {len(documents)}, Features: "
            f"{', '.join(example['features'])} -------------"
        )
        if not example["has_boundaries"] and "document_starts" not in example["features"]:
            yield "(no feature says where documents start: the block counts as one)"
        for document in documents:
            yield f"[{document['start']}:{document['end']}] {_shown(document)}"


def _shown(document: Mapping[str, Any]) -> str:
    if "text" not in document:
        ids = document["input_ids"]
        rest = f" ... {counted(len(ids), 'token')}" if len(ids) > _NUM_IDS else ""
        return " ".join(map(str, ids[:_NUM_IDS])) + rest
    text = document["text"]
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} ... {len(text)} characters"
