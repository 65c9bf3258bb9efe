"""Ask the referee about well-known collators: `python -m benchmarks.collators` prints the table of docs/referee.md.

Each collator gets samples as its own trainer hands them over, and a tiny model without a cache, as transformers'
Trainer runs it. What is not installed has no row. Nothing of it is a dependency of this package; LLaMA-Factory wants
versions of its own, so it has an environment of its own:

    pip install llamafactory dashscope pytest && pip install --no-deps -e .
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from swift_vlpack.attention import attention
from swift_vlpack.errors import IsolationError
from swift_vlpack.proof.verify import Collator, verify
from tests import tiny
from tests.proof import collators as c

ROOT = Path(__file__).parent.parent
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

    def __str__(self) -> str:
        return f"{self.library}: {self.collator}"


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


def packing(model: Any, *, neat: bool) -> Collator:
    """Rows as LLaMA-Factory packs them, `neat_packing` or not, and the collator of its SFT."""
    from types import SimpleNamespace

    from llamafactory.data.collator import SFTDataCollatorWith4DAttentionMask
    from llamafactory.data.mm_plugin import get_mm_plugin

    tokenizer = tiny.build_tokenizer(is_small=True)
    has_images = c.has_axes(model)
    tokens = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    plugin = get_mm_plugin("qwen2_vl", **tokens) if has_images else get_mm_plugin("base")
    collator = SFTDataCollatorWith4DAttentionMask(
        tokenizer=tokenizer,
        model=model,
        template=SimpleNamespace(mm_plugin=plugin),
        processor=tiny.build_processor(tokenizer, model.config.model_type) if has_images else None,
        block_diag_attn=neat,
        neat_packing=neat,
        attn_implementation="sdpa",
    )

    def collate(samples: Sequence[Any]) -> Mapping[str, Any]:
        images = [sample.get("images", []) for sample in samples]
        row = joined(samples) | {
            "attention_mask": c.numbers_of(samples)[0].clamp(max=len(samples) if neat else 1).tolist(),
            "position_ids": [number for length in c.lengths_of(samples) for number in range(length)],
            "images": [one for some in images for one in some],
            "packing_params": {
                "sequence_boundaries": [*accumulate(c.lengths_of(samples), initial=0)],
                "image_subseq_ids": [number for number, some in enumerate(images) for _ in some],
                "right_padding_length": 0,
            },
        }
        return {name: value for name, value in collator([row]).items() if value is not None}

    return collate


def with_pictures(model: Any) -> list[Any]:
    """Samples whose images the collator encodes itself, of as many pixels as make the tokens that they have."""
    noise = np.random.default_rng(0)
    samples = []
    for sample in c.samples_of(model):
        fields = {name: sample[name] for name in ("input_ids", "labels")}
        if (grid := sample.get("image_grid_thw")) is not None:
            height, width = (14 * int(size) for size in grid[0, 1:])
            fields["images"] = [Image.fromarray(noise.integers(0, 255, (height, width, 3), dtype=np.uint8))]
        samples.append(fields)
    return samples


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


VLPACK, QWEN = "vlpack", "qwen2_5_vl"
ENDS_ONLY = {"return_flash_attn_kwargs": True, "return_position_ids": False}
CASES = (
    Case(TRANSFORMERS, "`DataCollatorWithFlattening()`", c.TEXT, "sdpa", flattening),
    Case(TRANSFORMERS, "`DataCollatorWithFlattening()`, with a cache", c.TEXT, "sdpa", flattening, has_cache=True),
    Case(
        TRANSFORMERS,
        "`return_flash_attn_kwargs=True, return_position_ids=False`",
        c.TEXT,
        "sdpa",
        with_options(flattening, **ENDS_ONLY),
    ),
    Case(
        TRANSFORMERS,
        "`return_flash_attn_kwargs=True, return_position_ids=False`",
        c.TEXT,
        VLPACK,
        with_options(flattening, **ENDS_ONLY),
    ),
    Case(TRANSFORMERS, "`DataCollatorWithFlattening()`, images", QWEN, "sdpa", flattening),
    Case(TRANSFORMERS, "`DataCollatorWithFlattening()`, images", c.INTERN, "sdpa", flattening),
    Case(TRL, "`DataCollatorForLanguageModeling(padding_free=True)`", c.TEXT, "sdpa", padding_free),
    Case(TRL, "`padding_free=True`, with a cache", c.TEXT, "sdpa", padding_free, has_cache=True),
    Case(TRL, "`pad_to_multiple_of=64`", c.TEXT, "sdpa", with_options(padding_free, pad_to_multiple_of=64)),
    Case(TRL, "`pack_dataset`, `bfd`", c.TEXT, "sdpa", packed_rows),
    Case(TRL, "`pack_dataset`, `wrapped`", c.TEXT, "sdpa", wrapped_rows),
    Case(TRL, "`padding_free=True`, images (its trainer refuses them)", QWEN, "sdpa", padding_free),
    Case(FACTORY, "`packing`", c.TEXT, "sdpa", with_options(packing, neat=False)),
    Case(FACTORY, "`neat_packing`", c.TEXT, "sdpa", with_options(packing, neat=True)),
    Case(FACTORY, "`neat_packing`, images", QWEN, "sdpa", with_options(packing, neat=True), samples=with_pictures),
    Case(OURS, "`PackedCollator(cu_seqlens=True)`", c.TEXT, VLPACK, ours, has_cache=True),
)


def judged(case: Case, folder: Path) -> Row:
    """Ask the referee."""
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
    head = ["| collator | model | attention | samples are | because |", "|---|---|---|---|---|"]
    lines = [f"| {row.case} | {row.case.family} | {row.case.attention} | {row.verdict} | {row.cause} |" for row in rows]
    return "\n".join([*head, *lines])


def main() -> int:
    attention.register()
    known = {library: version_of(library) for library in dict.fromkeys(case.library for case in CASES)}
    cases = [case for case in CASES if known[case.library]]
    with tempfile.TemporaryDirectory() as folder:
        print(table([judged(case, Path(folder) / str(number)) for number, case in enumerate(cases)]))
    print("\n" + ", ".join(f"{library} {number or ABSENT}" for library, number in known.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
