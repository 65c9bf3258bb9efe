"""Hold the encoded rows of a stream that wait for a pack, and join rows that begin alike into units.

    row 7 with an image  ->  waits
    row 9 with the same  ->  joins row 7, if both fit into a pack: one unit, one item of the packer

A row finds other rows by the keys of its `Beginning`, which has the keys of most media first. Before a row joins, its
tokens, types, grids and decoded pixels are compared, so a unit of a stream never comes apart later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import StateMismatch
from swift_vlpack.feed.units import Unit, unit_of, why_apart, why_no_prefix
from swift_vlpack.plan.items import Item, ItemId, Size
from swift_vlpack.rows.beginnings import Beginning
from swift_vlpack.rows.contents import size_of
from swift_vlpack.rows.families import MediaTokens
from swift_vlpack.rows.prefixes import (
    CannotBeDivided,
    Prefix,
    are_equal,
    has_media_after,
    media_in_prefix,
    without_pixels,
)
from swift_vlpack.rows.samples import Encoded, SampleError, SampleId
from swift_vlpack.rows.shared import Alone
from swift_vlpack.rows.to_encode import RowToEncode

NOTHING_SHARED = Beginning()
_NUM_COMPARED = 8
"""First rows of a reader that are encoded both ways. Each costs a full encoding; a wrong rule shows in most rows."""
Fits = Callable[[ItemId, Size], bool]


@dataclass(slots=True)
class Held:
    """The samples of one item of the packer: a single sample, or a unit of several."""

    unit: Unit
    ids: list[ItemId]
    """The ids of the samples, in the order in which they came. The first is also the id of the item."""
    lengths: list[int]
    """The tokens of each sample alone."""
    beginning: Beginning = NOTHING_SHARED
    why_alone: Alone = Alone.NOTHING_SHARED
    """The cause if the sample is alone although another waiting sample has its medium."""
    errors: list[SampleError] = field(default_factory=list)
    """Errors of samples that could be encoded before the run was interrupted, but not now."""

    @property
    def alone(self) -> list[tuple[SampleId, Alone]]:
        """Return the sample with its cause, if it is alone although another sample has its medium; else nothing."""
        if not self.why_alone or len(self.ids) > 1:
            return []
        return [(sample["sample_id"], self.why_alone) for sample in self.unit.samples]

    def can_have(self, prefix: Prefix) -> bool:
        """Tell whether a branch with this prefix may join: the first branch decides the prefix of a unit."""
        return self.unit.prefix in (0, prefix.length)

    def in_pack(self) -> list[Encoded]:
        """Return the samples as a pack has them: the first with the pixels, the others as branches."""
        return self.unit.in_pack(list(range(len(self.unit.samples))))


class BranchEncoder:
    """Encodes rows without decoding their media, because a waiting row brings the pixels.

    The first `_NUM_COMPARED` rows are also encoded whole, and compared.
    """

    def __init__(self) -> None:
        self.can_be_encoded = True
        """False after a row was not what its header or its head promised: then all rows are encoded whole."""
        self._num_compared = 0

    def of(self, row: RowToEncode) -> Encoded | None:
        """Encode a row without its pixels, or whole while rows are compared. None: the caller must encode it whole."""
        branch = row.branch()
        if branch is None or self._num_compared == _NUM_COMPARED:
            return branch
        whole, has_drawn = row.whole()
        if isinstance(whole, SampleError):
            return None
        self._num_compared += 1
        self.can_be_encoded = not has_drawn and are_equal(without_pixels(whole), branch)
        return whole if self.can_be_encoded else None


class Waiting:
    """Holds the samples of a reader that wait for a pack, by the items of the packer."""

    def __init__(self, config: PackingConfig, tokens: MediaTokens) -> None:
        """Read the limits of a unit from the options. `tokens` tell media from text."""
        self._tokens = tokens
        self._most = config.packing_share_max
        self._capacity = config.packing_length
        self._held: dict[ItemId, Held] = {}
        self._by_key: dict[bytes, list[ItemId]] = {}
        self._by_head: dict[bytes, list[ItemId]] = {}
        self._by_medium: dict[bytes, list[ItemId]] = {}
        self.refused: ItemId | None = None
        """The sample that was refused last: it has the key of another one with room for it, but differs."""

    def __getitem__(self, key: ItemId) -> Held:
        return self._held[key]

    @property
    def held(self) -> Collection[Held]:
        """Return the samples and units of all items."""
        return self._held.values()

    @property
    def units(self) -> list[Held]:
        """Return the items with several samples."""
        return [held for held in self._held.values() if len(held.ids) > 1]

    def add(self, key: ItemId, sample: Encoded, beginning: Beginning) -> None:
        """Let a sample wait by itself; later samples may join it."""
        held = Held(Unit([sample]), [key], [int(sample["length"])], beginning)
        self._say_why_alone(held, is_refused=self.refused == key)
        self._hold(key, held)

    def join(self, key: ItemId, sample: Encoded, beginning: Beginning, fits: Fits) -> tuple[ItemId, Size] | None:
        """Let a sample join the first item that begins alike and has room.

        `fits` tells whether an item can grow by a size. Returns the item and the size that the sample adds to it, or
        None if the sample joins no item.
        """
        for digest, counted in beginning.prefixes.items():
            if (items := self._by_key.get(digest)) and (joined := self._joined(items, key, sample, counted(), fits)):
                return joined
        return None

    def join_undecoded(
        self, key: ItemId, head: bytes, encode: Callable[[], Encoded | None], fits: Fits
    ) -> tuple[ItemId, Size] | None:
        """Do as `join` for a row that is not encoded yet. Calls `encode` only if an item with the same head waits."""
        items = self._by_head.get(head)
        if not items:
            return None
        prefix = next(iter(self._held[items[0]].beginning.prefixes.values()))()
        items = [item for item in items if self._held[item].can_have(prefix)]
        # A branch has at least one token of its own.
        if not any(fits(item, Size(1)) for item in items) or (sample := encode()) is None:
            return None
        if has_media_after(sample, prefix.length, self._tokens):  # media after the prefix have to be decoded
            return None
        return self._joined(items, key, sample, prefix, fits)

    def _joined(
        self, items: Sequence[ItemId], key: ItemId, sample: Encoded, prefix: Prefix, fits: Fits
    ) -> tuple[ItemId, Size] | None:
        length = int(sample["length"])
        if not prefix.length or length >= self._capacity:
            return None
        own = own_size(sample, prefix, self._tokens)
        for item in items:
            held = self._held[item]
            if not held.can_have(prefix) or not fits(item, own):
                continue
            if _branches(held, sample, prefix, self._tokens):
                held.ids.append(key)
                held.lengths.append(length)
                if len(held.ids) >= self._most:
                    self.unlist([item])
                return item, own
            self.refused = key
        return None

    def restore(
        self, items: Sequence[Item], samples: Iterable[tuple[Encoded | SampleError, Beginning]], why_alone: Alone
    ) -> None:
        """Hold the samples of one saved item, encoded again. `items` has the saved size of each sample alone.

        Raises:
            StateMismatch: The samples no longer begin alike.
        """
        ids, lengths = [item.id for item in items], [item.length for item in items]
        held = Held(Unit([]), ids, lengths, why_alone=why_alone)
        for sample, beginning in samples:
            if isinstance(sample, SampleError):
                held.errors.append(sample)
            elif not held.unit.samples:
                held.unit, held.beginning = Unit([sample]), beginning
            elif not any(
                held.can_have(counted()) and _branches(held, sample, counted(), self._tokens)
                for digest, counted in beginning.prefixes.items()
                if digest in held.beginning.prefixes
            ):
                raise StateMismatch(
                    f"{sample['sample_id']} shared its first tokens with {held.unit.samples[0]['sample_id']} when the "
                    "state was saved, and does not now: data or template have changed. Give those of the saved run, or "
                    "start without --resume_from_checkpoint"
                )
        self._hold(items[0].id, held)

    def take(self, item: ItemId) -> Held:
        """Remove an item, and return its samples."""
        self.unlist([item])
        return self._held.pop(item)

    def unlist(self, items: Iterable[ItemId]) -> None:
        """Let no further sample find these items."""
        for item in items:
            for places, digest in self._places(self._held[item].beginning):
                if item in (found := places.get(digest, [])):
                    found.remove(item)
                    if not found:
                        del places[digest]

    def _hold(self, item: ItemId, held: Held) -> None:
        self._held[item] = held
        for places, digest in self._places(held.beginning) if len(held.ids) < self._most else ():
            places.setdefault(digest, []).append(item)

    def _places(self, begins: Beginning) -> list[tuple[dict[bytes, list[ItemId]], bytes]]:
        """Return every index and key under which an item is found: by prefix, by head, and by each medium."""
        places = [(self._by_medium, medium) for medium in set(begins.media)]
        places += [(self._by_key, digest) for digest in begins.prefixes]
        return places + ([(self._by_head, begins.head)] if begins.head else [])

    def _say_why_alone(self, held: Held, *, is_refused: bool) -> None:
        """Note why a sample does not join waiting samples with its medium. Notes the cause in these samples, too."""
        begins, is_too_long = held.beginning, held.lengths[0] >= self._capacity
        for item in set().union(*(self._by_medium.get(medium, ()) for medium in begins.media)):
            other = self._held[item]
            if begins.prefixes.keys() & other.beginning.prefixes.keys():
                # They could share. Mostly the pack or the unit would be too long, which is no cause to remove.
                why = Alone.TOO_LONG if is_too_long else Alone.DIFFERS if is_refused else Alone.NOTHING_SHARED
                held.why_alone = held.why_alone or why
                continue
            differ = Alone.OTHER_TOKENS if other.beginning.media == begins.media else Alone.OTHER_MEDIA
            for one in (held, other):
                one.why_alone = one.why_alone or one.beginning.cause or differ


def own_size(sample: Encoded, prefix: Prefix, tokens: MediaTokens) -> Size:
    """Return the size that a sample adds to a unit with this prefix."""
    size = size_of(sample)
    num_own = size.length - prefix.length
    if not has_media_after(sample, prefix.length, tokens):
        return Size(num_own)
    return Size(num_own, size.images - prefix.images, size.patches - prefix.patches)


def _branches(held: Held, sample: Encoded, prefix: Prefix, tokens: MediaTokens) -> bool:
    """Make a sample a branch of a unit if it begins like the unit. Returns True if it is a branch now."""
    unit = held.unit
    try:
        if not unit.prefix:  # this is the first branch, which decides the prefix
            first = unit.samples[0]
            if not prefix.length or why_no_prefix(first, prefix.length) is not None:
                return False
            unit = unit_of(first, prefix.length, media_in_prefix(first, prefix.length, tokens))
        inside = media_in_prefix(sample, prefix.length, tokens)
    except CannotBeDivided:
        return False
    if why_apart(sample, unit, inside) is not None:
        return False
    unit.add(sample, inside)
    held.unit = unit
    return True
