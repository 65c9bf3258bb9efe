"""Ask the referee about well-known collators: `python -m benchmarks.collators` prints the table of docs/referee.md.

Each collator gets samples as its own trainer hands them over, and a tiny model without a cache, as transformers'
Trainer runs it. What is not installed has a row that says so; none of it is a dependency of this package:

    pip install trl
    pip install --no-deps --target FOLDER llamafactory    # it wants older versions of what is here
    PYTHONPATH=FOLDER python -m benchmarks.collators
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from swift_vlpack.attention import attention
from swift_vlpack.errors import IsolationError
from swift_vlpack.proof.verify import Collator, verify
from tests.proof import collators as c

TRANSFORMERS, TRL, FACTORY, OURS = "transformers", "trl", "llamafactory", "swift-vlpack"
HOLDS, FAILS, ABSENT = "isolated", "**not isolated**", "not installed"
Made = tuple[Any, Collator, Sequence[Any]]


class Case(NamedTuple):
    """One row of the table."""

    library: str
    collator: str
    """As it is called, with what else is set."""
    family: str
    attention: str
    make: Callable[[Any], Collator]
    """Makes the collator for a model."""
    has_cache: bool = False
    samples: Callable[[Any], Sequence[Any]] = c.samples_of


class Row(NamedTuple):
    """What the referee says of a case."""

    case: Case
    verdict: str
    cause: str


# -- collators --------------------------------------------------------------------------------------------------------


def flattening(model: Any, **options: Any) -> Collator:
    from transformers import DataCollatorWithFlattening

    return DataCollatorWithFlattening(**options)


def padding_free(model: Any, **options: Any) -> Collator:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    return DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, **options)


def packed_rows(model: Any) -> Collator:
    """Rows as `trl.pack_dataset(strategy="bfd")` makes them: documents end to end, and their lengths beside them."""
    collator = padding_free(model)
    return lambda samples: collator([{**joined(samples), "seq_lengths": c.lengths_of(samples)}])


def wrapped_rows(model: Any) -> Collator:
    """Rows as `trl.pack_dataset(strategy="wrapped")` makes them: documents end to end."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collator = DataCollatorForLanguageModeling(pad_token_id=0)
    return lambda samples: collator([joined(samples)])


def neat_packing(model: Any, *, reads_mask: str) -> Collator:
    """Rows as LLaMA-Factory's `neat_packing` makes them, and the 4-D mask that its collator makes of their numbers."""
    import torch
    from llamafactory.data.collator import prepare_4d_attention_mask

    def collate(samples: Sequence[Any]) -> dict[str, Any]:
        row = joined(samples)
        numbers = c.numbers_of(samples)
        mask = numbers if reads_mask == "flash_attention_2" else prepare_4d_attention_mask(numbers, torch.float32)
        positions = [number for length in c.lengths_of(samples) for number in range(length)]
        fields = {"input_ids": row["input_ids"], "labels": row["labels"], "position_ids": positions}
        return {name: torch.tensor([values]) for name, values in fields.items()} | {"attention_mask": mask}

    return collate


def ours(model: Any) -> Collator:
    from types import SimpleNamespace

    from swift_vlpack.text import PackedCollator

    return PackedCollator(SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=0), cu_seqlens=True)


def joined(samples: Sequence[Any]) -> dict[str, list[int]]:
    """Documents end to end."""
    return {name: [number for one in samples for number in one[name]] for name in ("input_ids", "labels")}


# -- cases ------------------------------------------------------------------------------------------------------------


def with_options(make: Callable[..., Collator], **options: Any) -> Callable[[Any], Collator]:
    return lambda model: make(model, **options)


VLPACK = "vlpack"
ENDS_ONLY = {"return_flash_attn_kwargs": True, "return_position_ids": False}
CASES = (
    Case(TRANSFORMERS, "`DataCollatorWithFlattening()`", c.TEXT, "sdpa", flattening),
    Case(TRANSFORMERS, "the same, `use_cache=True`", c.TEXT, "sdpa", flattening, has_cache=True),
    Case(
        TRANSFORMERS,
        "`return_flash_attn_kwargs=True, return_position_ids=False`",
        c.TEXT,
        "sdpa",
        with_options(flattening, **ENDS_ONLY),
    ),
    Case(TRANSFORMERS, "the same", c.TEXT, VLPACK, with_options(flattening, **ENDS_ONLY)),
    Case(TRANSFORMERS, "`DataCollatorWithFlattening()`, images", "qwen2_5_vl", "sdpa", flattening),
    Case(TRANSFORMERS, "`DataCollatorWithFlattening()`, images", c.INTERN, "sdpa", flattening),
    Case(TRL, "`DataCollatorForLanguageModeling(padding_free=True)`", c.TEXT, "sdpa", padding_free),
    Case(TRL, "the same, `use_cache=True`", c.TEXT, "sdpa", padding_free, has_cache=True),
    Case(TRL, "`pad_to_multiple_of=64`", c.TEXT, "sdpa", with_options(padding_free, pad_to_multiple_of=64)),
    Case(TRL, "`pack_dataset`, `bfd`", c.TEXT, "sdpa", packed_rows),
    Case(TRL, "`pack_dataset`, `wrapped`", c.TEXT, "sdpa", wrapped_rows),
    Case(TRL, "`padding_free=True`, images", "qwen2_5_vl", "sdpa", padding_free),
    Case(FACTORY, "`neat_packing`, 4-D mask", c.TEXT, "sdpa", with_options(neat_packing, reads_mask="sdpa")),
    Case(
        FACTORY,
        "`neat_packing`, mask for flash-attn",
        c.TEXT,
        "sdpa",
        with_options(neat_packing, reads_mask="flash_attention_2"),
    ),
    Case(OURS, "`PackedCollator(cu_seqlens=True)`", c.TEXT, VLPACK, ours, has_cache=True),
)


def judged(case: Case, folder: Path) -> Row:
    """Ask the referee."""
    if version_of(case.library) is None:
        return Row(case, ABSENT, "")
    model = c.model_of(case.family, folder, case.attention)
    c.use_cache(model, yes=case.has_cache)
    try:
        verify(model, case.make(model), case.samples(model))
    except IsolationError as error:
        return Row(case, FAILS, error.cause)
    return Row(case, HOLDS, "")


def version_of(library: str) -> str | None:
    """Return the version of a library, or None if it is not installed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def table(rows: Sequence[Row]) -> str:
    """Make a table in Markdown."""
    head = ["| library | collator | model | attention | samples are | because |", "|---|---|---|---|---|---|"]
    lines = [
        f"| {row.case.library} | {row.case.collator} | {row.case.family} | {row.case.attention} | {row.verdict} "
        f"| {re.sub('[|]', '/', row.cause)} |"
        for row in rows
    ]
    return "\n".join([*head, *lines])


def main() -> int:
    attention.register()
    with tempfile.TemporaryDirectory() as folder:
        rows = [judged(case, Path(folder) / str(number)) for number, case in enumerate(CASES)]
    print(table(rows))
    known = dict.fromkeys(case.library for case in CASES)
    print(f"\n{', '.join(f'{library} {version_of(library) or ABSENT}' for library in known)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
