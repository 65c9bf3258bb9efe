"""Refuse by name what earlier versions or other projects have, and say what to do instead.

An entry of an earlier version stays for one release.

>>> refuse_gone("packing_share_min", "packing_buffer")
Traceback (most recent call last):
    ...
swift_vlpack.errors.ConfigError: packing_share_min is gone: rows share media alone; leave it out

A key is what a person wrote: an option, a value of one (`option=value`), a command (`vlpack name`), or a flag of one
(`vlpack name --flag`).
"""

from __future__ import annotations

from swift_vlpack.errors import ConfigError

_CHOOSE = "name a pack with --pack N (`vlpack inspect` says which is the longest and which the emptiest)"
_SPIKES = "find the step in the loss of ms-swift's log or TensorBoard, and give --step N"
_CLEAR = "`vlpack cache clear` removes all that is remembered"
GONE = {
    "vlpack export --context_parallel_size": "lengths are written as ms-swift writes them; leave it out",
    "vlpack export --pad_samples_to": "lengths are written as ms-swift writes them; leave it out",
    "vlpack export --packed": "trainers of ms-swift pack the exported rows; leave it out",
    "vlpack export --num_ranks": "trainers of ms-swift pack the exported rows; leave it out",
    "packing_share_min": "rows share media alone; leave it out",
    "packing_strategy=window": "packing_overflow=split with packing_strategy=exact fills packs as well, and "
    "swift_vlpack.text lays documents end to end",
    "vlpack schema --stream": "a stream of text is made in Python, by TextStream and FixedBatches of swift_vlpack.text",
    "vlpack schema --output": "the schema is printed: write `> FILE` after the command",
    "vlpack completion": "the options are in `vlpack sft --help` and, for editors, in `vlpack schema`",
    "vlpack inspect --random": _CHOOSE,
    "vlpack inspect --longest": _CHOOSE,
    "vlpack inspect --emptiest": _CHOOSE,
    "vlpack inspect --loss_spikes": _SPIKES,
    "vlpack inspect --loss-spikes": _SPIKES,
    "vlpack inspect --html_mb": "a page takes packs up to 20 MB; choose them by --epoch, --pack, --step or --sample",
    "vlpack bench --seconds": "give --minutes, the longest time for all runs together",
    **{f"vlpack cache {flag}": _CLEAR for flag in ("--source", "--template", "--model_type", "--older-than")},
}
_AT_THE_TOP = "write its keys at the top level, as ms-swift takes them (docs/migrate.md)"
_REMEMBERED = "lengths are remembered by themselves, in packing_cache_dir; leave it out"
COORDEXP = {
    "global_max_length": "max_length is the longest row, and packing_length (max_length, if not given) the pack",
    "packing_avg_samples": "steps are counted from the plan; leave it out",
    "packing_wait_timeout_s": "ranks wait for each other as ddp_timeout says; leave it out",
    "packing_length_precompute_workers": "dataset_num_proc processes measure lengths",
    "packing_length_cache_persist_every": _REMEMBERED,
    "static_packing_cache": _REMEMBERED,
    "encoded_sample_cache": "no sample is kept encoded, and lengths need no pixels; leave it out",
    **dict.fromkeys(("training", "tuner", "quantization"), _AT_THE_TOP),
    "custom": "data are named by dataset and val_dataset, or by fusion_config; leave the rest out",
    "extends": "a file is whole here; write the keys of the other file into it",
}
"""Keys of CoordExp that are others here. `effective_batch_size`, `packing_buffer` and more mean the same."""


def refuse_gone(*written: str) -> None:
    """Raise `ConfigError` for the first of these words that is gone, or is another project's."""
    for what in written:
        if what in GONE:
            raise ConfigError(f"{what} is gone: {GONE[what]}")
        if what in COORDEXP:
            raise ConfigError(f"{what} is a key of CoordExp: {COORDEXP[what]}")
