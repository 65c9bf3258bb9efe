"""Build the data of a packed run: rows, lengths, packs, the feed of the trainer, and validation rows.

`host/install.py` calls `prepare_dataset` in place of ms-swift's own, after the model and the template are loaded:

    prepare_dataset(pipeline) -> [feed, validation rows]        as ms-swift's trainer takes them
      build_feed              rows -> lengths -> epochs -> feed; the one place that decides planned or streamed
      check_...               ranks that differ, rows that cannot be read, RoPE: refused before step 1
      evaluation_data         validation rows, packed only under `eval_packing` (host/evaluation.py)

To see it run: `vlpack plan --config train.yaml` makes the feed and stops there, without weights (host/run.py).
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from swift.utils import get_logger, is_master, stat_array

from swift_vlpack.attention.sequence_effects import check_rope
from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import DataError
from swift_vlpack.feed.epoch_report import listing
from swift_vlpack.feed.failures import check_measured
from swift_vlpack.feed.feed import Feed
from swift_vlpack.feed.planned import PlannedPackingDataset
from swift_vlpack.feed.planned_feed import PlannedFeed
from swift_vlpack.feed.streamed import StreamedPackingDataset
from swift_vlpack.feed.streamed_feed import StreamedFeed
from swift_vlpack.host.args import (
    data_seed,
    deletes_failing_rows,
    packing_config,
    plans_ahead,
    unpacked_batch_size,
    unpacked_step,
)
from swift_vlpack.host.cached import compare_lengths, with_cached_validation
from swift_vlpack.host.evaluation import evaluation_data, saved_validation_rows
from swift_vlpack.host.headers import branch_template, reading_urls
from swift_vlpack.host.length_pass import with_all_lengths
from swift_vlpack.host.plain_order import unpacked_rows
from swift_vlpack.host.ranks import RanksOfRun, num_ranks_of_run, rank
from swift_vlpack.host.same_on_ranks import check_same_settings, check_same_validation
from swift_vlpack.host.sources import load_sources, load_stream
from swift_vlpack.host.use_attention import use_attention
from swift_vlpack.plan.report import length_warning, long_sequence_warning
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.families import refuse_sharing
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.fusion_config import read_fusion_config
from swift_vlpack.rows.randomness import RandomStream
from swift_vlpack.rows.source import RowSource
from swift_vlpack.rows.streams import StreamedRows
from swift_vlpack.rows.urls import Urls
from swift_vlpack.runlog import left_out
from swift_vlpack.runlog.events import FOLDER
from swift_vlpack.words import counted

logger = get_logger()

_SECONDS_WITHOUT_URL = 300
"""Seconds after which training retries a URL that failed."""

NUM_SAMPLES_SHOWN = 16
"""Samples of a stream that are encoded before training to judge its lengths. The first one is printed."""


def prepare_dataset(pipeline: Any) -> list[Any]:
    """Prepare the data in place of `SwiftSft._prepare_dataset`. Returns the training feed and the validation rows."""
    args, template = pipeline.args, pipeline.template
    config = packing_config(args)
    logger.info(f"packing: {config}")
    use_attention(pipeline.model, args.attn_impl)
    with listing(Path(args.output_dir) / FOLDER / left_out.FILE) if is_master() else nullcontext():
        # Before any row is encoded: encoding may change what templates and plugins hold.
        settings = check_same_settings(template, args.external_plugins or [])
        feed, val_rows = build_feed(args, template, config)
        feed.settings = settings
        check_same_validation(val_rows, RanksOfRun())
        # Check now: the length pass has seen all rows, so if a mount is gone, most of them have failed.
        check_measured(feed.sources, config.packing_max_failed_share)
    check_rope(pipeline.model.config, feed.sources, template.max_length, config)
    val_rows = with_cached_validation(saved_validation_rows(pipeline, val_rows), args, config)
    if is_master():
        _show(pipeline, feed)
    return [feed, evaluation_data(val_rows, pipeline, config)]


def build_feed(args: Any, template: Any, config: PackingConfig) -> tuple[Feed, Any]:
    """Build the feed of a run: load rows, measure them, plan the epochs. A stream is neither measured nor planned.

    Returns (feed, validation rows), because ms-swift's loader draws both from the same rows. The kind of feed is chosen
    here and nowhere else; all other code asks the feed.
    """
    if config.shares_media:
        refuse_sharing(template.config)
        if args.loss_scale.startswith("all") and is_master():
            logger.warning(
                f"packing_share=media shares nothing under --loss_scale {args.loss_scale}: every token is a target, "
                "and only tokens before the first target are shared; leave one of them out"
            )
    if plans_ahead(args):
        sources, val_rows = load_sources(args, config)
        return planned_feed(measured_rows(sources, template, args, config), template, args, config), val_rows
    rows, val_rows = _unmeasured_rows(args, template, config)
    packs = StreamedPackingDataset(
        rows, template, config, seed=data_seed(args), rank=rank(), num_ranks=num_ranks_of_run()
    )
    return StreamedFeed(
        packs, args.training_args.dataloader_num_workers, unpacked_batch_size=unpacked_batch_size(args)
    ), val_rows


def measured_rows(sources: list[RowSource], template: Any, args: Any, config: PackingConfig) -> FusionCaptionDataset:
    """Measure the rows of the sources, and fuse the sources into one data set."""
    encoder = RowEncoder.of(template, config)  # with the config, because sizes count the tokens that are targets
    measured = with_all_lengths(
        sources,
        encoder,
        args,
        config.packing_cache_dir,
        share_within=config.packing_length if config.shares_media else None,
    )
    compare_lengths(measured)
    return fused(measured, template, args, config)


def planned_feed(rows: FusionCaptionDataset, template: Any, args: Any, config: PackingConfig) -> PlannedFeed:
    """Plan the epochs of the run from measured rows, and make the feed."""
    num_ranks = num_ranks_of_run()
    # The accumulation includes the batch size (`_fold_batch_size` in host/args.py).
    packs_per_step = num_ranks * args.training_args.gradient_accumulation_steps
    step = unpacked_step(args)
    packs = PlannedPackingDataset(
        rows,
        template,
        config,
        seed=data_seed(args),
        num_ranks=num_ranks,
        # A run of 2.5 epochs ends within its third epoch, which is planned as a whole.
        num_epochs=math.ceil(args.num_train_epochs),
        num_packs=args.max_steps * packs_per_step if args.max_steps > 0 else None,
        step=step,
        unpacked=step and unpacked_rows(args, rows.sources, deletes_failing=deletes_failing_rows(args)),
    )
    plan = packs.epoch_plan
    if not plan.supervised[plan.packs.members].any():
        raise DataError(
            "there is nothing to train: no row of the plan has a label, all are -100. Give rows with answers that "
            "max_length does not cut off"
        )
    _warn_of_length(args, config, plan.lengths[plan.lengths > 0])
    if is_master() and (warning := long_sequence_warning(plan.packs.num_tokens_per_pack, config)):
        logger.warning(f"packing: {warning}")
    return PlannedFeed(packs, unpacked_batch_size=unpacked_batch_size(args))


def _unmeasured_rows(
    args: Any, template: Any, config: PackingConfig
) -> tuple[FusionCaptionDataset | StreamedRows, Any]:
    """Load the rows of a streamed feed, from a stream or from sized data, and the validation rows."""
    if args.streaming:
        return load_stream(args, reading_urls(template, urls_in_training()))
    sources, val_rows = load_sources(args, config)
    return fused(sources, template, args, config), val_rows


def fused(sources: list[RowSource], template: Any, args: Any, config: PackingConfig) -> FusionCaptionDataset:
    """Fuse the sources into one data set, with the run's options."""
    return FusionCaptionDataset(
        sources,
        reading_urls(template, urls_in_training()),
        seed=data_seed(args),
        strict=args.strict,
        shuffle=args.train_dataloader_shuffle,
        ratio_by=read_fusion_config(config.fusion_config).ratio_by if config.fusion_config else "rows",
        pixel_free=branch_template,
    )


def _warn_of_length(args: Any, config: PackingConfig, lengths: NDArray[np.int64], what: str = "rows") -> None:
    """Warn if packs are as long as the model allows: ms-swift takes that length if none is given, rarely on purpose."""
    if config.packing_length != args.model_info.max_model_len:
        return
    if is_master() and (warning := length_warning(config.packing_length, lengths, what=what)):
        logger.warning(f"packing: {warning}")


def urls_in_training() -> Urls:
    """Make the reader of URLs in training: two tries, and a retry later, because a server may come back."""
    return Urls(num_tries=2, seconds_left_alone=_SECONDS_WITHOUT_URL)


def _show(pipeline: Any, feed: Feed) -> None:
    """Print the first sample that can be encoded, as ms-swift does, and the numbers of the first epoch's plan."""
    # Use separate random numbers: only one rank does this, and LoRA's weights are drawn afterwards.
    with RandomStream(feed.seed, "shown"):
        # A plan knows the lengths. Without a plan, encode several samples to judge them.
        num_samples = NUM_SAMPLES_SHOWN if feed.epoch_plan is None else 1
        samples = list(feed.preview(num_samples))
    if samples:
        pipeline.template.print_inputs(samples[0])
    if feed.epoch_plan is None:
        lengths = np.array([sample["length"] for sample in samples], dtype=np.int64)
        _warn_of_length(pipeline.args, feed.config, lengths, what=f"first {len(lengths)} rows")
        return
    plan = feed.epoch_plan.packs
    _, pipeline.train_msg["train_dataset"] = stat_array(plan.num_tokens_per_pack.tolist())
    logger.info(
        f"plan of epoch 0: {counted(len(plan), 'pack')} of {feed.config.packing_length} tokens "
        f"from {counted(len(plan.members), 'sample')} "
        f"by {plan.method}, mean fill {100 * plan.mean_fill:.1f}%, {int(plan.is_single_long.sum())} single-long, "
        f"lower bound {counted(plan.lower_bound, 'pack')}"
    )
