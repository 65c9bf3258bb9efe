"""Report on a data set of blocks: what became of the documents, and what single blocks look like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.text.blocks import COLUMN, NAMES, REASONS
from swift_vlpack.text.documents import Specials, has_boundaries, read_block
from swift_vlpack.words import counted

Facts = tuple[int, int | None, Mapping[str, int] | None]
"""(number of tokens, number of pieces, counts) of a block; None for columns that the data set does not have."""

_ROWS_AT_A_TIME = 1000
_LONGEST_TEXT = 400
_NUM_IDS = 24


def block_report(dataset: Any, *, max_length: int | None = None, num_documents: int | None = None) -> dict[str, Any]:
    """Print and return the counts of a data set of blocks: documents in blocks, and documents left out.

    `dataset` is the result of `datasets.map(block_tokenize)`, or of one call. Blocks of another tool have no
    `block_counts`: their capacity is `max_length`, or the longest block if that is not given. A call of `map` that made
    no block has no counts either. Give `num_documents`, the number of all documents, to have these as
    `uncounted_documents`.
    """
    totals = _totals(_facts(dataset))
    if not totals["blocks"]:
        raise DataError("there are no blocks to report on")
    capacity = max_length or totals["max_length"] or totals["longest"]
    report: dict[str, Any] = {
        "blocks": totals["blocks"],
        "documents": totals["documents"],
        "pieces": totals["pieces"],
        "tokens": totals["tokens"],
        "max_length": capacity,
        "utilisation": totals["tokens"] / (totals["blocks"] * capacity),
        "cut_documents": totals["cut_documents"],
        "repeated_tokens": totals["repeated_tokens"],
        "truncated_documents": totals["truncated_documents"],
        "truncated_tokens": totals["truncated_tokens"],
        "dropped_documents": totals["dropped_documents"],
        "dropped_tokens": sum(totals[f"{reason.value}_tokens"] for reason in REASONS),
        "dropped": {
            reason.value: {what: totals[f"{reason.value}_{what}"] for what in ("pieces", "tokens")}
            for reason in REASONS
            if totals[f"{reason.value}_pieces"]
        },
    }
    if num_documents is not None:
        report["uncounted_documents"] = num_documents - report["documents"] - report["dropped_documents"]
    print(_text(report))
    return report


def _facts(dataset: Any) -> Iterator[Facts]:
    """Yield the facts of each block of a data set, a list of rows, or the columns that one call returned."""
    if isinstance(dataset, Mapping):
        if "input_ids" not in dataset:
            raise DataError(f"these are several data sets ({', '.join(map(str, dataset))}); report on one of them")
        yield from _facts(dict(zip(dataset, values, strict=True)) for values in zip(*dataset.values(), strict=True))
    elif hasattr(dataset, "with_format") and hasattr(dataset, "iter"):
        for table in dataset.with_format("arrow").iter(batch_size=_ROWS_AT_A_TIME):
            yield from zip(*_facts_of_table(table), strict=True)
    else:
        for row in dataset:
            starts = row.get("document_starts")
            yield len(row["input_ids"]), None if starts is None else len(starts), row.get(COLUMN)


def _facts_of_table(table: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the facts of a table without reading a token: an Arrow column knows the lengths of its lists."""
    import pyarrow.compute as pc

    names, nothing = set(table.column_names), [None] * len(table)
    return (
        pc.list_value_length(table["input_ids"]).to_pylist(),
        pc.list_value_length(table["document_starts"]).to_pylist() if "document_starts" in names else nothing,
        table[COLUMN].to_pylist() if COLUMN in names else nothing,
    )


def _totals(blocks: Iterable[Facts]) -> Counter[str]:
    """Add up the facts of all blocks; `max_length` and `longest`, the most tokens of a block, are maxima."""
    totals: Counter[str] = Counter()
    for num_tokens, num_starts, counts in blocks:
        num_pieces = 1 if num_starts is None else num_starts
        totals["longest"] = max(totals["longest"], num_tokens)
        totals.update(blocks=1, tokens=num_tokens, pieces=num_pieces)
        if counts is None:
            totals["documents"] += num_pieces
            continue
        totals.update({name: int(counts[name]) for name in NAMES if name != "max_length"})
        totals["max_length"] = max(totals["max_length"], int(counts["max_length"]))
    return totals


def _text(report: Mapping[str, Any]) -> str:
    cut, truncated = report["cut_documents"], report["truncated_documents"]
    lines = [
        f"blocks       {report['blocks']} of {report['max_length']} tokens, {report['utilisation']:.2%} used",
        f"documents    {report['documents']} in {counted(report['pieces'], 'piece')}, {report['tokens']} tokens",
        f"cut          {counted(cut, 'document')}, {report['repeated_tokens']} tokens repeated as context",
        f"truncated    {counted(truncated, 'document')}, {report['truncated_tokens']} tokens",
        f"dropped      {counted(report['dropped_documents'], 'document')} and {report['dropped_tokens']} tokens"
        f"{_by_reason(report['dropped'])}",
    ]
    if "uncounted_documents" in report:
        lines.append(f"uncounted    {counted(report['uncounted_documents'], 'document')} of calls that made no block")
    return "\n".join(lines)


def _by_reason(dropped: Mapping[str, Mapping[str, int]]) -> str:
    said: Sequence[str] = [f"{reason} {counts['pieces']}" for reason, counts in dropped.items()]
    return f" ({', '.join(said)})" if said else ""


# -- single blocks ----------------------------------------------------------------------------------------------------


def saved_blocks(folder: Path) -> Any:
    """Load a data set of blocks that `datasets.save_to_disk` wrote."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.name for path in folder.iterdir() if path.is_dir())
        raise ConfigError(f"{folder}: these are several data sets; name one of them: {', '.join(splits)}")
    if not (folder / "state.json").is_file():
        raise ConfigError(
            f"{folder} is not a data set that `save_to_disk` wrote; name such a folder, or give the --model of the run "
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
    """Describe the first blocks: tokens, features, and the place of every document; with a tokenizer also its text."""
    return [_example(blocks[number], number, tokenizer) for number in range(min(num_examples, len(blocks)))]


def _example(block: Mapping[str, Any], number: int, tokenizer: Any) -> dict[str, Any]:
    row = read_block(block, f"block {number}", Specials(None, None, None), by_tokens=False)
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
    """Yield the lines that show examples in a terminal."""
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
