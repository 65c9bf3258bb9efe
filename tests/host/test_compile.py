"""`--torch_compile true`: a compiled run is proved and trains what an uncompiled one trains."""

import logging

import pytest

from tests.data_rows import mixed_and_wordy_data
from tests.environment import packing_options
from tests.host.runs import packed_argv, train


@pytest.mark.slow
@pytest.mark.telling
def test_compiled_run_trains_what_an_uncompiled_one_trains(small_folder, tmp_path, caplog):
    """TRAIN-29: with the backend that generates no code, which takes minutes on a processor."""
    packing_options(packing_drop_last="false")
    data = mixed_and_wordy_data(tmp_path)

    def trained(name, **options):
        caplog.clear()
        flags = {"dataset": data, "max_steps": 10, "split_dataset_ratio": 0, "tuner_type": "lora", **options}
        with caplog.at_level(logging.INFO):
            result = train(packed_argv(small_folder("qwen2_5_vl"), "qwen2_5_vl", tmp_path / name, **flags))
        assert sum(record.getMessage().startswith("isolation verified") for record in caplog.records) == 3
        return [
            value for line in result["log_history"] if "loss" in line for value in (line["loss"], line["grad_norm"])
        ]

    plain = trained("plain")
    assert len(plain) == 20
    compiled = trained("compiled", torch_compile="true", torch_compile_backend="eager")
    assert compiled == pytest.approx(plain, rel=1e-5)
