"""What the evidence says, in a sentence. Whole models that are wrong in these ways: `test_sabotage.py`."""

from types import SimpleNamespace

import pytest
import torch

from swift_vlpack.proof.causes import (
    ALONE,
    ANOTHER,
    EMBEDDINGS,
    MIXED,
    Evidence,
    Module,
    Profile,
    cause_of,
    facts_of,
)
from swift_vlpack.proof.evidence import evidence_of, samples_to_change, where
from swift_vlpack.proof.limits import Limits
from swift_vlpack.proof.reference import own_attention
from tests.host.proof import sabotage as s
from tests.host.proof.proof_models import text_samples

RIGHT, PICTURE = Profile(30, False, None, None), Profile(30, True, None, None)
MLP, NORM = Module("layers.0.mlp", "Experts", False), Module("layers.0.norm", "RMSNorm", False)
ATTENTION = Module("layers.0.self_attn.o_proj", "Linear", True)
WRONG, WRONG_PICTURE = Profile(30, False, 0, 29), Profile(30, True, 4, 29)
LIMITS = Limits(1e-4, 1e-4, 1e-3, 1e-3)


def seen(*profiles, **facts):
    return Evidence(attention=facts.pop("attention", "vlpack"), profiles=profiles, **facts)


LATER = {(0, 1): 30, (0, 2): 30, (1, 2): 30}
CAUSES = {
    "sdpa": (seen(WRONG, attention="sdpa"), "attention sdpa knows no boundaries; leave attn_impl unset"),
    "all later ones": (seen(RIGHT, WRONG, WRONG, moved=LATER), "causal and has no boundaries"),
    "earlier ones": (seen(WRONG, WRONG, moved={(1, 0): 30}), "not causal over the sequence"),
    "one boundary": (seen(RIGHT, WRONG, RIGHT, moved={(0, 1): 30}), "boundary before sample 2 of the sequence is lost"),
    "a token at a boundary": (seen(RIGHT, WRONG, RIGHT, moved={(0, 1): 1}), "a boundary is shifted: where sample 2"),
    "its last token": (seen(Profile(30, False, 29, 29), RIGHT), "a boundary is shifted: only a few tokens"),
    "a layer with a state": (seen(RIGHT, WRONG, moved={(0, 1): 9}, layer_type="linear_attention"), "linear attention"),
    "media, in the embeddings": (
        seen(WRONG_PICTURE, RIGHT, PICTURE, moved_by_media={(2, 0): 9}, layer=EMBEDDINGS), "reach another: their feat",
    ),
    "media, deeper": (
        seen(WRONG_PICTURE, RIGHT, PICTURE, moved_by_media={(2, 0): 9}, layer=3), "in layer 3, not before it: .*deepst",
    ),
    "media of another": (
        seen(WRONG_PICTURE, RIGHT, PICTURE, given=(0, 2), moved_by_media={(2, 0): 9}),
        "wrong order: sample 1 of the sequence gives what it gives with the images, videos or sounds of sample 3",
    ),
    "pictures only, in the embeddings": (seen(WRONG_PICTURE, RIGHT, layer=EMBEDDINGS), "wrong order, their grids exch"),
    "pictures only, in the first layer": (seen(WRONG_PICTURE, RIGHT, layer=0), "positions of images or videos"),
    "pictures only, deeper": (seen(WRONG_PICTURE, RIGHT, layer=2), "from layer 2 on: .*deepstack"),
    "all but the first": (seen(RIGHT, WRONG, WRONG), "which do not restart at the boundaries, or has room for fewer"),
    "experts, from a token on": (
        seen(RIGHT, WRONG, WRONG, module=MLP), r"layers\.0\.mlp \(Experts\) gives .* no attention .*capacity of exp",
    ),
    "outside of attention": (
        seen(WRONG, WRONG, moved={(1, 0): 30}, module=NORM), r"outside of attention: .*norm \(RMSNorm\).*statistics",
    ),
    "inside of attention": (seen(RIGHT, WRONG, WRONG, moved=LATER, module=ATTENTION), "causal and has no boundaries"),
    "un-packed something else": (
        seen(WRONG, WRONG, moved={(1, 0): 30}, module=NORM, unpacked=ANOTHER), r"^samples.*A padded batch,",
    ),
    "un-packed padded": (
        seen(WRONG_PICTURE, RIGHT, layer=EMBEDDINGS, unpacked=ANOTHER), r"others of its batch, without packing",
    ),
    "all from the first token": (seen(WRONG, WRONG), "from their first token on, .*sinks"),
    "all from the second token": (seen(*[Profile(30, False, 1, 29)] * 2), "second token on, .*scaling, soft cap"),
    "behind the window": (seen(Profile(30, False, 16, 29), RIGHT, window=16), "its window is 16 tokens"),
    "rope": (
        seen(Profile(20, False, 1, 19), RIGHT, rope_type="longrope"),
        "RoPE is longrope, which takes its frequencies by the longest",
    ),
    "rope, and the longest too": (seen(WRONG, WRONG, rope_type="longrope"), "first token on, .*sinks"),
    "all later ones, in a layer without a state": (
        seen(RIGHT, WRONG, WRONG, moved=LATER, layer_type="full_attention", model_types=("linear_attention",)),
        "causal and has no boundaries",
    ),
    "all later ones, of a model with a state": (
        seen(RIGHT, WRONG, WRONG, moved=LATER, model_types=("linear_attention",)), "linear attention",
    ),
    "in training only": (
        seen(RIGHT, WRONG, WRONG, moved=LATER, is_only_in_training=True), "in training mode, not in eval.*, samples",
    ),
    "un-packed too": (
        seen(WRONG_PICTURE, PICTURE, RIGHT, layer=EMBEDDINGS, unpacked=MIXED), "mixes the samples of any batch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_cause_follows_the_evidence(name):
    """ISO-15"""
    import re

    evidence, cause = CAUSES[name]
    assert re.search(cause, cause_of(evidence))


def test_evidence_names_sample_tokens_and_layer():
    """ISO-15: of a boundary that is lost in the second layer only."""
    right = s.llama()
    second = right.model.model.layers[1].self_attn

    def attend(module, *args, **options):
        return (s.ignoring_boundaries if module is second else s.segmented_attention)(module, *args, **options)

    samples = text_samples(24, 9, 31)
    with s.attending(right, attend):
        evidence = evidence_of(right, samples, LIMITS)
    assert (evidence.layer, evidence.profiles[0].differs, evidence.profiles[1].first) == (1, False, 0)
    assert set(evidence.moved) == {(0, 1), (0, 2), (1, 2)}
    assert not evidence.is_only_in_training
    assert evidence.unpacked == ALONE
    assert where(samples, evidence) == (
        "text:1, number 2 of 3 in its sequence, differs from token 0 to 8 of 9, first in layer 1"
    )


def test_of_a_long_row_the_samples_around_the_wrong_one_are_changed():
    """ISO-15"""
    assert samples_to_change(9, 4) == tuple(range(9))
    assert samples_to_change(60, 30) == (0, 1, 28, 29, 30, 31, 32, 58, 59)
    assert samples_to_change(60, 59) == (0, 1, 57, 58, 59)


def test_boundary_that_is_lost_in_a_long_row_is_named():
    """ISO-15: 19 other boundaries hold, of which a few are asked."""
    right, samples = s.llama(), text_samples(*[12] * 20)
    lost = s.batches_changed(right, s.boundaries_at(lambda ends: [*ends[:10], *ends[11:]]))
    assert "the boundary before sample 11 of the sequence is lost" in cause_of(evidence_of(lost, samples, LIMITS))


def test_model_that_mixes_any_batch_is_told_from_a_wrong_pack():
    """ISO-15: as one whose vision tower mixes the images of a batch, also without packing."""
    right = s.llama()

    def mix(module, args, made):
        return made + made.mean(dim=(0, 1), keepdim=True) if made.shape[:2].numel() > 31 else made

    handle = right.model.get_input_embeddings().register_forward_hook(mix)
    assert evidence_of(right, text_samples(24, 25, 31), LIMITS).unpacked == MIXED
    handle.remove()


def test_evidence_leaves_the_model_as_it_was():
    """ISO-6 ISO-15"""
    right = s.llama(attention_dropout=0.5)
    right.model.train()
    evidence_of(right, text_samples(24, 9), LIMITS)
    assert right.model.training
    assert right.model.model.layers[0].self_attn.attention_dropout == 0.5
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in right.model.modules())
    with torch.no_grad(), own_attention(right.model):
        assert right.model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ({"sliding_window": 16}, (16, "default")),
        ({"sliding_window": 16, "use_sliding_window": False}, (None, "default")),
        ({"attention_chunk_size": 64, "rope_parameters": {"rope_type": "dynamic"}}, (64, "dynamic")),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, (None, "yarn")),
        ({}, (None, "default")),
    ],
)
def test_facts_of_a_config(text, facts):
    """ISO-15"""
    text = SimpleNamespace(**text)
    for config in (text, SimpleNamespace(text_config=text)):
        found = facts_of(config)
        assert (found["window"], found["rope_type"]) == facts
