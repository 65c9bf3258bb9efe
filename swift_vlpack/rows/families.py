"""Facts about model families, in one place: which tensors and tokens are media, and what packing them needs.

Most facts are read from the template, processor and config of a model (the functions at the end). `MEDIA` lists what
these do not say: the tensors in which templates pass images and videos, and which of their rows belong to which image.

>>> [one.families for one in MEDIA if one.divides is Divides.BY_TILES]
['InternVL (HF)']

**A new family**: if the names of its tensors are in `MEDIA`, its images are counted, and with `divides` its rows can be
cut. Otherwise add a line to `MEDIA`, and a builder of a tiny model to `tests/family_models.py`; `make families` tests
every family and writes docs/families.md. If layers of its model carry a state along the sequence, add their class to
`RESTARTED`. A family without a line trains packed too, but caps on images and patches do not count its media.
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
    """Name the rule by which the rows of a pixel tensor belong to images. `contents.media_spans` applies it.

    A row of data is cut, or shares its images, only if the rule is known.
    """

    BY_PATCHES = "a row is a patch: an image has as many as its grid says, and merged patches become its tokens"
    BY_TILES = "a row is a tile: every tile has equally many tokens, and the tokens of an image are contiguous"


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaTensors:
    """The tensors in which the templates of some families bring one kind of media."""

    families: str = field(repr=False)
    """Names of the families, for people. Code looks at tensor names only, so a new family with known tensors works."""
    kind: str = IMAGE
    pixels: str
    grid: str | None = None
    """Tensor of sizes in patches: (height, width), or (time, height, width)."""
    is_line_per_medium: bool = False
    """True if each line of the grid is a whole image or video. Otherwise (slices, tiles) images are counted in the row
    of data."""
    divides: Divides | None = None
    """How `pixels` divides into images; None if not known, so that rows with these tensors are never cut."""
    beside: str | None = None
    """A list with one entry per medium, which is cut together with the pixels."""
    templates: tuple[str, ...] = ()
    """Templates for which `divides` holds, if other families use the same tensor names in another way."""


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
    # Pictures or tiles without a grid. LLaVA, Gemma, Idefics, Llama and Mistral call theirs `pixel_values`, which is
    # listed above; these families have other names.
    MediaTensors(families="MiMo-V2", kind=VIDEO, pixels="video_pixel_values"),
    MediaTensors(families="Step3-VL", pixels="patch_pixel_values"),
    MediaTensors(families="DeepSeek-OCR", pixels="images"),
    MediaTensors(families="CogAgent", pixels="cross_images"),
    MediaTensors(families="Phi-4", pixels="input_image_embeds"),
    MediaTensors(families="Megrez-Omni", pixels="image_encoding"),
    MediaTensors(families="DeepSeek-VL2", pixels="output"),
)

# Views of the table.
GRIDS = tuple(one.grid for one in MEDIA if one.grid is not None)
IMAGE_GRIDS = tuple(one.grid for one in MEDIA if one.grid is not None and one.is_line_per_medium and one.kind == IMAGE)
VIDEO_GRIDS = tuple(one.grid for one in MEDIA if one.grid is not None and one.is_line_per_medium and one.kind == VIDEO)
PIXELS = tuple(dict.fromkeys(one.pixels for one in MEDIA))
BY_PATCHES = tuple(one for one in MEDIA if one.divides is Divides.BY_PATCHES)
BY_TILES = {template: one for one in MEDIA if one.divides is Divides.BY_TILES for template in one.templates}

_STARTS = ("<|vision_start|>", "<|begin_of_image|>", "<img>")
_ENDS = ("<|vision_end|>", "<|end_of_image|>", "</img>")
"""Tokens that templates write before and after an image or video; cutting never separates them from it."""

RESTARTED = (
    *("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"),
    *("OlmoHybridGatedDeltaNet", "Lfm2ShortConv", "Lfm2MoeShortConv"),
    *("BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "JambaMambaMixer", "NemotronHMamba2Mixer"),
)
"""Layers of transformers that carry a state along the sequence, and that were tested: with the state reset at every
sample (`attention/linear_attention.py`), packed samples give what they give alone."""
KEEPS_STATE = ("linear", "conv", "mamba", "recurrent", "hybrid")
"""Parts of the names that configs give to kinds of layers which carry a state along the sequence."""
SHARE_NOTHING = {
    "it has a prefix-LM mask: the tokens of the image see the question": ("paligemma", "git", "kosmos-2", "kosmos-2.5"),
    "its vision tower reads the question": ("instructblip", "instructblipvideo", "blip-2"),
    "its text layers see images by cross-attention": ("mllama", "idefics", "evolla", "florence2"),
    "its layers keep a state along the sequence": (
        *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe"),
        *("mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "zamba", "zamba2"),
    ),
}
"""Model types whose rows cannot share a prefix, by the reason: a prefix would depend on a branch, or a state would pass
from branch to branch."""
_CAPACITIES = ("expert_capacity", "capacity_factor", "moe_expert_capacity_factor")
"""Settings by which an expert drops tokens, depending on the other tokens of the sequence."""
GIVEN_BOUNDARIES_BY_SWIFT = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
"""Layers to whose flash-linear-attention kernels ms-swift itself passes where samples start."""


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """Tokens that a template writes for images and videos, and the number of patches that become one token."""

    placeholders: Mapping[str, int] = field(default_factory=dict)
    """For each kind of medium, the token that the model replaces by an output of its vision tower."""
    starts: tuple[int, ...] = ()
    """Tokens that may begin a medium."""
    ends: tuple[int, ...] = ()
    """Tokens that may end a medium."""
    merged: int = 1
    """Patches that become one token."""
    tiles: MediaTensors | None = None
    """The tensors of a family whose tiles are known to divide into images; None for other families."""
    before_video: int | None = None
    """The first token of a frame's time, which is written before the frame; None if the template writes no times."""

    @classmethod
    def of(cls, template: Any) -> MediaTokens:
        """Read the tokens from a template, its model's config and its processor."""
        config, processor = getattr(template, "config", None), getattr(template, "processor", None)
        ids = {kind: _placeholder_id(kind, template, config, processor) for kind in (IMAGE, VIDEO)}
        unknown = getattr(getattr(template, "tokenizer", None), "unk_token_id", None)
        # Version v3 of ms-swift's Qwen template (Qwen3-VL, Qwen3.5) writes "<1.5 seconds>" before a frame.
        has_times = getattr(template, "version", None) == "v3"
        return cls(
            placeholders={kind: token for kind, token in ids.items() if token not in (None, unknown)},
            starts=_ids(template, _STARTS),
            ends=_ids(template, _ENDS),
            merged=(merge_size(template) or 1) ** 2,
            tiles=BY_TILES.get(getattr(getattr(template, "template_meta", None), "template_type", "")),
            before_video=next(iter(_ids(template, ("<",))), None) if has_times else None,
        )


def merge_size(template: Any) -> int | None:
    """Return n if the patches of an n x n square become one token; None if the image processor does not say."""
    size = getattr(getattr(getattr(template, "processor", None), "image_processor", None), "merge_size", None)
    return size if isinstance(size, int) else None


def patch_size_of(template: Any) -> tuple[int, int] | None:
    """Return the height and width of a patch in pixels; None if the model's config does not say."""
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
    """Return the config of the language model: `config` itself, or a config inside it (two levels deep in Omni)."""
    config = getattr(config, "thinker_config", config)
    return getattr(config, "text_config", config)


def refuse_sharing(config: Any) -> None:
    """Refuse a model in which rows cannot share the beginning that they have in common.

    Raises:
        ConfigError: The model's config says so; names the reason.
    """
    text = text_config_of(config)
    types = {getattr(one, "model_type", None) for one in (config, getattr(config, "thinker_config", None), text)}
    reason = next((why for why, listed in SHARE_NOTHING.items() if types & {*listed}), None)
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    if keeping := sorted({kind for kind in map(str, kinds) if any(word in kind for word in KEEPS_STATE)}):
        reason = f"its layers of the kind {', '.join(keeping)} keep a state along the sequence"
    if capacity := next((name for name in _CAPACITIES if getattr(text, name, None)), None):
        reason = f"its experts drop tokens by a capacity ({capacity}={getattr(text, capacity)})"
    if reason is not None:
        raise ConfigError(
            f"packing_share=media cannot be used with the model {getattr(config, 'model_type', '')}: {reason}; leave "
            "packing_share out"
        )


def is_packed(template: Any) -> bool:
    """Tell whether ms-swift packs a template. If the template does not say, only text models are packed."""
    flag = template.support_padding_free
    return bool(not template.model_meta.is_multimodal if flag is None else flag)


def let_through(template: Any, *, any_family: bool, way_in: str) -> None:
    """Refuse a template that ms-swift does not pack, unless `any_family` lets it through.

    `way_in` tells the user how to set `any_family`.

    Raises:
        ConfigError: `any_family` is False. Or the template has media and says itself that it cannot be packed, perhaps
            for a reason that the proof cannot detect. A text model that says so (gpt-oss) is let through: its reason is
            kernels without attention sinks, which the proof does detect.
    """
    if is_packed(template):
        return
    name = template.template_meta.template_type
    if template.support_padding_free is not None and template.model_meta.is_multimodal:
        raise ConfigError(
            f"ms-swift does not pack the template {name!r} and declares that it cannot be packed; leave packing out"
        )
    if not any_family:
        raise ConfigError(
            f"ms-swift does not pack the template {name!r}; leave packing out, or let the proof decide: {way_in}"
        )
    # Set ms-swift's own field, which its arguments and collator read: there is no other way to let a family through.
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
    # Check by converting back: for a text that is no token, tokenizers may return the id of the unknown token.
    ids = [(text, tokenizer.convert_tokens_to_ids(text)) for text in texts]
    return tuple(one for text, one in ids if one is not None and tokenizer.convert_ids_to_tokens(one) == text)
