"""A stream by a YAML file: what it makes, what it refuses, and that its list of options is complete."""

import inspect
import json
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.text import FixedBatches, TextStream, load_stream, stream_file
from tests.text.vocabularies import corpus, text, words

CONFIG = Path(__file__).parents[2] / "configs" / "text_stream.yaml"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "corpus.txt").write_text("".join(f"{one}\n" for one in corpus(2, 300) if one))
    return tmp_path


def written(folder, content):
    path = folder / "stream.yaml"
    path.write_text(content)
    return path


def same(one, other):
    return all(np.array_equal(one[name], other[name]) for name in (*one, *other))


def test_the_ready_stream_makes_batches(folder):
    """TEXT-36: as it is, with its schema beside it in an editor."""
    with load_stream(CONFIG) as batches:
        made = list(islice(batches, 3))
    assert {name: field.shape for name, field in made[0].items()} == dict.fromkeys(made[0], (4, 8, 1024))
    stream = TextStream(
        "data/corpus.txt", tokenizer="byte", seq_len=1024, packing_mode="bin", packing_buffer_docs=512,
        shuffle_buffer_size=10_000, seed=1, repeat=True,
    )  # fmt: skip
    for batch, wanted in zip(made, FixedBatches(stream, batch_size=8, accumulation=4), strict=False):
        assert same(batch, wanted)


def test_options_win_over_the_file(folder):
    """TEXT-36: so one file serves all ranks."""
    shares = [load_stream(CONFIG, rank=rank, num_ranks=2, repeat=False, prefetch=0) for rank in range(2)]
    for share in shares:
        list(share)
    num_documents = [share.counts["documents"] for share in shares]
    assert sum(num_documents) == len((folder / "data" / "corpus.txt").read_text().splitlines())
    assert abs(num_documents[0] - num_documents[1]) <= 1


def test_every_source_and_tokenizer(folder):
    """TEXT-36: rows of JSON, several files, a data set of `load_dataset`; a tokenizer by its folder."""
    words().save_pretrained("tokenizer")
    rows = [text(number, number + 1) for number in range(9)]
    Path("rows.jsonl").write_text("".join(json.dumps({"body": one}) + "\n" for one in rows))
    Path("lines.txt").write_text("\n".join(rows))
    rest = "tokenizer: tokenizer\nseq_len: 5\nbatch_size: 2\n"
    wanted = list(FixedBatches(TextStream(rows, tokenizer=words(), seq_len=5), batch_size=2))
    for source in (
        "source: rows.jsonl\ntext_key: body",
        "source: [lines.txt]",
        "source: lines.txt\ndocument: line",
        "source: {path: json, data_files: rows.jsonl}\ntext_key: body",
        "source: {path: json, data_files: rows.jsonl, streaming: false}\ntext_key: body",
    ):
        made = list(load_stream(written(folder, f"{source}\n{rest}")))
        assert len(made) == len(wanted)
        assert all(map(same, made, wanted))


GOOD = "source: data/corpus.txt\ntokenizer: byte\nseq_len: 8\nbatch_size: 2\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (GOOD + "packing_mod: bin\n", "a stream has no option 'packing_mod'; did you mean 'packing_mode'?"),
        (GOOD + "xyz: 1\n", "a stream has no option 'xyz'; known are source, document"),
        (GOOD + "seed: one\n", "stream.yaml: seed must be int, got 'one'"),
        (GOOD + "prefetch: true\n", "prefetch must be int, got True"),
        (GOOD + "repeat: 1\n", "repeat must be bool, got 1"),
        (GOOD + "max_doc_tokens: all\n", "max_doc_tokens must be int or null, got 'all'"),
        (GOOD + "packing_mode: bins\n", "packing_mode must be 'sequential' or 'bin', got 'bins'"),
        ("source: data/corpus.txt\n", "a stream needs tokenizer, seq_len, batch_size"),
        ("- a\n", "a stream is a mapping of options, got list"),
        ("a: [\n", "stream.yaml: not YAML"),
        (GOOD.replace("corpus", "none"), "data/none.txt: there is no such text file"),
        (GOOD.replace("byte", "no/folder/here"), "tokenizer 'no/folder/here' cannot be loaded"),
        (GOOD.replace("data/corpus.txt", "{name: x}"), "a source that is a data set needs its path, got name"),
        (GOOD.replace("data/corpus.txt", "{path: json, data_files: none.jsonl}"), "source 'json' cannot be loaded"),
        (GOOD.replace("data/corpus.txt", "{path: json}") + "document: line\n", "document is an option for text files"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_the_file(folder, content, said, monkeypatch):
    """TEXT-36"""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises((ConfigError, DataError), match=re.escape(said)):
        load_stream(written(folder, content))


def test_a_file_has_every_option_that_there_is():
    """TEXT-36: with its default in the text, which an editor shows."""
    parameters = {**inspect.signature(TextStream).parameters, **inspect.signature(FixedBatches).parameters}
    assert set(stream_file.KINDS) == set(parameters) - {"stream", "sleep"} | {"document"}
    shown = dict(re.findall(r"^(\w+): (.*?)  # ", stream_file.__doc__, flags=re.MULTILINE))
    assert list(shown) == [*shown]
    assert set(shown) == set(stream_file.KINDS)
    examples = {"packing_mode", "batch_size"}
    for name, parameter in parameters.items():
        if name in shown and parameter.default is not parameter.empty and name not in examples:
            assert shown[name] == json.dumps(parameter.default).strip('"'), name
