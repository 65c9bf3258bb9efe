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
    """Iterate over batches of a stream's windows, all of the same shapes and dtypes; also a context manager.

    `input_ids`, `labels` (already shifted) and `segment_ids` are int32, `attention_mask` is bool.

    A pass begins anew after one that ended, and goes on after one that was left. Pass an instance to
    `DataLoader(batches, batch_size=None)`, whose workers share the documents, or, with `model_inputs` as collator, to
    `transformers.Trainer`.
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
        """Fill up the last batch with rows of padding, or drop it under `drop_last`; both are counted.

        `mask_boundary_loss`: do not train the first token of a document. `train_on_eos=False`: do not train EOS.
        `prefetch`: let a thread make this many batches ahead. The thread then owns the stream, so save the state of
        this object and not that of the stream.
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
        """True if a closed thread left the stream ahead of `_consumed`. The next batch first moves the stream back."""
        self._is_shared = False
        """True in a worker's copy once its stream is limited to the worker's share of the documents."""
        self._is_over = False
        """True once the last batch of a pass was handed out. The next pass begins anew."""

    def __iter__(self) -> Iterator[FixedBatch]:
        worker = _worker()
        if worker is not None and not self._is_shared:
            self._stream.share(*worker)
            self._is_shared = True
        if self._is_over:
            self._begin_anew()
        return self

    def _begin_anew(self) -> None:
        self.close()
        self._is_over = self._must_go_back = False
        self._consumed = None
        self._maker.begin_anew()

    def __next__(self) -> FixedBatch:
        if self._must_go_back:
            self._maker.load(plain(self._consumed)["state"])
            self._must_go_back = False
        try:
            return self._next()
        except StopIteration:
            self._is_over = True
            raise

    def _next(self) -> FixedBatch:
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
        """Return the counts up to the last batch handed out: those of the stream, `batches`, `padding_rows`, drops.

        `utilisation` is the share of token places in these batches that hold a token of a document.
        """
        state = self._state()["state"]
        counts = {**state["stream"]["state"]["counts"], **state["counts"]}
        size, dropped = self.shape[2] + 1, Reason.INCOMPLETE_BATCH.value
        num_tokens = counts.get("windows", 0) * size - counts.get("padding_tokens", 0)
        # Count rows and not batches, which may have had another shape before a resume.
        num_rows = counts.get("windows", 0) - counts.get(f"{dropped}_rows", 0) + counts.get("padding_rows", 0)
        num_places = num_rows * size
        num_used = num_tokens - counts.get(f"{dropped}_tokens", 0)
        return {**counts, "utilisation": num_used / num_places if num_places else 0.0}

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch handed out, as JSON. Prefetched batches are not part of it."""
        return envelope.signed(plain(self._state()))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which the state was taken. The batch size may differ, the labels may not."""
        saved = envelope.unseal(state, KIND, self._maker.objective, is_signed=True)
        self.close()
        self._must_go_back, self._is_over, self._consumed = False, False, None
        self._maker.load(saved)

    def close(self) -> None:
        """Stop the prefetch thread. Iterating again continues after the last batch that was handed out."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
            self._must_go_back = True  # move the stream back later: `close` has to work even if the source fails

    def __enter__(self) -> FixedBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _state(self) -> dict[str, Any]:
        return self._maker.snapshot() if self._consumed is None else self._consumed


def model_inputs(batches: FixedBatch | Sequence[FixedBatch]) -> PackedBatch:
    """Turn fixed batches into `(rows, length)` tensors for a model of transformers, as a collator does.

    `shift_labels` has the targets unchanged: the model would shift `labels` a second time and lose the last target of
    each row. Positions restart with every document. Without a cache, that keeps documents apart on `sdpa`, `eager` and
    `vlpack` attention. The 2-D mask is kept apart from the inputs (`PackedBatch` says why).
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
    """Register `FixedBatches` as an `IterableDataset`, so that `DataLoader` iterates it; only if torch is imported."""
    if sys.modules.get("torch") is not None:
        from torch.utils.data import IterableDataset

        IterableDataset.register(FixedBatches)


def _worker() -> tuple[int, int] | None:
    """Return (number of this `DataLoader` worker, number of workers); None outside of a worker."""
    if sys.modules.get("torch") is None:
        return None
    from torch.utils.data import get_worker_info

    info = get_worker_info()
    return None if info is None else (info.id, info.num_workers)


class _Maker:
    """Make batches of a stream's windows, and the state after each. Knows nothing of threads."""

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
        self.objective = {"mask_boundary_loss": mask_boundary_loss, "train_on_eos": train_on_eos}
        """The options that decide what is trained. A state of other ones is refused."""
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
        """Return the state, neither as JSON nor signed yet, which takes longer and can wait."""
        state = {"stream": self._stream.snapshot(), "counts": dict(self._counts)}
        return envelope.seal(KIND, self.objective, state)

    def load(self, saved: dict[str, Any]) -> None:
        """Restore a state that `snapshot` returned."""
        self._stream.restore(saved["stream"])
        self._counts = Counter(saved["counts"])

    def begin_anew(self) -> None:
        """Go back to the first document, with counts of zero."""
        self._stream.begin_anew()
        self._counts = Counter()

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


# -- the prefetch thread ----------------------------------------------------------------------------------------------


class _Shared:
    """The state that the prefetch thread shares with its `Prefetcher`.

    The thread has no reference to the `Prefetcher`, so that an abandoned one is garbage-collected and stops the thread.
    """

    def __init__(self, make: Callable[[], Any], depth: int) -> None:
        self.make = make
        self.depth = depth
        self.made: deque[Any] = deque()
        self.error: BaseException | None = None
        self.is_stopped = False
        self.changed = threading.Condition()

    def run(self) -> None:
        """Make items until `make` raises, as it does at the end, or until the owner stops the thread."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: len(self.made) < self.depth or self.is_stopped)
                if self.is_stopped:
                    return
            try:
                made = self.make()
            except BaseException as error:  # `next` raises it in the consumer; here it would end the thread unseen
                with self.changed:
                    self.error = error
                    self.changed.notify_all()
                return
            with self.changed:
                self.made.append(made)
                self.changed.notify_all()

    def stop(self) -> None:
        """Tell the thread to end after the item that it is making."""
        with self.changed:
            self.is_stopped = True
            self.changed.notify_all()


class Prefetcher:
    """Call `make` in a thread, up to `depth` items ahead of `next`. `make` ends the items with `StopIteration`."""

    def __init__(self, make: Callable[[], Any], depth: int) -> None:
        self._shared = _Shared(make, depth)
        self._thread = threading.Thread(target=self._shared.run, name="vlpack-prefetch", daemon=True)
        self._thread.start()
        self._end = finalize(self, self._shared.stop)

    def next(self) -> Any:
        """Return the oldest item. After the last one, raise the error that ended the thread, with its traceback."""
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
        """End the thread, and wait until it has finished the item that it is making."""
        self._end()
        self._thread.join()
