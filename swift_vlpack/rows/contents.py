"""Count the images and patches of an encoded sample, and find the tokens of each image.

`families.py` says what the tensors of a sample mean. Counting (`contents_of`, `size_of`) works for every family: from
grids of patches, or from pixels and the size of a patch. Finding the tokens (`media_spans`), so that a row can be cut
between its images, works for families where they are known for certain; for others it returns None.

>>> contents_of({"input_ids": [1, 2, 3], "image_grid_thw": torch.tensor([[1, 4, 6], [1, 2, 2]])})
Contents(images=2, patches=28, aspect=1.5)
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from math import prod
from typing import Any, NamedTuple

import torch

from swift_vlpack.plan.parts import Run
from swift_vlpack.rows.families import (
    BY_PATCHES,
    BY_TILES,
    GRIDS,
    IMAGE,
    IMAGE_GRIDS,
    PIXELS,
    VIDEO,
    VIDEO_GRIDS,
    MediaTensors,
    MediaTokens,
    placeholder_ids,
)
from swift_vlpack.rows.media import media
from swift_vlpack.rows.samples import Encoded
from swift_vlpack.rows.sizes import RowSize

NO_LABEL = -100
"""Label of a token that is not predicted; torch's cross entropy ignores it by default."""
USUAL_PATCH = 14
"""Side of a patch in pixels if the model's config does not say it: the patch of CLIP, SigLIP and InternViT."""

PER_TOKEN = ("input_ids", "labels", "loss_scale", "token_type_ids", "mm_token_type_ids", "image_token_types")
"""Fields of a sample with one entry a token."""
_OF_VISION = (*GRIDS, *PIXELS, "image_sizes")
"""Fields whose media are counted. A sample without any of them is a text."""
OWN = "_vlpack_own"
"""The field of an encoded sample with the columns of one's own that have names of fields of ours."""
_OF_SAMPLE = ("length", "lengths", "channel", "source", "sample_id", "contents", OWN, "_extra_kwargs")
_OF_HEADERS = ("header_kinds", "header_pixels")
PER_MEDIUM = frozenset(
    name for one in (*BY_PATCHES, *BY_TILES.values()) for name in (one.grid, one.pixels, one.beside) if name is not None
)
"""Fields of a sample that are known to divide by image or video."""
OF_MEDIA = frozenset({*PER_MEDIUM, *_OF_VISION})
"""Fields of a sample that are about its media and not about its tokens."""
_KNOWN = {*PER_TOKEN, *_OF_SAMPLE, *_OF_HEADERS, *PER_MEDIUM}
"""All fields that cutting can handle. A sample with any other field stays whole."""
_TOKENS_OF_TIME = 12
"""Most tokens that the time of a frame can have: "<1234.5 seconds>" has fewer in every tokenizer that was tried."""


class NoPatch(ValueError):
    """An image or video has no patch."""


class UnfilledToken(ValueError):
    """A text has a token that stands for an image or video, and there is none for it."""


# -- count ------------------------------------------------------------------------------------------------------------


class Contents(NamedTuple):
    """Counts of the media in a sample."""

    images: int = 0
    patches: int = 0
    """Patches of images and videos, including tiles that are only padding."""
    aspect: float = 0.0
    """Longer side over shorter side of the most extreme image or video; 0 if no tensor has the sides."""


def contents_of(sample: Mapping[str, Any]) -> Contents:
    """Return the counts that were stored when the row was encoded, or else count the sample's tensors."""
    stored: Contents | None = sample.get("contents")
    return stored if stored is not None else count_contents(sample)


def count_contents(
    sample: Mapping[str, Any], row: Mapping[str, Any] | None = None, *, patch_size: tuple[int, int] | None = None
) -> Contents:
    """Count the media of a sample.

    Images whose tensors have no line per image (tiles, slices) are counted in `row`, because no tensor says how many
    images the tiles came from.
    """
    if not any(sample.get(name) is not None for name in _OF_VISION):
        return Contents()  # a text: return now, because to look for grids and pixels would take 10 us
    grids = [grid for name in GRIDS for grid in _leaves(sample.get(name))]
    if grids:
        patches = sum(int(grid.prod(-1).sum()) for grid in grids)
    else:
        height, width = patch_size or (USUAL_PATCH, USUAL_PATCH)
        patches = sum(_patches(sample.get(name), height, width) for name in PIXELS)
    return Contents(_num_images(sample, row), patches, _aspect(sample))


def refuse_unfilled(sample: Encoded, tokens: MediaTokens) -> None:
    """Refuse a sample with more placeholders than its images and videos fill.

    Alone, a text with a pasted `<|image_pad|>` trains. In a pack, the model would fill it by the image of another.

    Raises:
        NoPatch: An image or video is so thin that nothing of it is left.
        UnfilledToken: There are more placeholders than the media become. Only for families whose placeholders
            are counted by grids, and for samples without media.
    """
    ids = sample.get("input_ids")
    if ids is None:  # a row of several sequences, whose fields have other names
        return
    grids = {one.kind: list(_leaves(sample.get(str(one.grid)))) for one in BY_PATCHES}
    if any(int(grid.prod(-1).min()) == 0 for found in grids.values() for grid in found):
        raise NoPatch("a side of an image or video is shorter than a patch once it is resized")
    if any(grids.values()):
        wanted = {
            kind: sum(int(grid.prod(-1).sum()) for grid in found) // tokens.merged for kind, found in grids.items()
        }
    elif any(sample.get(name) is not None for name in _OF_VISION):
        return
    else:
        wanted = dict.fromkeys(tokens.placeholders, 0)
    written = {kind: list(ids).count(token) for kind, token in tokens.placeholders.items()}
    if wanted.get(VIDEO) and not written.get(VIDEO):
        return  # frames are written as images
    for kind, num in written.items():
        if num > wanted.get(kind, 0):  # fewer are no proof: a family may write another token than its config names
            raise UnfilledToken(f"the text has {num} tokens of {kind}s, and its {kind}s become {wanted.get(kind, 0)}")


def size_of(sample: Encoded) -> RowSize:
    """Return the size of an encoded sample."""
    length = int(sample.get("length") or len(sample["input_ids"]))
    held = contents_of(sample)
    return RowSize(length, held.images, held.patches, num_supervised(sample))


def num_supervised(sample: Encoded) -> int:
    """Count the tokens that are predicted: those with a label, except the first, because no token precedes it."""
    labels = sample.get("labels")
    if labels is None or not len(labels):
        return 0
    labels = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    return len(labels) - labels.count(NO_LABEL) - int(labels[0] != NO_LABEL)


def num_vision_tokens(template: Any, sequence: Mapping[str, Any]) -> int:
    """Count the tokens of a sequence that stand for images, videos and sounds."""
    tokens, ids = sequence["input_ids"], placeholder_ids(template)
    return int(torch.isin(tokens, torch.tensor(ids, dtype=tokens.dtype)).sum()) if ids else 0


def num_images_of(row: Mapping[str, Any]) -> int:
    """Count the images that ms-swift takes from a row: those it lists, else `<img>` tags whose file exists."""
    named = list(media(row))
    listed = sum(medium.kind == IMAGE for medium in named)
    return listed or sum(medium.kind == "tag" and os.path.isfile(medium.value) for medium in named)


def _num_images(sample: Mapping[str, Any], row: Mapping[str, Any] | None) -> int:
    grids = [grid for name in IMAGE_GRIDS for grid in _leaves(sample.get(name))]
    if grids:
        return sum(map(len, grids))
    if row is not None:
        has_vision = any(sample.get(name) is not None for name in (*GRIDS, *PIXELS))
        return num_images_of(row) if has_vision else 0  # a text model leaves the images of a row alone
    sizes = sample.get("image_sizes")
    return 0 if sizes is None else len(sizes)


def _aspect(sample: Mapping[str, Any]) -> float:
    names = (*IMAGE_GRIDS, *VIDEO_GRIDS, "image_sizes")
    shapes = [shape for name in names for grid in _leaves(sample.get(name)) for shape in grid.tolist()]
    sides = [shape[-2:] for shape in shapes if isinstance(shape, list)]
    return max((max(height / width, width / height) for height, width in sides), default=0.0)


def _patches(value: Any, height: int, width: int) -> int:
    """Count the patches in pixels (..., channels, height, width) or in flattened patches (..., patches, numbers)."""
    # A single picture of three dimensions never comes as a bare tensor: templates put it into a list.
    if isinstance(value, torch.Tensor) and value.dim() in (2, 3):
        return prod(value.shape[:-1])
    return sum(
        prod(pixels.shape[:-3]) * (pixels.shape[-2] // height) * (pixels.shape[-1] // width)
        for pixels in _leaves(value)
        if pixels.ndim > 2
    )


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the arrays inside a value: templates put them into lists, tuples, mappings and objects."""
    if value is None:
        return
    if isinstance(value, torch.Tensor) or hasattr(value, "prod"):
        if value.ndim and len(value):  # a product over nothing would be 1
            yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, Mapping) or hasattr(value, "__dict__"):
        inside = value if isinstance(value, Mapping) else vars(value)
        for name in (*GRIDS, *PIXELS):
            yield from _leaves(inside.get(name))


# -- find the tokens --------------------------------------------------------------------------------------------------


class MediaSpan(NamedTuple):
    """An image or video of a sample: its tokens, with its begin and end tokens, and its part of the pixel tensor."""

    tensors: MediaTensors
    start: int
    stop: int
    units: int
    """Rows (patches or tiles) of the pixel tensor that belong to the image or video."""
    patches: int

    @property
    def is_image(self) -> bool:
        """Tell whether this is an image, not a video."""
        return self.tensors.kind == IMAGE


def media_spans(sample: Mapping[str, Any], tokens: MediaTokens) -> list[MediaSpan] | None:
    """Find the images and videos of a sample, in the order of its tokens.

    Returns None if they are not known for certain: a tensor has an unknown name, or numbers do not add up.
    """
    given = {name for name, value in sample.items() if value is not None}
    if given - _KNOWN:
        return None
    if any(one.grid in given for one in BY_PATCHES):
        found = _by_grids(sample, tokens)
    elif tokens.tiles is not None and tokens.tiles.pixels in given:
        found = _by_tiles(sample, tokens.tiles, tokens.placeholders.get(IMAGE))
    else:
        found = None if given & PER_MEDIUM else []
    if found is None:
        return None
    wrapped = [_with_ends(medium, sample["input_ids"], tokens) for medium in sorted(found, key=lambda one: one.start)]
    # Media may touch, but if they overlap, the numbers added up by accident only.
    return wrapped if all(one.stop <= other.start for one, other in pairwise(wrapped)) else None


def runs_of(num_tokens: int, spans: Sequence[MediaSpan] | None) -> list[Run] | None:
    """Split a row into runs of text and media, for `plan/parts.py` to cut; None if the media are not known."""
    if spans is None:
        return None
    runs, at = [], 0
    for medium in spans:
        runs += [Run(medium.start - at)] if medium.start > at else []
        runs.append(Run(medium.stop - medium.start, int(medium.is_image), medium.patches, is_whole=True))
        at = medium.stop
    return runs + ([Run(num_tokens - at)] if num_tokens > at else [])


def _by_grids(sample: Mapping[str, Any], tokens: MediaTokens) -> list[MediaSpan] | None:
    """Find media by their grids: each has as many tokens as its grid says, and as many rows of pixels as patches."""
    found: list[MediaSpan] = []
    for tensors in BY_PATCHES:
        grids = sample.get(str(tensors.grid))
        if grids is None:
            continue
        patches, token = [int(grid.prod()) for grid in grids], tokens.placeholders.get(tensors.kind)
        spans = _spans(sample["input_ids"], token, [num // tokens.merged for num in patches])
        if spans is None:
            return None
        found += [MediaSpan(tensors, *span, units, units) for span, units in zip(spans, patches, strict=True)]
    return found


def _by_tiles(sample: Mapping[str, Any], tensors: MediaTensors, token: int | None) -> list[MediaSpan] | None:
    """Find images by their tiles: all tiles have equally many tokens, and the tiles of an image are contiguous."""
    pixels = sample[tensors.pixels]
    if not isinstance(pixels, torch.Tensor) or pixels.dim() != 4 or token is None:
        return None
    runs = list(_runs_of_token(sample["input_ids"], token))
    num_tokens, num_tiles = sum(stop - start for start, stop in runs), len(pixels)
    per_tile, rest = divmod(num_tokens, num_tiles) if num_tiles else (0, 1)
    if rest or not per_tile or any((stop - start) % per_tile for start, stop in runs):
        return None
    contents = sample.get("contents")
    patches = contents.patches // num_tiles if contents is not None else 0
    tiles = [(stop - start) // per_tile for start, stop in runs]
    return [MediaSpan(tensors, *run, num, num * patches) for run, num in zip(runs, tiles, strict=True)]


def _spans(tokens: Sequence[int], token: int | None, nums: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return (start, stop) of each medium, from its first placeholder to its last.

    `nums` has the number of placeholders of each medium. Returns None unless the sample has exactly that many in all.
    """
    at = [index for index, one in enumerate(tokens) if one == token]
    ends = list(accumulate(nums))
    if token is None or not ends or ends[-1] != len(at) or 0 in nums:
        return None
    return [(at[end - num], at[end - 1] + 1) for end, num in zip(ends, nums, strict=True)]


def _runs_of_token(tokens: Sequence[int], token: int) -> Iterator[tuple[int, int]]:
    at = 0
    for is_token, group in groupby(tokens, lambda one: one == token):
        num = sum(1 for _ in group)
        if is_token:
            yield at, at + num
        at += num


def _with_ends(medium: MediaSpan, ids: Sequence[int], tokens: MediaTokens) -> MediaSpan:
    """Extend a medium by its begin and end tokens, so that a cut never separates them from it."""
    start, stop = _wrapped(medium.start, medium.stop, ids, tokens)
    if not medium.is_image and tokens.before_video is not None:
        # The first frame follows its time, "<1.5 seconds>", and all frames may be wrapped once more.
        before = [at for at in range(max(0, start - _TOKENS_OF_TIME), start) if ids[at] == tokens.before_video]
        start, stop = _wrapped(before[-1] if before else start, stop, ids, tokens)
    return medium._replace(start=start, stop=stop)


def _wrapped(start: int, stop: int, ids: Sequence[int], tokens: MediaTokens) -> tuple[int, int]:
    start -= start > 0 and ids[start - 1] in tokens.starts
    stop += stop < len(ids) and ids[stop] in tokens.ends
    return start, stop
