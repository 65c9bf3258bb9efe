"""Units of encoded rows, the sequences they make, and what is trained: against the rows one by one."""

import logging
import random

import numpy as np
import pytest
import torch
from PIL import Image

from swift_vlpack import PackingConfig, prove
from swift_vlpack.attention.prepare import prepare_model
from swift_vlpack.errors import BoundaryError
from swift_vlpack.feed.collate import Collator
from swift_vlpack.feed.dataset import PackingDataset
from swift_vlpack.feed.units import SHARED, Unit
from swift_vlpack.rows.contents import NO_LABEL, media_spans
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.families import PIXELS, MediaTokens
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.samples import SampleId
from swift_vlpack.rows.shared import SharedPrefixes
from swift_vlpack.rows.source import RowSource
from tests.conftest import load_tiny
from tests.data_rows import image_row, sentence, text_row
from tests.family_models import FAMILIES, load, own_ids
from tests.images import photo
from tests.marks import TELLING

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # of ms-swift's InternVL

TINY = {"Qwen2-VL": "qwen2_vl", "Qwen2.5-VL": "qwen2_5_vl", "Qwen3-VL": "qwen3_vl"}
NAMES = [
    "Qwen2.5-VL",
    *(pytest.param(name, marks=TELLING) for name in ("Qwen2-VL", "Qwen3-VL", "InternVL (HF)", "GLM-4.1V")),
]


def rows_about(folder, num_images, num_rows, seed=0):
    """Rows about a few images, and texts between them; with the number of the image of each, 0 for a text."""
    rng = random.Random(seed)
    rows = []
    for number in range(1, num_images + 1):
        image = photo(folder, f"image{number}", rng.randint(60, 160), rng.randint(60, 160), seed=number)
        rows += [(number, image_row([image], sentence(rng, 3, 12), sentence(rng, 3, 12))) for _ in range(num_rows)]
    rows += [(0, text_row(sentence(rng, 3, 12), sentence(rng, 3, 12))) for _ in range(num_images)]
    rng.shuffle(rows)
    return [row for _, row in rows], np.array([image for image, _ in rows])


@pytest.fixture(scope="module")
def loaded(small_folder, tmp_path_factory):
    """A function that loads a family: the model, prepared for packs, and its template."""
    made, opened = {}, []

    def of(name):
        if name not in made:
            if name in TINY:
                tiny = load_tiny(small_folder(TINY[name]), TINY[name])
                made[name] = tiny.model, tiny.template
            else:
                folder = tmp_path_factory.mktemp("family")
                FAMILIES[name].build(folder)
                opened.append(own_ids(folder, FAMILIES[name]))
                opened[-1].__enter__()
                made[name] = load(folder, FAMILIES[name])
            prepare_model(*made[name])
        model, template = made[name]
        model.eval()
        template.packing = template.padding_free = False
        return model, template

    yield of
    for one in opened:
        one.__exit__(None, None, None)


def encoded(rows, template):
    template.packing = template.padding_free = False
    encoder = RowEncoder(template)
    return [encoder.sample(row, SampleId("vqa", number), strict=True) for number, row in enumerate(rows)]


def fused(rows, image_of_row, template):
    """The rows as a data set that knows which of them share a prefix."""
    tokens, length = MediaTokens.of(template), np.zeros(len(rows), dtype=np.int32)
    for number, sample in enumerate(encoded(rows, template)):
        if image_of_row[number]:
            length[number] = media_spans(sample, tokens)[-1].stop
    source = RowSource(name="vqa", rows=rows, prefixes=SharedPrefixes(image_of_row.astype(np.uint64), length))
    return FusionCaptionDataset([source], template, shuffle=False)


def packs_of(rows, image_of_row, template, **options):
    config = PackingConfig(
        **{
            "packing_length": 600,
            "packing_strategy": "exact",
            "packing_share": "media",
            "packing_drop_last": False,
            **options,
        }
    )
    dataset = PackingDataset(fused(rows, image_of_row, template), template, config)
    return [dataset[number] for number in range(len(dataset))]


def trained(model, template, packs):
    """The sum of the losses of all targets, and the gradients."""
    model.zero_grad()
    total = 0.0
    for pack in packs:
        batch = Collator(template).sequence(pack)
        logits = model(**batch).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits, batch["labels"][0, 1:], ignore_index=NO_LABEL, reduction="sum")
        loss.backward()
        total += float(loss.detach())
    return total, {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def assert_trained_as_alone(loaded, rows, packs):
    model, template = loaded
    loss, gradients = trained(model, template, packs)
    expected, one_by_one = trained(model, template, [[sample] for sample in encoded(rows, template)])
    assert loss == pytest.approx(expected, rel=1e-6)
    assert gradients.keys() == one_by_one.keys()
    for parameter, gradient in one_by_one.items():
        gap = (gradients[parameter] - gradient).abs().max() / gradient.abs().max().clamp_min(1e-12)
        assert gap < 1e-5, parameter


@pytest.mark.parametrize("name", NAMES)
def test_units_train_what_their_rows_train_one_by_one(name, loaded, tmp_path):
    """SHARE-6, SHARE-7: loss and every gradient, and each image goes through the tower once."""
    template = loaded(name)[1]
    rows, image_of_row = rows_about(tmp_path, 3, 4)
    packs = packs_of(rows, image_of_row, template)
    assert sorted(sample["sample_id"].row for pack in packs for sample in pack) == [*range(len(rows))]
    assert sum(SHARED in sample for pack in packs for sample in pack) == 3 * 3
    assert sum(pack.record.num_images for pack in packs) == 3
    assert_trained_as_alone(loaded(name), rows, packs)


def planned(rows, template, **options):
    """The rows, as their prefixes are found in full encodings, as one pack."""
    config = {"packing_length": 6000, "packing_strategy": "exact", "packing_share": "media", "packing_drop_last": False}
    return PackingDataset(rows, template, PackingConfig(**{**config, **options}))


@pytest.mark.parametrize("name", NAMES)
def test_rows_with_several_images_share_all_of_them_or_none(name, loaded, tmp_path):
    """SHARE-6, SHARE-7: rows with the same images, in one order, are a unit; rows with some of them are whole."""
    a, b, c = (photo(tmp_path, f"p{n}", *size, seed=n) for n, size in enumerate([(70, 90), (60, 110), (84, 84)]))
    images = [(a, b), (a, b), (a, b), (b, a), (b, a), (a,), (a, b, c), (b, c)]
    rows = [image_row([*paths], f"question {number}?", f"answer {number}") for number, paths in enumerate(images)]
    dataset = planned([*rows, text_row("without an image", "none")], loaded(name)[1])
    packs = [dataset[number] for number in range(len(dataset))]
    assert np.flatnonzero(dataset.sources[0].prefixes.key).tolist() == [0, 1, 2, 3, 4]
    assert sum(SHARED in sample for pack in packs for sample in pack) == 3
    assert sum(pack.record.num_apart for pack in packs) == 0
    assert sum(pack.record.num_images for pack in packs) == dataset.epoch_plan.packs.images_of_members.sum() == 10
    assert_trained_as_alone(loaded(name), [*rows, text_row("without an image", "none")], packs)


def test_pack_that_is_cut_within_a_unit_brings_the_image_again(loaded, tmp_path):
    """SHARE-4: units of two rows at most, and packs of one image."""
    image, other = (photo(tmp_path, f"p{n}", 84, 112, seed=n) for n in range(2))
    rows = [image_row([image], f"question {n}") for n in range(5)] + [image_row([other], "and this?")]
    for options, num_images in (({"packing_share_max": 2}, 4), ({"packing_max_images": 1}, 2)):
        dataset = planned(rows, loaded("Qwen2.5-VL")[1], **options)
        packs = [dataset[number] for number in range(len(dataset))]
        assert sum(pack.record.num_images for pack in packs) == num_images
        assert_trained_as_alone(loaded("Qwen2.5-VL"), rows, packs)


@pytest.mark.slow
@pytest.mark.telling
@pytest.mark.parametrize("name", ["Qwen2.5-VL", "Qwen2-VL", "Qwen3-VL"])
def test_rows_that_share_a_video_and_an_image_train_what_they_train_one_by_one(name, loaded, tmp_path):
    """SHARE-6, SHARE-7"""
    frames = [photo(tmp_path, f"f{n}", 112, 112, seed=n) for n in range(8)]
    image = photo(tmp_path, "a", 84, 112, seed=20)

    def row(text, images, videos):
        media = {"images": images} if images else {}
        return {**text_row(text, f"it is {text[-8:]}"), **media, "videos": videos}

    rows = [
        row("<video>and <image>what is it like?", [image], [frames[:4]]),
        row("<video>and <image>who is it?", [image], [frames[:4]]),
        row("<video>and <image>what then?", [image], [frames[4:]]),
        row("<video>so?", [], [frames[4:]]),
        row("<video>and what now?", [], [frames[4:]]),
    ]
    dataset = planned(rows, loaded(name)[1], packing_length=12000)
    packs = [dataset[number] for number in range(len(dataset))]
    assert np.flatnonzero(dataset.sources[0].prefixes.key).tolist() == [0, 1, 3, 4]
    assert sum(SHARED in sample for pack in packs for sample in pack) == 2
    assert sum(pack.record.num_images for pack in packs) == 2
    assert_trained_as_alone(loaded(name), rows, packs)


@pytest.mark.parametrize("name", NAMES)
def test_units_are_proved_over_families(name, loaded, tmp_path):
    """SHARE-60, SHARE-64: in a trainer of one's own, with branches in the pack that is measured and in sequences."""
    model, template = loaded(name)
    config = PackingConfig(packing_length=900, packing_strategy="exact", packing_share="media", packing_drop_last=False)
    line = prove(model, template, PackingDataset(fused(*rows_about(tmp_path, 4, 4), template), template, config))
    assert line.startswith("isolation verified: max difference 0.0 over 6 samples, attention vlpack (packed equals ")
    assert "19 branches of 5 shared prefixes among them" in line


def test_every_token_has_what_it_has_in_its_row(loaded, tmp_path):
    """SHARE-6: ids, labels and positions of a row, taken out of the sequence, are those of the row alone."""
    _, template = loaded("Qwen2.5-VL")
    rows, image_of_row = rows_about(tmp_path, 2, 3)
    rows[1]["messages"][-1]["loss_scale"] = 0.5
    samples = encoded(rows, template)
    for pack in packs_of(rows, image_of_row, template):
        sequence = Collator(template, for_model=False).sequence(pack)
        for sample, ranges in zip(pack, pack.record.boundaries.samples, strict=True):
            tokens = torch.cat([torch.arange(*one) for one in ranges])
            alone = Collator(template, for_model=False).sequence([samples[sample["sample_id"].row]])
            for field in ("input_ids", "labels", "position_ids", "text_position_ids", "mm_token_type_ids"):
                assert torch.equal(sequence[field][..., tokens], alone[field]), field
        assert len(sequence["pixel_values"]) == int(sequence["image_grid_thw"].prod(-1).sum())
        assert sequence["input_ids"].shape[-1] == pack.record.num_tokens


def test_padding_follows_units(loaded, tmp_path):
    """SHARE-6: a multiple of tokens is counted with prefixes once."""
    _, template = loaded("Qwen2.5-VL")
    rows, image_of_row = rows_about(tmp_path, 2, 3)
    for pack in packs_of(rows, image_of_row, template, packing_length=512, packing_pad_to=64):
        batch = Collator(template).sequence(pack)
        assert batch["input_ids"].shape[-1] % 64 == 0
        assert batch.record.num_padding == batch["input_ids"].shape[-1] - pack.record.num_tokens
        assert sum(batch.record.lengths_in_sequence) == batch["input_ids"].shape[-1]


def changed(row, **values):
    return {**row, "messages": [{**row["messages"][0], **values}, *row["messages"][1:]]}


def test_rows_that_share_nothing_after_all_are_trained_whole(loaded, tmp_path, caplog):
    """SHARE-8: other pixels, other tokens before them: each leaves its unit with a line, and none is lost."""
    model, template = loaded("Qwen2.5-VL")
    rows, image_of_row = rows_about(tmp_path, 1, 5)
    of_image = np.flatnonzero(image_of_row)
    other = photo(tmp_path, "other", 300, 300, seed=77)
    with Image.open(rows[of_image[0]]["images"][0]) as image:
        same_size = photo(tmp_path, "same_size", *image.size, seed=78)
    rows[of_image[1]] = {**rows[of_image[1]], "images": [same_size]}
    rows[of_image[2]] = {**rows[of_image[2]], "images": [other]}
    text = rows[of_image[3]]["messages"][0]["content"]
    rows[of_image[3]] = changed(rows[of_image[3]], content=f"look: {text}")
    # The keys still say that all five are alike.
    whole = fused(rows, image_of_row, template)
    prefix = int(whole.sources[0].prefixes.length[of_image[0]])
    whole.sources[0].prefixes.length[of_image] = prefix
    config = PackingConfig(
        packing_length=2000, packing_strategy="exact", packing_share="media", packing_drop_last=False
    )
    with caplog.at_level(logging.WARNING):
        packs = [*map(PackingDataset(whole, template, config).__getitem__, [0])]
    assert sorted(sample["sample_id"].row for pack in packs for sample in pack) == [*range(len(rows))]
    assert sum(SHARED in sample for sample in packs[0]) == 1
    assert packs[0].record.num_apart == 3
    for why in ("other pixel_values", "other tokens"):
        assert why in caplog.text
    loss, _ = trained(model, template, packs)
    expected, _ = trained(model, template, [[sample] for sample in encoded(rows, template)])
    assert loss == pytest.approx(expected, rel=1e-6)


def test_rows_of_a_unit_whose_first_row_breaks_go_on_without_it(loaded, tmp_path):
    """SHARE-8: the next row brings the pixels."""
    _, template = loaded("Qwen2.5-VL")
    rows, image_of_row = rows_about(tmp_path, 1, 4)
    whole = fused(rows, image_of_row, template)
    of_image = np.flatnonzero(image_of_row)
    config = PackingConfig(
        packing_length=2000, packing_strategy="exact", packing_share="media", packing_drop_last=False
    )
    dataset = PackingDataset(whole, template, config)
    first = dataset.address(0).samples[
        dataset.address(0).shared.index(next(filter(None, dataset.address(0).shared))) - 1
    ]
    rows[first.row_index]["images"] = [str(tmp_path / "gone.jpg")]
    pack = dataset[0]
    assert len(pack) == len(rows) - 1
    assert pack.record.left_out[0].sample_id.row == first.row_index
    with_pixels = [sample for sample in pack if any(sample.get(name) is not None for name in PIXELS)]
    assert len(with_pixels) == 1
    assert sum(SHARED in sample for sample in pack) == len(of_image) - 2
    assert Collator(template).sequence(pack)["input_ids"].shape[-1] == pack.record.num_tokens


def test_rows_of_a_unit_whose_first_row_does_not_fit_go_on_without_it():
    """SHARE-8: the next row brings the pixels, and the others are its branches."""
    pixels = torch.ones(2, 3)
    unit = Unit([{"name": "a", "pixel_values": pixels}, {"name": "b"}, {"name": "c"}], prefix=4)
    assert unit.in_pack([1, 2]) == [{"name": "b", "pixel_values": pixels}, {"name": "c", SHARED: 4}]
    assert unit.in_pack([]) == []


def test_sounds_that_are_as_long_as_the_sequence_stay_whole(loaded, tmp_path, monkeypatch):
    """SHARE-6: the frames of a sound are no tokens, however many there are."""
    _, template = loaded("Qwen2.5-VL")
    rows, image_of_row = rows_about(tmp_path, 1, 2)
    (pack,) = packs_of(rows, image_of_row, template)
    sound = torch.rand(1, 4, sum(pack.record.lengths))
    pack[0]["input_features"] = sound
    made = type(template).data_collator
    monkeypatch.setattr(
        type(template),
        "data_collator",
        lambda self, batch, **options: {**made(self, batch, **options), "input_features": sound},
    )
    sequence = Collator(template).sequence(pack)
    assert torch.equal(sequence["input_features"], sound)
    assert sequence["input_ids"].shape[-1] == pack.record.num_tokens < sound.shape[-1]


def test_sequences_of_templates_that_join_grids_in_another_way_are_refused(loaded, tmp_path, monkeypatch):
    """SHARE-6: no pixels of another image, silently."""
    _, template = loaded("Qwen2.5-VL")
    rows, image_of_row = rows_about(tmp_path, 1, 2)
    (pack,) = packs_of(rows, image_of_row, template)
    made = type(template).data_collator

    def reversed_grids(self, batch, **options):
        sequence = made(self, batch, **options)
        sequence["image_grid_thw"] = sequence["image_grid_thw"].flip(0) + 1
        return sequence

    monkeypatch.setattr(type(template), "data_collator", reversed_grids)
    with pytest.raises(BoundaryError, match="joined image_grid_thw of its samples in an unknown way"):
        Collator(template).sequence(pack)
