"""Pack rows for any trainer: `PackingDataset` plans packs of rows that have a length, and streams other rows.

  PlannedPackingDataset    map-style: `len()` is the packs of this epoch, `[i]` encodes the samples of pack i only
  StreamedPackingDataset   iterable: encodes row by row, holds `packing_buffer` samples, yields packs as they fill

Both yield `PackedSamples`, a list of encoded samples for the template's own collator.
"""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any

from swift_vlpack.config import PackingConfig, is_planned, need_config
from swift_vlpack.errors import ConfigError
from swift_vlpack.feed.planned import PlannedPackingDataset, alike_on_ranks
from swift_vlpack.feed.streamed import StreamedPackingDataset
from swift_vlpack.rows.encoder import Template
from swift_vlpack.words import did_you_mean


def PackingDataset(
    dataset: Any, template: Template | None, config: PackingConfig, **options: Any
) -> PlannedPackingDataset | StreamedPackingDataset:
    """Pack a list, a data set, a stream or a mix of sources, in the form that the data and `packing_mode` require.

    Rows are of ms-swift's formats, or samples that are encoded already (`input_ids`), which need no template. A method
    `set_epoch` of a data set is called before an epoch is planned. Sets `template.packing` and `padding_free`.

    Both forms take `seed` and `num_ranks`. Planned packs also take `lengths`, the tokens of each row, and `num_epochs`,
    or `num_packs` if steps bound the run; streamed packs take `rank`.
    """
    need_config(config)
    planned = is_planned(config, is_sized=hasattr(dataset, "__len__"))
    kind = PlannedPackingDataset if planned else StreamedPackingDataset
    known = set(signature(kind).parameters)
    for name in options:
        if name not in known:
            packs = "planned" if planned else "streamed"
            raise ConfigError(f"{packs} packs have no option {name}{did_you_mean(name, known)}")
    make: Any = partial(kind, dataset, template, config, **options)
    return alike_on_ranks(options.get("num_ranks", 1), make) if planned else make()
