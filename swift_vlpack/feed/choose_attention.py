"""Choose the attention kernel of a run: record the model's calls of attention, then let `choose_kernel` try kernels.

A trainer of your own calls `print(choose_attention(model, template, packs))` after `prepare_model`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from swift_vlpack.attention import attention
from swift_vlpack.attention.choose_kernel import AUTO, choose, gaps_of_kernels
from swift_vlpack.attention.prepare import refuse_flat_attention, unwrapped
from swift_vlpack.comm import ALONE, OfAll
from swift_vlpack.errors import ConfigError
from swift_vlpack.feed.collate import NOT_FOR_THE_MODEL, on_device
from swift_vlpack.feed.packs import Packs
from swift_vlpack.feed.sequence import packed_sequence, placeholder


def choose_attention(
    model: Any,
    template: Any,
    packs: Packs,
    *,
    results_of_all: OfAll = ALONE.results_of_all,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> str:
    """Choose the kernel by the option `packing_attention` of the packs. Returns a line with the kernel and the reason.

    `auto` takes a kernel that is right on this device. The model may be wrapped. All ranks must call this
    function; `results_of_all` runs a function on each of them and returns all results to each. `forward_context` makes
    the context in which the trainer runs a forward, such as autocast.
    """
    if packs.config.shares_media:
        refuse_flat_attention(model)
    wanted, name = packs.config.packing_attention, attention.name_of(unwrapped(model).config)
    if name != attention.NAME:
        if wanted != AUTO:
            raise ConfigError(
                f"packing_attention={wanted} is for the attention vlpack, but the model has {name}; set "
                "packing_attention=auto, or leave attn_impl unset"
            )
        return f"attention {name}, as asked for"

    forward = partial(_forward, model, template, packs, forward_context)
    shares = packs.config.shares_media
    return choose(model, forward, shares_prefixes=shares, wanted=wanted, results_of_all=results_of_all)


def compare_kernels(
    model: Any, template: Any, packs: Packs, forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> dict[str, dict[str, float | str]]:
    """Compare all kernels with the reference, in the layers of this model: see `gaps_of_kernels`."""
    return gaps_of_kernels(model, partial(_forward, model, template, packs, forward_context))


def _forward(
    model: Any, template: Any, packs: Packs, forward_context: Callable[[], AbstractContextManager[Any]]
) -> None:
    multiple = packs.config.sequence_multiple
    row = packed_sequence(template, [placeholder(template), placeholder(template)], multiple=multiple)
    inputs = {name: value for name, value in row.items() if name not in ("labels", *NOT_FOR_THE_MODEL)}
    with forward_context():
        model(**on_device(inputs, next(model.parameters()).device))
