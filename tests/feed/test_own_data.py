"""Data sets of one's own, of samples that are encoded already, and of rows that change from epoch to epoch."""

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

from swift_vlpack import FusionCaptionDataset, PackingConfig, PackingDataset, RowSource
from swift_vlpack.errors import ConfigError, DataError, PlanError
from swift_vlpack.feed import reader
from swift_vlpack.feed.epoch_report import left_out_by
from swift_vlpack.rows import fusion
from tests.data_rows import text_row
from tests.marks import telling
from tests.own_data import Declared, Mixed, encoded
from tests.plain_template import PlainTemplate

RATIOS = {"target": 0.3, "source": 1.7}
FORMS = pytest.mark.parametrize("form", ["plan", "buffer"])


def config(**options):
    return PackingConfig(
        **{"packing_length": 100, "packing_strategy": "best_fit", "packing_drop_last": False, **options}
    )


def packs_of(packs):
    return [packs[number] for number in range(len(packs))] if hasattr(packs, "plan") else list(packs)


def names(packs):
    return sorted(sample["name"] for pack in packs_of(packs) for sample in pack)


def mixed(kind=Mixed, form="plan", **options):
    data = kind(RATIOS)
    return data, PackingDataset(data, None, config(packing_mode=form), **options)


# -- encoded samples --------------------------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("template", [None, PlainTemplate()])
@pytest.mark.parametrize("length", [{}, {"length": True}])
def test_encoded_samples_are_packed_with_every_field(form, template, length):
    """OWN-8: also columns that have names of ours, and a number for each token; what was given stays as it was."""
    image = {"pixel_values": torch.ones(4, 8), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    rows = [
        encoded(num, f"row {num}", sample_id=f"a-{num}", source="me", own=num, shared=2, weights=[0.5] * num, **image)
        for num in range(20, 60)
    ]
    rows = [row | {"length": len(row["input_ids"])} if length else row for row in rows]
    before = [{**row} for row in rows]
    packs = packs_of(PackingDataset(rows, template, config(packing_mode=form)))
    assert all(sum(sample["length"] for sample in pack) <= 100 for pack in packs)
    samples = sorted((sample for pack in packs for sample in pack), key=lambda sample: sample["name"])
    for sample, row in zip(samples, rows, strict=True):
        assert {name: sample[name] for name in row} == row
        assert sample["pixel_values"] is row["pixel_values"]
        assert set(sample) - set(row) <= {"length", "contents"}
    assert rows == before
    assert {pack.record.num_images == len(pack) for pack in packs} == {True}
    if template is not None:
        assert (template.packing, template.padding_free, template.encoded) == (True, True, [])


def test_tensors_become_the_lists_that_the_collators_of_ms_swift_join():
    """OWN-8: and stay tensors for a collator of one's own, where no template is given."""
    row = {name: torch.tensor(value) for name, value in encoded(20).items() if name != "name"}
    for template, kind in ((PlainTemplate(), list), (None, torch.Tensor)):
        (sample,) = PackingDataset([row], template, config())[0]
        assert {type(sample["input_ids"]), type(sample["labels"])} == {kind}
        assert list(sample["labels"]) == row["labels"].tolist()


def test_samples_get_the_form_that_a_template_collates(caplog):
    """OWN-8: arrays become tensors, a mask of ones goes; what it cannot collate is left out."""
    image = {"pixel_values": [[0.5] * 3] * 4, "image_grid_thw": np.array([[1, 2, 2]])}
    rows = [encoded(9, **image, attention_mask=torch.ones(1, 9)), encoded(9, attention_mask=[0] + [1] * 8), encoded(9)]
    del rows[2]["labels"]
    packs = PackingDataset(rows, PlainTemplate(), config())
    ((sample,),) = packs_of(packs)
    assert "attention_mask" not in sample
    assert (sample["pixel_values"].shape, sample["image_grid_thw"].tolist()) == ((4, 3), [[1, 2, 2]])
    assert [one.reason for one in left_out_by(packs.epoch_plan, packs.dataset)] == ["encode_failed"] * 2
    assert "attention_mask hides tokens" in caplog.text
    assert "labels are missing: give one for each token" in caplog.text


@FORMS
def test_sources_of_both_kinds_are_mixed(form):
    """OWN-8 DATA-3"""
    sources = [
        RowSource(name="mine", rows=[encoded(30, f"mine {n}") for n in range(20)], ratio=0.5),
        RowSource(name="rows", rows=[text_row(f"question {n}", "word " * 20) for n in range(10)]),
    ]
    template = PlainTemplate()
    packs = packs_of(PackingDataset(FusionCaptionDataset(sources, template), template, config(packing_mode=form)))
    assert Counter(one.source for pack in packs for one in pack.record.sample_ids) == {"mine": 10, "rows": 10}


def test_row_that_is_not_encoded_needs_a_template():
    """OWN-13 OWN-8: at once where packs are planned, else at the first row."""
    said = r"data:0 is no encoded sample, as it has no input_ids: give PackingDataset a template"
    with pytest.raises(ConfigError, match=said):
        PackingDataset([text_row()], None, config())
    with pytest.raises(ConfigError, match="stream:0 is no encoded sample"):
        list(PackingDataset(iter([text_row()]), None, config()))
    with pytest.raises(ConfigError, match="train_on_eos=false needs a template"):
        PackingDataset([encoded(9)], None, config(train_on_eos=False))


class Broken(Mixed):
    """Fails as own classes fail."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        made = {
            1: sample | {"input_ids": torch.ones(1, 9)},
            2: sample | {"input_ids": [[1, 2]]},
            3: sample | {"input_ids": []},
            4: sample | {"length": 99},
            5: sample | {"labels": [1, 2]},
            6: sample | {"loss_scale": [1.0] * 70},
        }
        if index == 0:
            raise FileNotFoundError("no such image")
        return made.get(index, sample)


@FORMS
def test_what_an_own_class_fails_to_give_is_left_out_and_counted(form, caplog):
    """OWN-8 DATA-7: a missing file, a batch for a sample, no tokens, another length than the tokens have."""
    data, packs = mixed(Broken, form)
    made = packs_of(packs)
    left_out = [one for pack in made for one in pack.record.left_out]
    left_out += left_out_by(packs.epoch_plan, packs.dataset) if form == "plan" else []
    assert {one.sample_id.row: one.reason for one in left_out} == {
        0: "file_missing", **dict.fromkeys(range(1, 7), "encode_failed"),
    }  # fmt: skip
    assert "length is 99, but input_ids has" in next(one.detail for one in left_out if one.sample_id.row == 4)
    assert sum(map(len, made)) == len(data) - 7
    strict = FusionCaptionDataset([RowSource(name="data", rows=data)], None, strict=True)
    with pytest.raises(DataError, match=r"data:\d: (file_missing: FileNotFoundError: no such image|encode_failed)"):
        packs_of(PackingDataset(strict, None, config(packing_mode=form)))


# -- lengths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Mixed, Declared])
def test_declared_lengths_plan_without_encoding_and_plan_the_same(kind, monkeypatch):
    """OWN-10 DATA-6: only a few rows are looked at."""
    monkeypatch.setattr(fusion, "NUM_COMPARED", 3)
    expected = PackingDataset(Mixed(RATIOS), None, config())
    data, given = kind(RATIOS), {}
    if kind is Mixed:
        given = {"lengths": [len(data[index]["input_ids"]) for index in range(len(data))]}
        data.num_encoded = 0
    packs = PackingDataset(data, None, config(), **given)
    assert data.num_encoded <= 3 + 2 + 2, "three that are drawn, the shortest, the longest, the first and the last"
    assert packs.plan.digest() == expected.plan.digest()
    assert names(packs) == data.names(0)


class Wrong(Declared):
    """Forgets the tokens of its images."""

    def length(self, index):
        return super().length(index) - 4


def test_declared_lengths_are_compared_with_what_is_loaded():
    """OWN-10: before anything is planned by them."""
    said = r"data:\d+ has \d+ tokens, not \d+ as declared: lengths count the tokens of an encoded row, images expanded"
    with pytest.raises(DataError, match=said):
        mixed(Wrong)
    with pytest.raises(DataError, match="source 'data': 2 lengths for 80 rows"):
        mixed(lengths=[1, 2])
    source = RowSource(name="a", rows=[encoded(9)], lengths=[9])
    with pytest.raises(ConfigError, match=r"lengths= is for one data set; give RowSource\(lengths=...\)"):
        PackingDataset(FusionCaptionDataset([source], None), None, config(), lengths=[9])
    with pytest.raises(ConfigError, match="streamed packs have no option lengths"):
        mixed(form="buffer", lengths=[9])


@pytest.mark.parametrize("options", [{"packing_max_images": 3}, {"packing_overflow": "split"}])
def test_lengths_are_not_enough_where_a_plan_counts_images_or_cuts(options):
    """OWN-10: then every row is encoded, as without them."""
    data = Declared(RATIOS)
    PackingDataset(data, None, config(**options))
    assert data.num_encoded == len(data)


def test_pass_that_encodes_says_what_it_costs(monkeypatch, caplog, capsys):
    """OWN-10: with a bar while it runs."""
    monkeypatch.setattr(fusion, "SECONDS_UNSAID", 0.0)
    data, _ = mixed()
    assert data.num_encoded == len(data) == 80
    assert "source data: 80 rows were encoded once to learn their lengths, which took" in caplog.text
    assert "ms a row); give lengths=, or its class a method length(index)" in caplog.text
    assert "Lengths of data: 100%" in capsys.readouterr().err


# -- epochs -----------------------------------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("kind", [Mixed, Declared])
def test_every_epoch_has_the_rows_that_the_data_set_draws_for_it(form, kind):
    """OWN-9 DATA-4: fusion first, packing second; the ratios of an epoch are those of the data set's schedule."""
    data, packs = mixed(kind, form)
    drawn = set()
    for epoch in range(4):
        packs.set_epoch(epoch)
        found = names(packs)
        assert found == data.names(epoch)
        assert Counter(name.partition("-")[0] for name in found) == {"target": 12, "source": 68}
        drawn.add(tuple(found))
    assert len(drawn) == 4


def test_data_set_is_told_before_anything_is_planned():
    """OWN-9"""
    data, packs = mixed()
    data.told.clear()
    length, seen = data.__class__.__getitem__, []
    data.__class__ = type("Watched", (Mixed,), {
        "__getitem__": lambda self, index: seen.append(list(self.told)) or length(self, index)
    })  # fmt: skip
    packs.set_epoch(3)
    assert data.told == [3]
    assert seen
    assert all(told == [3] for told in seen), "measured afterwards"
    assert packs.epoch_plan.schedule.row.tolist() == list(range(80)), "its order is the schedule"
    data, packs = mixed(num_epochs=3)
    data.told.clear()
    packs.set_epoch(1)
    assert data.told == [1], "also where the epoch was planned ahead"


@dataclass
class Unhashable(Mixed):
    """Compares by value, as dataclasses do."""

    ratios: dict

    def __post_init__(self):
        super().__init__(self.ratios)


class Slots:
    """Has no attributes but its own."""

    __slots__ = ("data",)

    def __init__(self, ratios):
        self.data = Mixed(ratios)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]

    def set_epoch(self, epoch):
        self.data.set_epoch(epoch)


@pytest.mark.parametrize("kind", [Unhashable, Slots])
def test_any_class_will_do(kind):
    """OWN-9"""
    _, packs = mixed(kind)
    packs.set_epoch(2)
    assert names(packs) == Mixed(RATIOS).names(2)


def test_two_packs_around_one_data_set_do_not_disturb_each_other():
    """OWN-9: each tells it the epoch that it reads."""
    data, one = mixed()
    other = PackingDataset(data, None, config())
    other.set_epoch(1)
    assert [names(packs) for packs in (one, other, one)] == [data.names(epoch) for epoch in (0, 1, 0)]


class Growing(Mixed):
    """Has more rows in every epoch."""

    def drawn(self, epoch):
        return super().drawn(epoch)[: 40 + 10 * epoch]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_all_epochs_get_one_number_of_packs_if_they_are_planned_ahead(num_ranks):
    """OWN-9 DATA-6 PLAN-15: rows, their count and their lengths may all differ; each epoch is encoded once."""
    data = Growing(RATIOS)
    packs = PackingDataset(data, None, config(), num_epochs=4, num_ranks=num_ranks)
    assert data.num_encoded <= 40 + 50 + 60 + 70
    assert len({packs.set_epoch(epoch) or len(packs) for epoch in range(4)}) == 1
    for epoch in (2, 0, 3):
        packs.set_epoch(epoch)
        assert names(packs) == data.names(epoch)
        assert len(packs) % num_ranks == 0
    alone = PackingDataset(Growing(RATIOS), None, config())
    nums = [alone.set_epoch(epoch) or len(alone) for epoch in (0, 3, 1)]
    assert nums[0] < nums[2] < nums[1] == len(packs), "without num_epochs it is that of each epoch"


class Shrinking(Mixed):
    """Has next to no rows in later epochs."""

    def drawn(self, epoch):
        return super().drawn(epoch)[: 3 if epoch else 80]


def test_epochs_that_cannot_have_as_many_steps_are_refused():
    """OWN-9: at the start, with the way out."""
    said = "with a data set that changes one epoch has 3 samples, another .* or leave num_epochs out, and set the steps"
    with pytest.raises(PlanError, match=said):
        mixed(Shrinking, num_epochs=2)
    data, packs = mixed(Shrinking)
    packs.set_epoch(1)
    assert names(packs) == data.names(1)


class Fixed:
    """Has the same rows in every epoch, and no word of epochs."""

    num_encoded = 0

    def __len__(self):
        return 30

    def __getitem__(self, index):
        self.num_encoded += 1
        return encoded(10 + index, f"fixed-{index}")


class Renamed(Mixed):
    """Has the same rows in the same order in every epoch, with another text of the same length."""

    def drawn(self, epoch):
        return super().drawn(0)


def test_rows_that_keep_their_lengths_are_not_encoded_again(monkeypatch):
    """OWN-10 OWN-9"""
    monkeypatch.setattr(fusion, "NUM_COMPARED", 3)
    data, _ = mixed(Renamed, num_epochs=4)
    assert data.num_encoded <= len(data) + 3 * 7
    again, _ = mixed(Mixed, num_epochs=4)
    assert again.num_encoded >= 4 * len(again), "of other rows each is"
    fixed = Fixed()
    sources = [RowSource(name="changing", rows=Mixed(RATIOS)), RowSource(name="fixed", rows=fixed)]
    PackingDataset(FusionCaptionDataset(sources, None), None, config(), num_epochs=4)
    assert fixed.num_encoded == len(fixed), "nor are those of a source that does not change"


class Moving(Mixed):
    """Has images in one half of its rows, in every epoch in the other half; all rows have one length."""

    def __getitem__(self, index):
        image = {"pixel_values": torch.ones(4, 8), "image_grid_thw": torch.tensor([[1, 2, 2]])}
        return encoded(10, **(image if (index < len(self) // 2) == bool(self.told and self.told[-1]) else {}))


def test_caps_hold_where_images_move_between_rows_of_one_length():
    """OWN-9 OWN-10: a plan that counts images measures each epoch."""
    _, packs = mixed(Moving)
    packs = PackingDataset(packs.sources[0].rows, None, config(packing_max_images=2))
    for epoch in range(3):
        packs.set_epoch(epoch)
        assert {pack.record.num_images for pack in packs_of(packs)} <= {0, 1, 2}


class FailingAtFirst(Renamed):
    """Cannot read one row in epoch 0."""

    def __getitem__(self, index):
        if index == 2 and not (self.told and self.told[-1]):
            raise OSError("mount is gone")
        return super().__getitem__(index)


def test_row_that_failed_in_one_epoch_is_read_in_the_next():
    """OWN-9 DATA-7"""
    data, packs = mixed(FailingAtFirst)
    assert len(names(packs)) == len(data) - 1
    packs.set_epoch(1)
    assert names(packs) == data.names(0)


def test_packs_of_an_epoch_are_those_of_a_run_that_begins_there():
    """OWN-9 RESUME-3: a resume in the middle of epoch 3 has the packs of epoch 3."""
    _, one = mixed(num_epochs=4)
    for epoch in range(4):
        one.set_epoch(epoch)
        packs_of(one)
    _, other = mixed(num_epochs=4)
    other.set_epoch(3)
    assert packs_of(one) == packs_of(other)
    assert one.plan.digest() == other.plan.digest()


@pytest.mark.parametrize(
    "options", [{"packing_share": "media"}, {"packing_batch": "samples"}], ids=lambda options: next(iter(options))
)
def test_options_that_need_the_same_rows_are_refused(options):
    """OWN-9"""
    steps = {"samples_per_step": 4} if "packing_batch" in options else {}
    with pytest.raises(ConfigError, match="need the same rows in every epoch, but the data set has set_epoch"):
        PackingDataset(Mixed(RATIOS), None, config(packing_drop_last=True, **options), **steps)


# -- workers and ranks ------------------------------------------------------------------------------------------------


def loader(packs, num_workers=2, **options):
    return DataLoader(packs, batch_size=None, collate_fn=None, num_workers=num_workers, **options)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("context", ["fork", telling("spawn")])
@pytest.mark.parametrize("live_on", [False, True])
def test_workers_read_the_rows_of_the_epoch(num_workers, context, live_on):
    """OWN-6 OWN-9: also the one that was left, and with all epochs planned ahead in the main process."""
    data, packs = mixed(num_epochs=3)
    options = {"multiprocessing_context": context, "persistent_workers": live_on} if num_workers else {}
    made = loader(packs, num_workers, sampler=packs.sampler if live_on else None, **options)
    for epoch in (0, 1, 2, 1):
        packs.set_epoch(epoch)
        assert sorted(sample["name"] for pack in made for sample in pack) == data.names(epoch)


@FORMS
def test_workers_of_accelerate_that_live_on_read_the_rows_of_the_epoch(form):
    """OWN-6 OWN-9: its loader sets the epoch by itself."""
    data, packs = mixed(form=form, **({"num_epochs": 3} if form == "plan" else {}))
    options = {"sampler": packs.sampler} if form == "plan" else {}
    made = DataLoader(packs, batch_size=1, collate_fn=next_of, num_workers=1, persistent_workers=True, **options)
    configuration = DataLoaderConfiguration(dispatch_batches=False)
    made = Accelerator(cpu=True, dataloader_config=configuration).prepare(made)
    for epoch in range(3):
        assert sorted(name for pack in made for name in pack) == data.names(epoch)


def next_of(batch):
    return [sample["name"] for sample in batch[0]]


def test_workers_that_live_on_without_addresses_are_refused_before_the_first_step():
    """OWN-6: of a run of one epoch they are right, and refused by name in the next."""
    _, packs = mixed(num_epochs=2)
    with pytest.raises(DataError, match=r"will live on.*give the loader sampler=packs\.sampler"):
        next(iter(loader(packs, persistent_workers=True)))
    _, packs = mixed()
    made = loader(packs, persistent_workers=True)
    assert len(list(made)) == len(packs)
    packs.set_epoch(1)
    with pytest.raises(DataError, match=r"packs of epoch 0, and epoch 1 is set: give the loader sampler="):
        list(made)


class Augmented(Mixed):
    """Draws at random while it encodes."""

    def __getitem__(self, index):
        return {**super().__getitem__(index), "drawn": random.random()}


def test_random_numbers_of_an_own_class_are_those_of_the_pack():
    """OWN-9 RAND-1: whatever process reads it, and what was drawn before."""
    _, packs = mixed(Augmented)
    one, other = packs_of(packs), list(loader(packs))
    assert one == other
    assert len({sample["drawn"] for pack in one for sample in pack}) > 20


class DrawnTokens:
    """Draws one token a row, for all its places, by the random state of the process."""

    def __init__(self, num_tokens):
        self.num_tokens = num_tokens

    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = [random.randint(1, 10**6)] * self.num_tokens
        return {"input_ids": ids, "labels": ids}


class DrawnTokensOfEpochs(DrawnTokens):
    """Is told the epoch."""

    def set_epoch(self, epoch):
        """Do nothing."""


@pytest.mark.parametrize("num_threads", [1, 2])
def test_parts_of_a_row_that_is_drawn_are_those_of_one_row(num_threads, monkeypatch):
    """OWN-9 RAND-1 CUT-1: whatever packs they are in, and however many threads read them."""
    monkeypatch.setattr(reader, "threads_per_worker", lambda: num_threads)
    packs = PackingDataset(DrawnTokens(250), None, config(packing_overflow="split"))
    drawn = {}
    for sample in (sample for pack in packs_of(packs) for sample in pack):
        drawn.setdefault(sample["sample_id"].row, set()).update(sample["input_ids"])
    assert len(drawn) == 8
    assert {len(tokens) for tokens in drawn.values()} == {1}


def agree(rank, said, seed_of_rank, num_ranks, only_later=False):
    data = Mixed(RATIOS, seed=0 if only_later else seed_of_rank * rank)
    packs = PackingDataset(data, None, config(), num_ranks=num_ranks, num_epochs=1 if only_later else 2)
    if only_later:
        data.seed = seed_of_rank * rank
        said.put("epoch 0")
        packs.set_epoch(1)
    said.put("planned")


def draw(rank, said, kind):
    random.seed(rank)
    packs = PackingDataset(kind(30), None, config(), num_ranks=2)
    packs.set_epoch(1)
    said.put("planned")


class FailingLater(Mixed):
    """Cannot draw epoch 1."""

    def set_epoch(self, epoch):
        if epoch == 1:
            raise OSError("disk is gone")
        super().set_epoch(epoch)


def fail_on_one(rank, said, num_epochs):
    kind = FailingLater if rank else Mixed
    packs = PackingDataset(kind(RATIOS), None, config(), num_ranks=2, num_epochs=num_epochs)
    packs.set_epoch(1)


def on_rank(rank, folder, act, said, args):
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    try:
        act(rank, said, *args)
    except (DataError, OSError) as error:
        said.put(str(error))
    finally:
        dist.destroy_process_group()


def on_two_ranks(folder, act, *args):
    """Run `act` in two processes, and return what they say, sorted."""
    context = torch.multiprocessing.get_context("fork")
    said = context.SimpleQueue()
    ranks = [context.Process(target=on_rank, args=(rank, folder, act, said, args), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert not any(process.is_alive() for process in ranks), "one waits for the other"
    heard = []
    while not said.empty():
        heard.append(said.get())
    return sorted(heard)


@pytest.mark.parametrize("kind", [DrawnTokens, DrawnTokensOfEpochs])
def test_ranks_of_data_that_draws_at_random_measure_the_same(kind, tmp_path):
    """OWN-9 RAND-1: whatever each process has drawn before."""
    assert on_two_ranks(tmp_path, draw, kind) == ["planned"] * 2


@pytest.mark.parametrize("num_epochs", [1, 2])
def test_error_on_one_rank_ends_all(num_epochs, tmp_path):
    """OWN-9: at the start and in an epoch, where the others would wait."""
    expected = ["disk is gone", "rank 1 cannot plan its packs: OSError: disk is gone"]
    assert on_two_ranks(tmp_path, fail_on_one, num_epochs) == expected


OTHER_ROWS = "rank 1 has other rows than rank 0: every rank has to draw the rows of all ranks"


@pytest.mark.parametrize(
    ("seed_of_rank", "num_ranks", "expected"), [(0, 2, "planned"), (1, 2, OTHER_ROWS), (1, 1, "planned")]
)
def test_ranks_with_other_rows_are_refused(seed_of_rank, num_ranks, expected, tmp_path):
    """OWN-9: unless each rank packs rows of its own."""
    heard = on_two_ranks(tmp_path, agree, seed_of_rank, num_ranks)
    assert [one.startswith(expected) for one in heard] == [True] * 2


def test_ranks_with_other_rows_in_a_later_epoch_are_refused(tmp_path):
    """OWN-9: an epoch that was not planned ahead is compared when it is set."""
    heard = on_two_ranks(tmp_path, agree, 1, 2, True)
    assert heard[:2] == ["epoch 0"] * 2
    assert [one.startswith(OTHER_ROWS) for one in heard[2:]] == [True] * 2
