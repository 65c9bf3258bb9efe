"""What a collated batch holds, and what travels beside it, whoever moves it."""

import copy
import gc
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from swift.utils import to_device
from torch.utils.data import DataLoader
from transformers import Trainer

from swift_vlpack import PackingConfig, PackingDataset
from swift_vlpack.feed.collate import NOT_FOR_THE_MODEL, Batch, Collator, batch_of
from swift_vlpack.rows.samples import PackRecord, SampleId
from tests.data_rows import mixed_rows

FAMILY = "qwen2_5_vl"
CPU = torch.device("cpu")
RECORD = PackRecord(1, 2, (SampleId("data", 3),), (4,), 0)


@pytest.fixture
def packs(template, tmp_path):
    rows = [{**row, "channel": "web", "note": "of its own"} for row in mixed_rows(tmp_path, 12, seed=3, largest=120)]
    return PackingDataset(rows, template, PackingConfig(packing_length=300, packing_drop_last=False))


def applied(data, function):
    """Rebuild nested collections as Lightning's `apply_to_collection` does."""
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, Mapping):
        return type(data)(OrderedDict((name, applied(value, function)) for name, value in data.items()))
    return data


def a_trainer():
    trainer = object.__new__(Trainer)  # all that moving a batch needs of one
    trainer.args, trainer.is_deepspeed_enabled = SimpleNamespace(device=CPU), False
    return trainer


def pinned(data):
    """Rebuild as PyTorch's `pin_memory` does."""
    clone = copy.copy(data)
    clone.update({name: value.clone() for name, value in data.items()})
    return clone


MOVERS = {
    "ms-swift": lambda batch: to_device(batch, CPU),
    "accelerate": lambda batch: send_to_device(batch, CPU),
    "transformers": lambda batch: a_trainer()._prepare_input(batch),
    "Lightning": lambda batch: applied(batch, lambda tensor: tensor.to(CPU)),
    "pin_memory": pinned,
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("mover", MOVERS)
def test_record_arrives_whoever_moves_the_batch(mover):
    """OWN-1"""
    batch = batch_of({"input_ids": torch.arange(4)}, RECORD, {"channel": ["web"]})
    moved = MOVERS[mover](batch)
    assert isinstance(moved, Batch)
    assert moved is not batch
    assert list(moved) == ["input_ids"]
    assert torch.equal(moved["input_ids"], batch["input_ids"])
    assert moved.record == RECORD
    assert moved.beside == {"channel": ["web"]}


def by_accelerate(loader):
    return Accelerator().prepare(loader)  # made now: a trainer before this test resets what the class shares


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("prepare", [lambda loader: loader, by_accelerate], ids=["plain", "accelerate"])
def test_records_come_through_a_loader(packs, template, num_workers, prepare):
    """OWN-1"""
    loader = prepare(DataLoader(packs, batch_size=1, collate_fn=Collator(template), num_workers=num_workers))
    expected = [packs[index].record for index in range(len(packs))]
    assert [batch.record for batch in loader] == expected
    assert len(expected) > 2


def test_types_of_batches_do_not_pile_up():
    """OWN-1"""

    def made():
        gc.collect()
        return sum(1 for kind in Batch.__subclasses__())

    before = made()
    for _ in range(1000):
        isinstance(MOVERS["ms-swift"](batch_of({"input_ids": torch.arange(2)}, RECORD, {})), Mapping)
    assert made() <= before + 1


def test_batch_holds_nothing_that_the_model_cannot_take(packs, template, tiny):
    """OWN-1: a forward without **kwargs would refuse it; what is taken out stays within reach."""
    template.remove_unused_columns = False
    try:
        packed = Collator(template)([packs[0]])
        padded = Collator(template)(list(packs[0]))
        for_host, padded_for_host = (Collator(template, for_model=False)(batch) for batch in ([packs[0]], [*packs[0]]))
    finally:
        template.remove_unused_columns = True
    assert not {*packed, *padded} & {*NOT_FOR_THE_MODEL, "note"}
    assert packed.beside["channel"] == ["web"] * len(packs[0])
    assert torch.equal(packed.beside["text_position_ids"], for_host["text_position_ids"])
    assert {*for_host} == {*packed, *packed.beside}
    assert {*padded_for_host} == {*padded, *padded.beside, "note"}, "a column the template does not know"
    assert for_host.record == packed.record == packs[0].record
    assert padded.record is None
    assert tiny(FAMILY).model(**packed).loss > 0
