"""The laws: what must hold for every packer and every plan, whatever the input."""

from __future__ import annotations

import json
from collections.abc import Iterable

from swift_vlpack import Item, Pack, Packer, PackingConfig


def assert_pack_is_legal(pack: Pack, config: PackingConfig) -> None:
    """Capacity and caps, for a pack of two or more (PACK-1)."""
    assert pack.items, "an empty pack"
    if len(pack.items) == 1:
        return
    assert pack.num_tokens <= config.packing_length
    for used, cap in (
        (len(pack.items), config.packing_max_samples),
        (sum(item.images for item in pack.items), config.packing_max_images),
        (sum(item.patches for item in pack.items), config.packing_max_patches),
    ):
        assert cap is None or used <= cap


class Ledger:
    """Follows every item through a packer: in once, out once, held in between (PACK-2)."""

    def __init__(self, config: PackingConfig, *, seed: int = 0) -> None:
        self.packer = Packer(config, seed=seed, on_drop=lambda item, _: self.inside.remove(item))
        self.inside: set[Item] = set()
        self.packs: list[Pack] = []

    def push(self, item: Item) -> None:
        self.inside.add(item)
        self._account(self.packer.push(item))

    def flush(self) -> None:
        self._account(self.packer.flush())

    def _account(self, packs: list[Pack]) -> None:
        for pack in packs:
            assert_pack_is_legal(pack, self.packer.config)
            self.inside.difference_update(pack.items)
        self.packs += packs
        packer = self.packer
        assert self.inside == set(packer.held)
        assert packer.num_held == len(self.inside)
        assert packer.num_emitted == sum(len(pack.items) for pack in self.packs)
        assert packer.num_pushed == packer.num_emitted + packer.num_held + sum(packer.num_dropped.values())


def run(packer: Packer, items: Iterable[Item]) -> list[Pack]:
    """Push everything, then flush."""
    return [pack for item in items for pack in packer.push(item)] + packer.flush()


def assert_resumes_at_every_step(config: PackingConfig, items: list[Item], *, seed: int = 0) -> None:
    """Every state, through JSON, into a fresh packer, has the same future (PACK-10)."""
    packer = Packer(config, seed=seed)
    states, emitted_by_step = [json.dumps(packer.state())], []
    for item in items:
        emitted_by_step.append(packer.push(item))
        states.append(json.dumps(packer.state()))
    emitted_by_step.append(packer.flush())
    for step, state in enumerate(states):
        again = Packer(config, seed=seed)
        again.load(json.loads(state))
        assert json.dumps(again.state()) == state, f"step {step}: loading changed the state"
        future = [again.push(item) for item in items[step:]]
        future.append(again.flush())
        assert future == emitted_by_step[step:], f"step {step}: a different future"
        assert again.num_dropped == packer.num_dropped, f"step {step}: different drops"
