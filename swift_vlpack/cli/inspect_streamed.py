"""Looking at a run whose packs are made as rows come: the first ones read again, those that were trained by record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

from swift_vlpack.cli.look import StreamedPacks
from swift_vlpack.cli.stream_rows import local_files, places_of, rows_at
from swift_vlpack.cli.trained import TrainedRun
from swift_vlpack.cli.wanted import Found, Wanted
from swift_vlpack.config import RECORD_PACKS
from swift_vlpack.errors import ConfigError
from swift_vlpack.feed.feed import Feed
from swift_vlpack.host.pipeline import data_seed
from swift_vlpack.host.run import Run
from swift_vlpack.host.sources import load_stream
from swift_vlpack.pages.values import StepShown, Trained
from swift_vlpack.rows.samples import SampleError
from swift_vlpack.runlog.losses import loss_at, spikes
from swift_vlpack.words import counted

NUM_ON_PAGE = 20
"""Packs that a page has where none were chosen: to read more takes as long as to train on them."""
RECORDED = "packs as recorded"


def found_of_stream(run: Run, feed: Feed, wanted: Wanted) -> Found:
    """The first packs of the first rank; anything else would need a plan."""
    wish = wanted.wish
    if wish.sample is not None or wish.longest or wish.emptiest or wish.random or wanted.epoch:
        raise ConfigError(
            "packs of a stream (or packing_mode=buffer) are made as rows come, so --sample, --longest, --emptiest, "
            "--random and --epoch cannot be answered ahead of time; --pack N and --step N read the first packs of rank "
            "0, --examples K the first rows, and --run OUTPUT_DIR --step N shows what was trained"
        )
    packs = StreamedPacks(run, feed)
    if wanted.examples is not None:
        samples = (one for one in feed.dataset.samples(0) if not isinstance(one, SampleError))
        return Found(examples=map(packs.example, islice(samples, wanted.examples)))
    accumulation = run.args.training_args.gradient_accumulation_steps
    first, last = 0, NUM_ON_PAGE if wanted.html else 1
    if wish.pack is not None:
        first, last = wish.pack, wish.pack + 1
    elif wanted.step is not None:
        first, last = (wanted.step - 1) * accumulation, wanted.step * accumulation
    if first < 0:
        raise ConfigError("packs are counted from 0, steps from 1")
    shown = list(islice(packs.shown(last), first, None))
    if not shown:
        raise ConfigError(f"the rows of rank 0 make fewer than {counted(first + 1, 'pack')}")
    return Found(packs=shown, num_packs=len(shown))


def found_on_record(run: Run, trained: TrainedRun, wanted: Wanted) -> Found:
    """The packs of steps, as every rank recorded them."""
    span = trained.recorded_steps()
    if span is None:
        raise ConfigError(
            f"{trained.folder} has no record of its packs, and packs of a stream cannot be computed again: it was "
            f"started with {RECORD_PACKS}=false, or by an earlier version. Leave {RECORD_PACKS} out, or set it to true"
        )
    if wanted.step is not None:
        return Found(steps=with_places([_step(trained, wanted.step, span)], run, trained.num_shares))
    found = spikes(trained.losses, wanted.loss_spikes or 0)
    if not found:
        raise ConfigError("--loss-spikes: the log has no loss that is higher than the one before it")
    steps = [
        replace(_step(trained, step, span), loss_before=spike.before.value)
        for spike in found
        for step in range(spike.loss.first, spike.loss.last + 1)
    ]
    return Found(steps=with_places(steps, run, trained.num_shares))


def _step(trained: TrainedRun, step: int, span: tuple[int, int]) -> StepShown:
    packs = trained.recorded_step(step)
    if not packs:
        raise ConfigError(f"step {step} is not on record, which has steps {span[0]} to {span[1]}")
    loss = loss_at(trained.losses, step)
    return StepShown(
        step=step,
        packs=packs,
        known_from=RECORDED,
        loss=None if loss is None else loss.value,
        loss_of=None if loss is None else (loss.first, loss.last),
    )


def with_places(steps: Sequence[StepShown], run: Run, num_shares: int | None) -> list[StepShown]:
    """The steps with the lines of rows of a stream, which is read again up to the last of them."""
    if not run.args.streaming or num_shares is None:
        return list(steps)
    stream, _ = load_stream(run.args, run.template)
    stream.seed = data_seed(run.args)
    packs = [pack for step in steps for pack in step.packs]
    places: dict[tuple[int, str], str] = {}
    for epoch in {pack.epoch for pack in packs}:
        names = {name for pack in packs if pack.epoch == epoch for name in pack.ids}
        rows = rows_at(stream, epoch, {_number(name) for name in names}, num_shares)
        found = places_of(rows, local_files(run.args.dataset))
        places |= {(epoch, name): found[_number(name)] for name in names if _number(name) in found}
    return [replace(step, packs=[_placed(pack, places) for pack in step.packs]) for step in steps]


def _placed(pack: Trained, places: Mapping[tuple[int, str], str]) -> Trained:
    where = [places.get((pack.epoch, name), place) for name, place in zip(pack.ids, pack.where, strict=True)]
    return replace(pack, where=where)


def _number(name: str) -> int:
    """Of `stream:17`, or `stream:17/2`, which is a part of the row."""
    return int(name.rpartition(":")[2].partition("/")[0])
