"""Blocks, windows and batches of documents are those of the pinned package; a saved place leads to the same ones."""

from __future__ import annotations

import json
from itertools import groupby, islice
from typing import Any

import pytest

from swift_vlpack.text import FixedBatches, TextStream, block_report, block_tokenize
from tests.pinned import pins

LENGTHS = pins.read("lengths")
TEXTS = [chr(97 + n % 26) * length for n, length in enumerate(LENGTHS["instructions"][:80])]
SHORT = [chr(97 + n % 26) * length for n, length in enumerate(LENGTHS["short"])]

BLOCKS: dict[str, dict[str, Any]] = {
    **{name: {"packing_strategy": name}
       for name in ("greedy", "greedy_uncut", "window", "first_fit", "best_fit", "exact", "binpack")},
    "not packed": {"packed": False},
    "stride": {"stride": 20},
    "stride and BOS": {"stride": 20, "bos_on_pieces": True},
    "first fit with stride": {"packing_strategy": "first_fit", "stride": 16, "min_len": 24},
    "truncated": {"overflow": False, "packing_strategy": "best_fit"},
    "bounds": {"min_len": 60, "max_len": 300},
    "bare": {"add_bos": False, "add_eos": False},
    "shuffled": {"shuffle_output": True, "seed": 3},
}  # fmt: skip
STREAMS: dict[str, dict[str, Any]] = {
    "sequential": {},
    "sequential, shuffled": {"shuffle_buffer_size": 20, "seed": 4},
    "sequential, rank 1 of 3": {"rank": 1, "num_ranks": 3, "shuffle_buffer_size": 10},
    "sequential, truncated": {"max_doc_tokens": 30, "add_bos": False},
    "bins by best fit": {"packing_mode": "bin", "packing_buffer_docs": 16},
    "bins by first fit": {"packing_mode": "bin", "packing_strategy": "first_fit", "packing_buffer_docs": 16},
    "bins by exact": {"packing_mode": "bin", "packing_strategy": "exact", "packing_buffer_docs": 32, "seed": 2},
    "bins of few": {"packing_mode": "bin", "packing_max_docs_per_bin": 3, "packing_buffer_docs": 8, "seed": 1},
    "bins, shuffled": {"packing_mode": "bin", "packing_buffer_docs": 16, "shuffle_buffer_size": 30, "seed": 6},
}


def in_runs(tokens: list[int]) -> list[list[int]]:
    """Tokens as [token, how often it follows itself]."""
    return [[token, len(list(same))] for token, same in groupby(tokens)]


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_as_pinned(name):
    made = block_tokenize({"text": [*TEXTS, ""]}, tokenizer="byte", **{"max_length": 256, **BLOCKS[name]})
    value = {
        "digest": pins.digest({column: made[column] for column in made if column != "block_counts"}),
        "columns": sorted(made),
        "num_blocks": len(made["input_ids"]),
        "first": [in_runs(ids) for ids in made["input_ids"][:3]],
        "first_starts": made["document_starts"][:5],
        "report": json.loads(json.dumps(block_report(made), default=str)),
    }
    pins.check("text", f"blocks, {name}", value)


def stream(name: str) -> TextStream:
    return TextStream([*SHORT, ""], tokenizer="byte", seq_len=63, **STREAMS[name])


def shown(windows: list[Any]) -> dict[str, Any]:
    tokens = [[window.tokens.tolist(), window.segment_ids.tolist()] for window in windows]
    return {"digest": pins.digest(tokens), "num": len(tokens), "first": [in_runs(one) for one, _ in tokens[:2]]}


@pytest.mark.parametrize("name", STREAMS)
def test_windows_are_as_pinned(name):
    made = stream(name)
    pins.check("text", f"windows, {name}", {**shown(list(made)), "counts": dict(made.counts)})


@pytest.mark.parametrize("name", STREAMS)
def test_place_in_a_stream_leads_to_the_pinned_windows(name):
    """Saved after the seventh window, through JSON."""
    before = stream(name)
    list(islice(before, 7))
    after = stream(name)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    pins.check("text", f"windows after 7, {name}", shown(list(after)))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_are_as_pinned(prefetch, drop_last):
    """Whether a thread makes them ahead, or not; and from a place after the third."""

    def batches():
        return FixedBatches(
            stream("bins, shuffled"), batch_size=2, accumulation=3, drop_last=drop_last, prefetch=prefetch,
            train_on_eos=False,
        )  # fmt: skip

    def value(made):
        arrays = [{column: batch[column].tolist() for column in sorted(batch)} for batch in made]
        return {"digest": pins.digest(arrays), "num": len(arrays)}

    with batches() as whole:
        everything = {**value(whole), "counts": dict(whole.counts)}
    with batches() as first:
        list(islice(first, 3))
        state = json.loads(json.dumps(first.state_dict()))
    with batches() as rest:
        rest.load_state_dict(state)
        everything["after 3"] = value(rest)
    pins.check("text", f"batches, drop_last={drop_last}", everything)
