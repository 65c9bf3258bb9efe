"""Templates of families that bring pixels, or grids under other names: ms-swift's own, with processors at real sizes.

Only `tests/host/rows/test_contents.py` asks for these, which counts patches. A new family goes into `family_models.py`.

Nothing is downloaded: configs are tiny, and every tokenizer is Qwen's with the family's words for images added.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import tiny

_TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
TEMPLATE_OF = {"internvl": "internvl_hf"}
"""Where it is not named as the model type."""


def load_template(folder: Path, family: str) -> Any:
    """ms-swift's template of a family, by its own loading."""
    import torch
    from swift.model import get_model_processor
    from swift.template import get_template

    _BUILD[family](folder)
    _, processor = get_model_processor(
        str(folder), model_type=family, torch_dtype=torch.float32, use_hf=True, load_model=False
    )
    template = get_template(processor, template_type=TEMPLATE_OF.get(family, family), max_length=32768)
    template.set_mode("train")
    if family == "gemma3_vision":  # an id that ms-swift names as a constant
        template.boi_token_id = template.tokenizer.convert_tokens_to_ids("<start_of_image>")
    return template


def _tokenizer(folder: Path, words: tuple[str, ...], **named: str) -> Any:
    """Qwen's tokenizer with more words; `named` are attributes by which a processor asks for some of them."""
    from transformers import Qwen2Tokenizer

    tokenizer = tiny.build_tokenizer(is_small=True)
    tokenizer.add_special_tokens({"additional_special_tokens": list(words)})
    tokenizer.save_pretrained(folder)
    return Qwen2Tokenizer.from_pretrained(folder, extra_special_tokens=named)


def _save(folder: Path, config: Any, architecture: str, processor: Any) -> None:
    config.architectures = [architecture]
    config.save_pretrained(folder)
    processor.save_pretrained(folder)


def _build_llava(folder: Path, family: str) -> None:
    """Config and processor of LLaVA 1.5 (as many tokens for any image) or 1.6 (tiles), with the tokenizer at hand."""
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaNextConfig,
        LlavaNextImageProcessor,
        LlavaNextProcessor,
        LlavaProcessor,
        Qwen2Config,
    )

    tokenizer = tiny.build_tokenizer(is_small=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    vision = CLIPVisionConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=336, patch_size=14)
    text = Qwen2Config(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    is_tiled = family != "llava1_5_hf"
    config = (LlavaNextConfig if is_tiled else LlavaConfig)(
        vision_config=vision.to_dict(),
        text_config=text.to_dict(),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    config.architectures = ["LlavaNextForConditionalGeneration" if is_tiled else "LlavaForConditionalGeneration"]
    images = (LlavaNextImageProcessor if is_tiled else CLIPImageProcessor)(size={"shortest_edge": 336}, crop_size=336)
    processor = (LlavaNextProcessor if is_tiled else LlavaProcessor)(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    config.save_pretrained(folder)
    processor.save_pretrained(folder)


def _build_internvl(folder: Path) -> None:
    """Tiles of 448 pixels."""
    import transformers

    names = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    names["video_token"] = "<video>"
    tokenizer = _tokenizer(folder, tuple(names.values()), **names)
    config = transformers.InternVLConfig(
        text_config=transformers.Qwen2Config(**_TEXT).to_dict(),
        vision_config={**_VISION, "image_size": [448, 448], "patch_size": [14, 14]},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
    )
    size = {"height": 448, "width": 448}
    processor = transformers.InternVLProcessor(
        transformers.GotOcr2ImageProcessor(size=size),
        tokenizer,
        transformers.InternVLVideoProcessor(size=size),
        image_seq_length=256,
    )
    _save(folder, config, "InternVLForConditionalGeneration", processor)


def _build_gemma3(folder: Path) -> None:
    """One square of 896 pixels an image."""
    import transformers

    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = _tokenizer(folder, (*names.values(), "<start_of_turn>", "<end_of_turn>", "<bos>"), **names)
    tokenizer.bos_token = "<bos>"
    config = transformers.Gemma3Config(
        text_config={"model_type": "gemma3_text", "head_dim": 16, **_TEXT},
        vision_config={"model_type": "siglip_vision_model", **_VISION, "image_size": 896, "patch_size": 14},
        mm_tokens_per_image=256,
        image_token_index=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
    )
    images = transformers.Gemma3ImageProcessor(size={"height": 896, "width": 896})
    processor = transformers.Gemma3Processor(images, tokenizer, image_seq_length=256)
    _save(folder, config, "Gemma3ForConditionalGeneration", processor)


def _build_glm4v(folder: Path) -> None:
    """A grid an image, as Qwen's."""
    import transformers

    words = ("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>", "<|begin_of_video|>")
    words += ("<|end_of_video|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>")
    tokenizer = _tokenizer(folder, words, image_token="<|image|>", video_token="<|video|>")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    config = transformers.Glm4vConfig(
        text_config={**_TEXT, "rope_parameters": rope},
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "patch_size": 14},
        image_token_id=tokenizer.convert_tokens_to_ids("<|image|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video|>"),
    )
    processor = transformers.Glm4vProcessor(
        transformers.Glm4vImageProcessor(), tokenizer, transformers.Glm4vVideoProcessor()
    )
    _save(folder, config, "Glm4vForConditionalGeneration", processor)


_BUILD = {
    **{name: lambda folder, name=name: _build_llava(folder, name) for name in ("llava1_5_hf", "llava1_6_mistral_hf")},
    "internvl": _build_internvl,
    "gemma3_vision": _build_gemma3,
    "glm4v": _build_glm4v,
}
FAMILIES = tuple(_BUILD)
