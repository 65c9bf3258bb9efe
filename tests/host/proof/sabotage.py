"""Ways to train packs wrongly. Each is what a model, a template or a kernel could really do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import transformers as T
from transformers import AttentionInterface

from swift_vlpack.attention.attention import NAME, segmented_attention
from swift_vlpack.proof.runner import Collated, Runner
from swift_vlpack.rows.samples import Encoded
from tests.attention.one_by_one import text
from tests.host.proof.runners import ChangedBatches, text_model, with_inputs

Broken = Iterator[Runner]


# -- models ------------------------------------------------------------------------------------------------------------


def gemma2(**changed: Any) -> Runner:
    """Soft caps and a sliding window."""
    layers = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 9}
    return text_model(T.Gemma2Config(**text(**layers), attn_logit_softcapping=0.5, **changed))


def gpt_oss() -> Runner:
    """Sinks."""
    layers = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 4}
    return text_model(T.GptOssConfig(**text(**layers), num_experts_per_tok=2))


def llama(**changed: Any) -> Runner:
    """Nothing special."""
    return text_model(T.LlamaConfig(**text(**changed)))


def lfm2() -> Runner:
    """A convolution over tokens, of which transformers' own path knows no boundaries."""
    return text_model(T.Lfm2Config(**text(layer_types=["conv", "full_attention"])))


# -- rows --------------------------------------------------------------------------------------------------------------


def batches_changed(proof_model: Runner, change: Callable[[Collated, Sequence[Encoded]], Collated]) -> Runner:
    """With other packed rows than the collator's."""
    return replace(proof_model, batches=ChangedBatches(proof_model.batches, change))


def boundaries_at(move: Callable[[list[int]], list[int]]) -> Callable[[Collated, Sequence[Encoded]], Collated]:
    """Other boundaries where a row has more than one sample."""

    def change(row: Collated, samples: Sequence[Encoded]) -> Collated:
        ends = move([0, *accumulate(sample["length"] for sample in samples)]) if len(samples) > 1 else None
        made = None if ends is None else torch.tensor(ends, dtype=torch.int32)
        return row if ends is None else with_inputs(row, cu_seq_lens_q=made, cu_seq_lens_k=made)

    return change


def no_boundaries(row: Collated, samples: Sequence[Encoded]) -> Collated:
    """The model does not get them."""
    return with_inputs(row, cu_seq_lens_q=None)


def positions_of_the_sequence(row: Collated, samples: Sequence[Encoded]) -> Collated:
    """Positions that go on over the samples, images too."""
    num_tokens = sum(sample["length"] for sample in samples)
    positions = torch.arange(num_tokens).expand_as(row.inputs["position_ids"])
    return with_inputs(row, position_ids=positions) if len(samples) > 1 else row


def axes_of_positions(row: Collated, samples: Sequence[Encoded], order: Sequence[int]) -> Collated:
    """Height and width are each other, or both are time: the axes of mRoPE in another order."""
    return with_inputs(row, position_ids=row.inputs["position_ids"][list(order)])


def token_types_of_text(row: Collated, samples: Sequence[Encoded], name: str) -> Collated:
    """No token is told to be one of an image."""
    return with_inputs(row, **{name: torch.zeros_like(row.inputs[name])})


def grids_exchanged(row: Collated, samples: Sequence[Encoded]) -> Collated:
    """The images are in order, and their grids are not."""
    if "pixel_values" not in row.inputs:
        return row
    return with_inputs(row, image_grid_thw=row.inputs["image_grid_thw"].roll(1, dims=0))


def media_exchanged(row: Collated, samples: Sequence[Encoded], name: str = "pixel_values") -> Collated:
    """The media of all samples the other way round; for media of one size."""
    if name not in row.inputs:
        return row
    grids = row.inputs["image_grid_thw" if name == "pixel_values" else "video_grid_thw"]
    parts = row.inputs[name].split(grids.prod(-1).tolist())
    return with_inputs(row, **{name: torch.cat(parts[::-1])})


def images_reversed(row: Collated, samples: Sequence[Encoded]) -> Collated:
    """The images of the row with their grids the other way round."""
    row = media_exchanged(row, samples)
    if "pixel_values" not in row.inputs:
        return row
    return with_inputs(row, image_grid_thw=row.inputs["image_grid_thw"].flip(0))


def labels_shifted(row: Collated, samples: Sequence[Encoded]) -> Collated:
    """By one over the whole row."""
    assert row.labels is not None
    return replace(row, labels=row.labels.roll(1, dims=-1)) if len(samples) > 1 else row


def weights_shifted(row: Collated, samples: Sequence[Encoded]) -> Collated:
    """Loss weights one token late."""
    weights = torch.ones(row.inputs["cu_seq_lens_q"][-1])[None]
    weights[:, ::7] = 2.0
    return replace(row, weights=weights)


# -- attention ---------------------------------------------------------------------------------------------------------


@contextmanager
def attending(proof_model: Runner, attend: Callable[..., Any]) -> Broken:
    """With another function as `vlpack`."""
    AttentionInterface.register(NAME, attend)
    try:
        yield proof_model
    finally:
        AttentionInterface.register(NAME, segmented_attention)


def dropping(name: str, *args: Any, **options: Any) -> Any:
    """Something the model asks for is not handed on."""
    return segmented_attention(*args, **{**options, name: None})


def without_window(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
    """Neither the keyword nor the mask of the window."""
    return segmented_attention(module, q, k, v, None, **{**options, "sliding_window": None})


def badly_scaled(*args: Any, **options: Any) -> Any:
    """By the size of another head."""
    return segmented_attention(*args, **{**options, "scaling": options["scaling"] * 1.5})


def scaled_a_little(*args: Any, **options: Any) -> Any:
    """By a tenth too much."""
    return segmented_attention(*args, **{**options, "scaling": options["scaling"] * 1.1})


def whole_row(module: Any, q: Any, k: Any, v: Any, mask: Any, is_causal: bool = True, **options: Any) -> Any:
    """One segment: the boundaries are ignored."""
    is_causal = is_causal and q.shape[2] > 1
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=options.get("scaling"), enable_gqa=True
    ).transpose(1, 2).contiguous(), None


def if_packed(wrong: Callable[..., Any]) -> Callable[..., Any]:
    """Only where the row has samples; the vision tower, and samples alone, as they should be."""

    def attend(*args: Any, cu_seq_lens_q: Any = None, **options: Any) -> Any:
        right = partial(segmented_attention, *args, cu_seq_lens_q=cu_seq_lens_q, **options)
        return (
            right() if cu_seq_lens_q is None or len(cu_seq_lens_q) <= 2 else wrong(right, args, cu_seq_lens_q, options)
        )

    return attend


@if_packed
def ignoring_boundaries(right: Any, args: Any, ends: Any, options: Any) -> Any:
    """Causal over the row."""
    return whole_row(*args, **options)


@if_packed
def looking_everywhere(right: Any, args: Any, ends: Any, options: Any) -> Any:
    """Not causal, and over the row."""
    return whole_row(*args, **{**options, "is_causal": False})


@if_packed
def leaking_in_training(right: Any, args: Any, ends: Any, options: Any) -> Any:
    """A kernel that is used in training only."""
    return whole_row(*args, **options) if args[0].training else right()


@if_packed
def losing_the_fourth(right: Any, args: Any, ends: Any, options: Any) -> Any:
    """Room for three samples: the boundaries behind them are lost."""
    kept = torch.cat([ends[:4], ends[-1:]]) if len(ends) > 5 else ends
    return segmented_attention(*args, cu_seq_lens_q=kept, **options)


@if_packed
def with_a_wrong_backward(right: Any, args: Any, ends: Any, options: Any) -> Any:
    """Right forwards; backwards the keys get nothing."""
    module, q, k, v, *others = args
    return segmented_attention(module, q, k.detach(), v, *others, cu_seq_lens_q=ends, **options)


def keeping_a_cache() -> Callable[..., Any]:
    """Values of the row before stay in a cache, as of generation, and are seen by the next."""
    before: dict[int, torch.Tensor] = {}

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        made, _ = segmented_attention(module, q, k, v, mask, **options)
        if options.get("cu_seq_lens_q") is None:
            return made, None
        seen = before.get(id(module))
        before[id(module)] = made.detach().mean(dim=1, keepdim=True)
        return (made if seen is None else made + 0.5 * seen), None

    return attend


def remembering_boundaries() -> Callable[..., Any]:
    """Those of the first row of so many tokens, as of a mask that is kept by its shape."""
    seen: dict[int, torch.Tensor] = {}

    def attend(*args: Any, cu_seq_lens_q: Any = None, **options: Any) -> Any:
        if cu_seq_lens_q is not None:
            cu_seq_lens_q = seen.setdefault(int(cu_seq_lens_q[-1]), cu_seq_lens_q)
        return segmented_attention(*args, cu_seq_lens_q=cu_seq_lens_q, **options)

    return attend


@if_packed
def forgetting_in_the_backward(right: Any, args: Any, ends: Any, options: Any) -> Any:
    """The boundaries are gone when a checkpointed layer is run again."""
    return whole_row(*args, **options) if is_run_again() else right()


@if_packed
def scaled_otherwise_in_the_backward(right: Any, args: Any, ends: Any, options: Any) -> Any:
    """The same when it is run again, but for a factor."""
    return badly_scaled(*args, cu_seq_lens_q=ends, **options) if is_run_again() else right()


def is_run_again() -> bool:
    """Whether this is in a backward."""
    return torch._C._current_graph_task_id() != -1


@if_packed
def leaking_where_gradients_are_asked_for(right: Any, args: Any, ends: Any, options: Any) -> Any:
    """Another kernel with a backward than without."""
    return whole_row(*args, **options) if torch.is_grad_enabled() else right()


@if_packed
def leaking_in_one_head(right: Any, args: Any, ends: Any, options: Any) -> Any:
    """The others are right."""
    made, _ = right()
    leaked, _ = whole_row(*args, **options)
    return torch.cat([leaked[:, :, :1], made[:, :, 1:]], dim=2), None


@if_packed
def losing_last_tokens(right: Any, args: Any, ends: Any, options: Any) -> Any:
    """A kernel that stops one token short: the last of each sample sees nobody."""
    made, _ = right()
    is_kept = torch.ones(made.shape[1], dtype=made.dtype)
    is_kept[ends[1:].long() - 1] = 0
    return made * is_kept[:, None, None], None


@contextmanager
def no_room_behind(proof_model: Runner, num_tokens: int) -> Broken:
    """Layers that work on so many tokens of a row and pass over the rest, as experts with a capacity do."""

    def cut(module: Any, args: Any, made: torch.Tensor) -> torch.Tensor:
        kept = torch.arange(made.shape[1]) < num_tokens
        return made * kept[:, None]

    handles = [layer.mlp.register_forward_hook(cut) for layer in proof_model.model.model.layers]
    try:
        yield proof_model
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def experts_with_a_capacity(proof_model: Runner, num_tokens: int) -> Broken:
    """About half of the tokens are sent to an expert that has room for so many of a row."""

    def cut(module: Any, args: Any, made: torch.Tensor) -> torch.Tensor:
        is_sent = args[0][..., 0] > 0
        return made * (~is_sent | (is_sent.cumsum(-1) <= num_tokens))[..., None]

    handles = [layer.mlp.register_forward_hook(cut) for layer in proof_model.model.model.layers]
    try:
        yield proof_model
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def norm_over_the_sequence(proof_model: Runner) -> Broken:
    """The norms divide by the root of the mean over all tokens, not over each by itself."""

    def over_all(module: Any, args: Any, made: torch.Tensor) -> torch.Tensor:
        hidden = args[0]
        return module.weight * hidden * hidden.square().mean(dim=(-2, -1), keepdim=True).rsqrt()

    handles = [layer.input_layernorm.register_forward_hook(over_all) for layer in proof_model.model.model.layers]
    try:
        yield proof_model
    finally:
        for handle in handles:
            handle.remove()


# -- gradients ---------------------------------------------------------------------------------------------------------


class SeesAll(torch.autograd.Function):
    """A norm's weight, whose gradient also has what other samples of the sequence are. All else is right."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        ctx.save_for_backward(states, weight)
        return states * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Add the mean of all states to the weight's gradient."""
        states, weight = ctx.saved_tensors
        of_weight = (gradient * states).sum(dim=(0, 1))
        return gradient * weight, of_weight + of_weight.norm() * states.mean(dim=(0, 1))


# -- images ------------------------------------------------------------------------------------------------------------


@contextmanager
def images_see_each_other(proof_model: Runner, num_patches: int = 0) -> Broken:
    """The vision tower looks at all images of the row, where it has so many patches."""
    merger = proof_model.model.model.visual.merger

    def mix(module: Any, args: Any, made: torch.Tensor) -> torch.Tensor:
        return made + made.mean(dim=0) if len(made) > num_patches else made

    handle = merger.register_forward_hook(mix)
    try:
        yield proof_model
    finally:
        handle.remove()


@contextmanager
def deepstack_misaligned(proof_model: Runner) -> Broken:
    """What the tower adds to deeper layers is one token late, in rows with more than one sample."""
    text_model = proof_model.model.model.language_model
    right = text_model._deepstack_process

    def late(hidden: torch.Tensor, where: torch.Tensor, visual: torch.Tensor) -> torch.Tensor:
        is_packed = where.shape[1] > 80
        added: torch.Tensor = right(hidden, where, visual.roll(1, dims=0) if is_packed else visual)
        return added

    text_model._deepstack_process = late
    try:
        yield proof_model
    finally:
        del text_model._deepstack_process
