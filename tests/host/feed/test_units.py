import random

import pytest
import torch

from swift_vlpack import PackingConfig
from swift_vlpack.feed.collate import Collator
from swift_vlpack.feed.dataset import PackingDataset
from swift_vlpack.feed.sequence import packed_sequence
from swift_vlpack.feed.units import why_apart
from swift_vlpack.plan.boundaries import ROOT
from swift_vlpack.rows.families import PIXELS, MediaTokens
from swift_vlpack.rows.contents import media_spans
from swift_vlpack.attention.prepare import prepare_model
from tests.data_rows import image_row, sentence, text_row
from tests.family_models import FAMILIES, load
from tests.images import photo

NAMES = ["Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL", "InternVL (HF)", "GLM-4.1V"]


def rows_about(folder, num_images, num_rows, seed=0):
    """Rows about a few images, in turns, and texts between them."""
    rng = random.Random(seed)
    images = [photo(folder, f"image{n}", rng.randint(60, 160), rng.randint(60, 160), seed=n) for n in range(num_images)]
    rows = [image_row([image], sentence(rng, 3, 12), sentence(rng, 3, 12)) for image in images for _ in range(num_rows)]
    rows += [text_row(sentence(rng, 3, 12), sentence(rng, 3, 12)) for _ in range(num_images)]
    rng.shuffle(rows)
    return rows


def prefix_of(sample, template):
    return media_spans(sample, MediaTokens.of(template))[-1].stop
