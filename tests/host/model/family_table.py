"""docs/families.md and what it is made of: `make families` tries every family and writes both."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.family_models import FAMILIES
from tests.host.model.family_checks import Checked

DOCS = Path(__file__).parents[3] / "docs"
RESULTS = Path(__file__).parent / "families.json"
NEAR = 1e-5
"""How far a pack may be off from its samples one by one, in float32."""
UNTESTED = {
    "SmolVLM, Cohere2 Vision, LFM2-VL": "ms-swift has no template for it",
    "ERNIE-4.5-VL": "remote code: ms-swift's loader asks the folder of the model for a class (`modeling_ernie4_5_vl`)",
    "Kimi-VL, Kimi K2.5, Ovis 1.6 to 2.5, MiniCPM-V up to 4.5, MiniCPM-o, Phi-3.5 and 4, Keye": "remote code",
    "LLaVA-OneVision 1.5 and 2, InternVL (not HF), DeepSeek-VL2 and -OCR, dots.ocr, Molmo": "remote code",
    "PaddleOCR-VL 1.0": "remote code, and ms-swift asks for transformers below 5",
    "MiniCPM-V 4.7, Muse Glimmer, Step3-VL": "ms-swift says that they cannot be packed, and they are refused",
    "GLM-5-Next, Qwen4, Qwen3-ASR, Ovis-OCR 2": "packed by ms-swift, in transformers, not tried",
    "Gemma 3n, Gemma 4 Unified, Pixtral, LLaVA-NeXT-Video, GOT-OCR 2 (HF), Hunyuan-OCR, Qwen2-Audio, Emu3": (
        "not packed by ms-swift, in transformers, not tried"
    ),
    "MiniMax-M3-VL": "its sparse attention is refused by name",
}
_PROSE = """# Families

What was tried on which family: real models of transformers with random weights, real processors at a small size,
ms-swift's own templates and loading, on a CPU in float32. `make families` writes this page; a test compares it with the
results.

What the columns say:

- **packed by ms-swift**: yes, or only with `packing_any_family=true`
  ([training.md](training.md#families-that-ms-swift-does-not-pack)).
- **lengths**: whether they equal `template.encode`, and where they come from: headers, or, if the processor needs
  pixels, the full encoding of every row (the length pass says so). Tried on grey, palette, CMYK, alpha, one-pixel,
  rotated, animated and very long images.
- **gradients**, **evaluation**: every gradient of a pack is compared with that of its samples one by one, in the
  model's own `eager` attention, padded by the template; and the padded loss with that of plain ms-swift. Equal means
  within 1e-5.
- **proof**: what it says about correct packs. **sabotages**: how many faults it stopped, of a lost boundary, positions
  that go on over the sequence, and images or sounds of two samples exchanged.
- **run**: two packed steps of `swift sft`.

Packs mix texts, samples with one image and with several; for Omni also with one sound, several sounds, a sound beside
an image, and a video. Videos are also tried on Qwen-VL, in the tests of the proof.
"""


def results_of(name: str, folder: Path, num_images: int) -> dict[str, Any]:
    """What was found, in words that are the same on every machine; a check that fails says with what."""
    try:
        checked = Checked(FAMILIES[name], folder)
    except Exception as error:
        return {"packed": "", "built": _said(error)}
    checks = {
        "lengths": lambda: checked.lengths(num_images),
        "gradients": lambda: _near(checked.gradient()),
        "evaluation": lambda: _near(checked.evaluation()),
        "proof": checked.proof,
        "sabotages": lambda: _stopped(checked.sabotages()),
        "run": lambda: "trained" if checked.run(os.environ.__setitem__) else "no loss",
    }
    packed = "yes" if checked.is_packed else "`packing_any_family`"
    return {"packed": packed, **{what: _outcome(check) for what, check in checks.items()}}


def _outcome(check: Callable[[], str]) -> str:
    try:
        return check()
    except Exception as error:
        return _said(error)


def _near(gap: float) -> str:
    return "equal" if gap <= NEAR else f"off by {gap:.1e}"


def _stopped(sabotages: dict[str, bool]) -> str:
    passed = [name for name, is_stopped in sabotages.items() if not is_stopped]
    return f"{sum(sabotages.values())} of {len(sabotages)}" + (f", not {', '.join(passed)}" if passed else "")


def _said(error: Exception) -> str:
    # The table has the class alone, which is the same on every machine; whoever adds a family needs to see why.
    traceback.print_exception(error)
    return f"fails: {type(error).__name__}"


def page(results: dict[str, dict[str, Any]], num_images: int) -> str:
    """The page."""
    columns = ("lengths", "gradients", "evaluation", "proof", "sabotages", "run")
    lines = [
        f"Lengths on {num_images:,} images.",
        "",
        f"| family | template | packed by ms-swift | {' | '.join(columns)} | |",
        f"|{'---|' * (len(columns) + 4)}",
    ]
    for name, found in results.items():
        family = FAMILIES[name]
        cells = [found.get(column, found.get("built", "")) for column in columns]
        lines.append(f"| {name} | `{family.template}` | {found['packed']} | {' | '.join(cells)} | {family.note} |")
    lines += ["", "## Untested", "", "| family | why |", "|---|---|"]
    lines += [f"| {name} | {why} |" for name, why in UNTESTED.items()]
    tested = "Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 are what nearly all other tests train."
    return "\n".join([_PROSE, tested, "", *lines, ""])


def saved() -> tuple[dict[str, dict[str, Any]], int]:
    """What `make families` found last, and on how many images."""
    made = json.loads(RESULTS.read_text())
    return made["families"], made["num_images"]


def main(names: Sequence[str] = (), num_images: int = 1000) -> None:
    """Try these, or all, and write both; of the others stays what was found before."""
    from tests.tiny import use_ids_of_tokenizer

    os.environ |= {"USE_HF": "1", "HF_HUB_OFFLINE": "1", "MODELSCOPE_CACHE": tempfile.mkdtemp()}
    use_ids_of_tokenizer()
    if unknown := set(names) - set(FAMILIES):
        sys.exit(
            f"no family {', '.join(sorted(unknown))}; FAMILIES in tests/family_models.py has {', '.join(FAMILIES)}"
        )
    before = saved()[0] if names else {}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(FAMILIES):
            is_asked = not names or name in names
            found[name] = results_of(name, Path(folder) / str(number), num_images) if is_asked else before[name]
            print(name, found[name], flush=True)
    RESULTS.write_text(json.dumps({"num_images": num_images, "families": found}, indent=1) + "\n")
    (DOCS / "families.md").write_text(page(found, num_images))


if __name__ == "__main__":
    main(sys.argv[1:])
