"""The table of docs/isolation.md of what the proof stops: `python -m tests.host.proof.what_stops` writes it.

Each row is a sabotage of the tests, run anew, with the cause that the proof names and how far the model was off.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from swift_vlpack.attention import attention
from swift_vlpack.errors import IsolationError
from swift_vlpack.proof.prove import run_proof
from tests.host.proof import sabotage as s
from tests.host.proof import sabotage_branches as b
from tests.host.proof import test_branches as of_branches
from tests.host.proof import test_hidden_sabotage as hidden
from tests.host.proof import test_sabotage as of_rows
from tests.host.proof.runners import text_samples, text_units

PAGE = Path(__file__).parents[3] / "docs" / "isolation.md"
BEGIN, END = "<!-- what stops, made by tests/host/proof/what_stops.py -->", "<!-- end of what stops -->"
LONG = [60] * 8
"""A sequence that is longer than the short samples together."""


def cases(encoded: Callable[..., Any], proof_model: Callable[[], Any]) -> Iterator[tuple[str, Any, Any, Any]]:
    """The name of each sabotage, the model with it, short samples and sequences."""
    short = text_samples(*of_rows.LENGTHS)
    for name, (change, kinds, _) in of_rows.OF_ROWS.items():
        right = proof_model()
        yield name, nullcontext(s.batches_changed(right, change)), encoded(right.batches.template, kinds), ()
    for name, (attend, _) in of_rows.OF_ATTENTION.items():
        yield f"attention: {name}", s.attending(s.llama(), attend), short, ()
    for name, (make, attend, _) in of_rows.DROPPED.items():
        yield f"attention drops: {name}", s.attending(make(), attend), short, ()
    units = [*text_units(20, (9, 14, 7), (5, 30)), *text_samples(24, 9)]
    for name, (make, attend, _) in of_branches.OF_ATTENTION.items():
        yield name, s.attending(make(), attend), units, ()
    yield "experts with a capacity", s.experts_with_a_capacity(s.llama(), 30), short, ()
    yield "norms over the row", s.norm_over_the_sequence(s.llama()), short, ()
    yield "a cache that lives on", s.attending(s.llama(), s.keeping_a_cache()), short, ()
    yield "a convolution without boundaries", nullcontext(s.lfm2()), short, ()
    yield "layers without room for a full row", s.no_room_behind(s.llama(), 150), short, [text_samples(*LONG)]
    scaled = {"": hidden.scaled_in_long_rows, " by a kernel of 16 bits only": hidden.scaled_in_long_rows_of_16_bits}
    for kernel, wrong in scaled.items():
        right = s.llama()
        right.model.to(torch.bfloat16)
        name = f"attention scaled by 1.3 in long rows{kernel}, of a model in bfloat16"
        yield name, s.attending(right, wrong), short, [text_samples(*LONG)]
    right = b.mistral()
    yield "positions over siblings", nullcontext(s.batches_changed(right, b.positions_over_siblings)), units, ()


def row(name: str, broken: Any, samples: Any, sequences: Any) -> str:
    """One line of the table."""
    with broken as runner:
        try:
            run_proof(runner, samples, sequences)
        except IsolationError as error:
            found = re.search(r"(?:differ|others|is off|again, |gradient of \w+ parts?) by ([\d.e-]+)", str(error))
            return f"| {name} | {error.cause.partition('; ')[0]} | {found[1].rstrip('.') if found else 'exact'} |"
    return f"| {name} | **not stopped** | |"


def table(folder: Path) -> str:
    """Run all sabotages."""
    from swift_vlpack.rows.encoder import RowEncoder
    from swift_vlpack.rows.samples import SampleId
    from tests.conftest import load_tiny
    from tests.host.proof.conftest import rows_in
    from tests.host.proof.runners import template_model
    from tests.tiny import save_model, use_ids_of_tokenizer

    use_ids_of_tokenizer()
    attention.register()
    loaded = load_tiny(save_model(folder / "model", of_rows.QWEN, is_small=True), of_rows.QWEN)
    loaded.template.packing = loaded.template.padding_free = False
    loaded.template.register_post_encode_hook([loaded.model])
    rows = rows_in(folder)

    def encoded(template: Any, kinds: Any) -> list[Any]:
        encoder = RowEncoder(template)
        return [encoder.sample(rows[kind], SampleId(kind, at), strict=True) for at, kind in enumerate(kinds)]

    lines = [row(*case) for case in cases(encoded, lambda: template_model(loaded))]
    return "\n".join(["| what is wrong | what the proof says | off by |", "|---|---|---|", *lines])


def main() -> int:
    """Write the table into the page. Returns 1 if something was not stopped."""
    with tempfile.TemporaryDirectory() as folder:
        made = table(Path(folder))
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}")
    return int("not stopped" in made)


if __name__ == "__main__":
    sys.exit(main())
