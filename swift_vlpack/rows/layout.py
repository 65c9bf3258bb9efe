"""Which tokens of an encoded sample are which image or video, for the families where that is known for certain.

Two ways of bringing images are known. With grids (`image_grid_thw`), a medium has as many tokens as its grid says, and
as many rows of the pixel tensor as patches. With tiles, every picture of the pixel tensor has equally many tokens, and
the tokens of an image follow one another; nothing but the family's word says that, so its templates are named here.
In every other case, or where the numbers do not add up, nothing is known, and the sample is not to be cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import torch

from swift_vlpack.plan.parts import Run
from swift_vlpack.rows.contents import GRIDS, PIXELS

PER_TOKEN = ("input_ids", "labels", "loss_scale", "token_type_ids", "mm_token_type_ids", "image_token_types")
"""Of a sample, one entry a token."""
OF_SAMPLE = ("length", "lengths", "channel", "source", "sample_id", "contents", "_extra_kwargs")
"""Whatever tokens there are."""
OF_HEADERS = ("header_kinds", "header_pixels")
IMAGE, VIDEO = "image", "video"
GRID_OF = {IMAGE: "image_grid_thw", VIDEO: "video_grid_thw"}
PIXELS_OF = {IMAGE: "pixel_values", VIDEO: "pixel_values_videos"}
PER_VIDEO = "second_per_grid_ts"
_KNOWN = {*PER_TOKEN, *OF_SAMPLE, *OF_HEADERS, *GRID_OF.values(), *PIXELS_OF.values(), PER_VIDEO}
OF_TILES = ("internvl_hf",)
"""Templates that put the tokens of all tiles of an image behind one another, between a word before and one behind."""
_STARTS = ("<|vision_start|>", "<|begin_of_image|>", "<img>")
_ENDS = ("<|vision_end|>", "<|end_of_image|>", "</img>")

_NUM_OF_TIME = 12
"""Tokens of the time of a frame, at most."""


class Medium(NamedTuple):
    """An image or a video: its tokens, with those that begin and end it, and its share of the pixels."""

    kind: str
    start: int
    stop: int
    units: int
    """Rows of the pixel tensor: patches, or tiles."""
    patches: int

    @property
    def is_image(self) -> bool:
        """Not a video."""
        return self.kind == IMAGE


@dataclass(frozen=True, slots=True)
class MediaWords:
    """What a template writes for images: ids of tokens, and how many patches become one."""

    placeholders: Mapping[str, int] = field(default_factory=dict)
    """Of each kind of medium the token that stands for what the vision tower gives."""
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    merged: int = 1
    """Patches that become a token."""
    has_tiles: bool = False
    before_video: int | None = None
    """With which the time of a video's frame begins, which stands before its first patch."""

    @classmethod
    def of(cls, template: Any) -> MediaWords:
        """Of a template, from its model's config and its processor."""
        config, processor = getattr(template, "config", None), getattr(template, "processor", None)
        ids = {kind: _id_of(kind, template, config, processor) for kind in (IMAGE, VIDEO)}
        merge_size = getattr(getattr(processor, "image_processor", None), "merge_size", 1)
        has_times = getattr(template, "version", None) == "v3"
        return cls(
            placeholders={kind: token for kind, token in ids.items() if token is not None},
            starts=_ids(template, _STARTS),
            ends=_ids(template, _ENDS),
            merged=int(merge_size) ** 2,
            has_tiles=getattr(getattr(template, "template_meta", None), "template_type", None) in OF_TILES,
            before_video=next(iter(_ids(template, ("<",))), None) if has_times else None,
        )


def media_of(sample: Mapping[str, Any], words: MediaWords) -> list[Medium] | None:
    """The images and videos of a sample, in the order of its tokens; None where it is not known which they are."""
    given = {name for name, value in sample.items() if value is not None}
    if given - _KNOWN or (given & {*GRIDS, *PIXELS}) - {*GRID_OF.values(), *PIXELS_OF.values()}:
        return None
    if GRID_OF[IMAGE] in given or GRID_OF[VIDEO] in given:
        found = _by_grids(sample, words)
    elif PIXELS_OF[IMAGE] in given:
        found = _by_tiles(sample, words)
    else:
        found = []
    if found is None:
        return None
    wrapped = [_with_ends(medium, sample["input_ids"], words) for medium in sorted(found, key=lambda one: one.start)]
    # Side by side they may be, but not inside of each other: then the numbers were right by accident.
    return wrapped if all(one.stop <= other.start for one, other in pairwise(wrapped)) else None


def runs_of(num_tokens: int, media: Sequence[Medium] | None) -> list[Run] | None:
    """What the core cuts: text, and media that stay whole."""
    if media is None:
        return None
    runs, at = [], 0
    for medium in media:
        runs += [Run(medium.start - at)] if medium.start > at else []
        runs.append(Run(medium.stop - medium.start, int(medium.is_image), medium.patches, is_whole=True))
        at = medium.stop
    return runs + ([Run(num_tokens - at)] if num_tokens > at else [])


def _by_grids(sample: Mapping[str, Any], words: MediaWords) -> list[Medium] | None:
    found: list[Medium] = []
    for kind, name in GRID_OF.items():
        grids = sample.get(name)
        if grids is None:
            continue
        patches = [int(grid.prod()) for grid in grids]
        spans = _spans(sample["input_ids"], words.placeholders.get(kind), [one // words.merged for one in patches])
        if spans is None:
            return None
        found += [Medium(kind, *span, units, units) for span, units in zip(spans, patches, strict=True)]
    return found


def _by_tiles(sample: Mapping[str, Any], words: MediaWords) -> list[Medium] | None:
    pixels, token = sample[PIXELS_OF[IMAGE]], words.placeholders.get(IMAGE)
    if not words.has_tiles or not isinstance(pixels, torch.Tensor) or pixels.dim() != 4 or token is None:
        return None
    runs = list(_runs_of_token(sample["input_ids"], token))
    num_tokens, num_tiles = sum(stop - start for start, stop in runs), len(pixels)
    per_tile, rest = divmod(num_tokens, num_tiles) if num_tiles else (0, 1)
    if rest or not per_tile or any((stop - start) % per_tile for start, stop in runs):
        return None
    contents = sample.get("contents")
    patches = contents.patches // num_tiles if contents is not None else 0
    tiles = [(stop - start) // per_tile for start, stop in runs]
    return [Medium(IMAGE, *run, num, num * patches) for run, num in zip(runs, tiles, strict=True)]


def _spans(tokens: Sequence[int], token: int | None, nums: Sequence[int]) -> list[tuple[int, int]] | None:
    """From the first placeholder of each medium to behind its last; None unless there are as many as the grids say."""
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


def _with_ends(medium: Medium, tokens: Sequence[int], words: MediaWords) -> Medium:
    start, stop = _wrapped(medium.start, medium.stop, tokens, words)
    if medium.kind == VIDEO and words.before_video is not None:
        # "<1.5 seconds>" before the first frame, a handful of tokens; around all frames there are ends once more.
        before = [at for at in range(max(0, start - _NUM_OF_TIME), start) if tokens[at] == words.before_video]
        start, stop = _wrapped(before[-1] if before else start, stop, tokens, words)
    return medium._replace(start=start, stop=stop)


def _wrapped(start: int, stop: int, tokens: Sequence[int], words: MediaWords) -> tuple[int, int]:
    start -= start > 0 and tokens[start - 1] in words.starts
    stop += stop < len(tokens) and tokens[stop] in words.ends
    return start, stop


def _id_of(kind: str, template: Any, config: Any, processor: Any) -> int | None:
    names = (f"{kind}_token_id", f"{kind}_token_index")
    for owner in (template, config, processor):
        for name in names:
            if isinstance(token := getattr(owner, name, None), int):
                return token
    return None


def _ids(template: Any, texts: Sequence[str]) -> tuple[int, ...]:
    tokenizer: Any = getattr(template, "tokenizer", None)
    if not hasattr(tokenizer, "convert_tokens_to_ids"):
        return ()
    # A text that is no token may become the one for what is unknown.
    ids = [(text, tokenizer.convert_tokens_to_ids(text)) for text in texts]
    return tuple(one for text, one in ids if one is not None and tokenizer.convert_ids_to_tokens(one) == text)
