"""The proof is run again in training: once in the first hundred steps, and after the first evaluation."""

import json
import logging
import re
import shutil

import pytest
import torch
from transformers import AttentionInterface

from swift_vlpack.attention import attention
from swift_vlpack.errors import IsolationError
from swift_vlpack.host.trainer import PackingTrainer
from tests.environment import packing_options
from tests.host.runs import packed_argv, train

FAMILY = "qwen2_5_vl"


@pytest.fixture
def run(small_folder, data, tmp_path, caplog):
    """Train five steps; what the proof said of batches of training."""

    def trained(folder=None, **options):
        packing_options(packing_drop_last="false")
        settings = {"dataset": data, "max_steps": 5, "split_dataset_ratio": 0, **options}
        with caplog.at_level(logging.INFO):
            train(packed_argv(folder or small_folder(FAMILY), FAMILY, tmp_path / "run", **settings))
        said = [record.getMessage() for record in caplog.records]
        return [re.search("batch of (the trainer|step .)", line)[0] for line in said if "verified in training" in line]

    return trained


def with_attention(monkeypatch, changed):
    """Let the attention of packed sequences be another one once `PackingTrainer.wrong` is true."""
    right = AttentionInterface()[attention.NAME]

    def sometimes(module, query, *args, **kwargs):
        is_wrong = PackingTrainer.wrong and kwargs.get("cu_seq_lens_q") is not None
        return changed(right, module, query, *args, **kwargs) if is_wrong else right(module, query, *args, **kwargs)

    monkeypatch.setattr(PackingTrainer, "wrong", False, raising=False)
    monkeypatch.setitem(AttentionInterface._global_mapping, attention.NAME, sometimes)


def without_boundaries(right, module, query, *args, **kwargs):
    """One sample sees the others."""
    ends = torch.tensor([0, query.shape[2]], dtype=torch.int32)
    return right(module, query, *args, **{**kwargs, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends})


def wrong_from_step(monkeypatch, number):
    """Be right until a step has trained."""
    count = PackingTrainer.count_step

    def count_step(self):
        count(self)
        PackingTrainer.wrong = self.state.global_step + 1 >= number

    monkeypatch.setattr(PackingTrainer, "count_step", count_step)


def test_right_run_is_looked_at_again(run, data):
    """ISO-26"""
    said = run(val_dataset=data, eval_strategy="steps", eval_steps=4)
    assert said[0] == "batch of the trainer"
    assert "batch of step 5" in said
    assert len(said) in (2, 3), "the step that is drawn may be the one after the evaluation"


def test_boundaries_that_are_lost_later_stop_the_run_with_its_step(run, monkeypatch):
    """ISO-26"""
    with_attention(monkeypatch, without_boundaries)
    wrong_from_step(monkeypatch, 1)
    with pytest.raises(IsolationError, match=r"isolation does not hold in a batch of step [2-5]: "):
        run()


@pytest.mark.slow
@pytest.mark.telling
def test_evaluation_that_leaves_boundaries_switched_off_stops_the_next_step(run, data, monkeypatch):
    """ISO-26"""
    with_attention(monkeypatch, without_boundaries)
    evaluate = PackingTrainer.evaluate

    def leaves_it_off(self, *args, **kwargs):
        metrics = evaluate(self, *args, **kwargs)
        PackingTrainer.wrong = True
        return metrics

    monkeypatch.setattr(PackingTrainer, "evaluate", leaves_it_off)
    with pytest.raises(IsolationError, match="isolation does not hold in a batch of step 5: "):
        run(val_dataset=data, eval_strategy="steps", eval_steps=4, seed=3)


@pytest.mark.slow
@pytest.mark.telling
def test_length_of_the_first_sequence_that_is_kept_stops_a_later_step(run, monkeypatch):
    """ISO-26: a sample that is longer sees only a part of itself; no neighbour moves."""

    def shortened(right, module, query, *args, **kwargs):
        return (
            right(module, query, *args, **kwargs)
            if query.shape[2] < 100
            else right(module, query * 0.5, *args, **kwargs)
        )

    with_attention(monkeypatch, shortened)
    wrong_from_step(monkeypatch, 1)
    with pytest.raises(IsolationError, match=r"isolation does not hold in a batch of step [2-5]: "):
        run()


@pytest.mark.slow
@pytest.mark.telling
def test_one_seed_for_all_draws_stops_a_later_step(run, small_folder, tmp_path, monkeypatch):
    """ISO-26: every step would drop the same numbers."""
    shutil.copytree(small_folder(FAMILY), folder := tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["attention_dropout"] = 0.3
    (folder / "config.json").write_text(json.dumps(config))
    compute_loss = PackingTrainer.compute_loss

    def seeded(self, *args, **kwargs):
        torch.manual_seed(0)
        return compute_loss(self, *args, **kwargs)

    monkeypatch.setattr(PackingTrainer, "compute_loss", seeded)
    with pytest.raises(IsolationError, match=r"a batch of step [2-5]: two random states draw the same numbers"):
        run(folder)
