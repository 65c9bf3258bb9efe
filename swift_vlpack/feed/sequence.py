"""Make one sequence of the samples of a pack with the template's collator, and check that it has exactly these samples.

    samples -> padding as a sample of its own -> fields completed -> the template's collator -> boundaries checked
            -> prefixes that samples share once

All code that trains, proves or shows packs makes its sequences with `packed_sequence`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from swift_vlpack.attention.packed_sequence import tensor_of
from swift_vlpack.errors import BoundaryError
from swift_vlpack.feed.units import SHARED
from swift_vlpack.plan.boundaries import Boundaries
from swift_vlpack.rows.contents import NO_LABEL, OF_MEDIA
from swift_vlpack.rows.encoder import Template
from swift_vlpack.rows.families import PIXELS as PIXELS_OF_FAMILIES
from swift_vlpack.rows.samples import Encoded

TYPES = "mm_token_type_ids"
"""The field that tells text from media, a tensor with a number for each token."""
PIXELS = ("pixel_values", "pixel_values_videos")
"""Fields with the pixels of a sample."""
_PLACEHOLDER_ROW = {"messages": [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]}


def packed_sequence(
    template: Template, samples: list[Encoded], name: str = "the pack", *, multiple: int = 1
) -> dict[str, Any]:
    """Make one sequence of these samples; without samples, make one that has no loss.

    Padding to a multiple of `multiple` tokens becomes a segment of its own. `name` is used in errors. Raises
    `BoundaryError` if the sequence does not have exactly these samples.
    """
    samples = completed(padded(template, samples or [placeholder(template)], multiple))
    lengths = tuple(int(sample["length"]) for sample in samples)
    shared = tuple(int(sample.pop(SHARED, 0)) for sample in samples)
    with layout(template, packed=True):
        # Copies, because templates take fields out of the samples that they join.
        sequence = template.data_collator([[{**sample} for sample in samples]])
    check_sequence(sequence, Boundaries(lengths), name)
    if any(shared):
        return _with_branches(sequence, samples, shared, name)
    return sequence if "cu_seq_lens_q" in sequence else sequence | boundary_tensors(Boundaries(lengths))


@contextmanager
def layout(template: Template, *, packed: bool) -> Iterator[None]:
    """Switch the template to packed sequences or padded batches inside this block."""
    before = template.packing, template.padding_free
    template.packing = template.padding_free = packed
    try:
        yield
    finally:
        template.packing, template.padding_free = before


def check_sequence(sequence: dict[str, Any], boundaries: Boundaries, name: str) -> None:
    """Raise `BoundaryError` unless the sequence has exactly these samples: tokens, positions and boundaries."""
    # TODO(sequence-parallel): this takes a whole sequence; a rank that holds a slice must know which slice it is.
    num_sequences, num_tokens = sequence["input_ids"].shape
    if num_sequences != 1 or num_tokens != boundaries.num_tokens:
        raise BoundaryError(
            f"{name}: the template made {num_sequences} sequences of {num_tokens} tokens, not one of "
            f"{boundaries.num_tokens}"
        )
    _check_positions(sequence, boundaries, name)
    made = sequence.get("cu_seq_lens_q")
    if made is not None and tuple(made.tolist()) != boundaries.cu_seqlens:
        raise BoundaryError(f"{name}: cu_seq_lens_q is {made.tolist()}, expected {list(boundaries.cu_seqlens)}")


def _check_positions(sequence: dict[str, Any], boundaries: Boundaries, name: str) -> None:
    positions = sequence.get("text_position_ids")
    if positions is None:
        positions = sequence["position_ids"]
    positions = positions.reshape(-1, boundaries.num_tokens)[0]
    if torch.equal(positions.long(), _expected_positions(boundaries)):
        return
    try:
        boundaries.check_positions(positions.tolist())  # says which token is wrong
    except BoundaryError as error:
        raise BoundaryError(f"{name}: {error}") from None


def _expected_positions(boundaries: Boundaries) -> torch.Tensor:
    lengths = torch.tensor(boundaries.lengths)
    starts = torch.tensor(boundaries.cu_seqlens[:-1]) - torch.tensor(boundaries.starts_of_positions)
    return torch.arange(boundaries.num_tokens) - starts.repeat_interleave(lengths)


def boundary_tensors(boundaries: Boundaries) -> dict[str, torch.Tensor]:
    """Return the boundaries as attention reads them, for templates that do not add them."""
    ends = tensor_of(boundaries)
    longest = torch.tensor(max(sum(stop - start for start, stop in sample) for sample in boundaries.samples))
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


# -- prefixes that samples share --------------------------------------------------------------------------------------


def _with_branches(whole: dict[str, Any], samples: list[Encoded], shared: tuple[int, ...], name: str) -> dict[str, Any]:
    """Take the prefixes that samples repeat out of a sequence of whole samples.

    `shared` has the tokens that each sample shares with the one before it. Each token keeps the positions, type and
    label that the template gave it in its row alone. Pixels of a prefix are there once already, because branches bring
    none.
    """
    lengths = [int(sample["length"]) for sample in samples]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    starts_and_ends = zip(ends, ends[1:], shared, strict=False)
    kept = torch.cat([torch.arange(int(start) + num, int(stop)) for start, stop, num in starts_and_ends])
    num_whole = int(ends[-1])
    made = {}
    for field, value in whole.items():
        if field in OF_MEDIA and value is not None:
            made[field] = value if field in PIXELS_OF_FAMILIES else _once(field, value, samples, shared, name)
        elif isinstance(value, torch.Tensor) and value.shape[-1:] == (num_whole,) and _is_per_token(field, samples):
            made[field] = value.index_select(-1, kept)
        else:
            made[field] = value
    boundaries = Boundaries.of_samples(lengths, shared)
    made |= boundary_tensors(boundaries)
    _check_positions(made, boundaries, name)
    return made


def _once(field: str, value: Any, samples: list[Encoded], shared: tuple[int, ...], name: str) -> Any:
    """Return a field with one entry for each medium, without the entries that later samples of a unit repeat.

    Raises:
        BoundaryError: `value` is not simply the entries of all samples, one after the other.
    """
    given = [(sample[field], num) for sample, num in zip(samples, shared, strict=True) if sample.get(field) is not None]
    every, once = [value for value, _ in given], [value for value, num_shared in given if not num_shared]
    if isinstance(value, torch.Tensor) and torch.equal(value, torch.cat(every)):
        return torch.cat(once)
    if isinstance(value, list) and value == [entry for entries in every for entry in entries]:
        return [entry for entries in once for entry in entries]
    raise BoundaryError(
        f"{name}: the template joined {field} of its samples in an unknown way, so no prefix can be shared; set "
        "packing_share=none"
    )


def _is_per_token(field: str, samples: list[Encoded]) -> bool:
    """Tell whether a field of the samples has a value for each token. True if no sample has the field: positions.

    Sounds have as many values as their template chose, which may be the tokens of a sequence by chance.
    """
    given = ((sample[field], int(sample["length"])) for sample in samples if sample.get(field) is not None)
    return all(_has_last(value, num) or (isinstance(value, list) and len(value) == num) for value, num in given)


def _has_last(value: Any, num: int) -> bool:
    return isinstance(value, torch.Tensor) and value.shape[-1:] == (num,)


# -- padding ----------------------------------------------------------------------------------------------------------


def placeholder(template: Template) -> Encoded:
    """Encode a sample of a few tokens without labels, for a pack that has no samples."""
    sample: Encoded = template.encode(_PLACEHOLDER_ROW, return_length=True)
    sample["labels"] = [NO_LABEL] * len(sample["input_ids"])
    return sample


def padded(template: Template, samples: list[Encoded], multiple: int) -> list[Encoded]:
    """Append a sample of padding, unless the samples already add up to a multiple of `multiple` tokens."""
    missing = -sum(int(sample["length"]) - int(sample.get(SHARED, 0)) for sample in samples) % multiple
    if not missing:
        return samples
    segment = padding(template, missing)
    # Give the padding a channel of the samples: ms-swift logs a loss for each channel, and all ranks have to log the
    # same channels.
    if "channel" in samples[0]:
        segment["channel"] = samples[0]["channel"]
    return [*samples, segment]


def padding(template: Template, num_tokens: int) -> Encoded:
    """Make a sample of pad tokens without labels, with every field that the template gives to a text."""
    like = placeholder(template)
    num_there = len(like["input_ids"])
    sample = {name: _resized(value, num_there, num_tokens) for name, value in like.items()}
    token = template.tokenizer.pad_token_id  # always set: ms-swift's templates need one
    return {**sample, "input_ids": [token] * num_tokens, "labels": [NO_LABEL] * num_tokens, "length": num_tokens}


def _resized(value: Any, num_there: int, num_tokens: int) -> Any:
    """Resize a per-token field to `num_tokens`; return other values unchanged."""
    if isinstance(value, list) and len(value) == num_there:
        return value[:1] * num_tokens
    if isinstance(value, torch.Tensor) and value.ndim and value.shape[-1] == num_there:
        return value[..., :1].expand(*value.shape[:-1], num_tokens).clone()
    return value


# -- complete fields that only some samples have ----------------------------------------------------------------------


def completed(samples: list[Encoded]) -> list[Encoded]:
    """Give every sample the per-token fields that any sample has, and all pixels one shape.

    Templates join the fields of samples end to end. A field that only some samples have would no longer fit the tokens.
    """
    if any(sample.get("loss_scale") is not None for sample in samples):
        for sample in samples:
            if sample.get("loss_scale") is None:
                sample["loss_scale"] = [1.0] * len(sample["input_ids"])
    _complete_types(samples)
    for name in PIXELS:
        _fill_up(samples, name)
    return samples


def _complete_types(samples: list[Encoded]) -> None:
    """Add token types to samples of text: zeros, because none of their tokens is media.

    If the types do not cover all tokens, they are dropped: GLM-4.5V's template gives types for the media only.
    """
    types = [sample[TYPES] for sample in samples if isinstance(sample.get(TYPES), torch.Tensor)]
    if not types:
        return
    fits = all(sample.get(TYPES) is None or sample[TYPES].shape[-1] == len(sample["input_ids"]) for sample in samples)
    for sample in samples:
        if not fits:
            sample.pop(TYPES, None)
        elif sample.get(TYPES) is None:
            sample[TYPES] = types[0].new_zeros((*types[0].shape[:-1], len(sample["input_ids"])))


def _fill_up(samples: list[Encoded], name: str) -> None:
    """Join the pixels of all samples in one tensor, as the family's processor does for one sample.

    Tiles (images, tiles, 3, height, width), and images of any size with `image_sizes`, are filled up with zeros, which
    their models ignore. Without this, the template would fail, because it only joins tensors of one shape.
    """
    with_media = [sample for sample in samples if isinstance(sample.get(name), torch.Tensor)]
    if len(with_media) < 2 or not all(_is_filled_up(sample, name) for sample in with_media):
        return
    shapes = [sample[name].shape[1:] for sample in with_media]
    largest = tuple(map(max, zip(*shapes, strict=True)))
    joined = torch.cat([_filled(sample.pop(name), largest) for sample in with_media])
    with_media[0][name] = joined


def _is_filled_up(sample: Encoded, name: str) -> bool:
    return sample[name].dim() == 5 or (sample[name].dim() == 4 and sample.get("image_sizes") is not None)


def _filled(pixels: torch.Tensor, shape: tuple[int, ...]) -> Any:
    """Append zeros in every dimension but the first, up to a shape."""
    missing = [(0, most - size) for size, most in zip(pixels.shape[1:], shape, strict=True)]
    return torch.nn.functional.pad(pixels, [size for pair in reversed(missing) for size in pair])
