"""Packs and steps as text: what is told apart by colour is told apart without it."""

import random
import re
from dataclasses import replace

from swift_vlpack.pages.terminal import (
    MARKS,
    bar_widths,
    pack_parts,
    printed,
    step_parts,
)
from swift_vlpack.pages.values import (
    Member,
    PackShown,
    Picture,
    Piece,
    SequenceTensors,
    SharedPrefix,
    StepShown,
    TrainedPack,
)

HOSTILE = "caption \x1b[2J\x07 \u202eabc\x9b31m"


def member(name="photos:3", *, tokens=30, start=0, text="an answer"):
    pieces = [
        Piece("prompt", 4, "<|im_start|>user\n"),
        Piece("vision", 12, "[image 640x480 = 12 tokens]"),
        Piece("supervised", 10, text),
        Piece("masked", tokens - 26, "<|im_end|>\n"),
    ]
    return Member(
        id=name, where=f"/data/{name}", source=name.partition(":")[0], start=start, num_tokens=tokens,
        num_supervised=10, num_vision=12, positions={"token": (0, tokens - 1)},
        pictures=[Picture("image", 12, 640, 480, "a.jpg")], pieces=pieces,
    )  # fmt: skip


def pack(*members, number=7, capacity=100):
    ends = [0]
    for one in members:
        ends.append(ends[-1] + one.num_tokens)
    sequence = SequenceTensors(input_ids=[], labels=[], position_ids=[], cu_seqlens=ends)
    left_out = [{"id": "photos:9", "reason": "file_missing", "error": HOSTILE}]
    return PackShown(
        epoch=1, number=number, num_packs=12, rank=0, step=4, packing_length=capacity, members=members,
        left_out=left_out, sequence=sequence,
    )  # fmt: skip


def unit(*, start=0, first=0, text="<b>system</b>"):
    """A prefix of 20 tokens, and its two branches of 30 and 40."""
    picture = Picture("image", 12, 640, 480, "a.jpg")
    pieces = [Piece("prompt", 8, text), Piece("vision", 12, f"[{picture}]")]
    prefix = SharedPrefix(
        members=[first, first + 1], start=start, num_tokens=20, num_vision=12, positions={"token": (0, 19)},
        pictures=[picture], pieces=pieces,
    )  # fmt: skip
    branches = [
        replace(member(f"vqa:{n}", tokens=tokens, start=at), prefix=0, pictures=[], num_vision=0,
                positions={"token": (20, 19 + tokens)})
        for n, tokens, at in ((3, 30, start + 20), (4, 40, start + 50))
    ]  # fmt: skip
    return prefix, branches


def plain(shown, width=80, is_colourful=False):
    return printed(pack_parts(shown, width), width=width, is_colourful=is_colourful)


def test_every_kind_of_token_has_a_mark_of_its_own_on_every_line():
    """SEE-2: also where the width breaks a line."""
    long = "word " * 40
    lines = plain(pack(member(text=long.strip())), width=66).splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("A photos:3"))
    marked = [(line[:2], line[2:]) for line in lines[start + 1 :] if line]
    assert {mark.strip() for mark, _ in marked} == {mark.strip() for mark in MARKS.values()}
    answer = [text for mark, text in marked if mark == "+ "]
    assert " ".join(" ".join(answer).split()) == long.strip()
    assert len(answer) > 3
    assert max(map(len, lines)) <= 66


def test_bar_is_to_scale_and_says_which_sample_is_which():
    """SEE-2"""
    lines = plain(pack(member("a:0", tokens=50), member("b:1", tokens=30, start=50)), width=102).splitlines()
    assert "[" + "A" * 50 + "B" * 30 + "." * 20 + "]" in lines
    assert re.search(r"A +a:0 +50 +10 +24% +640x480 = 12", "\n".join(lines))
    assert "boundaries (cu_seqlens): 0, 50, 80" in lines


def test_cells_of_a_bar_never_add_up_to_more_than_its_width():
    """SEE-2"""
    rng = random.Random(0)
    for _ in range(20):
        lengths = [rng.randint(1, 900) for _ in range(rng.randint(1, 200))]
        widths = bar_widths(lengths, 4096, 78)
        assert sum(widths) == round(sum(lengths) * 78 / max(4096, sum(lengths)))
        assert min(widths) >= 0


def test_nothing_in_a_row_moves_the_cursor_or_turns_writing_around():
    """SEE-6"""
    step = StepShown(
        step=3,
        packs=[TrainedPack(rank=0, epoch=0, number=1, ids=[HOSTILE], where=[HOSTILE], lengths=[1])],
    )
    texts = [
        plain(pack(member(name=HOSTILE, text=HOSTILE))),
        printed(step_parts(step), width=80, is_colourful=False),
    ]
    for text in texts:
        assert not set(text) & set("\x1b\x07\x9b\u202e")
        assert "␛[2J␇" in text


def test_colour_only_where_there_is_a_terminal():
    """SEE-2"""
    assert "\x1b[" in plain(pack(member()), is_colourful=True)
    assert "\x1b" not in plain(pack(member()))
    without = re.sub(r"\x1b\[[\d;]*m", "", plain(pack(member()), is_colourful=True))
    assert without == plain(pack(member()))


def test_step_says_loss_ranks_and_where_its_rows_are():
    """SEE-3"""
    packs = [
        TrainedPack(
            rank=0, epoch=0, number=4, ids=["a:1", "a:2"], where=["/d/a.jsonl:2", "/d/a.jsonl:3"], lengths=[5, 6]
        ),
        TrainedPack(rank=1, epoch=0, number=5, ids=[], where=[], lengths=[]),
    ]
    step = StepShown(step=3, packs=packs, loss=2.5, loss_of=(1, 3), notes=["a note"])
    text = printed(step_parts(step), width=100, is_colourful=False)
    assert "step 3: loss 2.5 (mean of steps 1-3); 2 packs, 2 samples" in text
    assert re.search(r"0 +0 +4 +5 +a:1 +/d/a.jsonl:2", text)
    assert re.search(r"1 +0 +5 +no sample, and so no loss", text)
    assert "a note" in text


def test_prefix_is_drawn_once_before_its_branches():
    """SHARE-83: in the bar, in the table, and in full; a sample beside it is as ever."""
    prefix, branches = unit()
    shown = replace(pack(*branches, member("chat:1", tokens=10, start=90)), prefixes=[prefix])
    text = plain(shown, width=102)
    assert "[" + "=" * 20 + "A" * 30 + "B" * 40 + "C" * 10 + "]" in text
    assert "100 of 100 tokens (100.0%) for 120 of the samples alone" in " ".join(text.split())
    assert re.search(r"= +prefix of A, B +20 +0 +60% +640x480 = 12 *\n A +vqa:3 +\+ 30 .*\n B +vqa:4 +\+ 40 ", text)
    assert re.search(r"C +chat:1 +10 ", text)
    assert "= prefix of A, B: tokens 0-19 of the sequence; positions: token 0-19" in text
    assert "A vqa:3: tokens 20-49 of the sequence; positions: token 20-49" in text
    assert text.index("= prefix of A, B: ") < text.index("A vqa:3: ") < text.index("C chat:1: ")
    assert text.count("[image 640x480 = 12 tokens]") == 1 + 3, "in the prefix once; the members of this test have one"
    assert "prefix" not in plain(pack(member()))


def test_step_says_what_its_samples_share():
    """SHARE-83"""
    packed = TrainedPack(
        rank=0, epoch=0, number=4, ids=["a:1", "a:2"], where=["", ""], lengths=[50, 60], shared=[0, 40]
    )
    text = printed(step_parts(StepShown(step=3, packs=[packed])), width=100, is_colourful=False)
    assert re.search(r" 50 +a:1.*\n.* 60 \(40 shared\) +a:2", text)
