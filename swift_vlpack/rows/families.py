"""Facts about model families, in one place: which tensors and tokens are media, and what a family needs to be packed.

Nearly all of a family is read from its template, processor and config (the functions at the end). What no object says
is listed in `MEDIA`: the tensors in which templates bring images and videos, and how these divide among images.

>>> [one.families for one in MEDIA if one.divides is Divides.BY_TILES]
['InternVL (HF)']

**A new family**: if its tensors have names that are in `MEDIA`, its images are counted, and with `divides` its rows can
be cut. Otherwise add a line here, and a builder of a tiny model in `tests/family_models.py`; `make families` tries all
that is promised and writes docs/families.md. If layers of its model keep a state along the row, their class goes into
`RESTARTED`. A family without a line trains packed too, but caps on images and patches do not see what it brings.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from swift_vlpack.errors import ConfigError

logger = logging.getLogger(__name__)

IMAGE, VIDEO = "image", "video"


class Divides(Enum):
    """How the rows of a pixel tensor belong to images. A row of data is only cut where this is known.

    Branches that share an image will ask the same question: which rows of the pixel tensor belong to which image.
    `contents.media_spans` is the place to ask it; today it answers for cutting.
    """

    BY_PATCHES = "a row is a patch: an image has as many as its grid says, and merged patches become its tokens"
    BY_TILES = "a row is a tile: every tile has equally many tokens, and an image's tokens follow one another"


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaTensors:
    """The tensors in which the templates of some families bring one kind of media."""

    families: str = field(repr=False)
    """Who brings them, for people. Code goes by the tensors, so that a new family with known tensors just works."""
    kind: str = IMAGE
    pixels: str
    grid: str | None = None
    """Tensor of sizes in patches: (height, width), or (time, height, width)."""
    is_line_per_medium: bool = False
    """Whether a line of the grid is a whole image or video. If not (slices, tiles), images are counted in the row."""
    divides: Divides | None = None
    """How `pixels` divides; None if that is not known, and then rows with these tensors are not cut."""
    beside: str | None = None
    """A list with one entry a medium, which is divided with the pixels."""
    templates: tuple[str, ...] = ()
    """Templates that `divides` is true of, if the names of the tensors alone do not tell."""


MEDIA = (
    MediaTensors(
        families="Qwen2-VL to Qwen3.5, Qwen-Omni, GLM-4.1V to GLM-4.6V, GLM-OCR, PaddleOCR-VL, dots.ocr",
        pixels="pixel_values",
        grid="image_grid_thw",
        is_line_per_medium=True,
        divides=Divides.BY_PATCHES,
    ),
    MediaTensors(
        families="videos of the same",
        kind=VIDEO,
        pixels="pixel_values_videos",
        grid="video_grid_thw",
        is_line_per_medium=True,
        divides=Divides.BY_PATCHES,
        beside="second_per_grid_ts",
    ),
    MediaTensors(
        families="InternVL (HF)",
        pixels="pixel_values",
        divides=Divides.BY_TILES,
        templates=("internvl_hf",),
    ),
    MediaTensors(
        families="Kimi-VL, Keye, older PaddleOCR-VL",
        pixels="pixel_values",
        grid="image_grid_hws",
        is_line_per_medium=True,
    ),
    MediaTensors(families="Ovis 2.5, Kimi K2.5", pixels="pixel_values", grid="grid_thws"),
    MediaTensors(families="ERNIE-VL", pixels="images", grid="grid_thw"),
    MediaTensors(families="MiniCPM-V to 4.5", pixels="pixel_values", grid="tgt_sizes"),  # a list of tensors
    MediaTensors(families="MiniCPM-V 4.6", pixels="pixel_values", grid="target_sizes"),
    MediaTensors(families="SigLIP 2, as of LFM2-VL", pixels="pixel_values", grid="spatial_shapes"),
    # Pictures or tiles without a grid: under `pixel_values` LLaVA, Gemma, Idefics, Llama, Mistral; here other names.
    MediaTensors(families="MiMo-V2", kind=VIDEO, pixels="video_pixel_values"),
    MediaTensors(families="Step3-VL", pixels="patch_pixel_values"),
    MediaTensors(families="DeepSeek-OCR", pixels="images"),
    MediaTensors(families="CogAgent", pixels="cross_images"),
    MediaTensors(families="Phi-4", pixels="input_image_embeds"),
    MediaTensors(families="Megrez-Omni", pixels="image_encoding"),
    MediaTensors(families="DeepSeek-VL2", pixels="output"),
)

# Read off the table.
GRIDS = tuple(one.grid for one in MEDIA if one.grid is not None)
IMAGE_GRIDS = tuple(one.grid for one in MEDIA if one.grid is not None and one.is_line_per_medium and one.kind == IMAGE)
VIDEO_GRIDS = tuple(one.grid for one in MEDIA if one.grid is not None and one.is_line_per_medium and one.kind == VIDEO)
PIXELS = tuple(dict.fromkeys(one.pixels for one in MEDIA))
BY_PATCHES = tuple(one for one in MEDIA if one.divides is Divides.BY_PATCHES)
BY_TILES = {template: one for one in MEDIA if one.divides is Divides.BY_TILES for template in one.templates}

_STARTS = ("<|vision_start|>", "<|begin_of_image|>", "<img>")
_ENDS = ("<|vision_end|>", "<|end_of_image|>", "</img>")
"""Words that templates write before and after a medium; cutting keeps them with it."""

RESTARTED = (
    *("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"),
    *("OlmoHybridGatedDeltaNet", "Lfm2ShortConv", "Lfm2MoeShortConv"),
    *("BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "JambaMambaMixer", "NemotronHMamba2Mixer"),
)
"""Layers of transformers that keep a state along the row and were tried: restarted at every sample
(`attention/linear_attention.py`), their samples in a row give what they give alone."""
GIVEN_BOUNDARIES_BY_SWIFT = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
"""Layers whose kernels of flash-linear-attention are told by ms-swift where samples start."""


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """What a template writes for images and videos: ids of tokens, and how many patches become one token."""

    placeholders: Mapping[str, int] = field(default_factory=dict)
    """For each kind of medium the token that stands for what the vision tower gives."""
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    merged: int = 1
    """Patches that become one token."""
    tiles: MediaTensors | None = None
    """The tensors, if the family brings tiles and these are known to divide."""
    before_video: int | None = None
    """The token with which the time of a frame begins, written before the frame's patches; None without times."""

    @classmethod
    def of(cls, template: Any) -> MediaTokens:
        """Read them off a template, its model's config and its processor."""
        config, processor = getattr(template, "config", None), getattr(template, "processor", None)
        ids = {kind: _placeholder_id(kind, template, config, processor) for kind in (IMAGE, VIDEO)}
        # Version v3 of ms-swift's Qwen template (Qwen3-VL, Qwen3.5) writes "<1.5 seconds>" before a frame.
        has_times = getattr(template, "version", None) == "v3"
        return cls(
            placeholders={kind: token for kind, token in ids.items() if token is not None},
            starts=_ids(template, _STARTS),
            ends=_ids(template, _ENDS),
            merged=(merge_size(template) or 1) ** 2,
            tiles=BY_TILES.get(getattr(getattr(template, "template_meta", None), "template_type", "")),
            before_video=next(iter(_ids(template, ("<",))), None) if has_times else None,
        )


def merge_size(template: Any) -> int | None:
    """Return how many patches in height and in width become one token; None if the image processor does not say."""
    size = getattr(getattr(getattr(template, "processor", None), "image_processor", None), "merge_size", None)
    return size if isinstance(size, int) else None


def patch_size_of(template: Any) -> tuple[int, int] | None:
    """Return height and width of a patch in pixels; None if the model's config does not say."""
    config = getattr(template, "config", None)
    for name in ("vision_config", "vit_config", "visual"):
        vision = getattr(config, name, None)
        size = vision.get("patch_size") if isinstance(vision, Mapping) else getattr(vision, "patch_size", None)
        if isinstance(size, int):
            return size, size
        if isinstance(size, (list, tuple)) and len(size) >= 2:
            return int(size[-2]), int(size[-1])
    return None


def placeholder_ids(template: Any) -> list[int]:
    """Return the tokens that stand for images, videos and sounds, as ms-swift's template names them."""
    return [token for token in getattr(template, "placeholder_tokens", ()) if isinstance(token, int)]


def text_config_of(config: Any) -> Any:
    """Return the language model's part of a config: the config itself, or one level down; two in an omni model."""
    config = getattr(config, "thinker_config", config)
    return getattr(config, "text_config", config)


def is_packed(template: Any) -> bool:
    """Tell whether ms-swift packs a template: it says yes or no, or nothing, which means yes for text models only."""
    said = template.support_padding_free
    return bool(not template.model_meta.is_multimodal if said is None else said)


def let_through(template: Any, *, any_family: bool, way_in: str) -> None:
    """Refuse a template that ms-swift does not pack, unless `any_family` lets it through.

    Raises:
        ConfigError: Without `any_family`; and in any case for a template with media that says no by itself, because its
            reason might be one that the proof does not see. The no of a text model (gpt-oss) is about kernels without
            attention sinks, which the proof does see.
    """
    if is_packed(template):
        return
    name = template.template_meta.template_type
    if template.support_padding_free is not None and template.model_meta.is_multimodal:
        raise ConfigError(f"ms-swift does not pack the template {name!r} and says that it cannot be; leave packing out")
    if not any_family:
        raise ConfigError(
            f"ms-swift does not pack the template {name!r}; leave packing out, or let the proof decide: {way_in}"
        )
    # ms-swift's own field, by which its arguments and collator decide; there is no other way to let a family through.
    template.support_padding_free = True
    logger.warning("ms-swift does not pack the template %r; the proof says whether its packs are right", name)


def _placeholder_id(kind: str, *owners: Any) -> int | None:
    for owner in owners:
        for name in (f"{kind}_token_id", f"{kind}_token_index"):
            if isinstance(token := getattr(owner, name, None), int):
                return token
    return None


def _ids(template: Any, texts: Sequence[str]) -> tuple[int, ...]:
    tokenizer: Any = getattr(template, "tokenizer", None)
    if not hasattr(tokenizer, "convert_tokens_to_ids"):
        return ()
    # A text that is no token may become the token for what is unknown.
    ids = [(text, tokenizer.convert_tokens_to_ids(text)) for text in texts]
    return tuple(one for text, one in ids if one is not None and tokenizer.convert_ids_to_tokens(one) == text)
