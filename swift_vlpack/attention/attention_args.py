"""What a layer asks of its attention besides query, key and value; anything that is not known here is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from swift_vlpack.errors import AttentionError

_KNOWN = ("scaling", "dropout", "softcap", "s_aux", "position_bias")
_ABOUT_THE_ROW = (
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),  # which the boundaries say
    *("position_ids", "cache_position", "position_embeddings"),  # in the query and the key already
    *("token_type_ids", "mm_token_type_ids"),  # in the mask, of models that see images as blocks
    *("num_items_in_batch", "labels", "shift_labels", "logits_to_keep", "use_cache", "return_dict"),
    *("device", "output_hidden_states", "output_router_logits", "deterministic"),
    *("is_causal", "sliding_window"),  # read by the caller, beside the mask
)
"""What reaches a layer and says nothing about how its tokens see each other."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One layer's wishes; `None` is not asked for."""

    scaling: float | None = None
    dropout: float = 0.0
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # (num_heads,)
    position_bias: torch.Tensor | None = None  # (1, num_heads, num_queries, num_keys)

    @property
    def is_plain(self) -> bool:
        """Whether transformers' sdpa does it, in all versions."""
        return self.softcap is None and self.sinks is None and self.position_bias is None

    def of_sample(self, start: int, end: int) -> Asked:
        """What is asked for the tokens of one sample."""
        if self.position_bias is None:
            return self
        bias = self.position_bias[..., start:end, start:end]
        return Asked(self.scaling, self.dropout, self.softcap, self.sinks, bias)


def asked_of(module: torch.nn.Module, options: dict[str, Any], *, strict: bool = True) -> Asked:
    """Read the keywords of a call; where strict, refuse the first that is not known, unless it asks for nothing."""
    for name, value in options.items() if strict else ():
        if name not in _KNOWN and name not in _ABOUT_THE_ROW and value is not None and value is not False:
            raise AttentionError(_refusal(module, name, value))
    return Asked(
        scaling=options.get("scaling"),
        dropout=float(options.get("dropout") or 0.0),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
        position_bias=options.get("position_bias"),
    )


def layer_name(module: torch.nn.Module) -> str:
    """How errors call a layer.

    >>> layer_name(torch.nn.Identity())
    'Identity'
    """
    number = getattr(module, "layer_idx", None)
    return type(module).__name__ + ("" if number is None else f" of layer {number}")


def _refusal(module: torch.nn.Module, name: str, value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        kind += f" {tuple(value.shape)}"
    if name == "output_attentions":
        return f"{layer_name(module)}: packed attention keeps no matrix of weights; leave output_attentions unset"
    return (
        f"{layer_name(module)} asks its attention for {name!r} ({kind}), which packing does not know and will not "
        "drop; train without packing, or with --attn_impl flash_attn where the model supports it, and report the model"
    )


def counted_in_samples(module: Any, query: torch.Tensor, ends: tuple[int, ...]) -> torch.Tensor:
    """The query as it would be alone, of layers that scale it by the token's number in the row (Llama 4)."""
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query
    if ends[-1] < module.floor_scale or len(ends) == 2:
        return query
    in_row = torch.arange(ends[-1], device=query.device)
    starts = torch.tensor(ends[:-1], device=query.device)
    lengths = torch.tensor(ends, device=query.device).diff()
    in_sample = in_row - torch.repeat_interleave(starts, lengths)
    factor = _temperature(module, in_sample) / _temperature(module, in_row)
    return (query * factor[:, None]).to(query.dtype)


def _temperature(module: Any, position: torch.Tensor) -> torch.Tensor:
    """Llama 4's own formula."""
    temperature: torch.Tensor = torch.log1p(torch.floor((position.float() + 1.0) / module.floor_scale))
    return temperature * module.attn_scale + 1.0
