"""The proof in a run that leaves everything to ms-swift: LoRA with dropout, checkpointing, workers, 16 bits."""

import pytest

from swift_vlpack.host.launch import plugin_path
from tests.data_rows import image_row, text_row, write_jsonl
from tests.host import runs
from tests.images import photo

OFFLINE = ("report_to", "use_hf", "check_model", "save_strategy", "logging_steps")
"""Of the flags of other tests those that say nothing about how a model is trained."""


@pytest.mark.slow
@pytest.mark.telling
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_proof_holds_in_a_run_of_defaults(small_folder, tmp_path, caplog, family):
    """ISO-5 ISO-11 ISO-13: bfloat16, as nearly every checkpoint has it."""
    rows = [text_row(f"how are you {number}", "fine, thanks a lot") for number in range(20)]
    pictures = [photo(tmp_path, str(number), 80 + 10 * number, 60, seed=number) for number in range(12)]
    rows += [image_row([picture], "what is it", f"picture {number}") for number, picture in enumerate(pictures)]
    flags = {
        **{name: runs.OFFLINE[name] for name in OFFLINE},
        "model": small_folder(family),
        "model_type": family,
        "template": family,
        "dataset": write_jsonl(tmp_path / "rows.jsonl", rows),
        "output_dir": tmp_path / "run",
        "external_plugins": plugin_path(),
        "packing": "true",
        "packing_length": 512,
        "max_steps": 2,
        "torch_dtype": "bfloat16",
        "use_cpu": "true",
    }
    done = runs.train([word for name, value in flags.items() for word in (f"--{name}", str(value))])
    assert all(line["loss"] > 0 for line in done["log_history"] if "loss" in line)
    assert "isolation verified: max difference 0.0 over " in caplog.text
    assert "lora_dropout=0.05" in caplog.text
