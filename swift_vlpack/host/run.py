"""Make a training run without training it: arguments, processor, template and data, by the methods of `swift sft`.

Commands about a run use it. Set the environment of the run before you import this module or ms-swift.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch
from swift.arguments import PretrainArguments
from swift.model import get_model_processor
from swift.pipelines.train.sft import SwiftSft

from swift_vlpack.errors import ConfigError
from swift_vlpack.feed.planned_feed import PlannedFeed
from swift_vlpack.host.args import is_ours, packing_config, plans_ahead
from swift_vlpack.host.callback import PackingCallback
from swift_vlpack.host.messages import said_by_swift
from swift_vlpack.host.pipeline import measured_rows, planned_feed, prepare_dataset
from swift_vlpack.host.ranks import counted_as
from swift_vlpack.host.run_flags import given_options, without_options
from swift_vlpack.host.sources import load_sources

LEFT_OUT = ("ddp_backend", "deepspeed", "fsdp")
"""Options of the run that are dropped: they change no pack, and need processes that a command does not start."""
NO_TRACE = ("--report_to", "none", "--add_version", "false")


class Run(SwiftSft):
    """The arguments, processor and template of a training run, by the methods of the run."""

    left_out: tuple[str, ...] = (*LEFT_OUT, "use_liger_kernel")
    overridden: tuple[str, ...] = (*NO_TRACE, "--use_cpu", "true")
    """Flags that win over those of the run. Without `use_cpu`, ms-swift refuses bfloat16 on a machine without a GPU."""
    has_weights = False
    """True if the weights are loaded. Lengths and packs need none."""

    def __init__(self, argv: Sequence[str], command: str) -> None:
        if command == "pt":
            self.args_class = PretrainArguments  # the pipeline of `swift pt` changes nothing else
        names = [str(given_options(argv).get("model"))]
        with said_by_swift("refuses the options", names):
            super(SwiftSft, self).__init__(list(argv))
        self.train_msg: dict[str, Any] = {}
        with said_by_swift(f"cannot load the {'model' if self.has_weights else 'processor'}", names):
            self._prepare_model_tokenizer(load_model=self.has_weights)
            self._prepare_template()


class TrainableRun(Run):
    """A run with its weights, on its own device. `run()` is ms-swift's own, except for its data and its training."""

    left_out = (*LEFT_OUT, "resume_from_checkpoint")
    overridden = NO_TRACE
    has_weights = True
    at_training: Callable[[Any], None]
    """Function that gets the trainer at the moment when ms-swift would let it train and save."""
    make_data: Callable[[], list[Any]] | None = None
    """If set, a function that returns the training and the evaluation data, in place of the run's own."""

    def train(self, trainer: Any) -> None:
        """Call `at_training` in place of training."""
        self.at_training(trainer)

    def _prepare_dataset(self) -> list[Any]:
        with said_by_swift("cannot load the data"):
            if self.make_data is not None:
                return self.make_data()
            need_packing(self.args)
            return prepare_dataset(self)


class _Prepared(Exception):
    """Stops the trainer once its model is prepared, before the first step."""


def prepare_to_train(trainer: Any, look: Callable[[], None]) -> None:
    """Let the trainer prepare its model as for training, then call `look` and stop before step 1.

    `look` is called at the moment when training would choose the attention and prove its model.
    """

    def stop(*args: Any, **kwargs: Any) -> NoReturn:
        look()
        raise _Prepared

    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, PackingCallback):
            callback.on_train_begin = stop  # type: ignore[method-assign]
    with suppress(_Prepared):
        trainer.train()


@contextmanager
def run_of(argv: Sequence[str], *, num_ranks: int, command: str = "sft", kind: type[Run] = Run) -> Iterator[Any]:
    """Make the run that ms-swift's command with these flags would start on `num_ranks`, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="vlpack-") as folder, counted_as(num_ranks):
        # ms-swift makes the output folder when it reads its arguments, so give it one that is removed afterwards.
        yield kind([*without_options(argv, kind.left_out), *kind.overridden, "--output_dir", folder], command)


def with_model_shape(template: Any) -> Any:
    """Give a template a model without weights: some templates ask the model how positions are counted.

    ms-swift would make such a model by itself, but it would guess the model's type again, and cannot for every folder.
    """
    if template.model_meta.is_multimodal and template.model is None and template.dummy_model is None:
        info = template.model_info
        # If the model cannot be made, that matters only if the template asks it. ms-swift then says what is wrong.
        with suppress(Exception), torch.device("meta"):
            made = get_model_processor(info.model_dir, model_type=info.model_type, return_dummy_model=True)
            template.dummy_model = made[0]
    return template


def need_packing(args: Any) -> None:
    """Raise `ConfigError` if the run does not pack."""
    if not is_ours(args):
        raise ConfigError("--packing false has no packs; leave it out")


def feed_of(run: Run) -> tuple[PlannedFeed, dict[str, float]]:
    """Make the feed that training would have. Returns (feed, the seconds that lengths and packs took)."""
    args, template = run.args, run.template
    need_packing(args)
    config = packing_config(args)
    if not plans_ahead(args):
        raise ConfigError(
            f"{'--streaming true' if args.streaming else 'packing_mode=buffer'} packs rows as they come and cannot be "
            "planned; plan without it, or train with --max_steps"
        )
    sources, _ = load_sources(args, config)
    start = time.perf_counter()
    rows = measured_rows(sources, template, args, config)
    measured = time.perf_counter()
    feed = planned_feed(rows, template, args, config)
    seconds = {"seconds_lengths": measured - start, "seconds_plan": time.perf_counter() - measured}
    return feed, {name: round(value, 4) for name, value in seconds.items()}
