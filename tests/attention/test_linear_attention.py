"""Layers with a state along the row: packed equals one by one."""

import copy

import pytest
import torch
import transformers as T
from packaging.version import Version

from swift_vlpack.attention.linear_attention import RESTARTED, restart_at_boundaries
from swift_vlpack.errors import AttentionError
from tests.attention.one_by_one import IMAGE, SIGLIP, built, compared, packed, run, samples_of, text

LAYERS = ["linear_attention", "full_attention"]
LINEAR = {
    "layer_types": LAYERS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LENGTHS = (70, 1, 40, 2, 66, 40)


def qwen3_next():
    return T.Qwen3NextConfig(**text(**LINEAR, **EXPERTS), shared_expert_intermediate_size=32)


def qwen3_5():
    return T.Qwen3_5TextConfig(**text(**LINEAR))


def qwen3_5_moe():
    return T.Qwen3_5MoeTextConfig(**text(**LINEAR, **EXPERTS), shared_expert_intermediate_size=32)


def lfm2():
    return T.Lfm2Config(**text(layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False))


def lfm2_moe():
    return T.Lfm2MoeConfig(
        **text(**EXPERTS, layer_types=["conv", "full_attention"]), num_dense_layers=1, use_expert_bias=False
    )


def olmo_hybrid():
    return T.OlmoHybridConfig(**text(**LINEAR))


MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}


def bamba():
    return T.BambaConfig(**text(head_dim=None, **MAMBA), attn_layer_indices=[1])


def falcon_h1():
    return T.FalconH1Config(**text(**MAMBA), mamba_d_ssm=128)


def granite_hybrid():
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 64}
    return T.GraniteMoeHybridConfig(**text(head_dim=None, **MAMBA, **experts, layer_types=["mamba", "attention"]))


def jamba():
    places = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
    return T.JambaConfig(**text(head_dim=None, num_experts=2, num_experts_per_tok=1), **places, use_mamba_kernels=False)


def nemotron_h():
    sizes = {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16}
    return T.NemotronHConfig(**text(**sizes, layers_block_type=["mamba", "attention"]))


MODELS = {
    qwen3_next: "Qwen3NextGatedDeltaNet",
    qwen3_5: "Qwen3_5GatedDeltaNet",
    qwen3_5_moe: "Qwen3_5MoeGatedDeltaNet",
    lfm2: "Lfm2ShortConv",
    lfm2_moe: "Lfm2MoeShortConv",
    olmo_hybrid: "OlmoHybridGatedDeltaNet",
    bamba: "BambaMixer",
    falcon_h1: "FalconH1Mixer",
    granite_hybrid: "GraniteMoeHybridMambaLayer",
    jamba: "JambaMambaMixer",
    nemotron_h: "NemotronHMamba2Mixer",
}


def test_every_class_that_is_restarted_was_tried():
    """ATTN-7"""
    assert sorted(MODELS.values()) == sorted(RESTARTED)


# Its layers hand no boundaries on before 5.17, which ms-swift 4.5 cannot have: the proof refuses it there.
KEEPS_BOUNDARIES = pytest.mark.xfail(Version(T.__version__) < Version("5.17"), reason="transformers loses boundaries")


@pytest.mark.parametrize(
    "config", [pytest.param(one, marks=KEEPS_BOUNDARIES if one is falcon_h1 else ()) for one in MODELS]
)
def test_state_restarts_with_every_sample(config):
    """ATTN-7"""
    model = built(config())
    assert (
        restart_at_boundaries(model) == sum(type(module).__name__ == MODELS[config] for module in model.modules()) > 0
    )
    assert max(compared(model, samples_of(LENGTHS))) < 1e-5


def lfm2_vl():
    vision = {**SIGLIP, "model_type": "siglip2_vision_model", "num_patches": 16}
    language = lfm2().to_dict()
    return T.Lfm2VlConfig(text_config=language, vision_config=vision, image_token_id=IMAGE)


def qwen3_5_vl():
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64}
    return T.Qwen3_5Config(text_config=qwen3_5().to_dict(), vision_config=vision, image_token_id=IMAGE)


@pytest.mark.parametrize("config", [lfm2_vl, qwen3_5_vl])
def test_state_restarts_inside_a_vision_language_model(config):
    """ATTN-7: its tower is not asked here; a run of ms-swift's with images is in tests/host/training."""
    model = built(config())
    assert restart_at_boundaries(model) == 1
    assert max(compared(model, samples_of(LENGTHS))) < 1e-5


def test_without_it_the_state_passes_on():
    """ATTN-7: so the tests above can fail."""
    assert min(compared(built(qwen3_next()), samples_of(LENGTHS))) > 1e-3


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_gradient_checkpointing(reentrant):
    """ATTN-7"""
    model = built(lfm2()).train()
    restart_at_boundaries(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert max(compared(model, samples_of(LENGTHS))) < 1e-5


def test_hooks_are_set_once_and_travel_with_a_copy():
    """ATTN-7"""
    model = built(lfm2())
    model.set_attn_implementation("vlpack")
    for _ in range(2):
        restart_at_boundaries(model)
    mixer = next(module for module in model.modules() if type(module).__name__ == "Lfm2ShortConv")
    assert len(mixer._forward_hooks) == len(mixer._forward_pre_hooks) == 1
    row = packed(samples_of(LENGTHS))
    with torch.no_grad():
        made = [run(one, row, lambda name: True) for one in (model, copy.deepcopy(model))]
    assert torch.equal(*made)


def test_padded_batches_and_generation_are_not_touched():
    """ATTN-5"""
    plain, ours = built(qwen3_next()), built(qwen3_next())
    restart_at_boundaries(ours)
    batch = torch.cat([sample["input_ids"] for sample in samples_of((20, 20))])
    with torch.no_grad():
        assert torch.equal(plain(batch).logits, ours(batch).logits)
        assert torch.equal(*(one.generate(batch, max_new_tokens=4, do_sample=False) for one in (plain, ours)))


def test_layers_that_nobody_tried_are_refused():
    """ATTN-7"""
    model = built(T.MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64))
    with pytest.raises(AttentionError, match=r"kind linear_attention, which keep a state .* train without packing"):
        restart_at_boundaries(model)
    model = built(T.RwkvConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64))
    with pytest.raises(AttentionError, match="kind rwkv"):
        restart_at_boundaries(model)
    model = built(T.RecurrentGemmaConfig(**text(lru_width=64, block_types=["recurrent", "attention"])))
    with pytest.raises(AttentionError, match="kind recurrent"):
        restart_at_boundaries(model)
    model = built(qwen3_next())
    assert restart_at_boundaries(model, leave=("Qwen3NextGatedDeltaNet",)) == 0


def test_boundaries_of_another_row_are_refused():
    """ATTN-5"""
    model = built(lfm2())
    model.set_attn_implementation("vlpack")
    restart_at_boundaries(model)
    row = packed(samples_of(LENGTHS))
    row["cu_seq_lens_q"] = row["cu_seq_lens_q"][:-1]
    with pytest.raises(AttentionError, match=r"Lfm2ShortConv: the boundaries .* go to 179, but .* 219 tokens"):
        run(model, row, lambda name: True)
