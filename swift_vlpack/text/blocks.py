"""Documents in, blocks of tokens out: the function for `datasets.map`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import ConfigError, DataError, StrategyError
from swift_vlpack.plan.boundaries import Boundaries
from swift_vlpack.plan.planner import plan
from swift_vlpack.plan.registry import WINDOW, Checked, strategy_named
from swift_vlpack.plan.shuffle import permutation
from swift_vlpack.reasons import Reason
from swift_vlpack.text.checks import check_whole
from swift_vlpack.text.counts import COLUMN, left_out, records
from swift_vlpack.text.cutting import Piece, pieces_of, windows_of
from swift_vlpack.text.rows import IGNORED
from swift_vlpack.text.special import edge_tokens, edged, token_ids
from swift_vlpack.text.vocabulary import tokenizer_of

Tokens = NDArray[np.int64]
GREEDY, UNCUT = "greedy", "greedy_uncut"
"""Here `greedy` cuts documents where a block is full; the core's `greedy`, which cuts nothing, is `greedy_uncut`."""
Strategy = str | Callable[[Sequence[int], int], Iterable[Iterable[int]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockOptions:
    """What documents become, checked once."""

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
        if self.min_len > self.max_length and not is_window:  # windows only leave out whole documents
            raise ConfigError(f"min_len={self.min_len} is more than max_length={self.max_length}: no piece is so long")
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
            strategy_named(self.packing_strategy)  # refuses what cannot be found
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

    @property
    def has_labels(self) -> bool:
        """Tell whether blocks need a `labels` column, because some tokens may be no targets."""
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

    Every block has `input_ids`, `document_starts` (where its documents, or pieces of them, begin; the first at 0) and
    `block_counts`, which `block_report` adds up. With a `stride` it has `labels`, in which repeated tokens are -100.
    `bos_on_pieces` puts BOS before every later piece of a document that is cut, which is no target either.
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
    # `Dataset.map` hands over a batch of its own kind, and stores arrays many times as fast as lists of numbers.
    return columns if type(features).__module__.startswith("datasets.") else _as_lists(columns)


def _documents(
    features: Mapping[str, Sequence[Any]], feature: str, tokenizer: Any, edges: tuple[list[int], list[int]]
) -> list[Tokens]:
    """The tokens of every document, with BOS and EOS; of one that is null, or of no token, none."""
    if feature not in features:
        raise DataError(f"the rows have no {feature!r}; they have {', '.join(features)}: name the text with feature=")
    if isinstance(features[feature], str):
        raise DataError(f"{feature} is one text, not a batch of them; call map with batched=True")
    texts = list(features[feature])
    for row, text in enumerate(texts, start=1):
        if text is not None and not isinstance(text, str):
            raise DataError(f"row {row}: {feature} must be a text, got {type(text).__name__}")
    tokens = iter(token_ids(tokenizer, [text for text in texts if text is not None]))
    nothing = np.empty(0, dtype=np.int32)
    return [edged(nothing if text is None else next(tokens), edges).astype(np.int64) for text in texts]


def _blocks(lengths: list[int], options: BlockOptions, lost: Counter[str]) -> list[list[Piece]]:
    """The pieces of every block; what is in none is counted."""
    usable = []
    for document, length in enumerate(lengths):
        reason = _why_left_out(length, options)
        if reason is None:
            usable.append(document)
        else:
            left_out(lost, reason, length, is_whole=True)
    if options.is_windowed:
        least = 1 if options.packing_strategy == WINDOW else options.min_len
        windows = windows_of(
            [lengths[document] for document in usable],
            options.max_length,
            stride=options.stride,
            num_edge=int(options.bos_on_pieces),
            least=least,
        )
        if windows and sum(piece.length for piece in windows[-1]) < least:  # the rest of one document
            left_out(lost, Reason.TOO_SHORT, windows.pop()[0].num_new, is_whole=False)
        return [[piece._replace(document=usable[piece.document]) for piece in window] for window in windows]
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


def _pieces(document: int, length: int, options: BlockOptions, lost: Counter[str]) -> list[Piece]:
    """The pieces of a document that are kept."""
    if not options.overflow:
        return [Piece(document, 0, min(length, options.max_length))]
    pieces = pieces_of(
        length,
        max_length=options.max_length,
        stride=options.stride,
        num_edge=int(options.bos_on_pieces),
        document=document,
    )
    if pieces[-1].length < options.min_len:
        left_out(lost, Reason.TOO_SHORT, pieces.pop().num_new, is_whole=False)
    return pieces


def _grouped(lengths: list[int], options: BlockOptions) -> Iterable[Iterable[int]]:
    """Which pieces share a block: a plan of them as one window, or the groups of a function."""
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
    own = tokens[piece.start : piece.end]
    return np.concatenate([bos, own]) if piece.num_edge else own


def _labels(tokens: Tokens, piece: Piece, bos: Tokens) -> Tokens:
    """Return labels that ignore context: an added BOS, and repeated tokens, which the piece before trains."""
    labels = _tokens(tokens, piece, bos).copy()
    labels[: piece.num_edge + piece.num_repeated] = IGNORED
    return labels


def _counts(
    block: list[Piece], documents: list[Tokens], num_pieces: Counter[int], options: BlockOptions
) -> Counter[str]:
    counts: Counter[str] = Counter(max_length=options.max_length)
    for piece in block:
        num_lost = 0 if options.overflow else len(documents[piece.document]) - piece.end
        counts["documents"] += piece.is_first
        counts["cut_documents"] += piece.is_first and num_pieces[piece.document] > 1
        counts["repeated_tokens"] += piece.num_repeated + piece.num_edge
        counts["truncated_documents"] += num_lost > 0
        counts["truncated_tokens"] += num_lost
    return counts
