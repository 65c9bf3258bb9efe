"""Every segment gets what the model asks for: a packed row equals its samples alone under the model's own `eager`."""

import pytest
import torch
import transformers as T
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from swift_vlpack.attention.attention import NAME
from swift_vlpack.errors import AttentionError
from tests.attention.one_by_one import IMAGE, SIGLIP, built, compared, samples_of, text, with_images


def gpt_oss():
    return T.GptOssConfig(
        **text(sliding_window=16, layer_types=["sliding_attention", "full_attention"], num_local_experts=4),
        num_experts_per_tok=2,
    )


def gemma2():
    return T.Gemma2Config(
        **text(sliding_window=16, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=9),
        attn_logit_softcapping=0.5,
    )


def mistral():
    return T.MistralConfig(**text(sliding_window=7))


def llama4():
    changed = {"intermediate_size_mlp": 96, "num_local_experts": 2, "num_experts_per_tok": 1, "attention_chunk_size": 8}
    layers = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
    return T.Llama4TextConfig(**text(**changed, **layers), floor_scale=16, attn_scale=0.5)


def deepseek():
    heads = {"head_dim": None, "num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    return T.DeepseekV3Config(
        **text(**heads, **experts), q_lora_rank=24, kv_lora_rank=16, moe_intermediate_size=32, first_k_dense_replace=1
    )


def gemma4():
    changed = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 32}
    return T.Gemma4TextConfig(
        **text(**changed), num_kv_shared_layers=0, hidden_size_per_layer_input=0, vocab_size_per_layer_input=512
    )


def cohere2():
    return T.Cohere2Config(**text(sliding_window=10, layer_types=["sliding_attention", "full_attention"]))


def granite_swa():
    return CONFIG_MAPPING["granite_swa"](**text(sliding_window=12, layer_types=["sliding_attention", "full_attention"]))


def gemma3_vision():
    layers = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    language = text(model_type="gemma3_text", query_pre_attn_scalar=16, **layers)
    return T.Gemma3Config(text_config=language, vision_config=SIGLIP, mm_tokens_per_image=4, image_token_index=IMAGE)


def paligemma():
    language = text(model_type="gemma2", sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    vision = {**SIGLIP, "projection_dim": 64}
    return T.PaliGemmaConfig(text_config=language, vision_config=vision, image_token_index=IMAGE, projection_dim=64)


TEXT_MODELS = (gpt_oss, gemma2, mistral, llama4, deepseek, gemma4, cohere2, granite_swa)


@pytest.mark.parametrize("config", TEXT_MODELS)
def test_packed_text_equals_one_by_one(config):
    """ATTN-1"""
    assert max(compared(built(config()), samples_of())) < 1e-5


def test_packed_text_equals_one_by_one_in_double_precision():
    """ATTN-1: the other models' `eager` takes its softmax in single precision."""
    assert max(compared(built(gpt_oss(), dtype=torch.float64), samples_of())) < 1e-13


@pytest.mark.parametrize(("config", "num_tokens"), [(gemma3_vision, 4), (paligemma, 16)])
def test_image_blocks_are_those_of_the_sample(config, num_tokens):
    """ATTN-1 ATTN-3: an image at the end of a sample and one at the start of the next are two blocks."""
    samples = with_images(((30 - num_tokens,), (0, 20), (), (9,)), num_tokens)
    assert max(compared(built(config()), samples, taken=lambda name: True)) < 1e-5


def test_image_blocks_of_gemma4():
    """ATTN-1 ATTN-3"""
    changed = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 32}
    text_config = gemma4().to_dict() | {**text(**changed), "use_bidirectional_attention": "vision"}
    vision = {**SIGLIP, "model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 16}
    config = T.Gemma4Config(
        text_config=text_config,
        vision_config=vision,
        audio_config=None,
        image_token_id=IMAGE,
        video_token_id=501,
        audio_token_id=502,
    )
    samples = with_images(((20,), (0, 20), (), (9,)), 10)
    blocks_only = compared(built(config), samples, taken=lambda name: name not in ("pixel_values", "token_type_ids"))
    assert max(blocks_only) < 1e-5


@pytest.mark.parametrize("config", [gpt_oss, gemma2, llama4, mistral])
def test_padded_batches_and_generation_stay_what_they_are(config):
    """ATTN-5"""
    model = built(config())
    samples = samples_of((19, 12))
    row = torch.nn.utils.rnn.pad_sequence(
        [sample["input_ids"][0].flip(0) for sample in samples], batch_first=True, padding_value=0
    ).flip(1)
    inputs = {"input_ids": row, "attention_mask": (row != 0).long()}
    seen = []
    for name in ("eager", NAME):
        model.set_attn_implementation(name)
        with torch.no_grad():
            made = model.generate(
                **inputs, max_new_tokens=5, do_sample=False, output_scores=True, return_dict_in_generate=True
            )
            alone = model.generate(samples[0]["input_ids"], max_new_tokens=3, do_sample=False)
            seen.append((model(**inputs).logits[:, -12:], torch.stack(made.scores), made.sequences, alone))
    for eager, ours in zip(*seen, strict=True):
        torch.testing.assert_close(eager, ours, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_keeps_the_boundaries(reentrant):
    """ATTN-1"""
    model = built(gemma2()).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert max(compared(model, samples_of())) < 1e-5


def test_sparse_attention_is_refused_by_name():
    """ATTN-4: which tokens it sees it reads from the mask of the whole row."""
    heads = {"head_dim": None, "num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    ranks = {"q_lora_rank": 24, "kv_lora_rank": 16, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    index = {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16}
    model = built(T.DeepseekV32Config(**text(**heads, **experts), **ranks, **index))
    with pytest.raises(AttentionError, match=r"the model's code .* its attention mask, .* without packing"):
        compared(model, samples_of())
