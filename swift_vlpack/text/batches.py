"""Make batches of one shape, `(accumulation, batch, length)`, for compiled training steps."""

from __future__ import annotations

import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from swift_vlpack import envelope
from swift_vlpack.reasons import Reason
from swift_vlpack.text.checks import check_whole
from swift_vlpack.text.collator import MASK, PackedBatch, batch_of
from swift_vlpack.text.documents import IGNORED
from swift_vlpack.text.sources import plain
from swift_vlpack.text.stream import TextStream, Window
from swift_vlpack.text.tokenizer import token_id

KIND = "fixed batches"
FixedBatch = dict[str, NDArray[Any]]


class FixedBatches:
    """Batches of the windows of a stream, each with the same shapes and dtypes; an iterator, and a context manager.

    `input_ids`, `labels` (already shifted) and `segment_ids` are int32, `attention_mask` is bool.

    They go into `DataLoader(batches, batch_size=None)`, whose workers share the documents, and, through `model_inputs`,
    into `transformers.Trainer`.
    """

    def __init__(  # noqa: PLR0913 - shape, end, labels and prefetch
        self,
        stream: TextStream,
        *,
        batch_size: int,
        accumulation: int = 1,
        drop_last: bool = False,
        mask_boundary_loss: bool = True,
        train_on_eos: bool = True,
        prefetch: int = 0,
    ) -> None:
        """Fill the last batch up with rows of padding, or drop it under `drop_last`; either is counted.

        `mask_boundary_loss`: the first token of a document is no target. `train_on_eos=False`: nor is EOS. `prefetch`
        batches are made ahead by a thread; the stream then belongs to it, and the state to ask for is this object's.
        """
        check_whole(1, "batch_size", "accumulation", batch_size=batch_size, accumulation=accumulation)
        check_whole(0, "prefetch", prefetch=prefetch)
        self._stream = stream
        _be_known_to_torch()
        self.shape = (accumulation, batch_size, stream.options.seq_len)
        self._maker = _Maker(stream, self.shape, drop_last, mask_boundary_loss, train_on_eos)
        self._prefetch = prefetch
        self._prefetcher: Prefetcher | None = None
        self._consumed: dict[str, Any] | None = None
        """With a prefetch thread, the state after the last batch that was handed out; otherwise None."""
        self._must_go_back = False
        """True if a closed thread left the stream ahead of `_consumed`: the next batch moves the stream back first."""
        self._is_shared = False
        """True in a worker's copy once its stream is limited to the worker's share of the documents."""

    def __iter__(self) -> Iterator[FixedBatch]:
        worker = _worker()
        if worker is not None and not self._is_shared:
            self._stream.share(*worker)
            self._is_shared = True
        return self

    def __next__(self) -> FixedBatch:
        if self._must_go_back:
            self._maker.load(plain(self._consumed)["state"])
            self._must_go_back = False
        if not self._prefetch:
            return self._maker.next()
        if self._prefetcher is None:
            self._consumed = self._maker.snapshot()
            self._prefetcher = Prefetcher(self._maker.next_with_snapshot, self._prefetch)
        try:
            batch, self._consumed = self._prefetcher.next()
        except StopIteration as end:
            self._consumed = end.value
            raise StopIteration from None
        made: FixedBatch = batch
        return made

    @property
    def counts(self) -> dict[str, Any]:
        """Return the stream's counts, `batches`, `padding_rows` and what was dropped, up to the last batch handed out.

        `utilisation` is the share of places in these batches that hold a token of a document.
        """
        state = self._state()["state"]
        counts = {**state["stream"]["state"]["counts"], **state["counts"]}
        size, dropped = self.shape[2] + 1, Reason.INCOMPLETE_BATCH.value
        num_tokens = counts.get("windows", 0) * size - counts.get("padding_tokens", 0)
        num_places = counts.get("batches", 0) * self.shape[0] * self.shape[1] * size
        num_used = num_tokens - counts.get(f"{dropped}_tokens", 0)
        return {**counts, "utilisation": num_used / num_places if num_places else 0.0}

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch handed out, as JSON; batches that were only made ahead do not count."""
        state: dict[str, Any] = plain(self._state())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which the state was taken; the batch size may differ."""
        saved = envelope.unseal(state, KIND, {}, shape=_STATE)
        self.close()
        self._must_go_back, self._consumed = False, None
        self._maker.load(saved)

    def close(self) -> None:
        """Stop the thread. Iterating again continues after the last batch that was handed out."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
            self._must_go_back = True  # not moved back here, because closing must work when the source fails

    def __enter__(self) -> FixedBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _state(self) -> dict[str, Any]:
        return self._maker.snapshot() if self._consumed is None else self._consumed


def model_inputs(batches: FixedBatch | Sequence[FixedBatch]) -> PackedBatch:
    """Turn fixed batches into `(rows, length)` tensors for a model of transformers: a `collate_fn`, a `data_collator`.

    `shift_labels` are the targets as they are: a model would shift `labels` once more, and lose the last of each row.
    Positions begin again with every document, which keeps documents apart on `sdpa`, `eager` and `vlpack` attention
    without a cache; the 2-D mask is beside the inputs, as `PackedCollator` has it.
    """
    given = [batches] if isinstance(batches, Mapping) else list(batches)
    rows = {
        name: np.concatenate([np.reshape(np.asarray(batch[name]), (-1, np.shape(batch[name])[-1])) for batch in given])
        for name in ("input_ids", "labels", "segment_ids", "attention_mask")
    }
    labels = rows["labels"].astype(np.int64)
    arrays = {
        "input_ids": rows["input_ids"].astype(np.int64),
        "labels": labels,
        "shift_labels": labels,
        "position_ids": _positions(rows["segment_ids"]),
        MASK: rows["attention_mask"].astype(np.int64),
    }
    return batch_of(arrays, is_packed=True, return_tensors="pt")


def _positions(segments: NDArray[Any]) -> NDArray[np.int64]:
    """Return positions that restart wherever the segment changes."""
    at = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
    begins = np.ones(segments.shape, dtype=bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return at - np.maximum.accumulate(np.where(begins, at, 0), axis=1)


def _be_known_to_torch() -> None:
    """Let a `DataLoader` see that these are batches in order; torch itself is never imported for it."""
    if sys.modules.get("torch") is not None:
        from torch.utils.data import IterableDataset

        IterableDataset.register(FixedBatches)


def _worker() -> tuple[int, int] | None:
    """Return the number of this worker of a `DataLoader`, and how many there are."""
    if sys.modules.get("torch") is None:
        return None
    from torch.utils.data import get_worker_info

    info = get_worker_info()
    return None if info is None else (info.id, info.num_workers)


class _Maker:
    """Makes the batches; knows nothing of threads."""

    def __init__(
        self,
        stream: TextStream,
        shape: tuple[int, int, int],
        drop_last: bool,
        mask_boundary_loss: bool,
        train_on_eos: bool,
    ) -> None:
        self._stream = stream
        self._shape = shape
        self._drop_last = drop_last
        self._mask_boundary_loss = mask_boundary_loss
        self._untrained = None if train_on_eos else token_id(stream.tokenizer, "eos")
        self._counts: Counter[str] = Counter()

    def next(self) -> FixedBatch:
        """Return the next batch. Raises `StopIteration` at the end."""
        size = self._shape[0] * self._shape[1]
        windows: list[Window] = []
        for window in self._stream:
            windows.append(window)
            if len(windows) == size:
                break
        if not windows or (len(windows) < size and self._drop_last):
            self._drop(windows)
            raise StopIteration
        self._counts.update(batches=1, padding_rows=size - len(windows))
        return self._batch(windows)

    def next_with_snapshot(self) -> tuple[FixedBatch, dict[str, Any]]:
        """Return the next batch and the state after it. At the end, `StopIteration` has the state as its value."""
        try:
            return self.next(), self.snapshot()
        except StopIteration:
            raise StopIteration(self.snapshot()) from None

    def snapshot(self) -> dict[str, Any]:
        """Return the state before it is made JSON by `plain`, which takes longer and can wait."""
        state = {"stream": self._stream.snapshot(), "counts": dict(self._counts)}
        return envelope.seal(KIND, {}, state)

    def load(self, saved: dict[str, Any]) -> None:
        """Continue from a state."""
        self._stream.load_state_dict(saved["stream"])
        self._counts = Counter(saved["counts"])

    def _drop(self, windows: list[Window]) -> None:
        if windows:
            num_tokens = int(sum((window.segment_ids != 0).sum() for window in windows))
            name = Reason.INCOMPLETE_BATCH.value
            self._counts.update({f"{name}_rows": len(windows), f"{name}_tokens": num_tokens})

    def _batch(self, windows: list[Window]) -> FixedBatch:
        num_rows, seq_len = self._shape[0] * self._shape[1], self._shape[2]
        tokens = np.full((num_rows, seq_len + 1), self._stream.pad_token_id, dtype=np.int32)
        segments = np.zeros((num_rows, seq_len + 1), dtype=np.int32)
        for row, window in enumerate(windows):
            tokens[row], segments[row] = window
        inputs, targets = segments[:, :-1], segments[:, 1:]
        labels = tokens[:, 1:].copy()
        labels[targets == 0] = IGNORED
        if self._mask_boundary_loss:
            labels[targets != inputs] = IGNORED
        if self._untrained is not None:
            labels[labels == self._untrained] = IGNORED
        fields = {
            "input_ids": tokens[:, :-1],
            "labels": labels,
            "attention_mask": inputs != 0,
            "segment_ids": inputs,
        }
        return {name: np.ascontiguousarray(field).reshape(self._shape) for name, field in fields.items()}


_STATE = {"stream": envelope.Named(None), "counts": envelope.Named(envelope.Whole())}


# -- the thread that works ahead --------------------------------------------------------------------------------------


class _Shared:
    """The state that the thread shares with its owner, to which it has no reference, so that it can be collected."""

    def __init__(self, make: Callable[[], Any], depth: int) -> None:
        self.make = make
        self.depth = depth
        self.made: deque[Any] = deque()
        self.error: BaseException | None = None
        self.is_stopped = False
        self.changed = threading.Condition()

    def run(self) -> None:
        """Make items until one raises (the end does), or the owner stops the thread."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: len(self.made) < self.depth or self.is_stopped)
                if self.is_stopped:
                    return
            try:
                made = self.make()
            except BaseException as error:
                with self.changed:
                    self.error = error
                    self.changed.notify_all()
                return
            with self.changed:
                self.made.append(made)
                self.changed.notify_all()

    def stop(self) -> None:
        """Let the thread end at its next step."""
        with self.changed:
            self.is_stopped = True
            self.changed.notify_all()


class Prefetcher:
    """Calls `make` ahead of `next`, at most `depth` times; `make` ends it by `StopIteration`."""

    def __init__(self, make: Callable[[], Any], depth: int) -> None:
        self._shared = _Shared(make, depth)
        self._thread = threading.Thread(target=self._shared.run, name="vlpack-prefetch", daemon=True)
        self._thread.start()
        self._end = finalize(self, self._shared.stop)

    def next(self) -> Any:
        """Return the oldest item that was made. Raises the error of the thread, with its traceback."""
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(lambda: shared.made or shared.error is not None)
            if shared.made:
                made = shared.made.popleft()
                shared.changed.notify_all()
                return made
            assert shared.error is not None
            raise shared.error

    def close(self) -> None:
        """End the thread and wait until it has; it finishes what it is making."""
        self._end()
        self._thread.join()
