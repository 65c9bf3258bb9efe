"""Streams among ranks and workers, in a `DataLoader` and in a `Trainer`; and what a long line takes."""

import json
import subprocess
import sys
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

from swift_vlpack.attention import attention
from swift_vlpack.errors import ConfigError, DataError, StateMismatch
from swift_vlpack.text import FixedBatches, TextStream, local_text, model_inputs, model_token_ids
from tests.text.test_batches import SOURCES
from tests.text.test_training import model_of, one_by_one
from tests.text.vocabularies import BOS, EOS, corpus, text, words

BARE = {"add_bos": False, "add_eos": False}


def numbers(batches):
    """Every document here is one word: its number, as often as it comes."""
    return Counter(
        int(token) - 4
        for batch in batches
        for token in np.asarray(batch["input_ids"])[np.asarray(batch["segment_ids"]) > 0]
    )


def single(tokenizer, source, **options):
    options = {"tokenizer": tokenizer, "seq_len": 1, "packing_mode": "bin", "packing_max_docs_per_bin": 1, **options}
    return FixedBatches(TextStream(source, **{**BARE, **options}), batch_size=2)


@pytest.mark.parametrize("kind", ["lines", "list", "function", "dataset", "streaming", "mapped"])
@pytest.mark.parametrize("shuffle", [0, 5])
def test_ranks_have_every_document_once_together(tokenizer, kind, shuffle, tmp_path):
    """TEXT-31"""
    source = [text(number) for number in range(37)]

    def given():
        (tmp_path / "files").mkdir(exist_ok=True)
        return SOURCES[kind](tmp_path / "files", source)

    wanted = numbers(single(tokenizer, given()))
    shares = [
        numbers(single(tokenizer, given(), rank=rank, num_ranks=3, shuffle_buffer_size=shuffle)) for rank in range(3)
    ]
    assert sum(shares, Counter()) == wanted
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_each_rank_goes_on_from_its_own_state(tokenizer):
    """TEXT-26 TEXT-31: another rank's is refused by name."""
    source = [text(number, number) for number in range(60)]

    def fresh(rank):
        return TextStream(source, tokenizer=tokenizer, seq_len=7, rank=rank, num_ranks=2, shuffle_buffer_size=4)

    one = fresh(1)
    list(islice(one, 4))
    state = json.loads(json.dumps(one.state_dict()))
    wanted, again = [window.tokens.tolist() for window in one], fresh(1)
    again.load_state_dict(state)
    assert [window.tokens.tolist() for window in again] == wanted
    with pytest.raises(StateMismatch, match=r"rank \(1, now 0\)"):
        fresh(0).load_state_dict(state)


def test_ranks_that_cannot_be_are_refused(tokenizer):
    """TEXT-31"""
    for options, said in (
        ({"rank": 2, "num_ranks": 2}, r"rank counts from 0 to 1 \(num_ranks - 1\), got 2"),
        ({"rank": -1}, "rank must be at least 0"),
        ({"num_ranks": 0}, "num_ranks must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            single(tokenizer, ["w1"], **options)
    with pytest.raises(DataError, match="an epoch without a document for rank 1 of 2 cannot be repeated"):
        next(single(tokenizer, ["w1"], rank=1, num_ranks=2, repeat=True))


@pytest.mark.parametrize(
    ("kind", "num_workers"), [("lines", 0), ("lines", 3), ("list", 2), ("streaming", 2), ("mapped", 2)]
)
def test_workers_of_a_loader_have_every_document_once_together(tokenizer, kind, num_workers, tmp_path):
    """TEXT-31: those of two ranks too."""
    source = [text(number) for number in range(37)]

    def given():
        (tmp_path / "files").mkdir(exist_ok=True)
        return SOURCES[kind](tmp_path / "files", source)

    wanted = numbers(single(tokenizer, given()))
    found = Counter()
    for rank in range(2):
        batches = single(tokenizer, given(), rank=rank, num_ranks=2)
        loader = DataLoader(batches, batch_size=None, num_workers=num_workers)
        made = list(loader)
        assert {tuple(batch["labels"].shape) for batch in made} == {(1, 2, 1)}
        found += numbers(made)
    assert found == wanted


def test_workers_cannot_share_what_has_begun(tokenizer):
    """TEXT-31"""
    batches = single(tokenizer, [text(number) for number in range(9)])
    next(batches)
    with pytest.raises(ConfigError, match="a stream that has begun cannot be shared among 2 workers"):
        list(DataLoader(batches, batch_size=None, num_workers=2))


def test_shards_of_a_streaming_data_set_are_enough_for_its_workers(tokenizer):
    """TEXT-31: a worker without a shard would have no document, and end a stream that repeats."""
    from datasets import Dataset

    rows = Dataset.from_dict({"text": [text(number) for number in range(9)]}).to_iterable_dataset(num_shards=2)
    with pytest.raises(
        ConfigError, match="IterableDataset has 2 shards for 3 workers, which share them; set num_workers"
    ):
        TextStream(rows, tokenizer=tokenizer, seq_len=1, repeat=True).share(0, 3)
    loader = DataLoader(single(tokenizer, rows), batch_size=None, num_workers=2)
    assert set(numbers(loader)) == set(range(9))


def test_token_ids_for_a_model(tokenizer):
    """TEXT-28"""
    assert model_token_ids(tokenizer, multiple=128) == {
        "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": 2, "vocab_size": 512,
    }  # fmt: skip
    bare = words(bos=False)
    bare.pad_token = None
    assert model_token_ids(bare) == {"eos_token_id": EOS, "pad_token_id": EOS, "vocab_size": 504}


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "vlpack"])
def test_model_inputs_train_documents_one_by_one(tokenizer, implementation):
    """TEXT-16 TEXT-32: every target of every window, each document by itself."""
    attention.register()
    options = {"seq_len": 48, "packing_mode": "bin", "packing_max_docs_per_bin": 2}
    batches = FixedBatches(
        TextStream(corpus(3, 12, longest=20), tokenizer=tokenizer, **options), batch_size=3, accumulation=2
    )
    (batch,) = made = list(batches)
    rows = [
        {
            "input_ids": ids[segments > 0].tolist(),
            "document_starts": np.flatnonzero(np.diff(segments[segments > 0], prepend=0)).tolist(),
        }
        for ids, segments in zip(batch["input_ids"].reshape(-1, 48), batch["segment_ids"].reshape(-1, 48), strict=True)
    ]
    assert sum(len(row["document_starts"]) for row in rows) > 6
    assert (batch["segment_ids"][..., -1] == 0).all(), "so that no document goes on after the inputs"
    model = model_of("Qwen2", implementation)
    wanted = one_by_one(model, [row for row in rows if row["input_ids"]])
    inputs = model_inputs(made)
    assert inputs["input_ids"].shape == (6, 48)
    model.zero_grad()
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    assert abs(loss.item() - wanted[0]) < 1e-5
    for name, value in model.named_parameters():
        assert torch.allclose(value.grad, wanted[1][name], atol=1e-5)


def test_a_trainer_of_transformers_trains_on_fixed_batches(tokenizer, tmp_path):
    """TEXT-32"""
    from transformers import Trainer, TrainingArguments

    class Watched(Trainer):
        seen = ()

        def training_step(self, model, inputs, num_items_in_batch=None):
            self.seen = (*self.seen, (inputs["input_ids"].shape, int(num_items_in_batch)))
            return super().training_step(model, inputs, num_items_in_batch)

    stream = TextStream(corpus(1, 60), tokenizer=tokenizer, seq_len=32, repeat=True)
    batches = FixedBatches(stream, batch_size=2, accumulation=2, prefetch=2)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=1, remove_unused_columns=False, report_to="none",
        use_cpu=True, save_strategy="no", logging_steps=1,
    )  # fmt: skip
    arguments.max_epochs = None  # ms-swift, once its trainers are loaded, asks every Trainer's arguments for it
    trainer = Watched(model_of("Qwen2"), arguments, train_dataset=batches, data_collator=model_inputs)
    trainer.train()
    batches.close()
    again = FixedBatches(
        TextStream(corpus(1, 60), tokenizer=tokenizer, seq_len=32, repeat=True), batch_size=2, accumulation=2
    )
    wanted = [int((batch["labels"] != -100).sum()) for batch in islice(again, 3)]
    assert trainer.seen == tuple((torch.Size([4, 32]), count) for count in wanted), "no target is lost"
    assert all(0 < line["loss"] < 20 for line in trainer.state.log_history if "loss" in line)


PEAK = """
import resource, sys
from swift_vlpack.text import FixedBatches, TextStream
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for number, batch in enumerate(FixedBatches(TextStream(sys.argv[1], tokenizer="byte", seq_len=1024), batch_size=8)):
    if number == 5:
        break
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_long_line_takes_a_few_times_its_size(tmp_path):
    """TEXT-33: 20 MB as one document took 400 MB, as 100 MB took 2,000."""
    path = tmp_path / "long.txt"
    path.write_text("word and more " * (20_000_000 // 14))
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout) < 8 * 20
    assert local_text(path).read() is not None


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_every_pass_of_a_loader_has_every_document(tokenizer, workers):
    """TEXT-37: also where the loader keeps the batches, or its workers, from pass to pass."""
    source = [f"w{number}" for number in range(40)]
    loader = DataLoader(single(tokenizer, source), batch_size=None, collate_fn=lambda batch: batch, **workers)
    passes = [numbers(loader) for _ in range(3)]
    assert passes == [passes[0]] * 3
    assert passes[0].total() == 40


def test_source_that_is_split_by_node_already_is_refused_with_ranks(tokenizer):
    """TEXT-31: two halves of a half would be read in silence."""
    whole = Dataset.from_dict({"text": [f"w{number}" for number in range(40)]}).to_iterable_dataset(num_shards=4)
    half = split_dataset_by_node(whole, rank=1, world_size=2)
    with pytest.raises(ConfigError, match="node 1 of 2"):
        single(tokenizer, half, rank=1, num_ranks=2)
    assert numbers(single(tokenizer, half)).total() == 20
