"""`megatron sft` and `megatron rlhf` on cached data sets, up to their trainer, which needs a GPU."""

import json
import os
import sys

import pytest
from datasets import load_from_disk

from tests.data_rows import mixed_rows, text_row, write_jsonl
from tests.e2e.ranks import ROOT, Processes, free_port
from tests.host.runs import SMALL_VOCABULARY
from tests.host.test_export import flags_of, ours, pair, theirs
from tests.images import GOOD, make

pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("options")]
FAMILY = "qwen2_5_vl"
MAX_LENGTH = 256
EXAMPLE = {
    "tuner_type": "lora", "lora_rank": 32, "lora_alpha": 64, "target_modules": "all-linear", "save_safetensors": "true",
    "merge_lora": "false", "micro_batch_size": 1, "recompute_granularity": "full", "recompute_method": "uniform",
    "recompute_num_layers": 1, "num_train_epochs": 3, "finetune": "true", "cross_entropy_loss_fusion": "true",
    "lr": 1e-4, "lr_warmup_fraction": 0.05, "min_lr": 1e-5, "eval_steps": 200, "save_steps": 200, "packing": "true",
    "dataloader_num_workers": 8, "dataset_num_proc": 2, "no_save_optim": "true", "no_save_rng": "true",
    "sequence_parallel": "true", "attention_backend": "flash",
}  # fmt: skip
"""The flags of ms-swift's `examples/train/cached_dataset/mcore.sh`, but for those of experts and of the size."""
OF_DPO = {"rlhf_type": "dpo", "rpo_alpha": 0.1, "beta": 0.1, "loss_type": "sigmoid"}
"""Those that `dpo.sh` has in addition."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Photos and texts; pairs of answers."""
    folder = tmp_path_factory.mktemp("rows")
    image = make(folder / "images", {"photo.jpg": GOOD["photo.jpg"]})["photo.jpg"]
    photos = mixed_rows(folder / "mixed", 24, largest=160)
    # Many short ones fill packs to the last token, so that a token more in each makes packs too long.
    texts = [text_row(f"question {n}", "word " * (n % 7)) for n in range(60)]
    return {
        "sft": write_jsonl(folder / "rows.jsonl", [*photos, *texts, text_row("a long one", "word " * 300)]),
        "rlhf": write_jsonl(folder / "pairs.jsonl", [pair(n, [image] if n % 2 else []) for n in range(1, 17)]),
    }


@pytest.fixture
def exported(rows, small_folder, tmp_path):
    """Export the rows of a command by a function, with more flags."""

    def made(export, name, command, *more, **options):
        flags = flags_of(
            small_folder(FAMILY), rows[command], split_dataset_ratio=0.2, max_length=MAX_LENGTH,
            template_mode="rlhf" if command == "rlhf" else "train", **options,
        )  # fmt: skip
        return export(flags, tmp_path / name, *more)

    return made


@pytest.fixture
def started(small_folder, tmp_path):
    """Start a command of Megatron on a cached data set; returns what it would train."""

    def run(command, folder, num_ranks=1, **flags):
        result, model = folder / "result.json", small_folder(FAMILY)
        given = {
            "model": model, "model_type": FAMILY, "template": FAMILY, "use_hf": "true", "torch_dtype": "float32",
            "max_length": MAX_LENGTH, "cached_dataset": folder / "train", "cached_val_dataset": folder / "val",
            "global_batch_size": 2, "ddp_backend": "gloo", "output_dir": tmp_path / "out",
            "external_plugins": SMALL_VOCABULARY, **EXAMPLE, **flags,
        }  # fmt: skip
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", num_ranks]
        launch += ["--master_port", free_port(), ROOT / "tests" / "plugins" / "megatron_on_cpu.py", command, result]
        launch += [part for name, value in given.items() for part in (f"--{name}", value)]
        processes = Processes(launch, os.environ, tmp_path / f"of_{folder.name}.txt")
        assert processes.wait() == 0, processes.output[-4000:]
        return json.loads(result.read_text())

    return run


@pytest.mark.parametrize("command", ["sft", "rlhf"])
def test_megatron_packs_our_export_as_that_of_ms_swift(command, exported, started):
    """EXPORT-4: by its own argument and data set classes, without this package; by the flags of the examples."""
    more = OF_DPO if command == "rlhf" else {}
    folder = exported(ours, "ours", command, "--check_pixels")
    found, right = (started(command, one, **more) for one in (folder, exported(theirs, "theirs", command)))
    assert found == right
    assert not found["is_with_vlpack"]
    lengths = [sum(of_row) for of_row in load_from_disk(str(folder / "train"))["lengths"]]
    assert sorted(row for pack in found["packs"] for row in pack) == list(range(len(lengths)))
    assert found["lengths"] == found["lengths_of_batches"]
    assert found["lengths"] == [sum(lengths[row] for row in pack) for pack in found["packs"]]
    assert len(found["packs"]) > 2
    assert min(sum(found["num_images"]), found["num_val_packs"], found["num_steps"]) > 0
