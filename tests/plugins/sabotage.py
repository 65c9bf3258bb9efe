"""What `--external_plugins` loads to train packs wrongly, by the word in the file SABOTAGE, which no key knows of."""

import functools
import os
from pathlib import Path

import torch
import torch.distributed as dist
from swift.template import Template
from swift.template.templates.qwen import Qwen2VLTemplate
from torch.utils.data import get_worker_info

from swift_vlpack.feed.collate import Collator


def sabotage():
    return Path(os.environ["SABOTAGE"]).read_text()


def wrapped(owner, name, make):
    """Put another method in the place of one. Loading the plugin again changes nothing more."""
    right = getattr(owner, name)
    right = getattr(right, "__wrapped__", right)
    setattr(owner, name, functools.wraps(right)(make(right)))


def over_the_row(packing_row):
    """Positions that go on over the samples."""

    def changed(self, row):
        packed = packing_row(self, row)
        if sabotage() == "positions":
            positions = packed["position_ids"]
            packed["position_ids"] = torch.arange(positions.shape[-1]).expand_as(positions).clone()
        return packed

    return changed


def politer(encode):
    """A word more in every question."""

    def changed(self, inputs, *args, **kwargs):
        if sabotage() == "lengths":
            first, *others = inputs["messages"]
            inputs = {**inputs, "messages": [{**first, "content": first["content"] + " please"}, *others]}
        return encode(self, inputs, *args, **kwargs)

    return changed


def one_late(sequence):
    """Labels one token late, where the last rank's dataloader workers collate."""

    def changed(self, pack):
        made = sequence(self, pack)
        # Not by the variable RANK: what a plugin reads of the environment is part of the key of lengths.
        is_last = dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1
        if sabotage() == "labels" and get_worker_info() is not None and is_last:
            made["labels"] = made["labels"].roll(1, dims=-1)
        return made

    return changed


wrapped(Collator, "sequence", one_late)
wrapped(Qwen2VLTemplate, "packing_row", over_the_row)
wrapped(Template, "encode", politer)
