"""A part of a row is a sample as if its tokens and images had been encoded alone, by real templates and models."""

import random

import pytest
import torch
from PIL import Image

from swift_vlpack import PackingConfig
from swift_vlpack.feed.collate import Collator
from swift_vlpack.host.headers import pixel_free
from swift_vlpack.plan.parts import Span
from swift_vlpack.rows.contents import media_spans, size_of
from swift_vlpack.rows.cutting import CannotBeCut, cut_sample
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.families import MediaTokens
from swift_vlpack.rows.samples import SampleId
from tests.attention.one_by_one import gap, gradients
from tests.data_rows import image_row, sentence
from tests.families import load_template
from tests.images import photo
from tests.marks import quick_only

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # of ms-swift's InternVL
UNIT_OF = {"qwen2_5_vl": 28, "qwen3_vl": 32}
"""Pixels on a side that become a token."""


def page(folder, sizes, seed=0, num_words=25):
    """A row of a page: words, an image, words, an image, and so on, all of it a target."""
    rng = random.Random(seed)
    images = [photo(folder, f"{seed}_{n}_{w}x{h}", w, h, seed=n) for n, (w, h) in enumerate(sizes)]
    text = "".join(f"{sentence(rng, num_words, num_words)}<image>" for _ in images) + sentence(
        rng, num_words, num_words
    )
    return {"messages": [{"role": "assistant", "content": text}], "images": images}


def encoded(encoder, row, number=0):
    return encoder.sample(row, SampleId("pages", number))


def parts_and_samples(template, row, **options):
    own = RowEncoder.of(template, PackingConfig(packing_overflow="split", mask_boundary_loss=False, **options))
    sample = encoded(own, row)
    cutter = own.cutter
    return sample, [(part, cutter.cut(sample, part.span)) for part in cutter.parts(sample) if part.reason is None]


@pytest.mark.parametrize("family", quick_only(("qwen2_5_vl",), UNIT_OF))
def test_a_pack_of_parts_has_the_gradients_of_each_part_alone(family, tiny, tmp_path):
    """CUT-8: the model's own positions, loss and gradients, of tokens and images put together by hand, against the
    template's row of what was cut out of the page."""
    template, model, unit = tiny(family).template, tiny(family).model, UNIT_OF[family]
    sizes = [(2 * unit, 3 * unit), (4 * unit, 2 * unit), (unit, 5 * unit), (3 * unit, 3 * unit)]
    row = page(tmp_path, sizes, num_words=50)
    sample, parts = parts_and_samples(template, row, packing_length=48, packing_stride=3)
    images = [Image.open(path).convert("RGB") for path in row["images"]]
    assert len(parts) > 4
    assert any(part.num_repeated for part, _ in parts)
    assert {part.images for part, _ in parts} >= {0, 1}
    template.packing = template.padding_free = True
    row = Collator(template)([[made for _, made in parts]])
    model.set_attn_implementation("vlpack")
    model.zero_grad()
    logits = model(**{k: v for k, v in row.items() if k != "labels"}, use_cache=False).logits[0]
    torch.nn.functional.cross_entropy(logits[:-1], row["labels"][0, 1:], reduction="sum").backward()
    of_packed = gradients(model)
    model.set_attn_implementation("eager")
    model.zero_grad()
    for part, _ in parts:
        ids = torch.tensor(sample["input_ids"][part.start : part.stop])[None]
        labels = ids[0].clone()
        labels[: max(1 if part.start else 0, part.num_repeated)] = -100
        labels[torch.tensor(sample["labels"][part.start : part.stop]) == -100] = -100  # images, and the row's own first
        inside = images[: part.images]
        del images[: part.images]
        media = (
            template.processor.image_processor(images=inside, return_tensors="pt", do_resize=False) if inside else {}
        )
        kinds = (ids == template.image_token_id).long()
        mask = torch.ones_like(ids)
        alone = model(input_ids=ids, attention_mask=mask, mm_token_type_ids=kinds, use_cache=False, **media).logits[0]
        torch.nn.functional.cross_entropy(alone[:-1], labels[1:], reduction="sum").backward()
    assert images == [], "every image in one part"
    expected = gradients(model)
    model.set_attn_implementation("vlpack")
    assert of_packed.keys() == expected.keys()
    assert gap(list(expected.values()), [of_packed[name] for name in expected]) < 1e-5


@pytest.mark.parametrize("family", [*UNIT_OF, "glm4v", "internvl"])
def test_parts_are_those_of_the_header_and_have_every_token_and_patch(family, tiny, tmp_path, tmp_path_factory):
    """CUT-1 CUT-9: what is decided without pixels is what is found with them, with grids and with tiles."""
    template = tiny(family).template if family in UNIT_OF else load_template(tmp_path_factory.mktemp(family), family)
    draw = random.Random(3)
    for seed in range(4):
        sizes = [(draw.randint(56, 500), draw.randint(56, 500)) for _ in range(draw.randint(1, 4))]
        row = page(tmp_path, sizes, seed, num_words=draw.randint(1, 120))
        capacity = draw.choice([300, 420]) if family != "internvl" else 3400
        own = RowEncoder.of(template, PackingConfig(packing_overflow="split", packing_length=capacity))
        sample, header = encoded(own, row), encoded(own.using(pixel_free(own.template)), row)
        cutter = own.cutter
        parts = cutter.parts(sample)
        assert parts == cutter.parts(header)
        kept = [cutter.cut(sample, part.span) for part in parts if part.reason is None]
        if not any(part.reason for part in parts) and parts:
            assert [token for made in kept for token in made["input_ids"]] == sample["input_ids"]
            pixels = [made["pixel_values"] for made in kept if "pixel_values" in made]
            assert torch.equal(torch.cat(pixels), sample["pixel_values"])
        for made, part in zip(kept, parts, strict=False):
            assert tuple(size_of(made)[:3]) == (part.length, part.images, part.patches)
            pixels = made.get("pixel_values")
            assert (pixels is None) == (part.images == 0)
            assert pixels is None or pixels.untyped_storage().nbytes() == pixels.nbytes, "not a view of the row's"


def test_labels_and_weights_of_what_is_repeated_are_none(tiny, tmp_path):
    """CUT-3 CUT-10: with a stride every token that was a target is one exactly once; without, one a cut is not."""
    template = tiny("qwen2_5_vl").template
    row = page(tmp_path, [], num_words=100)
    for stride, num_lost in ((4, 0), (0, 3)):
        sample, parts = parts_and_samples(template, row, packing_length=30, packing_stride=stride)
        trained = [part.start + at for part, made in parts for at, label in enumerate(made["labels"]) if label != -100]
        all_targets = [at for at, label in enumerate(sample["labels"]) if label != -100]
        assert sorted(trained) == sorted(set(trained))
        missing = set(all_targets) - set(trained)
        assert missing == ({part.start for part, _ in parts[1:]} if not stride else set())
        assert len(missing) >= num_lost


def test_what_is_not_known_for_certain_is_not_cut(tiny, tmp_path):
    """CUT-6: more placeholders than images, tensors that nobody knows, tiles of a family that is not named."""
    template = tiny("qwen2_5_vl").template
    sample = encoded(RowEncoder(template), image_row([photo(tmp_path, "a", 84, 84)]))
    words = MediaTokens.of(template)
    assert [medium.stop - medium.start for medium in media_spans(sample, words)] == [3 * 3 + 2]
    more = {**sample, "input_ids": [*sample["input_ids"], template.image_token_id]}
    assert media_spans(more, words) is None
    assert media_spans({**sample, "input_features": torch.zeros(3)}, words) is None
    tiles = {name: value for name, value in sample.items() if name != "image_grid_thw"}
    assert media_spans({**tiles, "pixel_values": torch.zeros(3, 3, 28, 28)}, words) is None


def test_an_image_is_never_cut(tiny, tmp_path):
    """CUT-2"""
    sample = encoded(RowEncoder(tiny("qwen2_5_vl").template), image_row([photo(tmp_path, "a", 84, 84)]))
    media = media_spans(sample, MediaTokens.of(tiny("qwen2_5_vl").template))
    with pytest.raises(CannotBeCut, match="would cut the image"):
        cut_sample(sample, Span(0, 0, media[0].start + 3), media)
    with pytest.raises(CannotBeCut, match="rows of pixel_values"):
        cut_sample({**sample, "pixel_values": sample["pixel_values"][1:]}, Span(0, 0, media[0].stop), media)
