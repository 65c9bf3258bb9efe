"""Tiny real models with the real Qwen vocabulary, and images to feed them; no network.

`python -m tests.tiny FOLDER [FAMILY]` writes one that `swift` and `transformers` load.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
QWEN_SPECIALS = (  # in Qwen's order, 151643 ... 151656
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
FIRST_SPECIAL_ID = {"qwen3_5": 248044}  # the others: 151643
NUM_SMALL = 4096
"""Tokens of a small vocabulary, beside `WORDS`: logits of 151,643 are nearly all that a tiny model computes."""
WORDS = (
    "You are helpful assistant system user question answer caption describe image word picture hi how you xxxx house "
    "tree car person walks runs near street photo shows sky small large red blue noise there is the a what this"
)
"""A small vocabulary has these words as the whole one has them, with and without a space before them."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def _ranks() -> dict[bytes, int]:
    import dashscope

    text = (Path(dashscope.__file__).parent / "resources" / "qwen.tiktoken").read_bytes()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in text.splitlines() if line)}


@cache
def _small_ranks() -> dict[bytes, int]:
    """The first tokens, and all that byte-pair encoding makes on its way to those of `WORDS`; numbered anew."""
    ranks = _ranks()
    wanted = [token for token, rank in ranks.items() if rank < NUM_SMALL]
    words = [word.encode() for word in WORDS.split()]
    more = [token for word in words for token in (word, b" " + word) if token in ranks]
    while more:
        token = more.pop()
        wanted.append(token)
        more += _merge_of(token, ranks[token], ranks) if len(token) > 1 else ()
    return {token: number for number, token in enumerate(sorted(set(wanted), key=ranks.__getitem__))}


def _merge_of(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The pair that byte-pair encoding joined last to make `token`: encode it with the merges that came before."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joins = [(ranks.get(a + b, rank), i) for i, (a, b) in enumerate(pairwise(parts))]
        _, at = min(joins)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + n) for n, byte in enumerate(others)}}


def first_special_id(family: str, *, is_small: bool) -> int:
    """Where ordinary tokens end."""
    return len(_small_ranks()) if is_small else FIRST_SPECIAL_ID.get(family, 151643)


def use_ids_of_tokenizer() -> None:
    """Let ms-swift's Qwen templates ask the tokenizer for ids that they name as constants."""
    from swift.template.templates.qwen import Qwen2VLTemplate, Qwen3_5Template

    for name, token in (("image_token_id", "<|image_pad|>"), ("video_token_id", "<|video_pad|>")):
        known = property(lambda self, token=token: self.tokenizer.convert_tokens_to_ids(token))
        for template in (Qwen2VLTemplate, Qwen3_5Template):
            setattr(template, name, known)


@cache
def _vocabulary(ranks_of: Callable[[], dict[bytes, int]]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Ordinary tokens with their numbers, and the merges that make them, in order."""
    ranks, letters = ranks_of(), _byte_alphabet()
    text = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token, rank in ranks.items():
        if len(token) > 1:
            first, second = _merge_of(token, rank, ranks)
            merges.append((text[first], text[second]))
    return {text[token]: rank for token, rank in ranks.items()}, merges


def build_tokenizer(family: str = "qwen2_5_vl", *, is_small: bool = False) -> Any:
    """Rebuild Qwen's tokenizer from the ranks that PyPI's dashscope ships."""
    from transformers import AddedToken, Qwen2Tokenizer

    words, merges = _vocabulary(_small_ranks if is_small else _ranks)
    first = first_special_id(family, is_small=is_small)
    vocab = words | {token: first + n for n, token in enumerate(QWEN_SPECIALS)}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=merges, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(token, special=True, normalized=False) for token in QWEN_SPECIALS]}
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_processor(tokenizer: Any, family: str) -> Any:
    """Join the tokenizer with the family's own image and video processors at their default settings."""
    import transformers

    if family == "qwen2_vl":
        image, video, processor = "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", "Qwen2VLProcessor"
    elif family == "qwen2_5_vl":
        image, video, processor = "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", "Qwen2_5_VLProcessor"
    else:
        image, video, processor = "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor", "Qwen3VLProcessor"
    patch_size = 14 if family in ("qwen2_vl", "qwen2_5_vl") else 16
    image_processor = getattr(transformers, image)(patch_size=patch_size)
    video_processor = getattr(transformers, video)(patch_size=patch_size)
    return getattr(transformers, processor)(
        image_processor=image_processor,
        tokenizer=tokenizer,
        video_processor=video_processor,
        chat_template=CHAT_TEMPLATE,
    )


def build_config(family: str, *, is_small: bool = False) -> Any:
    """Two layers, hidden 64: 10M parameters, nearly all of them embedding; 0.5M with a small vocabulary."""
    import transformers

    first = first_special_id(family, is_small=is_small)
    text = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": first + 293,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "bos_token_id": first,
        "eos_token_id": first + 2,
        "pad_token_id": first,
    }
    rope = {"rope_type": "default", "rope_theta": 1e6}
    tokens = {
        "image_token_id": first + 12,
        "video_token_id": first + 13,
        "vision_start_token_id": first + 9,
        "vision_end_token_id": first + 10,
        "tie_word_embeddings": True,
    }
    vision = {"depth": 2, "num_heads": 2, "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if family == "qwen2_vl":
        text["rope_parameters"] = {**rope, "mrope_section": [2, 3, 3]}
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "patch_size": 14}
        return transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)
    if family == "qwen2_5_vl":
        text["rope_parameters"] = {**rope, "mrope_section": [2, 3, 3]}
        vision |= {
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "patch_size": 14,
            "fullatt_block_indexes": [1],
            "window_size": 112,
        }
        return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    vision |= {
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "patch_size": 16,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0],
    }
    if family == "qwen3_vl":
        text |= {"head_dim": 16, "rope_parameters": {**rope, "mrope_section": [4, 2, 2], "mrope_interleaved": True}}
        return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)
    if family == "qwen3_5":
        vision.pop("deepstack_visual_indexes")
        text |= {
            "head_dim": 16,
            "rope_parameters": {
                **rope,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
                "partial_rotary_factor": 1.0,
            },
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        }
        return transformers.Qwen3_5Config(text_config=text, vision_config=vision, **tokens)
    raise ValueError(f"unknown family {family!r}; known: {', '.join(FAMILIES)}")


MODEL_CLASSES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
}


def build_model(family: str, *, seed: int = 0, is_small: bool = False) -> Any:
    """Random weights from a seed, large enough that attention matters."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = build_config(family, is_small=is_small)
    config.text_config.initializer_range = 0.1
    model = getattr(transformers, MODEL_CLASSES[family])(config)
    return model.eval()


def save_model(folder: Path, family: str = "qwen2_5_vl", *, seed: int = 0, is_small: bool = False) -> Path:
    """Write model, tokenizer and processor the way a hub repository has them; once."""
    done = folder / "ready.json"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        build_model(family, seed=seed, is_small=is_small).save_pretrained(folder)
        build_processor(build_tokenizer(family, is_small=is_small), family).save_pretrained(folder)
        done.write_text(json.dumps({"family": family, "seed": seed}))
    return folder


def save_text_model(folder: Path) -> Path:
    """Write a tiny Qwen2 with the small vocabulary."""
    import torch
    import transformers

    tokenizer = build_tokenizer(is_small=True)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(save_model(Path(sys.argv[1]), *sys.argv[2:3]))
