"""Blocks become batches: literal cases for every mask and boundary rule."""

import inspect
import pickle
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from swift_vlpack.errors import BoundaryError, ConfigError, DataError
from swift_vlpack.text import PackedCollator, block_tokenize
from tests.text.vocabularies import BOS, EOS, PAD, corpus, text, words

TWO = {"input_ids": [5, 6, 1, 7, 1], "document_starts": [0, 3]}
ONE = {"input_ids": [8, 9], "document_starts": [0]}


def listed(batch):
    return {name: batch[name].tolist() for name in batch}


def test_signature_is_the_contract():
    """TEXT-11"""
    parameters = list(inspect.signature(PackedCollator).parameters.values())
    assert [(one.name, one.default) for one in parameters[1:]] == [
        ("packed_sequences", None), ("padding", "longest"), ("max_length", None), ("return_tensors", "pt"),
        ("segment_ids", False), ("cu_seqlens", False), ("mask_boundary_loss", True), ("train_on_eos", True),
    ]  # fmt: skip
    assert parameters[0].name == "tokenizer"


@pytest.mark.parametrize("kind", ["pt", "np"])
def test_two_rows_by_hand(tokenizer, kind):
    """TEXT-12 TEXT-13"""
    batch = PackedCollator(tokenizer, segment_ids=True, return_tensors=kind)([TWO, ONE])
    fields = listed(batch)
    assert (kind == "np") == ("attention_mask" in fields)
    fields["attention_mask"] = batch["attention_mask"].tolist()
    assert fields == {
        "input_ids": [[5, 6, 1, 7, 1], [8, 9, PAD, PAD, PAD]],
        "labels": [[-100, 6, 1, -100, 1], [-100, 9, -100, -100, -100]],
        "attention_mask": [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]],
        "position_ids": [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]],
        "segment_ids": [[1, 1, 1, 2, 2], [1, 1, 0, 0, 0]],
    }
    assert {str(batch[name].dtype).removeprefix("torch.") for name in fields} == {"int64"}


@pytest.mark.parametrize("kind", ["pt", "np"])
def test_two_rows_with_boundaries_are_one_row_by_hand(tokenizer, kind):
    """TEXT-12 TEXT-13 TEXT-17"""
    options = {"segment_ids": True, "cu_seqlens": True, "return_tensors": kind}
    batch = PackedCollator(tokenizer, padding=4, **options)([TWO, ONE])
    assert {**listed(batch), "attention_mask": batch["attention_mask"].tolist()} == {
        "input_ids": [[5, 6, 1, 7, 1, 8, 9, PAD]],
        "labels": [[-100, 6, 1, -100, 1, -100, 9, -100]],
        "attention_mask": [[1, 1, 1, 1, 1, 1, 1, 0]],
        "position_ids": [[0, 1, 2, 0, 1, 0, 1, 0]],
        "segment_ids": [[1, 1, 1, 2, 2, 3, 3, 0]],
        "cu_seq_lens_q": [0, 3, 5, 7, 8],
        "cu_seq_lens_k": [0, 3, 5, 7, 8],
        "max_length_q": 3,
        "max_length_k": 3,
    }
    assert str(batch["cu_seq_lens_q"].dtype).endswith("int32")
    assert PackedCollator(tokenizer, **options)([TWO, ONE])["input_ids"].shape == (1, 7)
    fixed = PackedCollator(tokenizer, padding="max_length", max_length=6, **options)([TWO, ONE])
    assert fixed["input_ids"].shape == (1, 12), "as many tokens as two rows of 6"
    plain = PackedCollator(tokenizer, **options)([{"input_ids": [5, 6]}, {"input_ids": [7]}])
    assert plain["position_ids"].tolist() == [[0, 1, 0]]
    assert plain["cu_seq_lens_q"].tolist() == [0, 2, 3]


def test_masks_change_labels_and_no_shape(tokenizer):
    """TEXT-14"""

    def labels(**options):
        batch = PackedCollator(tokenizer, **options)([TWO, ONE])
        assert {tuple(value.shape) for value in batch.values()} == {(2, 5)}
        return batch["labels"].tolist()

    assert labels(mask_boundary_loss=False) == [[5, 6, 1, 7, 1], [8, 9, -100, -100, -100]]
    assert labels(train_on_eos=False) == [[-100, 6, -100, -100, -100], [-100, 9, -100, -100, -100]]
    assert labels(mask_boundary_loss=False, train_on_eos=False)[0] == [5, 6, -100, 7, -100]
    assert labels(packed_sequences=False) == labels(), "a boundary is none the less where attention does not see it"


def test_labels_of_overlapping_pieces_are_kept(tokenizer):
    """TEXT-14"""
    made = block_tokenize({"text": [text(*range(6))]}, tokenizer=tokenizer, max_length=5, stride=2)
    rows = [dict(zip(made, values, strict=True)) for values in zip(*made.values(), strict=True)]
    batch = PackedCollator(tokenizer)(rows)
    assert batch["labels"].tolist() == [[-100, 4, 5, 6, 7], [-100, -100, 8, 9, 1]]


@pytest.mark.parametrize(
    ("padding", "max_length", "width"),
    [
        ("longest", None, 5),
        ("longest", 8, 5),
        ("max_length", 7, 7),
        (4, None, 8),
        (5, None, 5),
        (1, 9, 5),
        (True, None, 5),
        (np.int64(4), None, 8),
    ],
)
def test_padding(tokenizer, padding, max_length, width):
    """TEXT-13"""
    batch = PackedCollator(tokenizer, padding=padding, max_length=max_length, segment_ids=True, cu_seqlens=True)([TWO])
    assert batch["input_ids"].shape == batch["position_ids"].shape == (1, width)
    assert batch["segment_ids"][0, 5:].tolist() == batch["attention_mask"][0, 5:].tolist() == [0] * (width - 5)
    assert batch["labels"][0, 5:].tolist() == [-100] * (width - 5)
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, *([width] if width > 5 else [])]


def test_positions_where_the_field_is(tokenizer):
    """TEXT-12"""
    plain = {"input_ids": [5, 6, 7]}
    batch = PackedCollator(tokenizer)([plain, {"input_ids": [5]}])
    assert listed(batch) == {
        "input_ids": [[5, 6, 7], [5, PAD, PAD]],
        "labels": [[-100, 6, 7], [-100, -100, -100]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
    }
    assert "position_ids" in PackedCollator(tokenizer)([TWO])
    assert "position_ids" not in PackedCollator(tokenizer, packed_sequences=False)([TWO])
    mixed = PackedCollator(tokenizer)([TWO, {**plain, "document_starts": None}, plain])
    assert mixed["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 0, 1], [0, 1, 2, 0, 1]]


@pytest.mark.parametrize(
    ("pad_is_eos", "bos", "tokens", "positions"),
    [
        (False, False, [5, 6, EOS, 7, EOS], [0, 1, 2, 0, 1]),
        (False, False, [5, 6, EOS, 7, 8], [0, 1, 2, 0, 1]),  # the last one was cut and has no EOS
        (True, False, [5, 6, EOS, 7, EOS], [0, 1, 2, 0, 1]),
        (True, False, [5, EOS, EOS, EOS], [0, 1]),  # two of them are padding
        (False, False, [5, EOS, PAD, PAD], [0, 1]),
        (False, True, [BOS, 5, BOS, 6, 7], [0, 1, 0, 1, 2]),
        (False, True, [BOS, 5, EOS, BOS, 6], [0, 1, 2, 0, 1]),
        (False, True, [5, 6, 7], [0, 1, 2]),
        (False, True, [5, 6, PAD], [0, 1]),
    ],
)
def test_positions_from_tokens(pad_is_eos, bos, tokens, positions):
    """TEXT-12: by EOS or BOS, and padding is no boundary where PAD is EOS."""
    collator = PackedCollator(words(bos=bos, pad_is_eos=pad_is_eos), packed_sequences=True, segment_ids=True)
    batch = collator([{"input_ids": tokens}, {"input_ids": [5] * 6, "document_starts": [0, 4]}])
    assert batch["position_ids"][0, : len(positions)].tolist() == positions
    assert batch["attention_mask"][0].tolist() == [1] * len(positions) + [0] * (6 - len(positions))
    assert batch["segment_ids"][0, len(positions) :].eq(0).all()
    assert batch["position_ids"][1].tolist() == [0, 1, 2, 3, 0, 1], "where the field is, it counts"


@pytest.mark.parametrize(
    ("feature", "said"),
    [
        ({"input_ids": [5, 6], "document_starts": [1]}, "row 2 .*begin with 0"),
        ({"input_ids": [5, 6], "document_starts": [0, 2]}, "row 2 .*less than its 2 tokens"),
        ({"input_ids": [5, 6], "document_starts": [0, 1, 1]}, "row 2 .*ascend"),
        ({"input_ids": [5, 6], "document_starts": []}, "row 2 .*begin with 0"),
        ({"input_ids": []}, "row 2 .*no tokens"),
        ({"input_ids": [5, 6], "labels": [5]}, "row 2 .*1 labels for 2 tokens"),
        ({"input_ids": [[5]]}, "row 2 .*flat list"),
        ({"input_ids": [5.5]}, "row 2 .*integers"),
        ({"input_ids": [5, 6], "attention_mask": [0, 1]}, "row 2 .*attention_mask"),
        ({"input_ids": [5] * 9}, "row 2 .*9 tokens, more than max_length=8"),
    ],
)
def test_a_row_that_cannot_be_is_refused_by_number(tokenizer, feature, said):
    """TEXT-12 TEXT-13"""
    with pytest.raises((BoundaryError, DataError), match=said):
        PackedCollator(tokenizer, max_length=8)([TWO, feature])


def test_rows_whose_documents_nobody_can_find_are_refused():
    """TEXT-12: by a tokenizer without EOS and BOS; where the field is, nothing has to be found."""
    collator = PackedCollator(SimpleNamespace(pad_token_id=0), packed_sequences=True)
    assert collator([TWO])["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    with pytest.raises(DataError, match="row 2 of the batch has no document_starts, and the tokenizer neither EOS nor"):
        collator([TWO, {"input_ids": [5, 6]}])


def test_rows_padded_on_the_left_are_refused_where_tokens_decide(tokenizer):
    """TEXT-12 BOUND-4"""
    with pytest.raises(BoundaryError, match="row 1 of the batch: the sequence starts with the pad token"):
        PackedCollator(tokenizer, packed_sequences=True)([{"input_ids": [PAD, PAD, 5, EOS]}])


def test_rows_that_come_padded_lose_their_padding(tokenizer):
    """TEXT-13"""
    feature = {"input_ids": [5, 6, PAD], "attention_mask": [1, 1, 0], "labels": [5, 6, -100]}
    batch = PackedCollator(tokenizer)([feature, {"input_ids": [5]}])
    assert batch["input_ids"].tolist() == [[5, 6], [5, PAD]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"padding": "shortest"}, "padding must be"),
        ({"padding": 0}, "padding must be"),
        ({"padding": False}, "padding must be"),
        ({"padding": "max_length"}, "needs max_length"),
        ({"max_length": 0}, "max_length must be at least 1"),
        ({"max_length": "8"}, "max_length must be a whole number"),
        ({"packed_sequences": "auto"}, "packed_sequences must be None, True or False"),
        ({"packed_sequences": 1}, "packed_sequences must be None, True or False, got 1"),
        ({"packed_sequences": np.True_}, "packed_sequences must be None, True or False"),
        ({"return_tensors": "tf"}, "return_tensors must be"),
        ({"cu_seqlens": True, "packed_sequences": False}, "needs positions"),
    ],
)
def test_impossible_options_are_refused(tokenizer, options, said):
    """TEXT-11"""
    with pytest.raises(ConfigError, match=said):
        PackedCollator(tokenizer, **options)
    with pytest.raises(DataError, match="no rows"):
        PackedCollator(tokenizer)([])


def test_a_call_says_which_tensors_and_may_not_ask_for_others(tokenizer):
    """TEXT-11"""
    collator = PackedCollator(tokenizer)
    assert isinstance(collator([TWO], return_tensors="np")["input_ids"], np.ndarray)
    assert isinstance(collator([TWO], return_tensors=None)["input_ids"], torch.Tensor)
    for kind in ("tf", ""):
        with pytest.raises(ConfigError, match=f"return_tensors must be 'pt' or 'np', got '{kind}'"):
            collator([TWO], return_tensors=kind)


def test_rows_that_look_packed_without_the_field_are_warned_of_once(tokenizer, caplog):
    """TEXT-12: Trainer drops the column unless it is told not to."""
    collator = PackedCollator(tokenizer)
    for _ in range(2):
        collator([{"input_ids": [5, EOS, 6, EOS]}])
    assert caplog.text.count("remove_unused_columns=False") == 1
    caplog.clear()
    PackedCollator(tokenizer)([{"input_ids": [5, 6, EOS]}, {"input_ids": [5, EOS, PAD]}])
    PackedCollator(tokenizer, packed_sequences=False)([{"input_ids": [5, EOS, 6, EOS]}])
    assert caplog.text == ""


def test_rows_may_be_lists_arrays_or_tensors(tokenizer):
    """TEXT-11"""
    wanted = listed(PackedCollator(tokenizer)([TWO]))
    for kind in (np.array, torch.tensor):
        assert listed(PackedCollator(tokenizer)([{name: kind(value) for name, value in TWO.items()}])) == wanted


def test_the_mask_of_packed_rows_is_beside_the_inputs(tokenizer):
    """TEXT-15"""
    batch = PackedCollator(tokenizer)([TWO, ONE])
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    wanted = [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert "attention_mask" in batch
    assert "nothing" not in batch
    for one in (batch, pickle.loads(pickle.dumps(batch)), batch.to("cpu")):
        assert one["attention_mask"].tolist() == one.get("attention_mask").tolist() == wanted
    assert batch.get("nothing", 3) == 3
    with pytest.raises(KeyError):
        batch["nothing"]
    assert batch.pop("attention_mask").tolist() == wanted
    assert "attention_mask" not in batch
    assert batch.pop("attention_mask", None) is None
    assert "attention_mask" in dict(PackedCollator(tokenizer, packed_sequences=False)([TWO]))


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
@pytest.mark.parametrize(
    "fields",
    [
        {"seq_lengths": [3, 2]},
        {"position_ids": [0, 1, 2, 0, 1]},
        {"position_ids": [0, 1, 2, 0, 1], "seq_lengths": [3, 2], "document_starts": [0, 3]},
        {"position_ids": None, "seq_lengths": None, "document_starts": [0, 3]},
    ],
    ids=["lengths", "positions", "all", "of other data"],
)
def test_boundaries_by_other_fields_are_those_of_document_starts(tokenizer, fields, kind):
    """TEXT-12: `seq_lengths` as TRL makes them, and positions that begin again."""
    fields = {name: None if field is None else kind(field) for name, field in fields.items()}
    for options in ({}, {"cu_seqlens": True}, {"packed_sequences": True}):
        collator = PackedCollator(tokenizer, segment_ids=True, **options)
        batch = collator([{"input_ids": TWO["input_ids"], **fields}, ONE])
        assert listed(batch) == listed(collator([TWO, ONE]))


def test_blocks_of_trl_are_isolated(tokenizer):
    """TEXT-12: of its `pack_dataset`, by its own column."""
    pytest.importorskip("trl", reason="TRL is not installed")
    from datasets import Dataset
    from trl import pack_dataset

    rows = Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9], [10]]})
    batch = PackedCollator(tokenizer)(list(pack_dataset(rows, 4, "bfd")))
    assert batch["input_ids"].tolist() == [[5, 6, 7, 10], [8, 9, PAD, PAD]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100], [-100, 9, -100, -100]]


def test_positions_of_one_document_are_no_boundaries(tokenizer):
    """TEXT-12: a row that is not packed has them too."""
    batch = PackedCollator(tokenizer)([{"input_ids": [5, 6, 7], "position_ids": [0, 1, 2]}])
    assert "position_ids" not in batch
    padded = {"input_ids": [5, 6, PAD], "position_ids": [0, 1, 1], "attention_mask": [1, 1, 0]}
    assert PackedCollator(tokenizer)([padded])["input_ids"].tolist() == [[5, 6]]
    padded = {"input_ids": [5, 6, 7, PAD], "position_ids": [0, 0, 1, 0], "attention_mask": [1, 1, 1, 0]}
    assert PackedCollator(tokenizer)([padded])["position_ids"].tolist() == [[0, 0, 1]]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"seq_lengths": [3, 1]},
            r"row 1 of the batch: seq_lengths must be at least 1 each and add up to its 5 tokens",
        ),
        ({"seq_lengths": [5, 0]}, "must be at least 1 each"),
        ({"seq_lengths": []}, "must be at least 1 each"),
        ({"position_ids": [0, 1, 2, 0, 2]}, "begin again with 0 where a document does; number 4 is 2 after 0"),
        ({"position_ids": [1, 2, 3, 4, 5]}, "must have a number for each of its 5 tokens, and begin with 0"),
        ({"position_ids": [0, 1, 0]}, "must have a number for each of its 5 tokens, and begin with 0"),
        (
            {"seq_lengths": [3, 2], "document_starts": [0, 2]},
            r"document_starts says \(0, 2\) and seq_lengths says \(0, 3\)",
        ),
        ({"seq_lengths": [3, 2], "position_ids": [0, 1, 2, 3, 4]}, "its fields disagree on where documents start"),
        ({"position_ids": [[0, 1, 2, 0, 1]] * 3}, "position_ids must be a flat list of integers, got 2 dimensions"),
    ],
)
def test_boundaries_that_contradict_are_refused(tokenizer, fields, said):
    """TEXT-12"""
    with pytest.raises((BoundaryError, DataError), match=said):
        PackedCollator(tokenizer)([{"input_ids": TWO["input_ids"], **fields}])


def test_through_a_loader_with_workers(tokenizer):
    """TEXT-11"""
    from torch.utils.data import DataLoader

    rows = [{"input_ids": [n + 4] * 3, "document_starts": [0, 2]} for n in range(6)]
    loader = DataLoader(rows, batch_size=2, num_workers=1, collate_fn=PackedCollator(tokenizer, cu_seqlens=True))
    batches = list(loader)
    assert [batch["input_ids"][0, ::3].tolist() for batch in batches] == [[4, 5], [6, 7], [8, 9]]
    assert batches[0]["attention_mask"].shape == (1, 6)


def test_every_field_agrees_over_random_blocks(tokenizer):
    """TEXT-12 TEXT-13 TEXT-14"""
    for seed in range(40):
        rng = random.Random(seed)
        strategy = rng.choice(("greedy", "exact", "window"))
        made = block_tokenize({"text": corpus(seed, 30)}, tokenizer=tokenizer, max_length=24, packing_strategy=strategy)
        rows = [dict(zip(made, values, strict=True)) for values in zip(*made.values(), strict=True)]
        options = {"padding": rng.choice(("longest", 7)), "segment_ids": True, "return_tensors": "np"}
        batch = PackedCollator(tokenizer, **options)(rows)
        width = batch["input_ids"].shape[1]
        for number, row in enumerate(rows):
            length, segments = len(row["input_ids"]), batch["segment_ids"][number]
            assert (segments != 0).tolist() == (batch["attention_mask"][number] == 1).tolist()
            assert (segments != 0).sum() == length
            changes = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist()]
            assert changes == row["document_starts"] + ([length] if length < width else [])
            assert np.flatnonzero(batch["position_ids"][number] == 0).tolist() == changes
            targets = batch["labels"][number] != -100
            assert targets.sum() == length - len(row["document_starts"])
            assert not targets[changes].any()
        line = PackedCollator(tokenizer, cu_seqlens=True, **options)(rows)
        real = batch["attention_mask"] == 1
        num_real = real.sum()
        assert line["attention_mask"][0].tolist() == [1] * num_real + [0] * (line["input_ids"].shape[1] - num_real)
        for name in ("input_ids", "labels", "position_ids"):
            assert line[name][0, :num_real].tolist() == batch[name][real].tolist()
        assert np.flatnonzero(line["position_ids"][0] == 0).tolist() == line["cu_seq_lens_q"][:-1].tolist()


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks"])
def test_tokens_that_a_mask_of_trl_leaves_out_have_no_label(tokenizer, name):
    """TEXT-14"""
    row = {"input_ids": [4, 5, 6, 7], name: [0, 0, 1, 1]}
    assert PackedCollator(tokenizer)([row])["labels"].tolist() == [[-100, -100, 6, 7]]
    with pytest.raises(DataError, match=f"{name} has 2 entries for 4 tokens"):
        PackedCollator(tokenizer)([{**row, name: [0, 1]}])
