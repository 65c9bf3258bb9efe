"""Which samples the proof takes, from real packs of a real template."""

import numpy as np
import pytest
import torch

from swift_vlpack import PackingConfig, PackingDataset, prove
from swift_vlpack.errors import DataError, IsolationError
from swift_vlpack.proof import prove as prove_module
from swift_vlpack.proof.branches import PREFIX, boundaries_of, units_in
from swift_vlpack.proof.choose_samples import chosen_samples, sequences_of_plan, short_samples
from swift_vlpack.rows.contents import contents_of
from tests.data_rows import image_row, text_row
from tests.host.feed.test_units import fused
from tests.images import photo

QWEN = "qwen2_5_vl"
FORMS = ("plan", "buffer")


@pytest.fixture
def packs(training):
    """Packs of rows, by a template that has its model."""
    loaded = training(QWEN)

    def make(rows, **options):
        config = PackingConfig(**{"packing_length": 400, "packing_strategy": "best_fit", **options})
        return PackingDataset(rows, loaded.template, config)

    return make


def ids(samples):
    return [sample["sample_id"].row for sample in samples]


def anything(sample):
    return True


def texts(num):
    return [text_row(f"question {n}", "word " * (3 + n % 40)) for n in range(num)]


@pytest.mark.parametrize("form", FORMS)
def test_every_kind_is_there(packs, rows, form):
    """ISO-12: the shortest of each, and more until there are four."""
    data = [*texts(12), rows["video"], rows["images"], rows["image"]]
    chosen = chosen_samples(packs(data, packing_mode=form), anything)
    images = sorted(contents_of(sample).images for sample in chosen)
    assert len(chosen) == 4
    assert images[-2:] == [1, 2]
    assert any("pixel_values_videos" in sample for sample in chosen)
    assert ids(sample for sample in chosen if "pixel_values" not in str(sample.keys())) == [0]
    assert len(chosen_samples(packs(texts(12), packing_mode=form), anything)) == 4


@pytest.mark.parametrize("form", FORMS)
def test_video_that_comes_only_with_an_image_is_there(packs, rows, form):
    """ISO-12: a kind of its own, though both have one image."""
    both = image_row(rows["image"]["images"], "what is it, and <video>what happens", "a picture, and nothing much")
    data = [*texts(12), *[rows["image"]] * 8, {**both, "videos": rows["video"]["videos"]}]
    chosen = chosen_samples(packs(data, packing_mode=form), anything)
    assert any({"pixel_values", "pixel_values_videos"} <= set(sample) for sample in chosen)


def test_row_with_the_most_images_is_there(packs, rows):
    """ISO-12: where another has more samples, and another the longest one."""
    many = {**text_row("<image><image>twice", "the same"), "images": rows["image"]["images"] * 2}
    data = [*[text_row("hi", "ho")] * 24, *[many] * 8, text_row("long", "word " * 320)]
    made = packs(data, packing_strategy="greedy")
    sequences = [[contents_of(sample).images for sample in row] for row in sequences_of_plan(made)]
    assert len(sequences) == 3
    *others, most = sorted(map(sum, sequences))
    assert most == max(sum(contents_of(sample).images for sample in pack) for pack in made)
    assert most > max(others)


@pytest.mark.parametrize("form", FORMS)
def test_data_of_one_sample_make_a_pack(packs, form):
    """ISO-12"""
    assert ids(chosen_samples(packs(texts(1), packing_mode=form), anything)) == [0, 0]


@pytest.fixture
def sharing(training, tmp_path):
    """Packs of rows of which some share an image, or two; as a run finds their prefixes."""
    loaded = training(QWEN)

    def make(more=(), **options):
        one, two, three = (photo(tmp_path, str(number), 84, 84, seed=number) for number in range(3))
        rows = [image_row([image], f"question {n}", "word " * (1 + n)) for image in (one, two) for n in range(5)]
        rows += [image_row([one, three], f"ask {n}", "answer") for n in range(2)]
        rows, images = [*rows, *texts(8), *more], np.array([1] * 5 + [2] * 5 + [3] * 2 + [0] * (8 + len(more)))
        config = {"packing_length": 400, "packing_strategy": "best_fit", "packing_share": "media", **options}
        return PackingDataset(fused(rows, images, loaded.template), loaded.template, PackingConfig(**config))

    return make


def test_branches_of_the_shortest_prefix_are_there(sharing):
    """SHARE-64: of the sequences of the plan that are compared, beside samples that share nothing."""
    packs = sharing()
    sequences = sequences_of_plan(packs)
    chosen = chosen_samples(packs, anything, sequences)
    (unit,) = ([chosen[at] for at in unit] for unit in units_in(chosen))
    lengths = [sum(sequence[at]["length"] for at in unit[:3]) for sequence in sequences for unit in units_in(sequence)]
    assert sum(sample["length"] for sample in unit) == min(lengths)
    assert len({sample["sample_id"] for sample in unit}) == len(unit) <= 3
    assert sum(PREFIX not in sample for sample in chosen) >= 3, "an image, two, none"


def test_sequence_with_branches_is_compared_first(sharing):
    """SHARE-64: whatever the budget of tokens, although another sequence has fewer."""
    sequences = sequences_of_plan(sharing(more=[text_row("long", "word " * 355)]))
    num_tokens = [boundaries_of(sequence).num_tokens for sequence in sequences]
    assert units_in(sequences[0])
    assert min(num_tokens) < num_tokens[0]
    plain = sequences_of_plan(sharing(packing_share="none"))
    assert all(PREFIX not in sample for sequence in plain for sample in sequence)


def test_units_with_broken_or_useless_rows_are_not_taken(sharing, monkeypatch):
    """SHARE-64 ISO-12: rows that cannot be read any more, or that the proof cannot use."""
    packs = sharing()
    breaking(monkeypatch, packs, lambda number: number in (0, 1, 2))
    sequences = sequences_of_plan(packs)
    chosen = chosen_samples(packs, lambda sample: sample["sample_id"].row not in (5, 6, 7, 8), sequences)
    rows = [{chosen[at]["sample_id"].row for at in unit} for unit in units_in(chosen)]
    assert rows in ([{3, 4}], [{10, 11}])


def breaking(monkeypatch, packs, is_broken):
    """Rows that cannot be encoded any more, though they were measured."""
    from swift_vlpack.rows.encoder import RowEncoder
    from swift_vlpack.rows.samples import SampleError

    sample = RowEncoder.sample

    def encode(encoder, row, sample_id, **options):
        if is_broken(sample_id.row):
            raise SampleError(sample_id, "file_missing", "gone")
        return sample(encoder, row, sample_id, **options)

    monkeypatch.setattr(RowEncoder, "sample", encode)


@pytest.mark.parametrize("num_broken", [3, 30])
def test_broken_short_rows_do_not_stop_good_data(packs, training, monkeypatch, num_broken):
    """ISO-12: the shortest ones are all broken; then rows all over the lengths are tried."""
    data = [text_row(f"number {n}", "word " * (5 + n)) for n in range(60)]
    made = packs(data)
    breaking(monkeypatch, made, lambda row: row < num_broken)
    assert all(row >= num_broken for row in ids(chosen_samples(made, anything)))
    assert all(row >= num_broken for row in ids(short_samples(made)))
    loaded = training(QWEN)
    assert prove(loaded.model, loaded.template, made).startswith(
        "isolation verified: max difference 0.0 over 4 samples"
    )


def test_more_samples_than_a_pack_has_room_for_are_not_taken(packs, rows):
    """ISO-12: a row longer than those that are trained might find no memory; two there have to be."""
    long = [text_row(f"question {n}", "word " * 300) for n in range(6)]
    chosen = chosen_samples(packs(long), anything)
    assert [len(chosen), len(chosen_samples(packs(texts(6)), anything))] == [2, 4]
    assert sum(sample["length"] for sample in chosen) > 400, "of packs with room for one"


def test_odd_rows_are_passed_by(packs, rows):
    """ISO-12"""
    chosen = chosen_samples(packs([*texts(8), rows["image"]]), lambda sample: sample["sample_id"].row > 3)
    assert min(ids(chosen)) > 3


def test_data_without_one_usable_row_is_named(packs, training, monkeypatch):
    """ISO-12"""
    made = packs(texts(5))
    breaking(monkeypatch, made, lambda row: True)
    loaded = training(QWEN)
    for refused in (lambda: prove(loaded.model, loaded.template, made), lambda: short_samples(made)):
        with pytest.raises(DataError, match="not one row could be encoded; the log has the reasons"):
            refused()
    monkeypatch.undo()
    odd = packs(texts(3))
    monkeypatch.setattr(prove_module, "can_be_replaced", lambda *args: False)
    with pytest.raises(DataError, match=r"no row that it can use, one with a label.* one that it cannot is data:0"):
        prove(loaded.model, loaded.template, odd)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:8606: Connection reset by peer"),
        torch.distributed.DistBackendError("NCCL error: remote process exited or there was a network error"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_collective_that_dies_is_no_proof_that_failed(error, packs, training):
    """RANKS-13: it goes through as it is; any other error of the model's is one of the proof."""
    loaded, made = training(QWEN), packs(texts(5))
    for raised, expected in ((error, type(error)), (RuntimeError("of the model"), IsolationError)):

        def fail(*args, raised=raised):
            raise raised

        handle = loaded.model.register_forward_pre_hook(fail)
        with pytest.raises(expected) as caught:
            prove(loaded.model, loaded.template, made)
        handle.remove()
        assert ("packing_verify=false" in str(caught.value)) == (expected is IsolationError)


def test_rows_of_the_plan_are_the_fullest_and_that_of_the_longest(packs):
    """ISO-12"""
    data = [*texts(30), text_row("long", "word " * 300)]
    made = packs(data)
    fullest, longest = sorted(sequences_of_plan(made), key=len, reverse=True)
    assert len(fullest) == max(made.plan.num_samples_per_pack)
    assert 30 in ids(longest)
    in_plan = [sorted(made[number].record.lengths) for number in range(len(made))]
    assert all(sorted(sample["length"] for sample in row) in in_plan for row in (fullest, longest))


def test_sequence_that_has_the_most_of_all_is_taken_once(packs):
    """ISO-12: many packs have as many samples, and one of these has the longest sample, too."""
    made = packs([text_row("word " * (50 + (number == 7)), "word") for number in range(30)])
    assert len(set(made.plan.num_samples_per_pack.tolist())) == 1
    (sequence,) = sequences_of_plan(made)
    assert 7 in ids(sequence)


def test_sequences_come_by_their_tokens(packs):
    """ISO-14: the budget takes cheap ones first."""
    made = packs([*texts(30), text_row("long", "word " * 300), text_row("longer", "word " * 600)])
    tokens = [sum(sample["length"] for sample in sequence) for sequence in sequences_of_plan(made)]
    assert len(tokens) == 2
    assert tokens == sorted(tokens)
    assert tokens[0] <= 400 < tokens[1]


def test_row_of_a_stream_is_filled_from_its_first_rows(packs):
    """ISO-12"""
    (row,) = sequences_of_plan(packs(texts(30), packing_mode="buffer"))
    assert 300 < sum(sample["length"] for sample in row) <= 400


def test_images_that_nobody_counted_are_found(packs, rows, monkeypatch):
    """ISO-12: of a family whose sizes say no image, the rows say it."""
    data = [*texts(20), rows["image"], image_row(rows["images"]["images"])]
    made = packs(data)
    for source in made.dataset.sources:
        source.sizes.columns[1:3] = 0
    assert {20, 21} <= set(ids(chosen_samples(made, anything)))
