"""Feeds as a trainer has them, over torch's own dataloader, in one process."""

import json

from torch.utils.data import DataLoader

from swift_vlpack.feed.planned import PlannedPackingDataset
from swift_vlpack.feed.planned_feed import PlannedFeed
from swift_vlpack.feed.streamed import ReaderProgress, StreamedPackingDataset
from swift_vlpack.feed.streamed_feed import StreamedFeed
from swift_vlpack.rows.randomness import own_generator


class Loader(DataLoader):
    """What `PackLoader` is to ms-swift's trainer."""

    def __init__(self, dataset, device=None, *, feed, **options):
        super().__init__(dataset, generator=own_generator(), **options)
        self.feed = feed

    def set_epoch(self, epoch):
        self.feed.begin(epoch)

    def __iter__(self):
        return self.feed.batches(super().__iter__())


class OneRank:
    """Nobody else to agree with."""

    def vote(self, mine):
        return lambda: mine


def loader_over(feed, **options):
    return feed.loader(0, Loader, ranks=OneRank, **options)


def planned_feed(rows, template, config, **options):
    return PlannedFeed(PlannedPackingDataset(rows, template, config, **options))


def streamed_feed(rows, template, config, *, num_workers=0, **options):
    return StreamedFeed(StreamedPackingDataset(rows, template, config, **options), num_workers)


def resumed(fresh, trained, records, epoch=0):
    """A fresh feed that goes on where another one is after these packs of an epoch, through JSON."""
    trained.begin(epoch)
    trained.consumed(records)
    states = json.loads(json.dumps([trained.state(), trained.rank_state()]))
    fresh.restore(*states)
    return fresh


def records_resumed_at_every_pack(fresh):
    """The records of a stream, which makes the same packs from each of them on after a resume there."""
    records = [pack.record for pack in fresh()]
    for step in range(1, len(records)):
        progress = ReaderProgress(0)
        for record in records[:step]:
            progress.trained(record)
        again = fresh()
        again.restore(ReaderProgress.of(progress.state()))
        rest = [(pack.record.sample_ids, pack.record.lengths) for pack in again]
        assert rest == [(record.sample_ids, record.lengths) for record in records[step:]], step
    return records
