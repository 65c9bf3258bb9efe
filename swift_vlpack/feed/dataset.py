"""PackingDataset: packs of encoded samples, planned ahead of time or made as rows come.

  PlannedPackingDataset    map-style: `len()` packs this epoch, `[i]` encodes the samples of pack i and no others
  BufferedPackingDataset   iterable: encodes row by row, holds `packing_buffer` of them, yields packs as they fill

Both yield `PackedSamples`, a list of encoded samples for the template's own collator.
"""

from __future__ import annotations

from typing import Any

from swift_vlpack.config import PackingConfig, is_planned
from swift_vlpack.feed.buffered import BufferedPackingDataset
from swift_vlpack.feed.planned import PlannedPackingDataset
from swift_vlpack.rows.encoder import Template


def PackingDataset(
    dataset: Any, template: Template, config: PackingConfig, **options: Any
) -> PlannedPackingDataset | BufferedPackingDataset:
    """Packs of a list of rows, a FusionCaptionDataset or a stream, in the form that data and `packing_mode` ask for.

    Sets `template.packing` and `padding_free`. `seed` and `num_ranks` go for both forms; `num_epochs`, or `num_packs`
    where a run is bounded by steps, for planned packs; `rank` for buffered ones.
    """
    planned = is_planned(config, is_sized=hasattr(dataset, "__len__"))
    return (PlannedPackingDataset if planned else BufferedPackingDataset)(dataset, template, config, **options)
