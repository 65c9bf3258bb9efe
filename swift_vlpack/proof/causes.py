"""Name the likeliest cause of a failed proof from its evidence. Runs no model.

>>> cause_of(Evidence(attention="sdpa"))
'attention sdpa knows no boundaries; leave attn_impl unset, so that packing chooses its own'

The order of the checks matters: samples that moved with a neighbour are explained before samples that only differ.
docs/isolation.md has the table of what is seen and what is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swift_vlpack.attention.sequence_effects import BY_LONGEST
from swift_vlpack.proof.handed import Handed, Mask, why_not_apart
from swift_vlpack.rows.families import text_config_of

NO_BOUNDARIES = ("sdpa", "eager", "flex_attention")
ALONE, ANOTHER, MIXED = "its samples alone", "something else", "its samples mixed"
"""Results of a padded batch of two samples. ALONE: each gives what it gives alone. ANOTHER: one gives something
else, but does not change when the content of the other changes. MIXED: one changes when the other does."""
EMBEDDINGS = -1
"""Stands in for a layer number if the input of the first layer differs already."""
_STATEFUL = ("linear", "mamba", "conv", "recurrent")
_FEW = 8
"""Number of tokens that count as the start or end of a sample."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A sample of the sequence, and the range of its tokens that differ from the sample alone."""

    num_tokens: int
    has_media: bool
    first: int | None
    """First token that differs, and `last` the last one; None if no token differs."""
    last: int | None
    num_prefix: int = 0
    """Tokens of the prefix that the sample shares with others in the sequence."""
    unit: int | None = None
    """Number of that prefix; None if the sample shares none."""
    has_own_media: bool = False
    """True if the sample has media after its prefix."""

    @property
    def differs(self) -> bool:
        """Tell whether any token differs."""
        return self.first is not None

    @property
    def differs_in_branch(self) -> bool:
        """Return whether the sample shares a prefix and differs only after it."""
        return self.unit is not None and self.first is not None and self.first >= self.num_prefix

    @property
    def is_edge(self) -> bool:
        """Tell whether only a few tokens at the sample's start or end differ."""
        # In a short sample every token is near an edge, so there only a single wrong token counts as an edge.
        if self.first is None or self.last is None or self.num_tokens <= 2 * _FEW:
            return self.first is not None and self.first == self.last
        return self.last < _FEW or self.first >= self.num_tokens - _FEW


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the model: its name, its class, and whether it is attention or inside of attention."""

    name: str
    kind: str
    is_attention: bool

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Observations of a sequence that differs from its samples alone."""

    attention: str
    profiles: tuple[Profile, ...] = ()
    moved: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """Number of tokens of sample `moved` that moved when the tokens of sample `changed` were replaced."""
    moved_by_media: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """Like `moved`, but the media of sample `changed` were replaced."""
    changed: tuple[int, ...] = ()
    """The samples that were changed: all of a short sequence, some of a long one."""
    given: tuple[int, int] | None = None
    """(sample, other): in the sequence, `sample` gives what it gives alone with the media of `other`."""
    layer: int | None = None
    """First layer whose output differs; EMBEDDINGS if the input of the first layer differs; None if unknown."""
    layer_type: str = ""
    is_only_in_training: bool = False
    module: Module | None = None
    """First module whose output differs; None if unknown."""
    unpacked: str = ALONE
    """What two samples give in the host's padded batch, by the model's own attention: ALONE, ANOTHER or MIXED."""
    window: int | None = None
    rope_type: str = "default"
    model_types: tuple[str, ...] = ()
    """Kinds of the model's layers, as its config names them."""
    handed: Handed | None = None
    """How the batch of the caller's own collator tells where samples start; None if the host makes the batch."""


def cause_of(evidence: Evidence) -> str:
    """Return one sentence that names the cause, and the remedy if one is known."""
    if evidence.handed is None and evidence.attention in NO_BOUNDARIES:
        name = evidence.attention
        return f"attention {name} knows no boundaries; leave attn_impl unset, so that packing chooses its own"
    # If samples got each other's media, new media move another sample, too. That is a wrong order, not a leak.
    has_moved = evidence.moved or (evidence.moved_by_media and evidence.given is None)
    cause = _of_moved(evidence) if has_moved else _of_differing(evidence)
    if evidence.unpacked == MIXED:
        return f"the model mixes the samples of any batch, without packing too. In the pack, {cause}"
    if evidence.unpacked == ANOTHER and not has_moved:
        return (
            "what a sample gives depends on the others of its batch, without packing too: on their sizes, to which it "
            f"is padded, and not on what is in them. In the pack, {cause}"
        )
    if evidence.unpacked == ANOTHER:
        return f"{cause}. A padded batch, without packing, does not give what its samples give alone either"
    if evidence.is_only_in_training:
        return f"in training mode, not in evaluation, {cause}"
    return cause


def of_linear_attention(kind: str = "linear attention") -> str:
    """Return the cause for a layer whose state runs on over the boundaries of samples."""
    return (
        f"the model has {kind}, whose state must restart with every sample, and here it goes on; "
        "train without packing, or report the model"
    )


def is_stateful(layer_type: str) -> bool:
    """Tell whether a kind of layer carries a state from token to token."""
    return any(word in layer_type for word in _STATEFUL)


def facts_of(config: Any) -> dict[str, Any]:
    """Read the fields of `Evidence` that come from the model's config: window, type of RoPE, kinds of layers."""
    text = text_config_of(config)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    # Some models have RoPE parameters for each kind of layer: take the first.
    rope = next((one for one in rope.values() if isinstance(one, dict)), rope)
    # Llama 4 calls its window chunks; Qwen names a window and may not use it.
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    return {
        "window": window if isinstance(window, int) and getattr(text, "use_sliding_window", True) else None,
        "rope_type": str(rope.get("rope_type") or rope.get("type") or "default"),
        "model_types": tuple(getattr(text, "layer_types", None) or ()),
    }


def _of_moved(evidence: Evidence) -> str:
    # A state that runs on moves all later samples, just as a causal mask without boundaries does. Only the kind of
    # layer tells the two apart.
    if is_stateful(evidence.layer_type):
        return of_linear_attention(evidence.layer_type.replace("_", " "))
    if not evidence.moved and evidence.layer not in (None, EMBEDDINGS):
        return (
            f"media of one sample reach another in layer {evidence.layer}, not before it: what the vision tower adds "
            "to deeper layers (deepstack) is at the wrong tokens"
        )
    if not evidence.moved:
        return (
            "images, videos or sounds of one sample reach another: their features are put at the tokens of another "
            "sample, or the vision tower mixes them"
        )
    if evidence.module and not evidence.module.is_attention:
        return (
            f"samples see each other outside of attention: {evidence.module} gives a sample something else when the "
            f"tokens of another one change{_over_the_sequence(evidence.module)}"
        )
    if evidence.handed is not None and (why := why_not_apart(evidence.handed, evidence.attention)):
        return why
    if all(_are_siblings(evidence.profiles, *pair) for pair in evidence.moved):
        return (
            "branches of one prefix see each other, or their prefix sees them: attention takes the prefix and its "
            "branches for one sample (it reads no second line in cu_seq_lens)"
        )
    if any(moved < changed for changed, moved in evidence.moved):
        return (
            "samples before a changed one moved too, so attention is not causal over the sequence and knows no "
            "boundaries: a mask that a hook or the model replaces, or no mask at all"
        )
    crossed = {moved for changed, moved in evidence.moved if moved == changed + 1}
    changed = evidence.changed or range(len(evidence.profiles))
    boundaries = {at + 1 for at in changed if at + 1 < len(evidence.profiles)}
    few = [of <= min(_FEW, evidence.profiles[moved].num_tokens // 2) for (_, moved), of in evidence.moved.items()]
    is_edge = any(few) or any(profile.is_edge for profile in evidence.profiles)
    # If all boundaries were crossed they would be lost, not shifted.
    if crossed and is_edge and len(crossed) < max(2, len(boundaries)):
        return (
            f"a boundary is shifted: where sample {min(crossed) + 1} of the sequence starts a few tokens belong to "
            "another sample than they should (wrong cu_seq_lens)"
        )
    if crossed and len(crossed) < len(boundaries):
        numbers = ", ".join(str(number + 1) for number in sorted(crossed))
        return f"the boundary before sample {numbers} of the sequence is lost, while others hold (wrong cu_seq_lens)"
    # The layer is not known, but the model has such layers.
    if not evidence.layer_type and any(map(is_stateful, evidence.model_types)):
        return of_linear_attention()
    return (
        "samples after a changed one moved and none before it, so the mask is causal and has no boundaries: a mask or "
        "a cache hides the boundaries from the attention function (a hook that replaces the model's inputs, or a model "
        "that does not hand cu_seq_lens on); train without packing, or report the model"
    )


def _of_differing(evidence: Evidence) -> str:
    """Name the cause if no sample moved when another sample changed, but samples differ packed and alone."""
    differing = [profile for profile in evidence.profiles if profile.differs]
    if differing and all(profile.differs_in_branch for profile in differing):
        is_of_own_media = all(profile.has_own_media for profile in differing)
        is_before_attention = evidence.layer == EMBEDDINGS or evidence.given is not None
        return _of_media(evidence) if is_of_own_media and is_before_attention else _of_branches(evidence)
    with_media = [profile for profile in evidence.profiles if profile.has_media]
    is_all_media = len(with_media) == len(evidence.profiles)
    is_of_media = evidence.layer == EMBEDDINGS or evidence.given or not is_all_media
    if differing and is_of_media and all(profile.has_media for profile in differing):
        return _of_media(evidence)
    if evidence.handed is not None and evidence.layer == EMBEDDINGS:
        return (
            "samples differ before the first layer: the model adds embeddings of positions, and those of the batch do "
            "not begin at 0 with every sample (position_ids that run over the row, or none beside padding on the left)"
        )
    if evidence.rope_type in BY_LONGEST and _are_shorter(differing, evidence.profiles):
        return (
            f"the model's RoPE is {evidence.rope_type}, which takes its frequencies by the longest sample of the "
            "sequence; set packing_length to the length up to which it does not"
        )
    if is_stateful(evidence.layer_type):
        return of_linear_attention(evidence.layer_type.replace("_", " "))
    if differing and all(profile.is_edge for profile in differing):
        return "a boundary is shifted: only a few tokens where samples meet differ (wrong cu_seq_lens)"
    if evidence.module and not evidence.module.is_attention and evidence.layer != EMBEDDINGS:
        return (
            f"{evidence.module} gives a sample something else in the sequence than alone, and it is no attention"
            f"{_over_the_sequence(evidence.module)}"
        )
    if differing and not evidence.profiles[0].differs:
        return (
            "all but the first sample differ: attention takes other positions than it was given, which do not restart "
            "at the boundaries, or has room for fewer tokens than the sequence has"
        )
    return _of_attention(evidence, differing)


def _are_siblings(profiles: Sequence[Profile], one: int, other: int) -> bool:
    """Return whether two samples share a prefix."""
    return profiles[one].unit is not None and profiles[one].unit == profiles[other].unit


def _of_branches(evidence: Evidence) -> str:
    """Name the cause if samples are right up to the end of a prefix that they share, and their branches differ."""
    units = [profile.unit for profile in evidence.profiles]
    firsts = [at for at, unit in enumerate(units) if unit is not None and unit not in units[:at]]
    if any(evidence.profiles[at].differs for at in firsts):
        return (
            "branches do not see their prefix as their rows alone do, while the prefix is right: it is hidden from "
            "them, seen twice, or at another distance"
        )
    return (
        "branches after the first one of a prefix differ, and none sees another: siblings between the prefix and a "
        "branch are counted (in positions, or in a window, which has to be counted in the row alone)"
    )


def _over_the_sequence(module: Module) -> str:
    """Describe how the output of such a module may depend on all tokens of the sequence; appended to a cause."""
    words = f"{module.name} {module.kind}".lower()
    if "norm" in words:
        return " (statistics over the tokens of the sequence, where each token should have its own)"
    if any(word in words for word in ("mlp", "expert", "moe", "router", "gate", "feed_forward", "ffn")):
        return " (room for a number of tokens of the sequence, as the capacity of experts, or a count over all of them)"
    return " (it computes over all tokens of the sequence)"


def _are_shorter(differing: Sequence[Profile], profiles: Sequence[Profile]) -> bool:
    """Tell whether every sample that differs is shorter than the longest sample, which does not differ."""
    longest = max(profile.num_tokens for profile in profiles)
    return bool(differing) and all(profile.num_tokens < longest for profile in differing)


def _of_media(evidence: Evidence) -> str:
    if evidence.given is not None:
        one, other = (number + 1 for number in evidence.given)
        return (
            f"media are in the wrong order: sample {one} of the sequence gives what it gives with the images, videos "
            f"or sounds of sample {other}"
        )
    if evidence.layer == EMBEDDINGS:
        return (
            "only samples with media differ, before the first layer: images or videos in the wrong order, their grids "
            "exchanged, or their features at the wrong tokens"
        )
    if evidence.layer:
        return (
            f"only samples with media differ, from layer {evidence.layer} on: what the vision tower adds to deeper "
            "layers (deepstack) is at the wrong tokens"
        )
    return (
        "only samples with media differ, from the first layer on: positions of images or videos (grids exchanged, or "
        "positions made of the whole sequence), what is added after the first layer (deepstack), or a mask that joins "
        "the tokens of an image"
    )


def _of_attention(evidence: Evidence, differing: list[Profile]) -> str:
    # The first token that differs tells what is missing: token 0 sees only itself, so it differs by sinks or values;
    # from token 1 on weights between tokens matter; a window or chunk ends later.
    lacks = f"attention {evidence.attention} does not do what the model asks of attention"
    if evidence.handed is not None and evidence.handed.mask in (Mask.OF_PAIRS, Mask.OF_PAIRS_THAT_LEAKS):
        lacks = "the 4-D attention_mask of the batch takes the place of the model's own and is not like it"
    starts = {profile.first for profile in differing}
    if evidence.window and starts and min(start or 0 for start in starts) >= evidence.window - 1:
        return f"{lacks}: samples differ from token {min(starts, key=lambda at: at or 0)} on, and its window is " + (
            f"{evidence.window} tokens (sliding window or chunks ignored)"
        )
    if starts == {0}:
        return f"{lacks}: samples differ from their first token on, which sees only itself (sinks, or values changed)"
    if starts and 0 not in starts:
        return (
            f"{lacks}: samples differ from their second token on, where weights begin to matter (scaling, soft cap, "
            "or a mask of the model's own)"
        )
    return f"{lacks} (sinks, soft cap, scaling, window, a mask of the model's own)"
