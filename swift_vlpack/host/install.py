"""Hook packing into ms-swift in two stages, so that nothing changes for a run that does not pack.

1. `install()` runs when `--external_plugins` loads the plugin. It registers the attention function and wraps two
methods of ms-swift's arguments: the first one that runs after plugins are loaded, and the check of `--packing`. 2.
`activate()` runs when that check finds `--packing true` of `swift sft` or `swift pt`. It replaces the trainer and the
preparation of data, and registers the callback.

Every name that is replaced or called is listed in `host/seam.py`, and looked up before anything is changed.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
from typing import Any

from swift_vlpack.attention import attention
from swift_vlpack.host.garbage import pass_over_imports
from swift_vlpack.host.messages import join_log, quiet_mistakes
from swift_vlpack.host.seam import CALLBACK, SEAM, UnsupportedSwift, check_seam
from swift_vlpack.rows.families import let_through

TRAINER = "swift_vlpack.host.trainer.PackingTrainer"


def install() -> None:
    """Let `swift sft` and `swift pt` with `--packing true` pack with this package. Calling it again changes nothing."""
    # Do nothing in a dataloader worker that replays the plugin: it reads no arguments and trains nothing.
    if multiprocessing.parent_process() is not None and "swift.arguments" not in sys.modules:
        return
    join_log()
    quiet_mistakes()
    attention.register()
    from swift.arguments import SftArguments

    check = getattr(SftArguments, "_check_padding_free", None)
    if check is None:
        check_seam()
        raise UnsupportedSwift(f"{SEAM[0][0]}.{SEAM[0][1]} is gone")
    if hasattr(check, "_vlpack_original"):
        return
    pass_over_imports()

    @functools.wraps(check)
    def _check_padding_free(self: Any) -> None:
        from swift_vlpack.host.args import check_packing_of_others, is_ours, prepare_args

        if not is_ours(self):
            deactivate()
            check_packing_of_others(self, flash_check=check)
            return
        check_seam()
        prepare_args(self, flash_check=check)
        activate()

    _check_padding_free._vlpack_original = check  # type: ignore[attr-defined]
    SftArguments._check_padding_free = _check_padding_free
    prepare_model_kwargs = SftArguments._init_model_kwargs

    @functools.wraps(prepare_model_kwargs)
    def _init_model_kwargs(self: Any) -> None:  # ms-swift calls this method first after it has loaded the plugins
        from swift_vlpack.host.args import OURS, settle_options

        if type(self) in OURS:
            settle_options(self)
        prepare_model_kwargs(self)

    SftArguments._init_model_kwargs = _init_model_kwargs


def activate() -> None:
    """Put the trainer, the callback and the data preparation of packing in place."""
    from swift.callbacks import callbacks_map
    from swift.pipelines.train.pretrain import SwiftPretrain
    from swift.pipelines.train.sft import SwiftSft
    from swift.trainers import TrainerFactory

    from swift_vlpack.host.callback import PackingCallback

    _original_trainer()
    TrainerFactory.TRAINER_MAPPING["causal_lm"] = TRAINER
    callbacks_map[CALLBACK] = PackingCallback
    prepare = SwiftSft._prepare_dataset
    if hasattr(prepare, "_vlpack_original"):
        return
    load_model = SwiftSft._prepare_model_tokenizer

    def is_packed(pipeline: Any) -> bool:
        from swift_vlpack.host.args import is_ours

        return type(pipeline) in (SwiftSft, SwiftPretrain) and is_ours(pipeline.args)

    @functools.wraps(load_model)
    def _prepare_model_tokenizer(self: Any, **kwargs: Any) -> None:
        from swift_vlpack.host.together import start_together

        if is_packed(self):
            start_together(self.args)
        load_model(self, **kwargs)

    SwiftSft._prepare_model_tokenizer = _prepare_model_tokenizer

    @functools.wraps(prepare)
    def _prepare_dataset(self: Any) -> Any:
        from swift_vlpack.host.pipeline import prepare_dataset

        return prepare_dataset(self) if is_packed(self) else prepare(self)

    _prepare_dataset._vlpack_original = prepare  # type: ignore[attr-defined]
    SwiftSft._prepare_dataset = _prepare_dataset
    _save_portable_args()
    _let_families_through()


def _let_families_through() -> None:
    """Decide by `let_through` which templates can be packed, before ms-swift decides by its own rule."""
    from swift.arguments import SftArguments

    get_template = SftArguments.get_template

    @functools.wraps(get_template)
    def _get_template(self: Any, *args: Any, **kwargs: Any) -> Any:
        from swift_vlpack.host.args import is_ours, packing_config

        template = get_template(self, *args, **kwargs)
        if is_ours(self):
            any_family = packing_config(self).packing_any_family
            let_through(template, any_family=any_family, way_in="packing_any_family=true")
        return template

    SftArguments.get_template = _get_template


def _save_portable_args() -> None:
    """Save args.json without the names of this package, because `swift infer` and `swift export` read it."""
    from swift.arguments import SftArguments

    save = SftArguments.save_args

    @functools.wraps(save)
    def save_args(self: Any, output_dir: Any = None) -> None:
        from swift_vlpack.host.args import is_ours, portable

        save(portable(self) if is_ours(self) else self, output_dir)

    SftArguments.save_args = save_args


def deactivate() -> None:
    """Put ms-swift's own trainer back, for a later run without packing in the same process."""
    from swift.trainers import TrainerFactory

    TrainerFactory.TRAINER_MAPPING["causal_lm"] = _original_trainer()


@functools.cache
def _original_trainer() -> str:
    """Return the trainer that the registry had before `activate`; the first call remembers it."""
    from swift.trainers import TrainerFactory

    name: str = TrainerFactory.TRAINER_MAPPING["causal_lm"]
    return name
