"""Tiny models of many families with processors at tiny sizes, written as a hub has them; nothing is downloaded.

Every tokenizer is Qwen's with the family's words added. What a family is called here is its row in docs/families.md.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import tiny

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "head_dim": 16,
    "initializer_range": 0.1,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
}
SIDE = 56
"""Pixels of a square picture: 16 patches."""


@dataclass(frozen=True)
class Family:
    """How ms-swift calls it, and what writes one."""

    build: Callable[[Path], None]
    model_type: str
    template: str
    has_images: bool = True
    has_texts: bool = True
    """Its template takes rows without media."""
    has_sounds: bool = False
    """Then it needs qwen_omni_utils."""
    note: str = ""
    """What docs/families.md says of it."""
    run_dtype: str = "float32"
    """Of its whole run; some processors give bfloat16 whatever the model has."""
    ids: tuple[tuple[str, str], ...] = ()
    """Ids that a template names as constants, and the words that they stand for."""


def load(folder: Path, family: Family, attn_impl: str | None = None) -> tuple[Any, Any]:
    """Model and template, by ms-swift's own loading."""
    import torch
    from swift.model import get_model_processor
    from swift.template import get_template

    model, processor = get_model_processor(
        str(folder), model_type=family.model_type, torch_dtype=torch.float32, attn_impl=attn_impl, use_hf=True
    )
    template = get_template(processor, template_type=family.template, max_length=4096)
    if family.model_type == "llama4":  # its processor gives bfloat16 whatever the model has
        tower = model.vision_model.patch_embedding
        tower.register_forward_pre_hook(lambda module, args: tuple(one.float() for one in args))
    return model, template


@contextmanager
def own_ids(folder: Path, family: Family) -> Any:
    """Let the template of a family know the ids of this tokenizer."""
    from swift.template import TEMPLATE_MAPPING
    from transformers import AutoTokenizer

    kind = TEMPLATE_MAPPING[family.template].template_cls
    before = {name: getattr(kind, name) for name, _ in family.ids}
    tokenizer = AutoTokenizer.from_pretrained(folder) if family.ids else None
    for name, word in family.ids:
        setattr(kind, name, tokenizer.convert_tokens_to_ids(word))
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(kind, name, value)


# -- parts ------------------------------------------------------------------------------------------------------------


def _tokenizer(folder: Path, words: tuple[str, ...] = (), bos: str | None = None, **named: str) -> Any:
    """A small vocabulary with more words; `named` are attributes by which a processor asks for some of them."""
    from transformers import Qwen2Tokenizer

    tokenizer = tiny.build_tokenizer(is_small=True)
    tokenizer.add_special_tokens({"additional_special_tokens": [*words, *named.values(), *([bos] if bos else [])]})
    if bos:
        tokenizer.bos_token = bos
    tokenizer.save_pretrained(folder)
    return Qwen2Tokenizer.from_pretrained(folder, extra_special_tokens=named)


def _text(tokenizer: Any, **more: Any) -> dict[str, Any]:
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    return {**TEXT, "vocab_size": len(tokenizer), **ids, "bos_token_id": None, **more}


def _save(folder: Path, model_class: str, config: Any, processor: Any) -> None:
    """Random weights from a seed, large enough that attention matters."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, model_class)._from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.12)
    model.generation_config = transformers.GenerationConfig()
    model.float().save_pretrained(folder)
    processor.save_pretrained(folder)


def _clip(**more: Any) -> dict[str, Any]:
    return {**TOWER, "model_type": "clip_vision_model", "image_size": SIDE, **more}


def _siglip(**more: Any) -> dict[str, Any]:
    return {**TOWER, "model_type": "siglip_vision_model", "image_size": SIDE, **more}


# -- families with tiles or squares -----------------------------------------------------------------------------------


def _internvl(folder: Path) -> None:
    import transformers

    names = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    tokenizer = _tokenizer(folder, **names, video_token="<video>")
    config = transformers.InternVLConfig(
        text_config=_text(tokenizer, model_type="qwen2"),
        vision_config={**TOWER, "image_size": [SIDE, SIDE], "patch_size": [14, 14]},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
    )
    size = {"height": SIDE, "width": SIDE}
    processor = transformers.InternVLProcessor(
        transformers.GotOcr2ImageProcessor(size=size, max_patches=4),
        tokenizer,
        transformers.InternVLVideoProcessor(size=size),
        image_seq_length=4,
    )
    _save(folder, "InternVLForConditionalGeneration", config, processor)


def _llava(folder: Path) -> None:
    import transformers

    tokenizer = _tokenizer(folder, ("<image>",))
    config = transformers.LlavaConfig(
        text_config=_text(tokenizer, model_type="llama"),
        vision_config=_clip(),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=SIDE),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    _save(folder, "LlavaForConditionalGeneration", config, processor)


_PINPOINTS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]


def _llava_next(folder: Path) -> None:
    import transformers

    tokenizer = _tokenizer(folder, ("<image>",), bos="<s>")
    config = transformers.LlavaNextConfig(
        text_config=_text(tokenizer, model_type="mistral"),
        vision_config=_clip(),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=_PINPOINTS,
        vision_feature_layer=-1,
    )
    images = transformers.LlavaNextImageProcessor(
        size={"shortest_edge": SIDE}, crop_size=SIDE, image_grid_pinpoints=_PINPOINTS
    )
    processor = transformers.LlavaNextProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    _save(folder, "LlavaNextForConditionalGeneration", config, processor)


def _gemma3(folder: Path) -> None:
    import transformers

    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = _tokenizer(folder, ("<start_of_turn>", "<end_of_turn>"), bos="<bos>", **names)
    config = transformers.Gemma3Config(
        text_config=_text(
            tokenizer,
            model_type="gemma3_text",
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=16,
        ),
        vision_config=_siglip(),
        mm_tokens_per_image=4,
        image_token_index=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
    )
    images = transformers.Gemma3ImageProcessor(size={"height": SIDE, "width": SIDE})
    processor = transformers.Gemma3Processor(images, tokenizer, image_seq_length=4)
    _save(folder, "Gemma3ForConditionalGeneration", config, processor)


def _mistral3(folder: Path) -> None:
    import transformers

    names = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    words = ("</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
    tokenizer = _tokenizer(folder, words, bos="<s>", **names)
    config = transformers.Mistral3Config(
        text_config=_text(tokenizer, model_type="mistral"),
        vision_config={**TOWER, "model_type": "pixtral", "image_size": 112, "head_dim": 16},
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )
    processor = transformers.PixtralProcessor(
        transformers.PixtralImageProcessor(size={"longest_edge": 112}, patch_size=14),
        tokenizer,
        patch_size=14,
        spatial_merge_size=2,
        **names,
    )
    _save(folder, "Mistral3ForConditionalGeneration", config, processor)


def _onevision(folder: Path) -> None:
    """ms-swift names the id of the image token, 151646, in its code."""
    import transformers

    tokenizer = _large_tokenizer(151643, (*tiny.QWEN_SPECIALS[:3], "<image>", "<video>"))
    config = transformers.LlavaOnevisionConfig(
        text_config=_text(tokenizer, model_type="qwen2"),
        vision_config=_siglip(),
        image_token_index=151646,
        video_token_index=151647,
        image_grid_pinpoints=_PINPOINTS,
        vision_aspect_ratio="anyres_max_9",
    )
    processor = transformers.LlavaOnevisionProcessor(
        transformers.LlavaOnevisionImageProcessor(
            size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=_PINPOINTS
        ),
        tokenizer,
        transformers.LlavaOnevisionVideoProcessor(size={"height": SIDE, "width": SIDE}),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
    )
    _save(folder, "LlavaOnevisionForConditionalGeneration", config, processor)


def _large_tokenizer(num_words: int, specials: tuple[str, ...]) -> Any:
    """The first words of the whole vocabulary, and behind them these."""
    with pytest.MonkeyPatch.context() as patch:
        words = {token: rank for token, rank in tiny._ranks().items() if rank < num_words}
        patch.setattr(tiny, "_small_ranks", lambda: words)
        patch.setattr(tiny, "QWEN_SPECIALS", specials)
        return tiny.build_tokenizer(is_small=True)


# -- families with grids ----------------------------------------------------------------------------------------------

_GLM_WORDS = (
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
    *("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "<think>", "</think>"),
)


def _glm(config_class: str, model_class: str, **text: Any) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        import transformers

        tokenizer = _tokenizer(folder, _GLM_WORDS, image_token="<|image|>", video_token="<|video|>")
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
        ids = {
            f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{word}|>")
            for name, word in (
                *(("image", "image"), ("video", "video")),
                *((f"{kind}_start", f"begin_of_{kind}") for kind in ("image", "video")),
                *((f"{kind}_end", f"end_of_{kind}") for kind in ("image", "video")),
            )
        }
        vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64}
        config = getattr(transformers, config_class)(
            text_config=_text(tokenizer, rope_parameters=rope, **text),
            vision_config={**vision, "patch_size": 14, "image_size": SIDE},
            **ids,
        )
        processor = transformers.Glm4vProcessor(
            transformers.Glm4vImageProcessor(size={"shortest_edge": 784, "longest_edge": 20000}),
            tokenizer,
            transformers.Glm4vVideoProcessor(),
        )
        _save(folder, model_class, config, processor)

    return build


_GLM_IDS = tuple(
    (f"{place}_of_{kind}_token", f"<|{place}_of_{kind}|>") for kind in ("image", "video") for place in ("begin", "end")
)
_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def _qwen3_vl_moe(folder: Path) -> None:
    import transformers

    dense = tiny.build_config("qwen3_vl", is_small=True)
    text = {name: value for name, value in dense.text_config.to_dict().items() if name not in ("model_type", "dtype")}
    config = transformers.Qwen3VLMoeConfig(
        text_config={
            **text,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
        },
        vision_config={name: v for name, v in dense.vision_config.to_dict().items() if name not in ("model_type",)},
        **{
            name: getattr(dense, name)
            for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        },
    )
    processor = tiny.build_processor(tiny.build_tokenizer("qwen3_vl", is_small=True), "qwen3_vl")
    _save(folder, "Qwen3VLMoeForConditionalGeneration", config, processor)


def _paddle_ocr(folder: Path) -> None:
    import transformers

    words = ("<|IMAGE_START|>", "<|IMAGE_END|>", "<|begin_of_sentence|>", "</s>")
    tokenizer = _tokenizer(folder, words, image_token="<|IMAGE_PLACEHOLDER|>")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    ids = {
        "image_token_id": "<|IMAGE_PLACEHOLDER|>",
        "vision_start_token_id": "<|IMAGE_START|>",
        "vision_end_token_id": "<|IMAGE_END|>",
    }
    config = transformers.PaddleOCRVLConfig(
        text_config=_text(tokenizer, rope_parameters=rope),
        vision_config={**TOWER, "image_size": SIDE},
        **{name: tokenizer.convert_tokens_to_ids(word) for name, word in ids.items()},
    )
    processor = transformers.PaddleOCRVLProcessor(
        transformers.PaddleOCRVLImageProcessor(size={"shortest_edge": 784, "longest_edge": 20000}), tokenizer
    )
    _save(folder, "PaddleOCRVLForConditionalGeneration", config, processor)


def _minicpm(folder: Path) -> None:
    import transformers

    names = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    pairs = {"image": "image", "slice": "slice", "image_id": "image_id"}
    names |= {f"{name}_start_token": f"<{word}>" for name, word in pairs.items()}
    names |= {f"{name}_end_token": f"</{word}>" for name, word in pairs.items()}
    tokenizer = _tokenizer(folder, **names)
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0, "mrope_section": [4, 2, 2]}
    config = transformers.MiniCPMV4_6Config(
        text_config=_text(
            tokenizer,
            model_type="qwen3_5_text",
            layer_types=["full_attention", "full_attention"],
            rope_parameters={**rope, "mrope_interleaved": True},
        ),
        vision_config={**TOWER, "image_size": 224},
        insert_layer_id=0,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
    )
    processor = transformers.MiniCPMV4_6Processor(
        image_processor=transformers.MiniCPMV4_6ImageProcessor(scale_resolution=224),
        tokenizer=tokenizer,
        video_processor=transformers.MiniCPMV4_6VideoProcessor(),
    )
    _save(folder, "MiniCPMV4_6ForConditionalGeneration", config, processor)


def _gemma4(folder: Path, **text: Any) -> None:
    import transformers

    names = {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "video_token": "<|video|>",
    }
    tokenizer = _tokenizer(folder, ("<|turn>", "<turn|>"), bos="<bos>", **names)
    config = transformers.Gemma4Config(
        text_config=_text(
            tokenizer,
            model_type="gemma4_text",
            **{
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"],
                "global_head_dim": 32,
                "num_kv_shared_layers": 0,
                "hidden_size_per_layer_input": 0,
                "vocab_size_per_layer_input": len(tokenizer),
                "use_bidirectional_attention": "vision",
                **text,
            },
        ),
        vision_config={**TOWER, "num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2},
        audio_config=None,
        **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image", "video", "audio")},
    )
    processor = transformers.Gemma4Processor(
        feature_extractor=transformers.Gemma4AudioFeatureExtractor(),
        image_processor=transformers.Gemma4ImageProcessor(patch_size=14, pooling_kernel_size=2, max_soft_tokens=70),
        tokenizer=tokenizer,
        video_processor=transformers.Gemma4VideoProcessor(),
    )
    _save(folder, "Gemma4ForConditionalGeneration", config, processor)


def _gemma4_e2b(folder: Path) -> None:
    """The small ones: inputs of every layer, later layers with the keys of earlier ones, and no image blocks."""
    _gemma4(
        folder,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=16,
        use_bidirectional_attention=None,
    )


def _llama4(folder: Path) -> None:
    import transformers

    names = {"image_token": "<|image|>"}
    words = (
        *("<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
        *("<|header_start|>", "<|header_end|>", "<|eot|>"),
    )
    tokenizer = _tokenizer(folder, words, bos="<|begin_of_text|>", **names)
    config = transformers.Llama4Config(
        text_config=_text(
            tokenizer,
            model_type="llama4_text",
            intermediate_size_mlp=96,
            num_local_experts=2,
            num_experts_per_tok=1,
            attention_chunk_size=64,
            layer_types=["chunked_attention", "full_attention"],
        ),
        vision_config={
            **TOWER,
            "intermediate_size": 128,
            "image_size": SIDE,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<|patch|>"),
    )
    processor = transformers.Llama4Processor(
        transformers.Llama4ImageProcessor(size={"height": SIDE, "width": SIDE}, max_patches=2), tokenizer, patch_size=14
    )
    _save(folder, "Llama4ForConditionalGeneration", config, processor)


def _idefics3(folder: Path) -> None:
    """ms-swift names the id of the image token, 128257, as a constant."""
    import transformers

    words = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|begin_of_text|>")
    tokenizer = _large_tokenizer(128257, (*words, *tiny.QWEN_SPECIALS))
    tokenizer.bos_token = "<|begin_of_text|>"
    config = transformers.Idefics3Config(
        text_config=_text(tokenizer, model_type="llama"),
        vision_config={**TOWER, "image_size": SIDE},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    processor = transformers.Idefics3Processor(
        transformers.Idefics3ImageProcessor(size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE}),
        tokenizer,
        image_seq_len=4,
    )
    _save(folder, "Idefics3ForConditionalGeneration", config, processor)


def _qwen3_5_moe(folder: Path) -> None:
    """Layers with a state, and experts."""
    import transformers

    dense = tiny.build_config("qwen3_5", is_small=True)
    parts = {
        part: {
            name: value for name, value in getattr(dense, part).to_dict().items() if name not in ("model_type", "dtype")
        }
        for part in ("text_config", "vision_config")
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    parts["text_config"] |= {**experts, "shared_expert_intermediate_size": 32}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = transformers.Qwen3_5MoeConfig(**parts, **{name: getattr(dense, name) for name in names})
    processor = tiny.build_processor(tiny.build_tokenizer("qwen3_5", is_small=True), "qwen3_5")
    _save(folder, "Qwen3_5MoeForConditionalGeneration", config, processor)


def _paligemma(folder: Path) -> None:
    import transformers

    tokenizer = _tokenizer(folder, ("<image>",), bos="<bos>", image_token="<image>")
    images = transformers.SiglipImageProcessor(size={"height": SIDE, "width": SIDE})
    images.image_seq_length = 16
    processor = transformers.PaliGemmaProcessor(images, tokenizer)
    config = transformers.PaliGemmaConfig(
        text_config=_text(
            tokenizer,
            model_type="gemma2",
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=16,
        ),
        vision_config=_siglip(projection_dim=64, vocab_size=len(tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=64,
        hidden_size=64,
        vocab_size=len(tokenizer),
    )
    _save(folder, "PaliGemmaForConditionalGeneration", config, processor)


def _mllama(folder: Path) -> None:
    import transformers

    words = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    tokenizer = _tokenizer(folder, words, bos="<|begin_of_text|>", image_token="<|image|>")
    rope = {"rope_type": "default", "rope_theta": 1e4}
    text = _text(tokenizer, cross_attention_layers=[1], num_hidden_layers=3, rope_parameters=rope)
    text["bos_token_id"] = tokenizer.bos_token_id
    config = transformers.MllamaConfig(
        text_config=text,
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_global_layers": 1,
            "attention_heads": 2,
            "image_size": SIDE,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 64,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<|image|>"),
    )
    processor = transformers.MllamaProcessor(
        transformers.MllamaImageProcessor(size={"height": SIDE, "width": SIDE}), tokenizer
    )
    _save(folder, "MllamaForConditionalGeneration", config, processor)


# -- families that listen ---------------------------------------------------------------------------------------------


def _omni(version: str) -> Callable[[Path], None]:
    """Qwen's thinker, without the talker. Sounds are of 16 bands, and of two seconds at most in 2.5."""

    def build(folder: Path) -> None:
        import torch
        import transformers

        is_3 = version == "3"
        media = ("<|image_pad|>", "<|audio_pad|>", "<|video_pad|>") if is_3 else ("<|IMAGE|>", "<|AUDIO|>", "<|VIDEO|>")
        ends = ("start", "end") if is_3 else ("bos", "eos")
        words = dict(zip(("image_token", "audio_token", "video_token"), media, strict=True))
        words |= {
            f"{kind}_{end}_token": f"<|{kind}_{own}|>"
            for kind in ("vision", "audio")
            for end, own in zip(("bos", "eos"), ends, strict=True)
        }
        tokenizer = _tokenizer(folder, **words)
        ids = {name: tokenizer.convert_tokens_to_ids(word) for name, word in words.items()}
        name = "Qwen3OmniMoe" if is_3 else "Qwen2_5Omni"
        config = getattr(transformers, f"{name}Config")(
            thinker_config=_thinker(tokenizer, ids, is_3=is_3), enable_audio_output=False
        )
        _save(folder, f"{name}ForConditionalGeneration", config, _omni_processor(name, tokenizer, is_3=is_3))
        torch.save({}, folder / "spk_dict.pt")  # the voices of the talker, which 2.5 looks for

    return build


def _thinker(tokenizer: Any, ids: dict[str, int], *, is_3: bool) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2] if is_3 else [2, 3, 3]}
    text = _text(tokenizer, rope_parameters={**rope, "mrope_interleaved": True} if is_3 else rope)
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    audio = {"num_mel_bins": 16, "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "output_dim": 64}
    audio["encoder_ffn_dim"] = 64
    if is_3:
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
        vision |= {"patch_size": 16, "num_position_embeddings": 256, "deepstack_visual_indexes": [0]}
        audio["downsample_hidden_size"] = 16
    else:
        vision |= {"patch_size": 14, "fullatt_block_indexes": [1], "window_size": 112}
    media = ("image", "video", "audio")
    return {
        "text_config": text,
        "vision_config": vision,
        "audio_config": audio,
        **{f"{one}_token_id" if is_3 else f"{one}_token_index": ids[f"{one}_token"] for one in media},
        "vision_start_token_id": ids["vision_bos_token"],
        "vision_end_token_id": ids["vision_eos_token"],
        "audio_start_token_id": ids["audio_bos_token"],
        "audio_end_token_id": ids["audio_eos_token"],
    }


def _omni_processor(name: str, tokenizer: Any, *, is_3: bool) -> Any:
    import transformers

    patch = 16 if is_3 else 14
    return getattr(transformers, f"{name}Processor")(
        image_processor=transformers.Qwen2VLImageProcessor(patch_size=patch),
        video_processor=transformers.Qwen2VLVideoProcessor(patch_size=patch),
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2),
        tokenizer=tokenizer,
        chat_template=tiny.CHAT_TEMPLATE,
    )


# -- text models ------------------------------------------------------------------------------------------------------


def _text_model(config_class: str, model_class: str, **more: Any) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        import transformers

        tokenizer = _tokenizer(folder)
        config = getattr(transformers, config_class)(**_text(tokenizer, **more))
        _save(folder, model_class, config, tokenizer)

    return build


_TUPLE = "ms-swift's code fails, un-packed too: it takes a tensor where transformers 5.19 has a tuple"

FAMILIES: dict[str, Family] = {
    "InternVL (HF)": Family(_internvl, "internvl", "internvl_hf"),
    "Qwen3-VL-MoE": Family(_qwen3_vl_moe, "qwen3_vl_moe", "qwen3_vl"),
    "GLM-4.1V": Family(_glm("Glm4vConfig", "Glm4vForConditionalGeneration"), "glm4v", "glm4v", ids=_GLM_IDS),
    "GLM-4.5V": Family(_glm("Glm4vMoeConfig", "Glm4vMoeForConditionalGeneration", **_EXPERTS), "glm4v_moe", "glm4_5v"),
    "LLaVA 1.5 (HF)": Family(_llava, "llava1_5_hf", "llava1_5_hf"),
    "LLaVA-NeXT (HF)": Family(_llava_next, "llava1_6_mistral_hf", "llava1_6_mistral_hf"),
    "Gemma 3": Family(_gemma3, "gemma3_vision", "gemma3_vision", ids=(("boi_token_id", "<start_of_image>"),)),
    "GLM-4.6V-Flash": Family(_glm("Glm4vConfig", "Glm4vForConditionalGeneration"), "glm4v", "glm4_5v"),
    "GLM-OCR": Family(_glm("GlmOcrConfig", "GlmOcrForConditionalGeneration"), "glm_ocr", "glm_ocr", ids=_GLM_IDS[:2]),
    "PaddleOCR-VL 1.5": Family(
        _paddle_ocr,
        "paddleocr_vl",
        "paddle_ocr_1_5",
        has_texts=False,
        ids=(("image_token_id", "<|IMAGE_PLACEHOLDER|>"),),
        note=f"on images {_TUPLE}; rows without an image it does not take at all",
    ),
    "MiniCPM-V 4.6": Family(_minicpm, "minicpmv4_6", "minicpmv4_6"),
    "Gemma 4": Family(
        _gemma4,
        "gemma4",
        "gemma4_nothinking",
        note=f"on images {_TUPLE}; on texts it loses the boundaries (of 31B and 26B), which is refused",
    ),
    "Gemma 4 E2B, text": Family(_gemma4_e2b, "gemma4", "gemma4_nothinking", has_images=False),
    "PaliGemma 2": Family(_paligemma, "paligemma", "paligemma", has_texts=False),
    "Llama 3.2 Vision": Family(
        _mllama,
        "llama3_2_vision",
        "llama3_2_vision",
        note="tokens attend to images across; ms-swift's template joins neither pictures nor their masks to a row",
    ),
    "Qwen3.5-MoE": Family(_qwen3_5_moe, "qwen3_5_moe", "qwen3_5"),
    "LLaVA-OneVision (HF)": Family(_onevision, "llava_onevision_hf", "llava_onevision_hf"),
    "Llama 4": Family(
        _llama4,
        "llama4",
        "llama4",
        run_dtype="bfloat16",
        note="its run in bfloat16, which its processor gives",
    ),
    "Idefics3": Family(
        _idefics3,
        "idefics3",
        "idefics3",
        note="ms-swift gives images side by side too few tokens, packed or not; the proof stops that",
    ),
    "Mistral 3": Family(_mistral3, "mistral3", "mistral_2503", ids=(("image_token", "[IMG]"),)),
    "Qwen2.5-Omni": Family(_omni("2.5"), "qwen2_5_omni", "qwen2_5_omni", has_sounds=True),
    "Qwen3-Omni": Family(
        _omni("3"),
        "qwen3_omni_moe",
        "qwen3_omni",
        has_sounds=True,
        note="sounds of less than a second depend on those beside them, packed or not; the proof stops that",
    ),
    "Qwen3": Family(_text_model("Qwen3Config", "Qwen3ForCausalLM"), "qwen3", "qwen3", has_images=False),
    "gpt-oss": Family(
        _text_model(
            "GptOssConfig",
            "GptOssForCausalLM",
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"],
        ),
        "gpt_oss",
        "gpt_oss",
        has_images=False,
    ),
    "Qwen3-Next": Family(
        _text_model(
            "Qwen3NextConfig",
            "Qwen3NextForCausalLM",
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        ),
        "qwen3_next",
        "qwen3_nothinking",
        has_images=False,
    ),
    "Llama": Family(_text_model("LlamaConfig", "LlamaForCausalLM"), "llama", "llama3_2", has_images=False),
}
