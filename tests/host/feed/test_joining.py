"""Rows of a stream that begin alike become one unit while they wait for a pack, without a trainer."""

import copy
import random

import pytest
import torch

from swift_vlpack.errors import StateMismatch
from swift_vlpack.feed.joining import Waiting
from swift_vlpack.feed.streamed import StreamedPackingDataset
from swift_vlpack.feed.units import SHARED
from swift_vlpack.rows.beginnings import BeginningReader
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.families import PIXELS
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.prefixes import are_equal
from swift_vlpack.rows.randomness import RandomStream
from swift_vlpack.rows.samples import SampleId
from swift_vlpack.rows.shared import Alone
from swift_vlpack.rows.source import RowSource
from swift_vlpack.rows.streams import StreamedRows
from swift_vlpack.rows.to_encode import RowToEncode
from tests.data_rows import image_row, sentence, text_row
from tests.host.feed.test_streamed import buffered, config, contents, everything, progress_after, records
from tests.images import photo

FAMILY = "qwen2_5_vl"
SHARE = {"packing_share": "media", "packing_buffer": 8}


def rows_about(folder, num_images, num_rows, *, seed=0, num_texts=6):
    """Rows about small images and a few texts, shuffled."""
    rng, rows = random.Random(seed), []
    for number in range(num_images):
        image = photo(folder, f"image{number}", 60 + 4 * number, 60, seed=number)
        rows += [image_row([image], f"{sentence(rng, 3, 12)}?", sentence(rng, 2, 6)) for _ in range(num_rows)]
    rows += [text_row(sentence(rng, 3, 9), sentence(rng, 2, 30)) for _ in range(num_texts)]
    rng.shuffle(rows)
    return rows


def packed(template, rows, form="stream", **options):
    """One epoch of packs, in this process."""
    return list(buffered(template, rows, form, **{**SHARE, **options}))


@pytest.mark.parametrize("strategy", ["binpack", "greedy", "exact", "best_fit"])
@pytest.mark.parametrize("form", ["sized", "stream"])
def test_every_state_has_the_same_future_in_units(template, form, strategy, tmp_path):
    """SHARE-11 STREAM-9: from before the first pack to after the last; every row comes once."""
    rows = rows_about(tmp_path, 10, 3)
    late = [
        {**row, "messages": text_row(f"see <image> {n}?")["messages"]} for n, row in enumerate(rows) if "images" in row
    ]
    rows = [*rows, *late[::5], image_row(["/gone.jpg"]), text_row("long", "word " * 300)]
    random.Random(3).shuffle(rows)
    options = {**SHARE, "packing_strategy": strategy}
    full = records(buffered(template, rows, form, **options))
    assert set(everything(full).values()) == {1}
    assert len(everything(full)) == len(rows)
    states = [state for record in full for state in record.progress]
    assert any(state.get("units") for state in states), "a unit waits over a pack's end"
    assert any(state.get("alone") for state in states)
    assert any(record.alone for record in full)
    for num_trained in range(len(full) + 1):
        again = buffered(template, rows, form, **options)
        again.restore(progress_after(full[:num_trained], 0))
        went_on = records(again)
        assert contents(went_on) == contents(full[num_trained:]), f"after {num_trained} packs"
        assert [one.shared for one in went_on] == [one.shared for one in full[num_trained:]]
        assert [one.alone for one in went_on] == [one.alone for one in full[num_trained:]]


def test_units_bring_pixels_once_and_no_pack_is_too_long(template, tmp_path):
    """SHARE-11: samples are those of the rows alone, but for pixels of branches; all rows of an image meet here."""
    rows = rows_about(tmp_path, 4, 4, num_texts=0)
    packs = packed(template, rows, packing_buffer=50)
    encoder = RowEncoder.of(template, packs_config(template, rows))
    branches = 0
    for pack in packs:
        assert pack.record.num_tokens <= 200
        for sample in pack:
            alone = encoder.sample(rows[sample["sample_id"].row], SampleId("data", 0))
            assert list(sample["input_ids"]) == list(alone["input_ids"])
            assert list(sample["labels"]) == list(alone["labels"])
            assert torch.equal(sample["image_grid_thw"], alone["image_grid_thw"])
            has_pixels = any(name in sample for name in PIXELS)
            assert has_pixels != bool(sample.get(SHARED))
            branches += not has_pixels
    assert branches == 12
    assert sum(pack.record.num_images for pack in packs) == 4


def packs_config(template, rows):
    return buffered(template, rows, "stream", **SHARE).config


def test_units_keep_their_bounds(template, tmp_path):
    """SHARE-11: rows of a unit, tokens of a pack, samples of a pack; a new unit takes what does not fit."""
    rows = rows_about(tmp_path, 1, 9, num_texts=0)
    shared = [
        pack.record.shared
        for pack in packed(template, rows, packing_share_max=3, packing_length=2000, packing_buffer=50)
    ]
    assert [one.count(0) for one in shared] == [3]
    assert [len(one) for one in shared] == [9]
    by_cap = packed(template, rows, packing_max_samples=4, packing_length=2000, packing_buffer=50)
    assert sorted(len(pack) for pack in by_cap) == [1, 4, 4]
    small = packed(template, rows, packing_length=100)
    assert all(pack.record.num_tokens <= 100 for pack in small)
    assert sum(len(pack) for pack in small) == 9
    assert any(pack.record.shared for pack in small)


def test_sample_cap_holds_after_a_resume(template, tmp_path):
    """SHARE-11: the packer's state counts a unit as one item; its samples are counted again."""
    rows = rows_about(tmp_path, 3, 6, num_texts=0)
    options = {**SHARE, "packing_max_samples": 5, "packing_length": 2000, "packing_buffer": 2}
    full = records(buffered(template, rows, "stream", **options))
    assert all(len(record.sample_ids) <= 5 for record in full)
    again = buffered(template, rows, "stream", **options)
    again.restore(progress_after(full[:1], 0))
    assert contents(records(again)) == contents(full[1:])


def test_texts_share_their_system_turn(template, tmp_path):
    """SHARE-11: of `packing_share_min` tokens; a shorter one is not shared, and another prompt is another key."""
    long, other = sentence(random.Random(0), 70, 80), sentence(random.Random(1), 70, 80)
    rows = [
        {"messages": [{"role": "system", "content": prompt}, *text_row(f"question {n}", "yes")["messages"]]}
        for n, prompt in enumerate([long, other, long, long, other, "be brief", "be brief"])
    ]
    (pack,) = packed(template, rows, packing_length=2000)
    units = dict(zip([key.row for key in pack.record.sample_ids], pack.record.shared, strict=True))
    assert [bool(units[row]) for row in range(7)] == [False, False, True, True, True, False, False]
    assert units[2] == units[3] > 70
    assert not any(packed(template, rows, packing_length=2000, packing_share_min=500)[0].record.shared)


def test_rows_that_stay_alone_are_named_with_their_cause(template, tmp_path):
    """SHARE-12: another question before the image, an image after an answer, other images beside it; not a lone row."""
    one, two, three = (photo(tmp_path, str(n), 80, 60, seed=n) for n in range(3))
    late = {
        "messages": [*text_row("hello", "hi")["messages"], *image_row([two], "what is this", "a dog")["messages"]],
        "images": [str(two)],
    }
    rows = [
        image_row([one], "what colour", "red"),
        {**image_row([one], "x", "blue"), "messages": text_row("what is here? <image>", "a cat")["messages"]},
        late,
        image_row([two, one], "which one", "the first"),
        image_row([three], "what colour", "green"),
        image_row([three], "describe it", "word " * 400),
    ]
    packs = packed(template, rows, packing_length=400)
    assert not any(any(pack.record.shared) for pack in packs)
    named = {key.row: cause for pack in packs for key, cause in pack.record.alone}
    others = {0: Alone.OTHER_TOKENS, 1: Alone.OTHER_TOKENS, 2: Alone.AFTER_ANSWER, 3: Alone.OTHER_MEDIA}
    assert named == {**others, 5: Alone.TOO_LONG}


def test_rows_with_other_pixels_never_join(template, tmp_path):
    """SHARE-11: equal keys are not trusted, as a digest reads some of the pixels only."""
    rows = rows_about(tmp_path, 1, 2, num_texts=0)
    encoder = RowEncoder.of(template, packs_config(template, rows))
    reader = BeginningReader(encoder, 64)
    given = [RowToEncode(row, SampleId("data", n), encoder, None, RandomStream(n)) for n, row in enumerate(rows)]
    first, second = (one.sample() for one in given)
    begins = reader.of(given[0], first)
    same = reader.of(given[1], second)
    assert (begins.prefixes.keys(), *begins[1:]) == (same.prefixes.keys(), *same[1:])
    changed = {**second, "pixel_values": second["pixel_values"].clone()}
    changed["pixel_values"][-1, -1] += 1
    for sample, joins in ((changed, False), (second, True)):
        waiting = Waiting(packs_config(template, rows), reader.tokens)
        waiting.add(0, dict(first), begins)
        assert (waiting.join(1, sample, begins, lambda *_: True) is not None) == joins
        if not joins:
            waiting.add(1, sample, begins)
            assert waiting.take(1).alone == [(sample["sample_id"], Alone.DIFFERS)]


def test_state_whose_rows_no_longer_begin_alike_is_refused(template, tmp_path):
    """SHARE-11"""
    rows = rows_about(tmp_path, 6, 3, num_texts=0)
    full = records(buffered(template, rows, "stream", **SHARE))
    at, state = next((number, state) for number, one in enumerate(full) for state in one.progress if "units" in state)
    first, second = (number for number, _ in state["units"][0][:2])
    other = next(row for row in rows if row["images"] != rows[first]["images"])
    changed = [*rows]
    changed[second] = {**rows[second], "images": other["images"]}
    again = buffered(template, changed, "stream", **SHARE)
    again.restore(progress_after(full[: at + 1], 0))
    with pytest.raises(StateMismatch, match=r"(shared its first tokens|tokens when the state was saved)"):
        records(again)


def undecoded(template, data, form, pixel_free, **options):
    """Packs whose reader can encode branches by headers."""
    if form == "sized":
        rows = FusionCaptionDataset([RowSource(name="data", rows=data)], template, seed=5, pixel_free=pixel_free)
    else:
        rows = StreamedRows(data, template, name="data", pixel_free=pixel_free)
    return list(StreamedPackingDataset(rows, template, config(**{**SHARE, **options}), seed=2))


@pytest.fixture
def encoded_whole(monkeypatch):
    """The names of the rows that are encoded with their pixels."""
    names, encode = [], RowToEncode.whole
    monkeypatch.setattr(RowToEncode, "whole", lambda row: names.append(row.sample_id) or encode(row))
    return names


def changed(change):
    """A function that makes a template of headers, which does something else with the rows that it encodes."""
    from swift_vlpack.host.headers import branch_template

    def make(template):
        made = copy.copy(branch_template(template))
        encode = made.encode
        made.encode = lambda row, **options: change(encode(row, **options))
        return made

    return make


def as_it_is(made):
    return made


def drawing(made):
    random.random()
    return made


def wrong(made):
    return {**made, "input_ids": [*made["input_ids"][:-1], 0]}


@pytest.mark.parametrize("form", ["sized", "stream"])
@pytest.mark.parametrize(
    ("change", "num_whole"),
    [
        (as_it_is, 6 + 6 + 8),  # texts, the first row of each image, and rows that are compared
        (drawing, 36),
        (wrong, 36 + 1),  # one is compared, and then encoded whole
    ],
)
def test_media_of_branches_are_decoded_only_where_headers_are_not_enough(
    template, form, change, num_whole, tmp_path, encoded_whole
):
    """SHARE-14: the packs are those of rows that are all decoded, tensor by tensor."""
    rows = rows_about(tmp_path, 6, 5)
    expected = packed(template, rows, form, packing_buffer=50)
    encoded_whole.clear()
    packs = undecoded(template, rows, form, changed(change), packing_buffer=50)
    assert len(encoded_whole) == num_whole
    for one, other in zip(packs, expected, strict=True):
        assert contents([one.record]) == contents([other.record])
        assert one.record.shared == other.record.shared
        assert are_equal([{**sample} for sample in one], [{**sample} for sample in other])


def test_rows_share_their_first_images_and_the_most_of_them(template, tmp_path):
    """SHARE-13 SHARE-11: a branch keeps the pixels of its own images; a unit has one prefix; caps count own images."""
    one, two, three, four = (photo(tmp_path, str(n), 60 + 8 * n, 60, seed=n) for n in range(4))
    about = [[one, two], [one, two], [one, three], [one], [four], [one, two, four], [one, four]]
    rows = [image_row(images, f"question {n}", "yes") for n, images in enumerate(about)]
    (pack,) = packed(template, rows, packing_length=4000)
    units, unit = [], []
    for key, num_shared in zip(pack.record.sample_ids, pack.record.shared, strict=True):
        if not num_shared:
            unit = []
            units.append(unit)
        unit.append(key.row)
    assert sorted(map(sorted, units)) == [[0, 1, 5], [2, 3, 6], [4]]
    assert pack.record.num_images == 2 + 1 + 2 + 1 + 1
    encoder = RowEncoder.of(template, packs_config(template, rows))
    whole = [encoder.sample(row, SampleId("data", n)) for n, row in enumerate(rows)]
    own = {key.row: sample.get("pixel_values") for key, sample in zip(pack.record.sample_ids, pack, strict=True)}
    num = len(whole[0]["pixel_values"])
    assert own[1] is None
    assert torch.equal(own[5], whole[5]["pixel_values"][num:])
    capped = packed(template, rows, packing_length=4000, packing_max_images=3)
    assert all(pack.record.num_images <= 3 for pack in capped)
    assert sum(len(pack) for pack in capped) == 7


def test_state_has_the_same_future_where_rows_share_some_images(template, tmp_path):
    """SHARE-13 SHARE-11 STREAM-9"""
    rng = random.Random(1)
    images = [photo(tmp_path, str(n), 60 + 4 * n, 60, seed=n) for n in range(5)]
    rows = [
        image_row([images[rng.randrange(2)], *rng.sample(images[2:], rng.randrange(3))], sentence(rng, 2, 6), "yes")
        for _ in range(40)
    ]
    full = records(buffered(template, rows, "stream", **SHARE))
    assert len({one for record in full for one in record.shared}) > 2, "prefixes of one and of two images"
    for num_trained in range(len(full) + 1):
        again = buffered(template, rows, "stream", **SHARE)
        again.restore(progress_after(full[:num_trained], 0))
        went_on = records(again)
        assert contents(went_on) == contents(full[num_trained:])
        assert [one.shared for one in went_on] == [one.shared for one in full[num_trained:]]


@pytest.mark.parametrize("draws", [True, False])
def test_rows_whose_pixels_differ_never_get_those_of_another(template, draws, tmp_path, monkeypatch):
    """SHARE-14: a template that changes pixels only, at random or by a column, is noticed when rows are compared."""
    from swift_vlpack.host.headers import branch_template

    rows = [{**row, "flip": n % 2} for n, row in enumerate(rows_about(tmp_path, 1, 30, num_texts=0))]
    encode = RowToEncode.whole

    def changing(row):
        sample, has_drawn = encode(row)
        noise = torch.rand(1) if draws else torch.tensor(float(row.row["flip"]))
        return {**sample, "pixel_values": sample["pixel_values"] + noise}, has_drawn or draws

    monkeypatch.setattr(RowToEncode, "whole", changing)
    packs = undecoded(template, rows, "stream", branch_template, packing_length=4000, packing_share_max=30)
    units = []
    for pack in packs:
        for key, num_shared in zip(pack.record.sample_ids, pack.record.shared or [0] * len(pack), strict=True):
            units = [*units[:-1], [*units[-1], key.row]] if num_shared else [*units, [key.row]]
    assert sorted(row for unit in units for row in unit) == list(range(30))
    assert all(len({row % 2 for row in unit}) == 1 for unit in units)
    assert any(len(unit) > 1 for unit in units) is not draws


def test_buffer_counts_the_samples_of_units(template, tmp_path):
    """SHARE-11: rows that share take places like others; one more pack is made before the first one is given."""
    rows = rows_about(tmp_path, 4, 10, num_texts=0)
    packs = iter(buffered(template, rows, "stream", **SHARE, packing_length=4000))
    (state,) = next(packs).record.progress
    assert state["num_read"] <= 2 * 8
