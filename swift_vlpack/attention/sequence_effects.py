"""Handle what looks at the whole sequence where it would have looked at one sample: RoPE by length, NEFTune noise."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from swift_vlpack.attention.packed_sequence import by_token, to_device
from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import ConfigError
from swift_vlpack.rows.families import text_config_of

logger = logging.getLogger(__name__)

BY_LONGEST = ("dynamic", "longrope", "su")
"""RoPE types that choose frequencies by the longest sample of a sequence; su is the first name of longrope."""
_REMEMBERS = (
    "the model's RoPE is dynamic, and there are samples of up to %d tokens, more than its limit of %d: each has a "
    "sequence of its own, but the model also remembers longer sequences that came before, so losses depend on the "
    "order, with packing and without. --max_length %d makes them exact"
)


def check_rope(model_config: Any, sources: Sequence[Any], max_length: int | None, config: PackingConfig) -> None:
    """Raise `ConfigError` if a long sample would change the RoPE frequencies of the samples beside it.

    Up to the length that the model was trained with, all samples have the same frequencies. A longer sample does no
    harm if it does not fit a pack, because then it has a sequence of its own.
    """
    longest, most_padding = _longest(sources, max_length), config.sequence_multiple - 1
    if config.cuts_rows:
        longest = min(longest, config.packing_length)
    for rope_type, limit in rope_limits(model_config):
        if most_padding > limit:
            raise ConfigError(
                f"the model's RoPE is {rope_type}: it takes other frequencies for a sequence with a segment of more "
                f"than {limit} tokens, and padding can have {most_padding}. Set packing_pad_to to {limit} or less"
            )
        if longest <= limit:
            continue
        if config.packing_length <= limit:
            if rope_type == "dynamic":
                logger.warning(_REMEMBERS, longest, limit, limit)
            continue
        of_their_own = f"--packing_length {limit}, so that longer ones have a sequence of their own, or "
        raise ConfigError(
            f"the model's RoPE is {rope_type}: it takes other frequencies for a sequence with a sample of more than "
            f"{limit} tokens, and there are some (up to {longest}). Samples beside one would not be trained as they "
            f"are alone. Set {'' if rope_type == 'dynamic' else of_their_own}--max_length {limit}"
        )


def rope_limits(model_config: Any) -> Iterator[tuple[str, int]]:
    """Yield the RoPE types that depend on the longest sample, with the length up to which they do not."""
    text = text_config_of(model_config)
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    is_flat = not all(isinstance(value, Mapping) for value in parameters.values())
    for one in (parameters,) if is_flat else parameters.values():
        rope_type = one.get("rope_type") or one.get("type")
        if rope_type not in BY_LONGEST:
            continue
        limit = None if rope_type == "dynamic" else one.get("original_max_position_embeddings")
        limit = limit or getattr(text, "original_max_position_embeddings", None) or text.max_position_embeddings
        yield rope_type, int(limit)


def _longest(sources: Sequence[Any], max_length: int | None) -> int:
    """Return the tokens of the longest sample; the most it can have if rows were not measured."""
    sizes = [source.sizes for source in sources]
    if sizes and all(of_source is not None for of_source in sizes):
        return max(int(of_source.lengths.max(initial=0)) for of_source in sizes)
    return max_length or 0


def noise_by_sample(trainer: Any) -> None:
    """Scale NEFTune's noise by the length of each sample, as without packing, not by that of the sequence.

    Replaces the trainer's own hook by one under the same handle, because the trainer removes that handle at the end.
    """
    if trainer.neftune_noise_alpha is None:
        return
    trainer.neftune_hook_handle.remove()
    model = trainer.accelerator.unwrap_model(trainer.model)
    embeddings = model.get_input_embeddings()

    def add_noise(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return output
        lengths = trainer.lengths_in_sequence or tuple(output.shape[1:2])
        # Raises if the samples do not make up the sequence: noise of a wrong size would go unnoticed.
        size = by_token((to_device(lengths, output.device) * output.shape[2]).rsqrt(), lengths).view(1, -1, 1)
        noise = torch.empty_like(output).uniform_(-1, 1)
        return output + noise * (module.neftune_noise_alpha * size).to(output.dtype)

    trainer.neftune_hook_handle = embeddings.register_forward_hook(add_noise)
