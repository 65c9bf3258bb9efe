"""Cut and pack documents into blocks of tokens: the function for `datasets.map`.

>>> blocks = block_tokenize({"text": ["abc", "defgh"]}, tokenizer="byte", max_length=6, add_bos=False)
>>> blocks["document_starts"]  # 257 is EOS; the second document goes on in the next block
[[0, 4], [0]]
>>> blocks["input_ids"]
[[97, 98, 99, 257, 100, 101], [102, 103, 104, 257]]

The column `block_counts` says what happened to the documents. It has a record for each block, because `map` calls this
function in several processes, and columns are all that it collects. Documents that are in no block are counted with the
first block of their call.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import ConfigError, DataError, StrategyError
from swift_vlpack.plan.boundaries import Boundaries
from swift_vlpack.plan.parts import Cutting, Part, Run, parts_of
from swift_vlpack.plan.planner import plan
from swift_vlpack.plan.registry import Checked, strategy_named
from swift_vlpack.plan.shuffle import permutation
from swift_vlpack.reasons import Kind, Reason
from swift_vlpack.text.checks import check_whole
from swift_vlpack.text.documents import IGNORED
from swift_vlpack.text.tokenizer import edge_tokens, edged, token_ids, tokenizer_of

logger = logging.getLogger(__name__)

Tokens = NDArray[np.int64]
GREEDY, UNCUT, WINDOW = "greedy", "greedy_uncut", "window"
"""Here `greedy` cuts documents where a block is full. The strategy `greedy` of `plan`, which cuts nothing, is called
`greedy_uncut` here. `window` is `greedy` without a stride, which leaves out no short rest."""
Strategy = str | Callable[[Sequence[int], int], Iterable[Iterable[int]]]

COLUMN = "block_counts"
REASONS = tuple(reason for reason in Reason if reason.kind is Kind.DOCUMENT)
OF_A_BLOCK = ("max_length", "documents", "cut_documents", "repeated_tokens", "truncated_documents", "truncated_tokens")
"""`documents` counts documents that begin in the block; `cut_documents` counts those that continue in another block."""
LEFT_OUT = tuple(f"{reason.value}_{what}" for reason in REASONS for what in ("pieces", "tokens"))
NAMES = (*OF_A_BLOCK, "dropped_documents", *LEFT_OUT)


@dataclass(frozen=True, kw_only=True)
class BlockOptions:
    """The options of `block_tokenize`, checked once."""

    max_length: int
    packed: bool = True
    packing_strategy: Strategy = "greedy"
    overflow: bool = True
    stride: int = 0
    min_len: int = 1
    max_len: int | None = None
    bos_on_pieces: bool = False

    def __post_init__(self) -> None:
        check_whole(1, "max_length", "min_len", max_length=self.max_length, min_len=self.min_len, max_len=self.max_len)
        check_whole(0, "stride", stride=self.stride)
        is_window = self.packed and self.packing_strategy == WINDOW
        if self.min_len > self.max_length and not is_window:  # `window` compares min_len with whole documents only
            raise ConfigError(
                f"min_len={self.min_len} is more than max_length={self.max_length}, so every piece would be left out; "
                "lower min_len"
            )
        longest = self.max_length - 1 - self.bos_on_pieces
        if self.stride > longest:
            least = "max_length - 1, and a BOS" if self.bos_on_pieces else "max_length - 1"
            raise ConfigError(f"stride must be from 0 to {longest} ({least}), got {self.stride}")
        if self.stride and not self.overflow:
            raise ConfigError(
                f"stride={self.stride} is the overlap of pieces, and overflow=False makes none; set it to 0"
            )
        if self.bos_on_pieces and not self.overflow:
            raise ConfigError("bos_on_pieces is for later pieces, and overflow=False makes none; leave it out")
        if isinstance(self.packing_strategy, str) and self.packing_strategy not in (WINDOW, UNCUT):
            strategy_named(self.packing_strategy)  # raises for an unknown name
        if is_window and (self.stride or self.bos_on_pieces):
            raise ConfigError(
                "packing_strategy=window cuts without overlap: leave stride and bos_on_pieces out, or take greedy"
            )
        if is_window and not self.overflow:
            raise ConfigError("packing_strategy=window truncates nothing: leave overflow=False out")

    @property
    def is_windowed(self) -> bool:
        """Tell whether documents are cut wherever a block is full."""
        return self.packed and self.overflow and self.packing_strategy in (WINDOW, GREEDY)

    @cached_property
    def cutting(self) -> Cutting:
        """Return the rule by which `plan.parts` cuts documents."""
        is_window = self.packed and self.packing_strategy == WINDOW
        return Cutting(
            how="split" if self.overflow else "truncate",
            capacity=self.max_length,
            stride=self.stride,
            min_len=1 if is_window else self.min_len,  # `window` leaves out short documents, never short pieces
            num_added=int(self.bos_on_pieces),
        )

    @property
    def has_labels(self) -> bool:
        """Tell whether blocks need a `labels` column, because some of their tokens are not trained."""
        return bool(self.stride or self.bos_on_pieces)


def block_tokenize(  # noqa: PLR0913 - the options of one `functools.partial`, as `datasets.map` takes them
    features: Mapping[str, Sequence[Any]],
    *,
    tokenizer: Any,
    feature: str = "text",
    max_length: int,
    packed: bool = True,
    packing_strategy: Strategy = "greedy",
    overflow: bool = True,
    stride: int = 0,
    min_len: int = 1,
    max_len: int | None = None,
    add_bos: bool = True,
    add_eos: bool = True,
    bos_on_pieces: bool = False,
    shuffle_output: bool = False,
    seed: int | None = None,
) -> dict[str, list[Any]]:
    """Tokenize a batch of documents into blocks of at most `max_length` tokens, for `datasets.map(batched=True)`.

    Every block has `input_ids`, `document_starts` (where its documents, or pieces of documents, begin; the first is 0)
    and `block_counts`, which `block_report` adds up. With a `stride`, it also has `labels`, in which repeated tokens
    are -100. `bos_on_pieces` puts a BOS before every later piece of a cut document; its label is -100, too.
    """
    edges = edge_tokens(tokenizer_of(tokenizer), add_bos=add_bos, add_eos=add_eos)
    if bos_on_pieces and not add_bos:
        raise ConfigError("bos_on_pieces puts BOS before later pieces of documents that begin with it: set add_bos")
    options = BlockOptions(
        max_length=max_length,
        packed=packed,
        packing_strategy=packing_strategy,
        overflow=overflow,
        stride=stride,
        min_len=min_len,
        max_len=max_len,
        bos_on_pieces=bos_on_pieces and bool(edges[0]),
    )
    tokenizer = tokenizer_of(tokenizer)
    documents = _documents(features, feature, tokenizer, edges)
    lost: Counter[str] = Counter()
    blocks = _blocks([len(tokens) for tokens in documents], options, lost)
    if shuffle_output:
        blocks = [blocks[index] for index in _order(len(blocks), seed)]
    columns = _columns(documents, blocks, options, lost, np.array(edges[0], dtype=np.int64))
    # `Dataset.map` passes a batch class of its own, and stores arrays many times faster than lists of numbers. Any
    # other caller gets lists.
    return columns if type(features).__module__.startswith("datasets.") else _as_lists(columns)


def _documents(
    features: Mapping[str, Sequence[Any]], feature: str, tokenizer: Any, edges: tuple[list[int], list[int]]
) -> list[Tokens]:
    """Return the tokens of every document, with BOS and EOS. A document that is null or has no token stays empty."""
    if feature not in features:
        raise DataError(f"the rows have no {feature!r}; they have {', '.join(features)}: name the text with feature=")
    if isinstance(features[feature], str):
        raise DataError(f"{feature} is one text, not a batch of texts; call map with batched=True")
    texts = list(features[feature])
    for row, text in enumerate(texts, start=1):
        if text is not None and not isinstance(text, str):
            raise DataError(f"row {row}: {feature} must be a text, got {type(text).__name__}")
    tokens = iter(token_ids(tokenizer, [text for text in texts if text is not None]))
    nothing = np.empty(0, dtype=np.int32)
    return [edged(nothing if text is None else next(tokens), edges).astype(np.int64) for text in texts]


class Piece(NamedTuple):
    """A part of a document in a block."""

    document: int
    part: Part
    num_added: int = 0
    """Tokens put before the part: a BOS, if later parts of a document get one."""

    @property
    def length(self) -> int:
        """Return the number of tokens in the block: those of the part, also repeated ones, and an added BOS."""
        return self.part.length + self.num_added


def _blocks(lengths: list[int], options: BlockOptions, lost: Counter[str]) -> list[list[Piece]]:
    """Return the pieces of every block. Documents and pieces that are in no block are counted in `lost`."""
    usable = []
    for document, length in enumerate(lengths):
        reason = _why_left_out(length, options)
        if reason is None:
            usable.append(document)
        else:
            count_left_out(lost, reason, length, is_whole=True)
    if options.is_windowed:
        return _windows(usable, lengths, options, lost)
    pieces = [piece for document in usable for piece in _pieces(document, lengths[document], options, lost)]
    groups = (
        _grouped([piece.length for piece in pieces], options) if options.packed else [[n] for n in range(len(pieces))]
    )
    return [[pieces[index] for index in group] for group in groups]


def _why_left_out(length: int, options: BlockOptions) -> Reason | None:
    if length == 0:
        return Reason.EMPTY_DOCUMENT
    if options.max_len is not None and length > options.max_len:
        return Reason.TOO_LONG
    return Reason.TOO_SHORT if length < options.min_len else None


def _windows(usable: list[int], lengths: list[int], options: BlockOptions, lost: Counter[str]) -> list[list[Piece]]:
    """Lay documents end to end and cut them wherever a block is full."""
    cutting, blocks, room = options.cutting, list[list[Piece]](), 0
    for document in usable:
        # A block with room for fewer than `min_len` tokens is full, so that no first piece is shorter.
        parts = _end_to_end(lengths[document], cutting, room if room >= cutting.min_len else cutting.capacity)
        for piece in _placed(document, parts, options):
            if piece.length > room:
                blocks.append([])
                room = cutting.capacity
            blocks[-1].append(piece)
            room -= piece.length
    if blocks and sum(piece.length for piece in blocks[-1]) < cutting.min_len:
        # Every document has at least `min_len` tokens, so such a short last block is the end of a single one.
        (rest,) = blocks.pop()
        count_left_out(lost, Reason.TOO_SHORT, rest.part.num_new, is_whole=False)
    return blocks


def _end_to_end(length: int, cutting: Cutting, room: int) -> list[Part]:
    """Cut a document that begins in a block with `room` tokens left.

    >>> [part[1:3] for part in _end_to_end(9, Cutting(how="split", capacity=6), room=2)]
    [(0, 2), (2, 8), (8, 9)]
    """
    parts: list[Part] = []
    at = 0
    while at < length:
        num_repeated = min(cutting.stride, at)
        stop = min(length, at + (cutting.capacity - cutting.num_added - num_repeated if at else room))
        parts.append(Part(len(parts), at - num_repeated, stop, num_repeated))
        at = stop
    return parts


def _pieces(document: int, length: int, options: BlockOptions, lost: Counter[str]) -> list[Piece]:
    """Cut a document into pieces. A piece that is too short is counted in `lost`; `_counts` counts truncated tokens."""
    kept = []
    for part in parts_of([Run(length)], options.cutting) or [Part(0, 0, length)]:
        if part.reason is None:
            kept.append(part)
        elif part.reason is Reason.TOO_SHORT:
            count_left_out(lost, Reason.TOO_SHORT, part.num_new, is_whole=False)
    return _placed(document, kept, options)


def _placed(document: int, parts: Iterable[Part], options: BlockOptions) -> list[Piece]:
    return [Piece(document, part, options.cutting.num_added if part.number else 0) for part in parts]


def _grouped(lengths: list[int], options: BlockOptions) -> Iterable[Iterable[int]]:
    """Decide which pieces share a block, by the given function or by a plan with all pieces in one buffer."""
    if not isinstance(options.packing_strategy, str):
        name = getattr(options.packing_strategy, "__qualname__", repr(options.packing_strategy))
        try:
            return Checked(name, options.packing_strategy)(lengths, options.max_length)
        except StrategyError as error:
            raise StrategyError(f"{error} (a batch of {len(lengths)} pieces)") from error.__cause__
    config = PackingConfig(
        packing_length=options.max_length,
        packing_strategy=GREEDY if options.packing_strategy == UNCUT else options.packing_strategy,
        packing_buffer=max(1, len(lengths)),
        packing_drop_last=False,
    )
    return plan(lengths, config, label=None)


def _order(num_blocks: int, seed: int | None) -> list[int]:
    fresh = random.SystemRandom().getrandbits(64)
    order: list[int] = permutation(num_blocks, fresh if seed is None else seed, "blocks").tolist()
    return order


def _columns(
    documents: list[Tokens], blocks: list[list[Piece]], options: BlockOptions, lost: Counter[str], bos: Tokens
) -> dict[str, list[Any]]:
    num_pieces = Counter(piece.document for block in blocks for piece in block)
    columns: dict[str, list[Any]] = {
        "input_ids": [
            np.concatenate([_tokens(documents[piece.document], piece, bos) for piece in block]) for block in blocks
        ],
        "document_starts": [
            np.array(Boundaries(tuple(piece.length for piece in block)).document_starts) for block in blocks
        ],
    }
    if options.has_labels:
        columns["labels"] = [
            np.concatenate([_labels(documents[piece.document], piece, bos) for piece in block]) for block in blocks
        ]
    counted = [_counts(block, documents, num_pieces, options) for block in blocks]
    return {**columns, COLUMN: records(counted, lost)}


def _as_lists(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {
        name: [value.tolist() if isinstance(value, np.ndarray) else value for value in column]
        for name, column in columns.items()
    }


def _tokens(tokens: Tokens, piece: Piece, bos: Tokens) -> Tokens:
    own = tokens[piece.part.start : piece.part.stop]
    return np.concatenate([bos, own]) if piece.num_added else own


def _labels(tokens: Tokens, piece: Piece, bos: Tokens) -> Tokens:
    """Return labels that ignore an added BOS and repeated tokens, because the piece before trains these."""
    labels = _tokens(tokens, piece, bos).copy()
    labels[: piece.num_added + piece.part.num_repeated] = IGNORED
    return labels


def _counts(
    block: list[Piece], documents: list[Tokens], num_pieces: Counter[int], options: BlockOptions
) -> Counter[str]:
    counts: Counter[str] = Counter(max_length=options.max_length)
    for piece in block:
        num_lost = 0 if options.overflow else len(documents[piece.document]) - piece.part.stop
        is_first = piece.part.number == 0
        counts["documents"] += is_first
        counts["cut_documents"] += is_first and num_pieces[piece.document] > 1
        counts["repeated_tokens"] += piece.part.num_repeated + piece.num_added
        counts["truncated_documents"] += num_lost > 0
        counts["truncated_tokens"] += num_lost
    return counts


def record(counts: Counter[str]) -> dict[str, int]:
    """Return the numbers of a block under all names, because every call of `map` must return the same columns."""
    return {name: counts[name] for name in NAMES}


def count_left_out(counts: Counter[str], reason: Reason, num_tokens: int, *, is_whole: bool) -> None:
    """Count a document (`is_whole`) or a piece of a document that is in no block."""
    counts["dropped_documents"] += is_whole
    counts[f"{reason.value}_pieces"] += 1
    counts[f"{reason.value}_tokens"] += num_tokens


def records(blocks: list[Counter[str]], lost: Counter[str]) -> list[dict[str, int]]:
    """Return the column `block_counts`, with `lost` added to the first block. Without any block, log `lost`."""
    if blocks:
        return [record(blocks[0] + lost), *map(record, blocks[1:])]
    if lost:
        said: dict[str, Any] = {name: count for name, count in lost.items() if count}
        logger.warning("a call made no block of its documents, so block_report cannot count them: %s", said)
    return []
