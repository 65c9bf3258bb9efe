"""Which rows share a prefix, found before training, and by real templates."""

import random

import pytest

from swift_vlpack.host import length_pass
from swift_vlpack.lengths import prefixes as pass_of_prefixes
from swift_vlpack.lengths.prefixes import SharingLimits
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.prefixes import have_same_prefix
from swift_vlpack.rows.shared import Alone
from tests.data_rows import image_row, text_row
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
