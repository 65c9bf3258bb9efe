import copy
import pickle

import pytest
import torch

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.feed.planned import recipe_of
from swift_vlpack.plan.epoch import plan_epoch
from swift_vlpack.rows.contents import size_of
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.samples import Address, SampleError, SampleId
from swift_vlpack.rows.sizes import LengthIndex, RowSize
from swift_vlpack.rows.source import RowSource
from swift_vlpack.rows.streams import StreamedRows
from tests.data_rows import image_row, text_row
from tests.images import photo

FAMILY = "qwen2_5_vl"
ADDED = {"contents", "source", "sample_id"}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    return [photo(folder, "wide", 320, 120, seed=1), photo(folder, "tall", 90, 260, seed=2)]


def texts(num_rows, name="row"):
    return [text_row(f"{name} {number}?") for number in range(num_rows)]


def fused(template, *sources, **options):
    return FusionCaptionDataset(sources, template, **options)


def source(name="data", rows=None, **options):
    return RowSource(name=name, rows=texts(10) if rows is None else rows, **options)


def ids(dataset):
    return [dataset.sample_id(Address(*where)) for where in dataset.schedule]


def epoch_of(dataset):
    """The sizes of epoch 0 at the positions of its schedule."""
    config = PackingConfig(packing_length=10_000)
    return plan_epoch(recipe_of(dataset, config, seed=0, num_ranks=1), 0)


def rows_of(dataset, name):
    return [sample_id.row for sample_id in ids(dataset) if sample_id.source == name]


def is_same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


# -- encoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_images", [0, 1, 2])
def test_sample_is_what_the_template_encodes_plus_length_source_and_id(template, pictures, num_images):
    """DATA-1"""
    row = {**image_row(pictures[:num_images]), "channel": "web"} if num_images else text_row()
    sample = fused(template, source("captions", [row]))[0]
    expected = template.encode(row)
    assert ("pixel_values" in expected) == (num_images > 0)
    for name, value in expected.items():
        assert is_same(sample[name], value), name
    assert set(sample) - set(expected) == {"length", "lengths", *ADDED}  # `lengths` is ms-swift's own
    assert sample["length"] == len(expected["input_ids"])
    assert sample["source"] == "captions"
    assert sample["sample_id"] == SampleId("captions", 0)
    assert size_of(sample).images == num_images


def test_encoding_leaves_the_row_as_it_was(template, pictures):
    """DATA-1 DATA-3"""
    rows = [image_row(pictures)]
    before = copy.deepcopy(rows)
    first, again = (fused(template, source(rows=rows, system="Be brief."))[0] for _ in range(2))
    assert rows == before
    assert first["input_ids"] == again["input_ids"]


def test_sample_id_is_the_number_in_the_file_where_rows_are_missing(template):
    """DATA-2"""
    dataset = fused(template, source("captions", texts(5), row_numbers=[0, 3, 4, 8, 9], num_lost=5), shuffle=False)
    assert [str(sample_id) for sample_id in ids(dataset)] == [f"captions:{n}" for n in (0, 3, 4, 8, 9)]
    asked_for = template.tokenizer.decode(dataset[3]["input_ids"])
    assert "row 3?" in asked_for, "the fourth row that is there"
    assert dataset[3]["sample_id"] == SampleId("captions", 8)


def test_row_that_cannot_be_encoded_is_named_with_a_reason(template, tmp_path):
    """DATA-2 DATA-7"""
    rows = [text_row(), image_row([str(tmp_path / "missing.jpg")])]
    dataset = fused(template, source("captions", rows, row_numbers=[4, 7]), shuffle=False)
    with pytest.raises(SampleError, match="captions:7: file_missing: ") as caught:
        dataset[1]
    assert (caught.value.sample_id, caught.value.reason) == (SampleId("captions", 7), "file_missing")
    travelled = pickle.loads(pickle.dumps(caught.value))  # out of a dataloader worker
    assert (str(travelled), travelled.reason) == (str(caught.value), "file_missing")


def test_strict_raises_the_error_with_the_row_and_the_cause(template, tmp_path):
    """DATA-7"""
    rows = [text_row(), image_row([str(tmp_path / "missing.jpg")])]
    dataset = fused(template, source("captions", rows, row_numbers=[4, 7]), strict=True, shuffle=False)
    assert dataset[0]["sample_id"].row == 4
    with pytest.raises(DataError, match=r"captions:7: file_missing: no such file: ") as caught:
        dataset[1]
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(DataError, match=r"captions:7"):
        list(dataset.samples(0))


def test_template_that_makes_several_samples_of_a_row_is_refused(template):
    """DATA-1 DATA-8"""
    splitting = copy.copy(template)
    splitting.max_length, splitting.truncation_strategy = 20, "split"
    with pytest.raises(ConfigError, match=r"captions:3.*truncation_strategy=split"):
        RowEncoder(splitting).sample(text_row(answer="word " * 60), SampleId("captions", 3))


def test_measured_sizes_are_those_of_the_encoded_rows(template, pictures, tmp_path):
    """DATA-6 DATA-7: a row that cannot be encoded measures 0 and keeps its reason."""
    rows = [text_row(), image_row(pictures), image_row([str(tmp_path / "missing.jpg")])]
    dataset = fused(template, source(rows=rows), source("more", texts(2)))
    dataset.measure()
    sizes = epoch_of(dataset).sizes
    for position, sample in enumerate(dataset.samples(0)):
        expected = (0, 0, 0, 0)
        if not isinstance(sample, SampleError):
            patches = len(sample.get("pixel_values", ()))
            num_labels = sum(label >= 0 for label in sample["labels"])
            assert 0 < num_labels < len(sample["input_ids"])
            expected = (len(sample["input_ids"]), len(sample.get("image_grid_thw", ())), patches, num_labels)
        assert tuple(sizes[:, position].tolist()) == expected
    assert dataset.failed(Address(0, 2)).reason == "file_missing"


# -- the mix ----------------------------------------------------------------------------------------------------------


def test_sample_limit_keeps_the_same_rows_in_all_epochs(template):
    """DATA-3"""
    dataset = fused(template, source("few", texts(50), sample_limit=7), source("rest"))
    epochs = []
    for epoch in range(5):
        dataset.set_epoch(epoch)
        epochs.append(rows_of(dataset, "few"))
        assert len(dataset) == 17
    assert {frozenset(rows) for rows in epochs} == {frozenset(epochs[0])}
    assert len(set(epochs[0])) == 7
    assert len({tuple(rows) for rows in epochs}) == 5, "another order in every epoch"
    assert set(epochs[0]) != set(range(7)), "a draw, not the head of the file"


def test_sample_limit_counts_before_the_ratio_and_may_exceed_the_rows(template):
    """DATA-3"""
    dataset = fused(template, source("few", texts(50), sample_limit=8, ratio=0.5), source("all", sample_limit=99))
    drawn = set()
    for epoch in range(12):
        dataset.set_epoch(epoch)
        assert len(rows_of(dataset, "few")) == 4
        assert sorted(rows_of(dataset, "all")) == list(range(10))
        drawn |= set(rows_of(dataset, "few"))
    assert len(drawn) == 8


def test_limited_rows_are_measured_at_their_own_place(template):
    """DATA-3 DATA-6"""
    rows = [text_row(answer="word " * (1 + number)) for number in range(12)]
    dataset = fused(template, source(rows=rows, sample_limit=4))
    dataset.measure()
    lengths = epoch_of(dataset).lengths.tolist()
    assert lengths == [sample["length"] for sample in dataset.samples(0)]
    assert len(set(lengths)) == 4


def test_system_is_given_to_rows_without_one_only(template):
    """DATA-3"""
    system = {"role": "system", "content": "Own words."}
    own = {"messages": [system, *text_row()["messages"]]}
    given = {"messages": [{"role": "system", "content": "Be brief."}, *text_row()["messages"]]}
    dataset = fused(template, source(rows=[text_row(), own], system="Be brief."), shuffle=False)
    assert dataset[0]["input_ids"] == template.encode(given)["input_ids"] != template.encode(text_row())["input_ids"]
    assert dataset[1]["input_ids"] == template.encode(own)["input_ids"]


def test_max_pixels_shrinks_the_images_of_its_source_only(template, pictures):
    """DATA-3"""
    row, limit = image_row(pictures[:1]), 320 * 120 // 4
    dataset = fused(template, source("small", [row], max_pixels=limit), source("full", [row]), shuffle=False)
    small, full = dataset[0], dataset[1]
    assert small["length"] < full["length"] == len(template.encode(row)["input_ids"])
    pixels = small["image_grid_thw"].prod().item() * 14 * 14
    assert pixels <= 1.3 * limit, "up to rounding to whole patches"
    dataset.measure()
    assert epoch_of(dataset).lengths.tolist() == [small["length"], full["length"]]


def test_seed_of_a_source_moves_its_draws_and_no_others(template):
    """DATA-3"""

    def drawn(**options):
        dataset = fused(template, source("a", ratio=0.5, **options), source("b", ratio=0.5), seed=3)
        return rows_of(dataset, "a"), rows_of(dataset, "b")

    before, after = drawn(), drawn(seed=99)
    assert before[0] != after[0]
    assert before[1] == after[1]
    assert drawn(seed=3) == before, "the run's seed is the default"


def test_source_that_contradicts_itself_is_refused():
    """DATA-3 DATA-6"""
    with pytest.raises(ConfigError, match="'data': sample_limit must be at least 1, got 0"):
        source(sample_limit=0)
    with pytest.raises(DataError, match="'data': 1 lengths for 10 rows"):
        source(sizes=LengthIndex.of([RowSize(5)]))
    with pytest.raises(DataError, match="no source"):
        FusionCaptionDataset([], None)


def test_stream_hears_of_the_epoch_if_it_listens(template):
    """DATA-4"""

    class Rows(list):
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

    rows = Rows(texts(2))
    assert len(list(StreamedRows(rows, template).samples(3))) == 2
    assert rows.epoch == 3
    assert len(list(StreamedRows(iter(rows), template).samples(3))) == 2
