"""One progress bar for the passes of all sources of a run."""

from types import SimpleNamespace

import numpy as np
import pytest

from swift_vlpack import PackingConfig
from swift_vlpack.host.pipeline import measured_rows
from swift_vlpack.rows.source import RowSource
from tests.data_rows import text_row
from tests.lengths.test_progress import lines

pytestmark = pytest.mark.usefixtures("no_other_bars")


def test_all_sources_are_measured_with_one_bar(tiny, tmp_path, capsys):
    """CLI-15: the real pass over three sources; the second start only looks up."""
    template = tiny("qwen2_5_vl").template
    sources = [RowSource(name=name, rows=[text_row(f"{name} {n}") for n in range(300)]) for name in "abc"]
    args = SimpleNamespace(dataset_num_proc=1, strict=False, train_dataloader_shuffle=True, data_seed=1, seed=1)
    config = PackingConfig(packing_length=512, packing_cache_dir=str(tmp_path))
    for _ in range(2):
        dataset = measured_rows(sources, template, args, config)
        assert all(np.all(source.sizes.lengths > 0) for source in dataset.sources)
        shown = lines(capsys.readouterr())
        assert [("100%" in line, line.count("of c")) for line in shown] == [(True, 1)], shown
