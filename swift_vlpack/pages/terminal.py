"""Show packs, steps and epochs in a terminal, with rich.

Nothing depends on colour: samples have letters and kinds of tokens have marks, so a pipe or a file shows the same.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from swift_vlpack.pages.safe_text import visible
from swift_vlpack.pages.values import (
    MASKED,
    PROMPT,
    SUPERVISED,
    VISION,
    PackShown,
    Picture,
    Segment,
    SharedPrefix,
    StepShown,
    TrainedPack,
)
from swift_vlpack.words import counted

STYLES = {PROMPT: "", SUPERVISED: "bold green", MASKED: "dim strike", VISION: "magenta"}
MARKS = {PROMPT: " ", SUPERVISED: "+", MASKED: "-", VISION: "#"}
"""Mark at the beginning of every line of text, for readers without colour."""
_SAMPLES = ("cyan", "yellow", "green", "magenta", "blue", "red")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_PREFIX = "="
"""Stands for a prefix where letters stand for samples."""
WIDEST_BAR = 100
_NUM_NAMED = 4
"""Most images of a sample that the table lists: a document may have hundreds."""


def printed(parts: Iterable[RenderableType], *, width: int, is_colourful: bool) -> str:
    """Return the text of some parts at this width, with colour codes if `is_colourful`."""
    file = io.StringIO()
    console = Console(
        file=file, width=width, force_terminal=is_colourful, no_color=not is_colourful, highlight=False, markup=False,
        color_system="standard" if is_colourful else None, emoji=False, legacy_windows=False,
    )  # fmt: skip
    for part in parts:
        console.print(part)
    return file.getvalue()


def overview_line(overview: Mapping[str, Any]) -> str:
    """Say what an epoch has (`overview_of`), and which packs are worth a look."""
    return (
        f"epoch {overview['epoch']}: {overview['num_packs']} packs of {overview['packing_length']} tokens for "
        f"{counted(overview['num_ranks'], 'rank')}, {overview['num_samples']} samples, fill "
        f"{overview['mean_fill']:.1%} mean; longest pack {overview['longest']}, emptiest pack {overview['emptiest']}"
    )


class Drawn(NamedTuple):
    """A segment of a pack, and the words and the style that stand for it."""

    mark: str
    name: str
    tokens: str
    style: str
    segment: Segment


def drawn(pack: PackShown) -> Iterator[Drawn]:
    """Yield the segments of a pack: `=` stands for a prefix, letters and colours stand for samples."""
    at = 0
    for one in pack.segments:
        if isinstance(one, SharedPrefix):
            name = f"prefix of {', '.join(map(letter, one.members))}"
            yield Drawn(_PREFIX, name, str(one.num_tokens), "", one)
        else:
            tokens = str(one.num_tokens) if one.prefix is None else f"+ {one.num_tokens}"
            yield Drawn(letter(at), visible(one.id), tokens, _SAMPLES[at % len(_SAMPLES)], one)
            at += 1


def pack_parts(pack: PackShown, width: int) -> Iterator[RenderableType]:
    """Show a pack: headline, bar, table of samples, left-out samples, and the text of each sample."""
    yield Text(headline(pack), "bold")
    yield _bar(pack, min(WIDEST_BAR, width - 2))
    yield _members(pack)
    for gone in pack.left_out:
        yield Text(visible(f"left out: {gone['id']}: {gone['reason']}: {gone['error']}"), "yellow")
    yield Text(
        f"boundaries (cu_seqlens): {', '.join(map(str, pack.sequence.cu_seqlens if pack.sequence else ()))}\n"
        + (f"{_PREFIX} prefix, computed once: the samples below it go on from it\n" if pack.prefixes else "")
        + f"{MARKS[SUPERVISED]} supervised   {MARKS[MASKED]} masked (of an answer, not trained)   "
        f"{MARKS[VISION]} vision   no mark: prompt",
        "dim",
    )
    for mark, name, _, style, one in drawn(pack):
        positions = ", ".join(f"{axis} {low}-{high}" for axis, (low, high) in one.positions.items())
        last = one.start + one.num_tokens - 1
        said = f"\n{mark} {name}: tokens {one.start}-{last} of the sequence; positions: {positions}"
        yield Text(said, f"bold {style}")
        yield from piece_lines(one, width)
    yield Text()


def headline(pack: PackShown) -> str:
    """Return the headline of a pack: its place in the run, its fill, its shares of supervised and vision tokens."""
    of = "" if pack.num_packs is None else f" of {pack.num_packs} (numbered from 0)"
    step = "" if pack.step is None else f", trained in step {pack.step}"
    shared = f" for {pack.num_tokens_alone} of the samples alone" if pack.prefixes else ""
    return (
        f"epoch {pack.epoch}, pack {pack.number}{of}, rank {pack.rank}{step}: "
        f"{pack.num_tokens} of {pack.packing_length} tokens ({pack.fill:.1%}){shared}, "
        f"{_share(pack.num_supervised, pack.num_tokens)} supervised, {_share(pack.num_vision, pack.num_tokens)} vision"
    )


def letter(at: int) -> str:
    """Return the letter that stands for sample `at` of a pack in the bar, the table and the text."""
    return _LETTERS[at % len(_LETTERS)]


def bar_widths(lengths: Sequence[int], capacity: int, width: int) -> list[int]:
    """Divide the cells of a bar among samples, in proportion to their lengths.

    The ends of samples are rounded, not their lengths, so that the cells never add up to more than the width.

    >>> bar_widths([50, 25], 100, 8), bar_widths([300], 100, 8)
    ([4, 2], [8])
    """
    whole, ends, total = max(capacity, sum(lengths)), [0], 0
    for length in lengths:
        total += length
        ends.append(round(total * width / whole))
    return [end - start for start, end in pairwise(ends)]


def _bar(pack: PackShown, width: int) -> Text:
    widths = bar_widths([one.num_tokens for one in pack.segments], pack.packing_length, width)
    bar = Text("[")
    for (mark, _, _, style, _), cells in zip(drawn(pack), widths, strict=True):
        bar.append(mark * cells, f"black on {style}" if style else "bold reverse")
    bar.append("." * (width - sum(widths)), "dim")
    return bar.append("]")


def _members(pack: PackShown) -> RenderableType:
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1))
    for name in ("", "id"):
        table.add_column(name)
    for name in ("tokens", "supervised", "vision"):
        table.add_column(name, justify="right")
    table.add_column("images", overflow="fold")
    table.add_column("where", overflow="fold")
    for mark, name, tokens, style, one in drawn(pack):
        table.add_row(
            Text(mark, style),
            Text(name),
            tokens,
            str(one.num_supervised),
            _share(one.num_vision, one.num_tokens),
            Text(visible(pictures_text(one.pictures))),
            Text(visible(one.where), "dim"),
        )
    return table


def pictures_text(pictures: Sequence[Picture]) -> str:
    """List the first few images of a sample.

    >>> pictures_text([Picture("image", 391, 640, 480), Picture("video", None)])
    '640x480 = 391, video'
    """

    def short(picture: Picture) -> str:
        size = picture.kind if picture.width is None else f"{picture.width}x{picture.height}"
        return size if picture.num_tokens is None else f"{size} = {picture.num_tokens}"

    more = len(pictures) - _NUM_NAMED
    return ", ".join(map(short, pictures[:_NUM_NAMED])) + (f", and {more} more" if more > 0 else "")


def piece_lines(segment: Segment, width: int) -> Iterator[Text]:
    """Write the text of a sample, with a mark before every line, also where the width breaks a line."""
    console = Console(width=width, file=io.StringIO())
    for piece in segment.pieces:
        lines = visible(piece.text).split("\n")
        # A newline at the end of a piece belongs to its last line, and begins no new one.
        shown = [f"{line}⏎" for line in lines[:-1]] + lines[-1:] * bool(lines[-1])
        for line in shown or [""]:
            for part in Text(line).wrap(console, max(1, width - 2)):
                yield Text(f"{MARKS[piece.kind]} ").append(part.plain, STYLES[piece.kind])


def step_parts(step: StepShown) -> Iterator[RenderableType]:
    """Show a step: a headline with its loss, notes, and a table of its packs by rank."""
    loss = ""
    if step.loss is not None and step.loss_of is not None:
        first, last = step.loss_of
        loss = f"loss {step.loss:g}{'' if first == last else f' (mean of steps {first}-{last})'}; "
    packs, samples = counted(len(step.packs), "pack"), counted(step.num_samples, "sample")
    yield Text(f"step {step.step}: {loss}{packs}, {samples}", "bold")
    for note in step.notes:
        yield Text(visible(note), "yellow")
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1))
    for name in ("rank", "epoch", "pack", "tokens"):
        table.add_column(name, justify="right")
    table.add_column("id")
    table.add_column("where", overflow="fold")
    for pack in step.packs:
        for at, sample in enumerate(pack.ids):
            of_pack = (str(pack.rank), str(pack.epoch), str(pack.number)) if at == 0 else ("", "", "")
            tokens = tokens_text(pack, at)
            table.add_row(*of_pack, tokens, Text(visible(sample)), Text(visible(pack.where[at]), "dim"))
        if not pack.ids:
            table.add_row(str(pack.rank), str(pack.epoch), str(pack.number), "", Text("no sample, and so no loss"))
    yield table


def tokens_text(pack: TrainedPack, at: int) -> str:
    """Write the tokens of a sample of a step: those of its row, and how many it shares with the sample before it.

    >>> pack = TrainedPack(
    ...     rank=0, epoch=0, number=0, ids=["a:0", "a:1"], where=["", ""], lengths=[90, 80], shared=[0, 60]
    ... )
    >>> tokens_text(pack, 0), tokens_text(pack, 1)
    ('90', '80 (60 shared)')
    """
    num_shared = pack.shared[at] if pack.shared else 0
    return f"{pack.lengths[at]} ({num_shared} shared)" if num_shared else str(pack.lengths[at])


def _share(part: int, whole: int) -> str:
    return f"{part / max(1, whole):.0%}"
