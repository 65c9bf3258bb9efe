"""Turn a stream of documents into windows of one length: the tokens, and the number of the document of each token."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from swift_vlpack import envelope
from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.reasons import Reason
from swift_vlpack.text.blocks import WINDOW
from swift_vlpack.text.checks import check_whole
from swift_vlpack.text.local import LocalText, paths_in
from swift_vlpack.text.reading import Documents, ReadOptions
from swift_vlpack.text.sources import plain, shares_among_workers, source_of
from swift_vlpack.text.tokenizer import Tokens, edge_tokens, edged, token_id, token_ids, tokenizer_of
from swift_vlpack.text.windows import Bins, Fetch, Held, Sequential

MODES = SEQUENTIAL, BIN = "sequential", "bin"
KIND = "text stream"
_OF_READING = ("shuffle_buffer_size", "seed", "repeat", "rank", "num_ranks")


class Window(NamedTuple):
    """A window of `seq_len + 1` tokens: `seq_len` inputs, and the targets, which are shifted by one."""

    tokens: Tokens  # (seq_len + 1,)
    segment_ids: Tokens  # (seq_len + 1,): 1, 2, ... for the documents in order, 0 for padding


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowOptions:
    """The options of making windows, checked once."""

    seq_len: int
    packing_mode: str = SEQUENTIAL
    packing_strategy: str = "best_fit"
    packing_buffer_docs: int = 128
    packing_max_docs_per_bin: int | None = None
    add_bos: bool = True
    add_eos: bool = True
    max_doc_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.packing_mode not in MODES:
            raise ConfigError(f"packing_mode must be {SEQUENTIAL!r} or {BIN!r}, got {self.packing_mode!r}")
        names = ("seq_len", "packing_buffer_docs", "packing_max_docs_per_bin", "max_doc_tokens")
        check_whole(1, "seq_len", "packing_buffer_docs", **{name: getattr(self, name) for name in names})
        if self.packing_strategy == WINDOW:
            raise ConfigError(f"packing_strategy=window is packing_mode={SEQUENTIAL!r}; set that, or another strategy")
        if self.packing_mode == BIN:
            self.of_packer()  # raises for options that the packer refuses

    def of_packer(self) -> PackingConfig:
        """Return the options of the packer."""
        return PackingConfig(
            packing_length=self.seq_len + 1,
            packing_strategy=self.packing_strategy,
            packing_buffer=self.packing_buffer_docs,
            packing_max_samples=self.packing_max_docs_per_bin,
            packing_drop_last=False,
        )


class TextStream:
    """Iterate over windows of documents, in order (`sequential`) or packed (`bin`). Can be saved after every window.

    `source` is a path or a list of paths (of text or `.jsonl` files), the result of `local_text`, a data set of Hugging
    Face, streaming or not, a list of texts or rows, or a function that makes an iterator of texts or rows.
    """

    def __init__(  # noqa: PLR0913 - one line of options, which two frozen objects check
        self,
        source: Any,
        *,
        tokenizer: Any,
        seq_len: int,
        packing_mode: str = SEQUENTIAL,
        packing_strategy: str = "best_fit",
        packing_buffer_docs: int = 128,
        packing_max_docs_per_bin: int | None = None,
        text_key: str = "text",
        shuffle_buffer_size: int = 0,
        seed: int = 0,
        repeat: bool = False,
        add_bos: bool = True,
        add_eos: bool = True,
        max_doc_tokens: int | None = None,
        max_retries: int = 3,
        retry_delay_sec: float = 1.0,
        rank: int = 0,
        num_ranks: int = 1,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Check the options. `packing_strategy`, `packing_buffer_docs` and `packing_max_docs_per_bin` apply to bins.

        `max_doc_tokens` truncates documents, and counts the truncated tokens. A read that fails is retried up to
        `max_retries` times, after `retry_delay_sec`, then twice that, and so on. Each of `num_ranks` streams reads all
        documents and keeps its share, so that all streams together have every document once.
        """
        self.options = WindowOptions(
            seq_len=seq_len,
            packing_mode=packing_mode,
            packing_strategy=packing_strategy,
            packing_buffer_docs=packing_buffer_docs,
            packing_max_docs_per_bin=packing_max_docs_per_bin,
            add_bos=add_bos,
            add_eos=add_eos,
            max_doc_tokens=max_doc_tokens,
        )
        self.tokenizer = tokenizer_of(tokenizer)
        self.counts: Counter[str] = Counter()
        """`documents` and `tokens` that went into windows, `windows`, `padding_tokens`, and what was lost, by name."""
        self._reading = ReadOptions(
            shuffle_buffer_size=shuffle_buffer_size,
            seed=seed,
            repeat=repeat,
            max_retries=max_retries,
            retry_delay_sec=retry_delay_sec,
            rank=rank,
            num_ranks=num_ranks,
        )
        paths = paths_in(source)
        self._source = source_of(source, text_key) if paths is None else LocalText(paths, text_key=text_key)
        # A data set that `split_dataset_by_node` made yields the documents of its node alone.
        if num_ranks > 1 and (split := getattr(source, "_distributed", None)) is not None:
            raise ConfigError(
                f"the source has the documents of node {split.rank} of {split.world_size} alone "
                f"(split_dataset_by_node), and num_ranks={num_ranks} would share these again; pass the whole data set, "
                "or leave rank and num_ranks out"
            )
        self._sleep = sleep
        self._edges = edge_tokens(self.tokenizer, add_bos=add_bos, add_eos=add_eos)
        self.begin_anew()

    @property
    def pad_token_id(self) -> int:
        """Return the token that pads windows: PAD, else EOS, else 0. Padding is never trained."""
        for name in ("pad", "eos"):
            found = token_id(self.tokenizer, name)
            if found is not None:
                return found
        return 0

    def __iter__(self) -> Iterator[Window]:
        return self

    def __next__(self) -> Window:
        while (parts := self._windows.take()) is None:
            if self._is_over:
                raise StopIteration
            self._read()
        return self._window(parts)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream, as JSON."""
        return envelope.signed(plain(self.snapshot()))

    def snapshot(self) -> dict[str, Any]:
        """Return the state, neither as JSON nor signed yet, which takes longer and can wait."""
        state = {
            "documents": self._documents.snapshot(),
            "windows": self._windows.snapshot(),
            "is_over": self._is_over,
            "epoch_of_tokens": self._epoch_of_tokens,
            "counts": dict(self.counts),
        }
        return envelope.seal(KIND, self._fingerprint, state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. Raises `StateMismatch` if the source, the tokenizer or the options differ."""
        self.restore(state, is_signed=True)

    def restore(self, state: dict[str, Any], *, is_signed: bool = False) -> None:
        """Continue from a snapshot, as JSON."""
        saved = envelope.unseal(state, KIND, plain(self._fingerprint), is_signed=is_signed)
        self.begin_anew()
        self._documents.load(saved["documents"])
        self._windows.load(saved["windows"], self._fetcher())
        self._is_over, self._epoch_of_tokens = saved["is_over"], saved["epoch_of_tokens"]
        self.counts = Counter(saved["counts"])

    def share(self, worker: int, num_workers: int) -> None:
        """Limit this copy of the stream to the share of a loader worker. Raises `ConfigError` once it has been read."""
        if self._documents.is_started:
            raise ConfigError(
                f"a stream that has begun cannot be shared among {num_workers} workers: each would go on with the same "
                "documents; use num_workers=0 with prefetch=N, or load no state"
            )
        if shares_among_workers(self._source, num_workers):
            return
        reading = self._reading
        self._reading = replace(
            reading, rank=reading.rank * num_workers + worker, num_ranks=reading.num_ranks * num_workers
        )
        self.__dict__.pop("_fingerprint", None)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Go back to the first document, with counts of zero."""
        options = self.options
        self._documents = Documents(self._source, self._reading, self._sleep)
        self._windows: Sequential | Bins
        if options.packing_mode == SEQUENTIAL:
            self._windows = Sequential(options.seq_len + 1)
        else:
            self._windows = Bins(options.of_packer(), self._reading.seed)
        self._is_over = False
        self._epoch_of_tokens = 0
        self.counts = Counter()

    def _read(self) -> None:
        """Read the next document into the windows, or end them."""
        document = self._documents.read()
        if document is None:
            self._is_over = True
            self._windows.end()
            return
        tokens = self._encoded(document.text, self.counts)
        if len(tokens):
            self._epoch_of_tokens = self._documents.epoch
            self.counts.update(documents=1, tokens=len(tokens))
            self._windows.add(Held(tokens, document.address, 0, len(tokens)))
            return
        self.counts[f"{Reason.EMPTY_DOCUMENT.value}s"] += 1
        if self._documents.epoch > self._epoch_of_tokens + 1:
            raise DataError(
                f"{self._source.name}: no document of a whole epoch has a token, so repeat=True would never make a "
                "window"
            )

    def _encoded(self, text: str | None, counts: Counter[str]) -> Tokens:
        if text is None:
            return np.empty(0, dtype=np.int32)
        (ids,) = token_ids(self.tokenizer, [text])
        longest = self.options.max_doc_tokens
        if longest is not None and len(ids) > longest:
            counts.update(truncated_documents=1, truncated_tokens=len(ids) - longest)
            ids = ids[:longest]
        return edged(ids, self._edges)

    def _fetcher(self) -> Fetch:
        """Return a function that fetches and tokenizes a document by its address, once, without counting it again."""
        known: dict[str, Tokens] = {}

        def fetch(address: Any) -> Tokens:
            if str(address) not in known:
                known[str(address)] = self._encoded(self._documents.fetch(address), Counter())
            return known[str(address)]

        return fetch

    def _window(self, parts: list[Held]) -> Window:
        size = self.options.seq_len + 1
        tokens = np.full(size, self.pad_token_id, dtype=np.int32)
        segment_ids = np.zeros(size, dtype=np.int32)
        at = 0
        for number, part in enumerate(parts, start=1):
            tokens[at : at + part.length] = part.own
            segment_ids[at : at + part.length] = number
            at += part.length
        self.counts.update(windows=1, padding_tokens=size - at)
        return Window(tokens, segment_ids)

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        """Return what must be equal for a state to be loaded. Cached, because asking the source may read rows."""
        reading = {name: getattr(self._reading, name) for name in _OF_READING}
        special = [token_id(self.tokenizer, name) for name in ("bos", "eos", "pad")]
        size = len(self.tokenizer) if hasattr(self.tokenizer, "__len__") else None
        return {
            **asdict(self.options),
            **reading,
            "source": self._documents.fingerprint(),
            "tokenizer": [type(self.tokenizer).__name__, size, *special],
        }
