"""Windows and batches of one shape: literal cases, conservation, resume at every batch, threads that end."""

import gc
import json
import random
import threading
import time
import traceback
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from swift_vlpack.errors import ConfigError, DataError, SourceError, StateMismatch
from swift_vlpack.text import FixedBatches, TextStream, local_text
from swift_vlpack.text.sources import source_of
from tests.text.vocabularies import BOS, EOS, PAD, corpus, text

DTYPES = {"input_ids": "int32", "labels": "int32", "attention_mask": "bool", "segment_ids": "int32"}
BARE = {"add_bos": False, "add_eos": False}


@pytest.fixture
def stream(tokenizer):
    return lambda source, **options: TextStream(source, **{"tokenizer": tokenizer, "seq_len": 7, **options})


def same(one, other):
    return len(one) == len(other) and all(
        set(a) == set(b) and all(np.array_equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


def documents_in(windows):
    """Their tokens, document by document as far as windows know them."""
    for window in windows:
        for number in range(1, window.segment_ids.max() + 1):
            yield tuple(window.tokens[window.segment_ids == number].tolist())


def test_sequential_windows_by_hand(stream):
    """TEXT-20"""
    windows = list(stream([text(0, 1), text(2), text(*range(3, 9))], seq_len=4))
    assert [window.tokens.tolist() for window in windows] == [
        [BOS, 4, 5, EOS, BOS], [6, EOS, BOS, 7, 8], [9, 10, 11, 12, EOS],
    ]  # fmt: skip
    assert [window.segment_ids.tolist() for window in windows] == [
        [1, 1, 1, 1, 2], [1, 1, 2, 2, 2], [1, 1, 1, 1, 1],
    ]  # fmt: skip


def test_bins_by_hand(stream):
    """TEXT-21"""
    source = [text(*range(4)), text(*range(3)), text(9), text(8)]
    windows = list(stream(source, seq_len=4, packing_mode="bin", packing_buffer_docs=4, **BARE))
    assert sorted(window.tokens.tolist() for window in windows) == [[4, 5, 6, 7, 12], [4, 5, 6, 13, PAD]] or sorted(
        window.tokens.tolist() for window in windows
    ) == [[4, 5, 6, 7, 13], [4, 5, 6, 12, PAD]]
    capped = list(stream(source, seq_len=4, packing_mode="bin", packing_max_docs_per_bin=1, **BARE))
    assert len(capped) == 4
    assert all(set(window.segment_ids.tolist()) <= {0, 1} for window in capped)


def test_more_documents_to_choose_from_make_fewer_windows(stream):
    """TEXT-21: 40 bytes fill four windows of ten, where the packer may pair those that fit."""
    source = ["x" * size for size in (1, 9, 3, 7, 5, 5, 2, 8)]
    options = {"tokenizer": "byte", "seq_len": 9, "packing_mode": "bin", **BARE}
    num_windows = {size: len(list(stream(source, packing_buffer_docs=size, **options))) for size in (1, 4, 128)}
    assert num_windows == {1: 8, 4: 4, 128: 4}


def test_a_batch_by_hand(stream):
    """TEXT-22 TEXT-23"""
    source = [text(0, 1), text(2)]
    made = list(FixedBatches(stream(source, seq_len=4), batch_size=1, accumulation=2))
    assert {name: field.tolist() for name, field in made[0].items()} == {
        "input_ids": [[[BOS, 4, 5, EOS]], [[6, EOS, PAD, PAD]]],
        "labels": [[[4, 5, EOS, -100]], [[EOS, -100, -100, -100]]],
        "attention_mask": [[[True] * 4], [[True, True, False, False]]],
        "segment_ids": [[[1, 1, 1, 1]], [[1, 1, 0, 0]]],
    }
    for options, labels in (
        ({"mask_boundary_loss": False}, [[4, 5, EOS, BOS], [EOS, -100, -100, -100]]),
        ({"train_on_eos": False}, [[4, 5, -100, -100], [-100, -100, -100, -100]]),
        ({"mask_boundary_loss": False, "train_on_eos": False}, [[4, 5, -100, BOS], [-100, -100, -100, -100]]),
    ):
        (other,) = FixedBatches(stream(source, seq_len=4), batch_size=2, **options)
        assert other["labels"].tolist() == [labels]


@pytest.mark.parametrize("mode", ["sequential", "bin"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_batch_has_one_shape_and_the_last_one_is_counted(stream, mode, drop_last):
    """TEXT-22 TEXT-23"""
    for seed in range(6):
        batches = FixedBatches(
            stream(corpus(seed, 50), packing_mode=mode), batch_size=3, accumulation=2, drop_last=drop_last
        )
        made = list(batches)
        for batch in made:
            assert {name: str(field.dtype) for name, field in batch.items()} == DTYPES
            assert {field.shape for field in batch.values()} == {(2, 3, 7)}
            segments = batch["segment_ids"]
            assert ((segments != 0) == batch["attention_mask"]).all()
            steps = np.diff(segments, axis=-1)
            assert (((steps == 0) | (steps == 1)) | (segments[..., 1:] == 0)).all(), "rising within a row"
            assert (batch["labels"][segments == 0] == -100).all()
        counts, size = batches.counts, 6
        dropped = counts.get("incomplete_batch_rows", 0)
        assert counts["batches"] == len(made)
        assert counts["windows"] + counts["padding_rows"] == len(made) * size + dropped
        assert (dropped == 0) if not drop_last else (counts["padding_rows"] == 0)
        num_real = counts["windows"] * 8 - counts["padding_tokens"]
        assert counts["tokens"] == num_real
        assert next(batches, None) is None, "the end stays the end"


def test_truncated_documents_by_hand(stream):
    """TEXT-20 TEXT-23: `max_doc_tokens` is of the text; BOS and EOS are added to what is left of it."""
    one = stream([text(*range(5)), text(9, 10), text(*range(20, 24))], seq_len=5, max_doc_tokens=2)
    assert [window.tokens.tolist() for window in one] == [
        [BOS, 4, 5, EOS, BOS, 13], [14, EOS, BOS, 24, 25, EOS],
    ]  # fmt: skip
    assert one.counts == {
        "documents": 3, "tokens": 12, "windows": 2, "padding_tokens": 0, "truncated_documents": 2,
        "truncated_tokens": 3 + 2,
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["sequential", "bin"])
@pytest.mark.parametrize("shuffle", [0, 9])
def test_every_token_is_in_exactly_one_window(stream, tokenizer, mode, shuffle):
    """TEXT-20 TEXT-21 TEXT-29"""
    for seed in range(8):
        source = corpus(seed, 60, longest=30)
        wanted = [[BOS, *tokenizer(one)["input_ids"], EOS] for one in source if one]
        made = stream(source, packing_mode=mode, shuffle_buffer_size=shuffle, seed=seed, packing_buffer_docs=16)
        windows = list(made)
        flat = [token for window in windows for token in window.tokens[window.segment_ids != 0].tolist()]
        assert Counter(flat) == Counter(token for tokens in wanted for token in tokens)
        assert made.counts["tokens"] == len(flat)
        if mode == "sequential":
            assert all((window.segment_ids != 0).all() for window in windows[:-1]), "only the last one is padded"
            assert (flat == [token for tokens in wanted for token in tokens]) == (shuffle == 0)
        else:
            whole = Counter(tuple(tokens) for tokens in wanted if len(tokens) <= 8)
            assert whole - Counter(documents_in(windows)) == Counter(), "what fits into a window is not cut"


# -- sources ----------------------------------------------------------------------------------------------------------


def files(folder, source):
    lines = [f"{one}\n" for one in source if one]
    (folder / "a.txt").write_text("".join(lines[:20]))
    (folder / "b.txt").write_text("".join(lines[20:]).rstrip("\n"))  # no newline at the end
    return [folder / "a.txt", folder / "b.txt"]


def sized(source):
    from datasets import Dataset

    return Dataset.from_dict({"text": source})


def streaming(source):
    return sized(source).to_iterable_dataset(num_shards=3)


def generated(source):
    from datasets import IterableDataset

    return IterableDataset.from_generator(_rows, gen_kwargs={"source": source})


def _rows(source):
    for one in source:
        yield {"text": one}


def _upper(row):
    return {"text": row["text"] + " w499"}


SOURCES = {
    "lines": lambda folder, source: local_text(files(folder, source)),
    "list": lambda folder, source: source,
    "rows": lambda folder, source: [{"text": one} for one in source],
    "function": lambda folder, source: lambda: iter(source),
    "dataset": lambda folder, source: sized(source),
    "streaming": lambda folder, source: streaming(source),
    "generated": lambda folder, source: generated(source),
    "mapped": lambda folder, source: streaming(source).map(_upper).filter(lambda row: "w7" not in row["text"]),
    "shuffled": lambda folder, source: streaming(source).shuffle(seed=3, buffer_size=10),
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize(
    "options",
    [
        {"packing_mode": "sequential"},
        {"packing_mode": "bin", "packing_buffer_docs": 8, "packing_strategy": "exact"},
        {"packing_mode": "bin", "shuffle_buffer_size": 7, "packing_max_docs_per_bin": 2},
        {"packing_mode": "sequential", "shuffle_buffer_size": 5, "repeat": True, "max_doc_tokens": 9},
    ],
    ids=["sequential", "bin", "shuffled bin", "repeated"],
)
def test_resume_at_every_batch_has_the_same_future(stream, kind, options, tmp_path):
    """TEXT-26"""
    source = [one for one in corpus(4, 40, longest=25) if one]

    def fresh():
        (tmp_path / "files").mkdir(exist_ok=True)
        return FixedBatches(stream(SOURCES[kind](tmp_path / "files", source), **options), batch_size=2, accumulation=2)

    one = fresh()
    states, made = [json.dumps(one.state_dict())], []
    for batch in islice(one, 25):
        made.append(batch)
        states.append(json.dumps(one.state_dict()))
    assert len(made) > 5
    for number in (*range(0, len(made), 4), len(made) - 1, len(made)):
        again = fresh()
        again.load_state_dict(json.loads(states[number]))
        assert json.dumps(again.state_dict()) == states[number], "loading changes nothing"
        assert same(list(islice(again, 25 - number)), made[number:])
        assert again.counts == one.counts


@pytest.mark.parametrize(("before", "after"), [((2, 2), (3, 1)), ((1, 1), (2, 3)), ((5, 1), (1, 2))])
def test_resume_with_another_shape_loses_no_row_and_repeats_none(stream, before, after):
    """TEXT-26: rows of padding are at the end only, and counted as what they are."""
    source = [one for one in corpus(4, 40, longest=25) if one]

    def fresh(batch_size, accumulation):
        return FixedBatches(stream(source, packing_mode="bin"), batch_size=batch_size, accumulation=accumulation)

    def rows(batches):
        ids = np.concatenate([batch["input_ids"].reshape(-1, batch["input_ids"].shape[-1]) for batch in batches])
        segments = np.concatenate([batch["segment_ids"].reshape(-1, ids.shape[-1]) for batch in batches])
        return [row.tolist() for row, segment in zip(ids, segments, strict=True) if segment.any()]

    whole = rows(fresh(1, 1))
    one, again = fresh(*before), fresh(*after)
    first = list(islice(one, 2))
    again.load_state_dict(json.loads(json.dumps(one.state_dict())))
    rest = list(again)
    assert rows(first) + rows(rest) == whole
    made = sum(batch["segment_ids"][..., 0].size for batch in (*first, *rest))
    counts = again.counts
    assert counts["padding_rows"] == made - len(whole)
    size = again.shape[2] + 1
    assert counts["utilisation"] == pytest.approx((len(whole) * size - counts["padding_tokens"]) / (made * size))


def test_a_state_holds_addresses_where_the_source_can_seek(stream, tmp_path):
    """TEXT-26"""
    source = [text(*range(50, 90))] * 30
    options = {"packing_mode": "bin", "shuffle_buffer_size": 10, "packing_buffer_docs": 16, "seq_len": 63}
    sizes = {}
    for name, given in (("files", local_text(files(tmp_path, source))), ("function", lambda: iter(source))):
        one = stream(given, **options)
        next(one)
        sizes[name] = len(json.dumps(one.state_dict()))
    assert sizes["files"] < sizes["function"] / 3


def test_resuming_a_seekable_source_reads_nothing_again(stream, tmp_path):
    """TEXT-26"""

    class Watched(list):
        asked = 0

        def __getitem__(self, index):
            self.asked += 1
            return super().__getitem__(index)

    rows = Watched(corpus(1, 2000))
    one = stream(rows)
    for _ in islice(one, 500):
        pass
    state = one.state_dict()
    rows.asked = 0
    again = stream(rows)
    again.load_state_dict(state)
    next(again)
    assert rows.asked < 10

    rows = Watched([text(*range(400)), *corpus(1, 2000)])
    one, again = (stream(rows, packing_mode="bin", packing_buffer_docs=200) for _ in range(2))
    for _ in islice(one, 20):
        pass
    state, rows.asked = one.state_dict(), 0
    assert len(state["state"]["windows"]["parts"]) + len(state["state"]["windows"]["ready"]) > 20
    again.load_state_dict(state)
    assert rows.asked < 10, "one document in many pieces is asked for once"

    one = stream(Drifting(rows, 0))
    for _ in islice(one, 500):
        pass
    rows.asked, again = 0, stream(Drifting(rows, 0))
    again.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert same([{"tokens": next(again).tokens}], [{"tokens": next(one).tokens}])
    assert rows.asked < 20, "eight rows prove the place"


CHAINS = {
    "map": lambda rows: rows.map(_upper),
    "filter": lambda rows: rows.filter(lambda row: row["text"] != "w1"),
    "rename": lambda rows: rows.rename_column("text", "other").rename_column("other", "text"),
    "map and filter": lambda rows: rows.map(_upper).filter(lambda row: "w1" not in row["text"]),
    "batched": lambda rows: rows.map(_twice, batched=True, batch_size=3, remove_columns=["text"]),
    "interleaved": lambda rows: _interleaved(rows, rows.map(_upper)),
    "skip": lambda rows: rows.skip(5).map(_upper),
}


def _twice(rows):
    return {"text": [one for one in rows["text"] for _ in range(2)]}


def _interleaved(*several):
    from datasets import interleave_datasets

    return interleave_datasets(list(several))


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("texts", [["w2"], ["w2", "", "w2", "w3", "w1"]], ids=["all equal", "some equal"])
def test_a_place_is_proved_where_texts_repeat(chain, texts, monkeypatch):
    """TEXT-26: one equal row is no proof of a place; with chunks of 7 rows, where large sets have 1,000."""
    import datasets.config

    monkeypatch.setattr(datasets.config, "DEFAULT_MAX_BATCH_SIZE", 7)
    monkeypatch.setattr(datasets.config, "ARROW_READER_BATCH_SIZE_IN_DATASET_ITER", 7)
    rng = random.Random(1)
    rows = [{"text": rng.choice(texts)} for _ in range(44)]

    def source():
        return source_of(CHAINS[chain](streaming([row["text"] for row in rows])), "text")

    one = source()
    one.start(0)
    read, states = [], [json.dumps(one.state())]
    while (document := one.read()) is not None:
        read.append(document.text)
        states.append(json.dumps(one.state()))
    for number in range(0, len(states), 3):
        again = source()
        again.load(json.loads(states[number]))
        assert json.dumps(again.state()) == states[number]
        rest = []
        while (document := again.read()) is not None:
            rest.append(document.text)
        assert rest == read[number:], number


def test_a_place_within_a_chunk_is_found_by_its_position(stream, caplog):
    """TEXT-26: the state of datasets 4.8 after `map` is that of a whole chunk of rows, which are counted from there."""
    source = [text(number, number + 1) for number in range(90)]
    one = stream(streaming(source).map(_upper))
    for _ in range(50):
        next(one)
    state = json.loads(json.dumps(one.state_dict()))
    assert 0 < state["state"]["documents"]["source"][3][0] < one.counts["documents"], "not from the beginning"
    wanted = [window.tokens.tolist() for window in one]
    again = stream(streaming(source).map(_upper))
    again.load_state_dict(state)
    assert caplog.text == ""
    assert [window.tokens.tolist() for window in again] == wanted


class Drifting:
    """A data set whose own state leads a few rows too far."""

    def __init__(self, rows, drift):
        self.rows, self.drift, self.at = rows, drift, 0

    def __iter__(self):
        while self.at < len(self.rows):
            self.at += 1
            yield {"text": self.rows[self.at - 1]}

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"] + self.drift


@pytest.mark.parametrize("drift", [1, 5])
def test_a_place_that_is_not_proved_is_read_up_to_and_said(stream, drift, caplog):
    """TEXT-26"""
    source = [text(1)] * 60
    one = stream(Drifting(source, drift))
    for _ in range(12):
        next(one)
    state = json.loads(json.dumps(one.state_dict()))
    wanted = [window.tokens.tolist() for window in one]
    again = stream(Drifting(source, drift))
    again.load_state_dict(state)
    assert "Drifting: its own state leads to another position, so its first 32 rows are read again" in caplog.text
    assert [window.tokens.tolist() for window in again] == wanted


@pytest.mark.parametrize("kind", ["function", "shuffled"])
def test_a_source_that_cannot_seek_says_what_is_read_again(stream, kind, caplog):
    """TEXT-26"""
    source = [text(number) for number in range(60)]
    one = stream(SOURCES[kind](None, source))
    for _ in range(12):
        next(one)
    stream(SOURCES[kind](None, source)).load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert "cannot seek, so its first 32 rows are read again" in caplog.text


@pytest.mark.parametrize("kind", ["function", "streaming"])
def test_a_stream_that_has_changed_is_refused(stream, kind):
    """TEXT-26"""
    source = [text(number) for number in range(30)]
    one = stream(SOURCES[kind](None, source))
    for _ in islice(one, 4):
        pass
    source[one.counts["documents"] - 1] = "w400"
    with pytest.raises(DataError, match=r"the first \d+ rows of epoch 0 are not those of the saved state"):
        stream(SOURCES[kind](None, source)).load_state_dict(one.state_dict())
    del source[3:]
    with pytest.raises(DataError, match="are not those of the saved state"):
        stream(SOURCES[kind](None, source)).load_state_dict(one.state_dict())


@pytest.mark.parametrize("mode", ["sequential", "bin"])
def test_a_held_document_that_has_lost_tokens_is_refused(stream, mode):
    """TEXT-26: as an empty one has, which was BOS and EOS in states of before."""
    source = [text(*range(9)), text(*range(5)), text(*range(5)), text(1)]
    options = {"seq_len": 7, "packing_mode": mode, "packing_buffer_docs": 4}
    one = stream(source, **options)
    next(one), next(one)
    state = json.loads(json.dumps(one.state_dict()))
    source[1:3] = "", ""
    with pytest.raises(DataError, match=r"the document at [12] has 0 tokens, and the state holds its first 7"):
        stream(source, **options).load_state_dict(state)


def test_a_state_of_something_else_is_refused_by_name(stream, tokenizer, tmp_path):
    """TEXT-26 STATE-3"""
    path = tmp_path / "a.txt"
    path.write_text("w1 w2\nw3\n" * 9)
    one = stream(path)
    next(one)
    state = json.loads(json.dumps(one.state_dict()))
    for options, field in (
        ({"seq_len": 8}, "seq_len"), ({"packing_mode": "bin"}, "packing_mode"), ({"seed": 1}, "seed"),
        ({"tokenizer": "byte"}, "tokenizer"),
    ):  # fmt: skip
        with pytest.raises(StateMismatch, match=field):
            stream(path, **options).load_state_dict(state)
    path.write_text("w1 w2\nw3\n" * 10)
    with pytest.raises(StateMismatch, match="source"):
        stream(path).load_state_dict(state)
    with pytest.raises(StateMismatch, match="not a text stream state"):
        stream(path).load_state_dict(FixedBatches(stream(path), batch_size=1).state_dict())
    for fresh in (lambda: stream(path), lambda: FixedBatches(stream(path), batch_size=1)):
        saved = fresh().state_dict()
        saved["state"]["counts"]["windows"] = 3
        with pytest.raises(StateMismatch, match="damaged: the digest of the saved"):
            fresh().load_state_dict(saved)


@pytest.mark.parametrize("option", ["mask_boundary_loss", "train_on_eos"])
def test_a_state_of_batches_with_other_labels_is_refused(stream, option):
    """TEXT-26"""
    one = FixedBatches(stream(corpus(2, 60)), batch_size=1)
    next(one)
    with pytest.raises(StateMismatch, match=option):
        FixedBatches(stream(corpus(2, 60)), batch_size=1, **{option: False}).load_state_dict(one.state_dict())


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_pass_begins_anew_after_one_that_ended_and_goes_on_after_one_that_was_left(stream, prefetch):
    """TEXT-37"""
    batches = FixedBatches(stream(corpus(2, 60)), batch_size=2, prefetch=prefetch)
    with batches:
        first, counts = list(batches), batches.counts
        assert first
        assert same(list(batches), first)
        assert batches.counts == counts
        left = list(islice(batches, 1))
        assert same([*left, *batches], first)


def test_local_text_by_line_and_by_paragraph(tmp_path):
    """TEXT-24"""
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\ntwo\n\n \nthree é\r\nfour".encode())

    def texts(document):
        source = local_text([path, path], document=document)
        source.start(0)
        found = []
        while (one := source.read()) is not None:
            found.append(one)
        assert [source.fetch(one.address) for one in found] == [one.text for one in found]
        return [one.text for one in found]

    assert texts("line") == ["one", "two", "three é", "four"] * 2
    assert texts("paragraph") == ["one\ntwo", "three é\nfour"] * 2


def test_sources_that_cannot_be_are_refused(stream, tmp_path):
    """TEXT-24"""
    for source, said in (
        (tmp_path / "none.txt", "no such text file"),
        ({"train": []}, "several data sets"),
        (iter(["a"]), "can be read once"),
        (3, "a int is not a source of documents"),
    ):
        with pytest.raises(DataError, match=said):
            stream(source)
    with pytest.raises(ConfigError, match="document must be"):
        local_text(__file__, document="page")
    with pytest.raises(DataError, match="row 1 has no 'content'; it has text"):
        next(stream([{"text": "w1"}], text_key="content"))
    with pytest.raises(DataError, match="row 2 of epoch 0: text must be a text, got int"):
        list(stream(lambda: iter([{"text": "w1"}, {"text": 4}])))
    (tmp_path / "latin.txt").write_bytes("w1\né".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin.txt: the document at byte 3 is not UTF-8"):
        list(stream(tmp_path / "latin.txt"))


def test_a_list_of_paths_is_their_text_and_never_their_names(stream, tmp_path, monkeypatch):
    """TEXT-24"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("w1\nw2\n")
    (tmp_path / "corpus").write_text("w3\n")
    (tmp_path / "a file").write_text("w4\n")
    wanted = [[BOS, 5, EOS, BOS, 6, EOS, PAD, PAD]]
    for source in (["a.txt"], [tmp_path / "a.txt"], ("a.txt",), [str(tmp_path / "a.txt")]):
        assert [window.tokens.tolist() for window in stream(source)] == wanted
    both = list(stream(["a.txt", tmp_path / "corpus", "a file"], seq_len=11))
    assert both[0].tokens.tolist() == [BOS, 5, EOS, BOS, 6, EOS, BOS, 7, EOS, BOS, 8, EOS]
    assert [len(list(stream(one))) for one in (["corpus"], ["a file"])] == [1, 1]
    for source, said in (
        (["b.txt"], r"b.txt: there is no such text file; give texts that look like file names as rows"),
        ([tmp_path / "b"], "there is no such text file"),
        (["a.txt", "w1 w2"], "the list of paths has something else as number 2: 'w1 w2'"),
        ([tmp_path / "a.txt", 3], "the list of paths has something else as number 2: '3'"),
        ("a.parquet", "there is no such text file"),
    ):
        with pytest.raises(DataError, match=said):
            stream(source)
    named = list(stream([{"text": "a.txt"}, {"text": "w1"}], tokenizer="byte", seq_len=5, **BARE))
    assert bytes(named[0].tokens[:5].tolist()) == b"a.txt"
    assert len(list(stream(["w1", "a.txt"]))) == 1, "a text later on may be anything"


def test_rows_of_json_are_their_text(stream, tmp_path):
    """TEXT-24: by the ending of the file, and by byte as every text file."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "w1", "id": 3}\n\n{"text": null}\n{"text": "w2\\nw3"}\n"w4"\n')
    (one,) = made = list(stream(path, seq_len=12))
    assert one.tokens.tolist() == [BOS, 5, EOS, BOS, 6, 7, EOS, BOS, 8, EOS, PAD, PAD, PAD]
    again = stream([path], seq_len=12)
    next(again)
    assert again.counts["empty_documents"] == 1
    first = stream(path, seq_len=2)
    states = [json.loads(json.dumps(first.state_dict())) for _ in islice(first, 2)]
    wanted, other = [window.tokens.tolist() for window in first], stream(path, seq_len=2)
    other.load_state_dict(states[-1])
    assert [window.tokens.tolist() for window in other] == wanted
    assert made[0].segment_ids.max() == 3
    lines = list(stream(local_text(path, document="line"), tokenizer="byte", seq_len=200))
    assert b'{"text": "w1", "id": 3}' in bytes(token for token in lines[0].tokens.tolist() if token < 256)
    (tmp_path / "b.txt").write_text('{"body": "w9"}\n')
    rows = local_text([tmp_path / "b.txt"], document="row", text_key="body")
    assert next(stream(rows, seq_len=2)).tokens.tolist() == [BOS, 13, EOS]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "w1"}\n{"text": "w', r"a.jsonl: the document at byte 15 is not JSON \(Unterminated string"),
        (
            '{"content": "w1"}\n',
            r"a.jsonl: the document at byte 0 has no 'text'; it has content: name it with text_key=",
        ),
        ('{"text": 3}\n', "a.jsonl: the document at byte 0: text must be a text, got int"),
    ],
)
def test_rows_of_json_that_cannot_be_are_refused(stream, tmp_path, content, said):
    """TEXT-24"""
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=said):
        list(stream(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("name", "form"), [("a.json", "json"), ("a.csv", "csv"), ("a.parquet", "parquet"), ("a.txt.gz", "text")]
)
def test_files_of_other_formats_are_refused_with_the_way_out(stream, tmp_path, name, form):
    """TEXT-24: they would be read as lines of text."""
    (tmp_path / name).write_text("w1\n")
    with pytest.raises(
        DataError, match=rf"{name} is not plain text: give datasets.load_dataset\('{form}', data_files="
    ):
        stream([tmp_path / name])
    assert len(list(stream(local_text(tmp_path / name, document="line")))) == 1


def test_text_key_and_rows_without_text(stream):
    """TEXT-24"""
    rows = [{"content": one} for one in (text(1), None, "", "  ", text(2))]
    one = stream(rows, text_key="content")
    assert [window.tokens.tolist() for window in one] == [[BOS, 5, EOS, BOS, 6, EOS, PAD, PAD]]
    assert (one.counts["documents"], one.counts["empty_documents"]) == (2, 3)
    assert list(stream([], seq_len=3)) == []


def test_repeat_and_shuffle(stream):
    """TEXT-29"""
    source = [text(number) for number in range(20)]

    def drawn(num_documents, **options):
        one = stream(source, seq_len=1, repeat=True, add_bos=False, **options)
        return [int(window.tokens[0]) - 4 for window in islice(one, num_documents)]

    assert drawn(45) == [*range(20), *range(20), *range(5)]
    shuffled = drawn(40, shuffle_buffer_size=6, seed=1)
    assert sorted(shuffled[:20]) == sorted(shuffled[20:]) == list(range(20))
    assert shuffled[:20] != list(range(20))
    assert shuffled[:20] != shuffled[20:]
    assert all(number < at + 6 for at, number in enumerate(shuffled[:20])), "from a buffer of 6"
    assert drawn(40, shuffle_buffer_size=6, seed=1) == shuffled != drawn(40, shuffle_buffer_size=6, seed=2)
    assert drawn(20, shuffle_buffer_size=1) == list(range(20))


@pytest.mark.parametrize(("source", "said"), [([], "without a document"), ([None, ""], "no document of a whole epoch")])
def test_repeating_nothing_ends(stream, source, said):
    """TEXT-29"""
    with pytest.raises(DataError, match=said):
        next(stream(source, repeat=True))


@pytest.mark.parametrize("kind", ["list", "lines", "function", "streaming"])
def test_a_repeated_stream_goes_on_before_an_empty_document(stream, kind, tmp_path):
    """TEXT-26 TEXT-29: in its second epoch, and where the next document has no token."""
    source = [text(1), "", text(2, 3), "", "", text(4)]

    def fresh():
        (tmp_path / "files").mkdir(exist_ok=True)
        given = SOURCES[kind](tmp_path / "files", source)
        return stream(given, seq_len=2, repeat=True, add_bos=False)

    one = fresh()
    states, made = [], []
    for window in islice(one, 30):
        states.append(json.dumps(one.state_dict()))
        made.append(window.tokens.tolist())
    for number, state in enumerate(states[:20]):
        again = fresh()
        again.load_state_dict(json.loads(state))
        assert [window.tokens.tolist() for window in islice(again, 9)] == made[number + 1 : number + 10]


def test_options_that_cannot_be_are_refused(stream):
    """TEXT-20 TEXT-21 TEXT-25 TEXT-29"""
    for options, said in (
        ({"seq_len": 0}, "seq_len must be at least 1"),
        ({"packing_mode": "wrapped"}, "packing_mode must be 'sequential' or 'bin'"),
        ({"packing_mode": "bin", "packing_strategy": "magic"}, "packing_strategy must be one of"),
        (
            {"packing_mode": "bin", "packing_strategy": "binpack", "packing_max_docs_per_bin": 2},
            "has no caps other than tokens",
        ),
        ({"packing_mode": "bin", "packing_strategy": "window"}, "packing_strategy=window is packing_mode='sequential'"),
        ({"packing_buffer_docs": 0}, "packing_buffer_docs must be at least 1"),
        ({"max_retries": -1}, "max_retries must be at least 0"),
        ({"max_retries": 1.5}, "max_retries must be a whole number, got 1.5"),
        ({"shuffle_buffer_size": "3"}, "shuffle_buffer_size must be a whole number, got '3'"),
        ({"shuffle_buffer_size": None}, "shuffle_buffer_size must be a whole number, got None"),
        ({"retry_delay_sec": "1"}, "retry_delay_sec must be a number of at least 0, got '1'"),
        ({"retry_delay_sec": -0.5}, "retry_delay_sec must be a number of at least 0, got -0.5"),
        ({"retry_delay_sec": float("nan")}, "retry_delay_sec must be a number of at least 0, got nan"),
        ({"tokenizer": "bert"}, "tokenizer must be"),
    ):
        with pytest.raises(ConfigError, match=said):
            stream(["w1"], **options)
    for options in ({"batch_size": 0}, {"batch_size": 1, "accumulation": 0}, {"batch_size": 1, "prefetch": -1}):
        with pytest.raises(ConfigError, match="must be at least"):
            FixedBatches(stream(["w1"]), **options)


# -- errors and threads -----------------------------------------------------------------------------------------------


class Flaky:
    """A streaming data set that fails at some rows so often, as a network does; its iterator is then at its end."""

    def __init__(self, rows, failures):
        self.rows, self.failures, self.at = rows, failures, 0

    def __iter__(self):
        while self.at < len(self.rows):
            at = self.at
            self.at += 1  # moved on before it fails, as a data set that maps does
            if self.failures.get(at, 0):
                self.failures[at] -= 1
                raise ConnectionError(f"row {at} did not come")
            yield {"text": self.rows[at]}

    def __deepcopy__(self, memo):
        return Flaky(self.rows, self.failures)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("failures", [{0: 2}, {7: 3}, {0: 1, 1: 1, 19: 2}])
def test_a_read_that_fails_is_tried_again_with_growing_delays(stream, failures, caplog):
    """TEXT-25"""
    source, slept = [text(number) for number in range(20)], []
    wanted = [window.tokens.tolist() for window in stream(source)]
    one = stream(Flaky(source, dict(failures)), retry_delay_sec=0.5, sleep=slept.append)
    assert [window.tokens.tolist() for window in one] == wanted, "no row is lost, none comes twice"
    assert slept == [0.5 * 2**attempt for times in failures.values() for attempt in range(times)]
    assert caplog.text.count("did not come; trying again in") == len(slept)


def test_what_stays_broken_is_raised_with_source_and_position(stream):
    """TEXT-25"""
    slept = []
    one = stream(Flaky([text(1)] * 9, {5: 99}), max_retries=2, sleep=slept.append, seq_len=1)
    with pytest.raises(
        SourceError, match=r"Flaky: document 6 of epoch 0 cannot be read, after 3 attempts \(Conn"
    ) as error:
        list(one)
    assert isinstance(error.value.__cause__, ConnectionError)
    assert slept == [1.0, 2.0]
    never = stream(Flaky([text(1)], {0: 1}), max_retries=0, sleep=slept.append)
    with pytest.raises(SourceError, match="after 1 attempts"):
        next(never)


def test_a_state_is_tried_again_too(stream):
    """TEXT-25: of some sources it reads the first and the last row."""

    class Lost(list):
        failures = 2

        def __getitem__(self, index):
            if self.failures:
                self.failures -= 1
                raise ConnectionError("the network is gone")
            return super().__getitem__(index)

    slept = []
    state = stream(Lost([text(1)] * 9), sleep=slept.append).state_dict()
    assert state == stream([text(1)] * 9).state_dict()
    assert slept == [1.0, 2.0]
    with pytest.raises(SourceError, match=r"Lost: document 1 of epoch 0 cannot be read, after 1 attempts"):
        stream(Lost([text(1)] * 9), max_retries=0).state_dict()


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "vlpack-prefetch"]


def ended(thread_list):
    for thread in thread_list:
        thread.join(20)
    return not any(thread.is_alive() for thread in thread_list)


def test_a_thread_leaves_the_data_set_of_its_caller_alone(stream):
    """TEXT-27: who copies it in a thread meets "dictionary changed size during iteration" where the caller uses it."""
    touched = []

    class Given(Flaky):
        def __deepcopy__(self, memo):
            touched.append((self, threading.current_thread() is threading.main_thread()))
            return Given(self.rows, self.failures)

    given = Given([text(number) for number in range(20)], {})
    with FixedBatches(stream(given, repeat=True), batch_size=2, prefetch=2) as batches:
        for _ in range(9):
            next(batches)
    assert [is_main for one, is_main in touched if one is given] == [True]
    assert len(touched) > 2, "a copy of the copy for every epoch"


@pytest.mark.parametrize("prefetch", [1, 3])
def test_prefetched_batches_and_states_are_those_without(stream, prefetch):
    """TEXT-27"""
    source, rng = corpus(6, 80), random.Random(0)
    options = {"shuffle_buffer_size": 4, "packing_mode": "bin", "packing_buffer_docs": 8}
    plain = FixedBatches(stream(source, **options), batch_size=2)
    ahead = FixedBatches(stream(source, **options), batch_size=2, prefetch=prefetch)
    made = []
    assert ahead.state_dict() == plain.state_dict()
    for batch in ahead:
        made.append(batch)
        assert same([batch], [next(plain)])
        if rng.random() < 0.5:
            time.sleep(0.002)  # lets the thread run ahead
        assert json.dumps(ahead.state_dict()) == json.dumps(plain.state_dict()), "of what was consumed"
        assert ahead.counts == plain.counts
    assert next(plain, None) is None
    assert ahead.state_dict() == plain.state_dict()
    assert ended(threads())


def test_closing_early_leaves_no_thread_and_going_on_misses_nothing(stream):
    """TEXT-27"""
    source = corpus(6, 80)
    wanted = list(FixedBatches(stream(source), batch_size=2))
    with FixedBatches(stream(source), batch_size=2, prefetch=3) as batches:
        made = [next(batches), next(batches)]
        assert len(threads()) == 1
    assert threads() == []
    made += [next(batches)]
    state = batches.state_dict()
    batches.close()
    batches.close()
    assert batches.state_dict() == state
    assert same([*made, *batches], wanted)
    batches.load_state_dict(state)
    assert same(list(batches), wanted[3:])
    batches.close()
    assert threads() == []


def test_a_forgotten_one_ends_its_thread_too(stream):
    """TEXT-27"""
    batches = FixedBatches(stream(corpus(6, 80), repeat=True), batch_size=2, prefetch=2)
    next(batches)
    alive = threads()
    assert len(alive) == 1
    del batches
    gc.collect()
    assert ended(alive)


def test_an_error_in_the_thread_reaches_the_consumer_with_its_traceback(stream):
    """TEXT-27 TEXT-25"""
    options = {"seq_len": 1, "add_bos": False, "max_retries": 0}
    batches = FixedBatches(stream(Flaky([text(1)] * 9, {5: 1}), **options), batch_size=2, prefetch=4)
    made = [next(batches), next(batches)]
    state = batches.state_dict()
    for _ in range(2):  # it stays
        with pytest.raises(SourceError, match="document 6") as error:
            next(batches)
    frames = [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]
    assert "run" in frames
    assert "_wait_or_give_up" in frames
    assert batches.state_dict() == state
    batches.close()
    assert threads() == []
    made += list(batches)  # the row has come back by now
    assert len(made) == 5
