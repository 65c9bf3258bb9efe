"""Which rows share a prefix, found before training, and by real templates."""

import pickle
import random
from dataclasses import replace

import pytest
import torch
from PIL import ImageFile
from swift.model import get_model_processor
from swift.template import get_template

from swift_vlpack.config import PackingConfig
from swift_vlpack.host import headers, length_pass
from swift_vlpack.lengths import prefixes as pass_of_prefixes
from swift_vlpack.lengths.prefixes import SharingLimits
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.prefixes import have_same_prefix
from swift_vlpack.rows.samples import Address
from swift_vlpack.rows.shared import Alone
from swift_vlpack.rows.urls import Urls
from tests.data_rows import image_row, text_row
from tests.family_models import FAMILIES, own_ids
from tests.host.lengths.support import ARGS, FAMILY, dataset, source
from tests.images import photo

LIMITS = SharingLimits(packing_length=2048, least_system_tokens=16)


def shared(template, sources, cache, limits=LIMITS):
    """The sources with the prefixes that their rows share."""
    return length_pass.with_all_lengths(sources, RowEncoder(template), ARGS, str(cache), sharing=limits)


@pytest.fixture
def template(tiny):
    return tiny(FAMILY).template


def questions(paths, each=3):
    return [image_row([path], f"question {number} of it?", "an answer") for path in paths for number in range(each)]


def test_rows_of_one_image_share_the_tokens_through_it(template, tmp_path):
    """SHARE-40"""
    paths = [photo(tmp_path, f"p{n}", 100 + 28 * n, 140, seed=n) for n in range(3)]
    rows = [*questions(paths), image_row([photo(tmp_path, "other", 90, 90)])]
    random.Random(0).shuffle(rows)
    (found,) = shared(template, [source(dataset(rows))], tmp_path / "cache")
    assert found.prefixes.num_sharing == 9
    encoder = RowEncoder(template)
    samples = [encoder.sample(found.row(n), found.sample_id(n)) for n in range(len(rows))]
    by_key = {}
    for n, (key, length) in enumerate(zip(found.prefixes.key.tolist(), found.prefixes.length.tolist(), strict=True)):
        assert (key == 0) == (length == 0) == (len(rows[n]["images"]) == 1 and "other" in rows[n]["images"][0])
        by_key.setdefault(key, []).append((n, length))
    del by_key[0]
    assert sorted(map(len, by_key.values())) == [3, 3, 3]
    end = template.tokenizer.convert_tokens_to_ids("<|vision_end|>")
    for members in by_key.values():
        first, length = members[0]
        assert all(rows[n]["images"] == rows[first]["images"] for n, _ in members)
        assert all(have_same_prefix(samples[first], samples[n], length) for n, _ in members)
        assert samples[first]["input_ids"][length - 1] == end


# -- branches without pixels -------------------------------------------------------------------------------------------


def fused_rows(template, sources):
    return FusionCaptionDataset(
        sources, headers.reading_urls(template, Urls()), pixel_free=headers.branch_template
    )


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


def assert_branches_equal_full_encodings(rows):
    compared = 0
    for index, key in enumerate(rows.sources[0].prefixes.key.tolist()):
        if not key:
            continue
        full, branch = rows.encode(Address(0, index)), rows.encode_branch(Address(0, index))
        assert branch is not None
        assert {name for name in full if name not in branch} == {"pixel_values"}, "nothing else is missing"
        assert all(same(full[name], branch[name]) for name in branch)
        compared += 1
    assert compared


def decode_nothing(monkeypatch):
    def load(self):
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_branches_have_all_but_their_pixels(family, tiny, tmp_path):
    """SHARE-45"""
    template = tiny(family).template
    paths = [photo(tmp_path, "a", 320, 240), photo(tmp_path, "b", 100, 700)]
    limited = [{**row, "chat_template_kwargs": {"max_pixels": 20000}} for row in questions(paths[:1])]
    boxes = [
        {
            **text_row(f"<image>where is <ref-object> in it, {n}?", "at <bbox>"),
            "images": paths[:1],
            "objects": {"ref": ["the tree"], "bbox": [[10, 10, 50, 50 + n]]},
        }
        for n in range(2)
    ]
    both = [image_row(paths, f"question {n}") for n in range(2)]
    rows = [*questions(paths), *both, *limited, *boxes]
    (found,) = shared(template, [source(rows)], tmp_path / "cache")
    assert found.prefixes.num_sharing == len(rows)
    assert_branches_equal_full_encodings(fused_rows(template, [found]))


def test_branches_decode_no_image_and_survive_pickling(template, tmp_path, monkeypatch):
    """SHARE-45: spawned workers get the data set by pickle."""
    rows = questions([photo(tmp_path, "a", 320, 240)])
    (found,) = shared(template, [source(rows)], tmp_path / "cache")
    model, template.model = template.model, None
    try:
        made = fused_rows(template, [found])
        made.encode_for(PackingConfig(packing_length=2048))
        unsized = made.with_sources([replace(one, sizes=None, prefixes=None) for one in made.sources])
        again = pickle.loads(pickle.dumps(unsized))
    finally:
        template.model = model
    full = made.encode(Address(0, 1))
    decode_nothing(monkeypatch)
    for one in (made, again):
        branch = one.encode_branch(Address(0, 1))
        assert all(same(full[name], branch[name]) for name in full if name != "pixel_values")
    with pytest.raises(Exception, match="decoded"):
        again.encode(Address(0, 1))


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # of ms-swift's InternVL
@pytest.mark.parametrize("name", ["GLM-4.1V", "InternVL (HF)"])
def test_branches_of_other_families_have_all_but_their_pixels(name, tmp_path):
    """SHARE-45"""
    family = FAMILIES[name]
    (tmp_path / "model").mkdir()
    family.build(tmp_path / "model")
    with own_ids(tmp_path / "model", family):
        _, processor = get_model_processor(
            str(tmp_path / "model"), model_type=family.model_type, torch_dtype=torch.float32, use_hf=True, load_model=False
        )
        template = get_template(processor, template_type=family.template, max_length=4096)
        template.set_mode("train")
        paths = [photo(tmp_path, "a", 320, 240), photo(tmp_path, "b", 100, 300)]
        rows = [*questions(paths), *[image_row(paths, f"question {n}") for n in range(2)]]
        (found,) = shared(template, [source(rows)], tmp_path / "cache")
        assert found.prefixes.num_sharing == len(rows)
        assert_branches_equal_full_encodings(fused_rows(template, [found]))
