"""Documents: `block_tokenize` against TRL's `pack_dataset`, and `PackedCollator` against transformers' collators.

python -m benchmarks.documents [--num_documents 1000]

The documents are the Python modules of the installed packages, by Qwen's own vocabulary (from dashscope, as in the
tests). TRL is needed for its rows only (`pip install trl`; it comes with ms-swift). Its `bfd_split` is of TRL 1.0 and
later; `bfd-requeue` was its name before.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sysconfig
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset

from swift_vlpack.text import PackedCollator, block_report, block_tokenize
from tests.tiny import build_tokenizer

BATCH = 1000
CAPACITIES = (2048, 8192)
BARE = {"add_bos": False, "add_eos": False}
OURS = ("greedy", "greedy_uncut", "best_fit", "exact", "window")


class Known:
    """Hands out tokens that are there already, so that packing is timed and not tokenizing."""

    bos_token_id = eos_token_id = None

    def __init__(self, ids: list[list[int]]) -> None:
        self._ids = ids

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [self._ids[int(text)] for text in texts]}


def documents(num_documents: int) -> list[str]:
    """Texts of every length, the same on every run of one installation."""
    files = sorted(Path(sysconfig.get_paths()["purelib"]).glob("*/**/*.py"), key=lambda path: hash_of(path.name))
    texts = (path.read_text(encoding="utf-8", errors="ignore") for path in files)
    return [text for _, text in zip(range(num_documents), filter(str.strip, texts), strict=False)]


def hash_of(name: str) -> int:
    """An order that owes nothing to packages."""
    return sum(ord(letter) * 31**at for at, letter in enumerate(name)) % 1_000_003


def timed(work: Callable[[], Any], num_runs: int = 2) -> tuple[float, Any]:
    """The faster of two runs, and what it gave."""
    fastest, made = float("inf"), None
    for _ in range(num_runs):
        start = time.perf_counter()
        made = work()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest, made


def line(name: str, *cells: str) -> None:
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def ours(ids: list[list[int]], capacity: int, strategy: str) -> tuple[float, dict[str, float]]:
    """Seconds of one `map`, and its report in words common to all."""
    names = Dataset.from_dict({"text": [str(number) for number in range(len(ids))]})
    options = {"max_length": capacity, "packing_strategy": strategy, **BARE}
    function = partial(block_tokenize, tokenizer=Known(ids), **options)
    mapped = {"batched": True, "batch_size": BATCH, "remove_columns": ["text"], "load_from_cache_file": False}
    # Without a fingerprint `map` would make one of all tokens, which here are in the function.
    seconds, made = timed(lambda: names.map(function, new_fingerprint=uuid.uuid4().hex, **mapped))
    with contextlib.redirect_stdout(io.StringIO()):
        report = block_report(made)
    needless = _cut_although_they_fit(ids, made, capacity)
    return seconds, {**report, "needless": needless, "lost": report["dropped_tokens"] + report["truncated_tokens"]}


def _cut_although_they_fit(ids: list[list[int]], made: Dataset, capacity: int) -> int:
    """Documents that fit into a block and are in more than one piece."""
    pieces = Counter(
        tuple(row["input_ids"][start:end])
        for row in made
        for start, end in pairwise([*row["document_starts"], len(row["input_ids"])])
    )
    whole = Counter(tuple(document) for document in ids if len(document) <= capacity)
    return (whole - pieces).total()


def trls(ids: list[list[int]], capacity: int, strategy: str) -> tuple[float, dict[str, float]]:
    """The same of TRL."""
    from trl import pack_dataset

    rows = Dataset.from_dict({"input_ids": ids})
    options = {"batch_size": BATCH, "load_from_cache_file": False}
    seconds, made = timed(lambda: pack_dataset(rows, seq_length=capacity, strategy=strategy, map_kwargs=options))
    num_tokens = sum(len(row["input_ids"]) for row in made)
    lost = sum(map(len, ids)) - num_tokens
    too_long = sum(len(document) > capacity for document in ids)
    cut = _cut_by_wrapping(ids, capacity) if strategy == "wrapped" else (too_long, 0)
    return seconds, {
        "blocks": len(made),
        "utilisation": num_tokens / (len(made) * capacity),
        "cut_documents": 0 if strategy == "bfd" else cut[0],
        "truncated_documents": too_long if strategy == "bfd" else 0,
        "needless": cut[1],
        "lost": lost,
    }


def _cut_by_wrapping(ids: list[list[int]], capacity: int) -> tuple[int, int]:
    """Documents that a cut every `capacity` tokens goes through, batch by batch, and those of them that would fit."""
    cut = needless = 0
    for first in range(0, len(ids), BATCH):
        at = 0
        for document in ids[first : first + BATCH]:
            is_cut = at // capacity != (at + len(document) - 1) // capacity
            cut += is_cut
            needless += is_cut and len(document) <= capacity
            at += len(document)
    return cut, needless


def trl_strategies() -> Iterator[str]:
    """Those of the TRL that is installed; none, with a word, where it is not."""
    try:
        import trl
        from trl import pack_dataset
    except ImportError as error:
        print(f"TRL cannot be imported ({error}): its rows are missing. pip install trl\n")
        return
    print(f"TRL {trl.__version__}\n")
    empty = Dataset.from_dict({"input_ids": [[1]]})
    for strategy in ("bfd", "bfd_split", "bfd-requeue", "wrapped"):
        with contextlib.suppress(ValueError):
            pack_dataset(empty, seq_length=4, strategy=strategy)
            yield strategy


def compare_packing(ids: list[list[int]]) -> None:
    num_tokens = sum(map(len, ids))
    candidates = [(f"TRL {name}", trls, name) for name in trl_strategies()] + [
        (f"`{name}`", ours, name) for name in OURS
    ]
    for capacity in CAPACITIES:
        too_long = sum(len(document) > capacity for document in ids)
        print(f"\n{len(ids)} documents, {num_tokens} tokens, blocks of {capacity}; {too_long} documents are longer\n")
        line("packing", "blocks", "used", "documents cut", "of them would fit", "tokens lost", "million tokens/s")
        print("|---|---|---|---|---|---|---|")
        for name, run, strategy in candidates:
            seconds, of = run(ids, capacity, strategy)
            cells = (
                f"{of['blocks']:.0f}",
                f"{of['utilisation']:.1%}",
                f"{of['cut_documents']:.0f}",
                f"{of['needless']:.0f}",
            )
            line(name, *cells, f"{of['lost']:.0f}", f"{num_tokens / seconds / 1e6:.2f}")


def compare_from_text(texts: list[str], tokenizer: Any, num_tokens: int) -> None:
    """Tokenizing included, as people run it."""
    rows, capacity = Dataset.from_dict({"text": texts}), CAPACITIES[0]
    options = {"batched": True, "batch_size": BATCH, "remove_columns": ["text"], "load_from_cache_file": False}

    def tokenized() -> Dataset:
        return rows.map(
            lambda batch: {"input_ids": tokenizer(batch["text"], return_attention_mask=False)["input_ids"]}, **options
        )

    def through_trl() -> Any:
        from trl import pack_dataset

        return pack_dataset(tokenized(), seq_length=capacity, map_kwargs={"load_from_cache_file": False})

    options_of_blocks = {"max_length": capacity, "packing_strategy": "best_fit", **BARE}
    function = partial(block_tokenize, tokenizer=tokenizer, **options_of_blocks)
    ways = {"tokenizing alone": tokenized, "`block_tokenize`": lambda: rows.map(function, **options)}
    with contextlib.suppress(ImportError):
        import trl  # noqa: F401

        ways["tokenizing and TRL bfd"] = through_trl
    print("\nFrom text, one process:\n")
    line("way", "seconds", "million tokens/s")
    print("|---|---|---|")
    for name, way in ways.items():
        seconds, _ = timed(way)
        line(name, f"{seconds:.2f}", f"{num_tokens / seconds / 1e6:.2f}")


def compare_collators(ids: list[list[int]], tokenizer: Any) -> None:
    from transformers import DataCollatorForLanguageModeling, DataCollatorWithFlattening

    capacity, rows_per_batch = CAPACITIES[0], 8
    short = [document[:capacity] for document in ids]
    made = block_tokenize(
        {"text": [str(number) for number in range(len(short))]}, tokenizer=Known(short), max_length=capacity,
        packing_strategy="best_fit", **BARE,
    )  # fmt: skip
    blocks = [dict(zip(made, values, strict=True)) for values in zip(*made.values(), strict=True)]
    plain = [{"input_ids": document} for document in short]
    ways = {
        "`PackedCollator` on blocks": (blocks, PackedCollator(tokenizer)),
        "`PackedCollator(cu_seqlens=True)` on blocks": (blocks, PackedCollator(tokenizer, cu_seqlens=True)),
        "transformers `DataCollatorWithFlattening` on documents": (
            plain, DataCollatorWithFlattening(return_flash_attn_kwargs=True),
        ),
        "transformers `DataCollatorForLanguageModeling` on documents": (
            plain, DataCollatorForLanguageModeling(tokenizer, mlm=False),
        ),
        "`PackedCollator` on documents": (plain, PackedCollator(tokenizer, packed_sequences=False)),
    }  # fmt: skip
    print(f"\nBatches of {rows_per_batch} rows, documents truncated to {capacity} tokens:\n")
    line("collator", "padding", "tokens in a batch, least and most", "million real tokens/s")
    print("|---|---|---|---|")
    for name, (rows, collator) in ways.items():
        chunks = [rows[at : at + rows_per_batch] for at in range(0, len(rows), rows_per_batch)]
        seconds, batches = timed(lambda chunks=chunks, collator=collator: [collator(list(chunk)) for chunk in chunks])
        sizes = [batch["input_ids"].numel() for batch in batches[:-1]]
        real = sum(len(row["input_ids"]) for row in rows)
        total = sum(batch["input_ids"].numel() for batch in batches)
        line(name, f"{1 - real / total:.1%}", f"{min(sizes)}, {max(sizes)}", f"{real / seconds / 1e6:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_documents", type=int, default=1000)
    datasets.disable_progress_bars()
    tokenizer = build_tokenizer()
    texts = documents(parser.parse_args().num_documents)
    ids = [list(one) for one in tokenizer(texts, verbose=False)["input_ids"]]
    compare_packing(ids)
    compare_from_text(texts, tokenizer, sum(map(len, ids)))
    compare_collators(ids, tokenizer)


if __name__ == "__main__":
    main()
