"""List every name of ms-swift that packing replaces or calls, and check these names before anything is changed.

If a release of ms-swift moves one of them, the user gets one clear error, not a run that goes wrong.
"""

from __future__ import annotations

import inspect
from functools import reduce
from importlib import import_module
from typing import Any

from swift_vlpack.errors import VLPackError

CALLBACK = "vlpack"
"""Our name in ms-swift's registry of callbacks."""
TESTED = "4.5.3 to 4.6.0"

SEAM: tuple[tuple[str, str, frozenset[str]], ...] = tuple(
    (module, name, frozenset(parameters.split()))
    for module, name, parameters in (
        ("swift.arguments", "SftArguments._check_padding_free", "self"),
        ("swift.arguments", "PretrainArguments", ""),
        ("swift.arguments", "SftArguments._init_model_kwargs", "self"),
        ("swift.arguments", "SftArguments.get_dataset_kwargs", "self"),
        ("swift.arguments", "SftArguments.get_template", "self processor"),
        ("swift.arguments", "SftArguments.save_args", "self output_dir"),
        ("swift.callbacks", "callbacks_map", ""),
        ("swift.callbacks", "TrainerCallback", "args trainer"),
        (
            "swift.dataloader",
            "BatchSamplerShard",
            "total_samples batch_size shuffle drop_last data_seed group_by_length lengths",
        ),
        ("swift.dataloader", "DataLoaderShard", "dataset device"),
        ("swift.dataset", "AutoPreprocessor._get_preprocessor", "self dataset"),
        ("swift.dataset", "DATASET_MAPPING", ""),
        ("swift.dataset", "DatasetLoader.load", "self dataset_syntax dataset_meta use_hf"),
        ("swift.dataset", "DatasetMeta", "ms_dataset_id hf_dataset_id dataset_path subsets preprocess_func loader"),
        ("swift.dataset", "DatasetSyntax", "dataset subsets dataset_sample use_hf"),
        ("swift.dataset", "DatasetSyntax.get_dataset_meta", "self use_hf"),
        ("swift.dataset", "DatasetSyntax.parse", "dataset"),
        ("swift.dataset", "LazyLLMDataset", "dataset encode_func strict random_state"),
        ("swift.dataset", "RowPreprocessor.batched_preprocess", "self batched_row"),
        ("swift.dataset", "RowPreprocessor.prepare_dataset", "self dataset"),
        ("swift.dataset", "RowPreprocessor.preprocess", "self row"),
        ("swift.dataset", "load_dataset", "datasets split_dataset_ratio shuffle use_hf"),
        ("swift.pipelines.train.pretrain", "SwiftPretrain._prepare_dataset", "self"),
        ("swift.pipelines.train.sft", "SwiftSft._prepare_dataset", "self"),
        ("swift.pipelines.train.sft", "SwiftSft._prepare_model_tokenizer", "self"),
        ("swift.pipelines.train.sft", "SwiftSft._encode_dataset", "self train_dataset val_dataset"),
        ("swift.pipelines.train.sft", "SwiftSft._save_val_dataset", "self val_dataset"),
        ("swift.template", "Template.data_collator", "self batch padding_to"),
        ("swift.template", "Template.encode", "self inputs return_length"),
        ("swift.template", "Template.packing_row", "self row"),
        ("swift.trainers", "Seq2SeqTrainer._get_data_collator", "self args template"),
        ("swift.trainers", "Seq2SeqTrainer.get_train_dataloader", "self skip_batches"),
        ("swift.trainers", "Seq2SeqTrainer._init_training_state", "self"),
        ("swift.trainers", "Seq2SeqTrainer._load_from_checkpoint", "self resume_from_checkpoint model"),
        ("swift.trainers", "Seq2SeqTrainer._run_epoch", "self epoch steps_in_epoch num_update_steps_per_epoch"),
        ("swift.trainers", "Seq2SeqTrainer._save_checkpoint", "self"),
        ("swift.trainers", "Seq2SeqTrainer._update_last_checkpoint_symlink", "self barrier"),
        ("swift.trainers", "Seq2SeqTrainer.set_initial_training_values", "self"),
        ("swift.trainers", "TrainerFactory.TRAINER_MAPPING", ""),
        ("swift.utils", "parse_args", "argv"),
    )
)
"""(module, name, parameters that the name must have) of everything that packing replaces or calls."""


class UnsupportedSwift(VLPackError):
    """This ms-swift has moved something that packing replaces or calls."""


def check_seam() -> None:
    """Raise `UnsupportedSwift` with everything that is missing, unless all names are there with their parameters."""
    missing = [problem for module, name, wanted in SEAM if (problem := _problem(module, name, wanted))]
    if missing:
        import swift

        raise UnsupportedSwift(
            f"ms-swift {swift.__version__} has moved what packing relies on: {'; '.join(missing)}. "
            f"Tested with {TESTED}; install one of these, or run with --packing false"
        )


def _problem(module: str, name: str, wanted: frozenset[str]) -> str | None:
    try:
        found: Any = reduce(getattr, name.split("."), import_module(module))
    except (ImportError, AttributeError):
        return f"{module}.{name} is gone"
    if not wanted:
        return None
    lost = wanted - set(inspect.signature(found).parameters)
    lost -= {"self"} if inspect.isclass(found) else set()
    return f"{module}.{name} lost {', '.join(sorted(lost))}" if lost else None
