"""Make a stream and its batches from a YAML file (`load_stream`), with these options:

source: data/corpus.txt  # a path, a list of paths, or arguments of datasets.load_dataset: {path: ..., split: train}
document: line  # of text files: line, paragraph, or row of JSON; by default row for .jsonl and line for others
text_key: text  # the field of a row that has its text
tokenizer: byte  # byte, or the name or folder of a tokenizer of transformers
seq_len: 1024  # inputs of a row, and targets
packing_mode: bin  # sequential (cut wherever a row is full) or bin (documents packed whole)
packing_strategy: best_fit  # for bins: how documents are packed
packing_buffer_docs: 128  # for bins: documents to choose from at a time
packing_max_docs_per_bin: null  # for bins: the most documents in a row
add_bos: true  # BOS before every document
add_eos: true  # EOS after every document
max_doc_tokens: null  # keep the first tokens of a document, count the rest
shuffle_buffer_size: 0  # documents to draw the next one from
seed: 0  # seed of the shuffle
repeat: false  # begin another epoch at the end, without end
max_retries: 3  # how often a failed read is retried
retry_delay_sec: 1.0  # seconds before the first retry, twice as long before each further one
rank: 0  # number of this reader, from 0; readers share the documents
num_ranks: 1  # number of readers
batch_size: 8  # rows of a batch
accumulation: 1  # batches of a step
drop_last: false  # drop the last batch if it is not full, in place of padding it
mask_boundary_loss: true  # do not train the first token of a document
train_on_eos: true  # train EOS
prefetch: 0  # batches that a thread makes ahead
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from swift_vlpack.errors import ConfigError
from swift_vlpack.text.batches import FixedBatches
from swift_vlpack.text.local import local_text
from swift_vlpack.text.stream import TextStream
from swift_vlpack.text.tokenizer import tokenizer_named
from swift_vlpack.yaml_files import read_yaml

_OF_FILE: dict[str, tuple[type, ...]] = {"source": (str, list, dict), "document": (str,), "tokenizer": (str,)}
"""Options of a file that `TextStream` takes in another form: `load_stream` makes a source and a tokenizer of them."""


def _kinds_of(maker: type, *others: str) -> dict[str, tuple[type, ...]]:
    """Return the options of a class without `others`, each with the types that YAML may have, from its signature."""
    hints = get_type_hints(maker.__init__)  # type: ignore[misc]  # mypy objects to `__init__` of an instance
    kinds = {name: get_args(hint) or (hint,) for name, hint in hints.items() if name not in (*others, "return")}
    return {name: (float, int) if kind == (float,) else kind for name, kind in kinds.items()}


_OF_BATCHES = _kinds_of(FixedBatches, "stream")
KINDS = {**_OF_FILE, **_kinds_of(TextStream, "source", "tokenizer", "sleep"), **_OF_BATCHES}
NEEDED = ("source", "tokenizer", "seq_len", "batch_size")


def load_stream(path: str | os.PathLike[str], **options: Any) -> FixedBatches:
    """Make the batches that a YAML file describes. `options`, such as `rank` and `num_ranks`, win over the file.

    Paths in the file are relative to the current directory.
    """
    found = read_yaml(Path(path), str(path))
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path}: a stream is a mapping of options, got {type(found).__name__}")
    given = {**found, **options}
    _check(given, str(path))
    batches = {name: value for name, value in given.items() if name in _OF_BATCHES}
    stream = {name: value for name, value in given.items() if name not in (*_OF_BATCHES, *_OF_FILE)}
    source = _source(given, str(path))
    return FixedBatches(TextStream(source, tokenizer=tokenizer_named(given["tokenizer"]), **stream), **batches)


def _check(given: Mapping[str, Any], path: str) -> None:
    for name, value in given.items():
        if name not in KINDS:
            near = difflib.get_close_matches(str(name), KINDS, 1)
            meant = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(KINDS)}"
            raise ConfigError(f"{path}: a stream has no option {name!r}{meant}")
        is_bool_for_number = isinstance(value, bool) and bool not in KINDS[name]
        if not isinstance(value, KINDS[name]) or is_bool_for_number:
            kinds = " or ".join("null" if kind is type(None) else kind.__name__ for kind in KINDS[name])
            raise ConfigError(f"{path}: {name} must be {kinds}, got {value!r}")
    missing = [name for name in NEEDED if name not in given]
    if missing:
        raise ConfigError(f"{path}: a stream needs {', '.join(missing)}")


def _source(given: Mapping[str, Any], path: str) -> Any:
    source, text_key = given["source"], given.get("text_key", "text")
    if not isinstance(source, Mapping):
        return local_text(source, given.get("document"), text_key)
    if "document" in given:
        raise ConfigError(f"{path}: document is an option for text files, but source is a data set; leave document out")
    if "path" not in source:
        raise ConfigError(f"{path}: a source that is a data set needs its path, got {', '.join(map(str, source))}")
    from datasets import load_dataset

    try:
        return load_dataset(**{"split": "train", "streaming": True, **source})
    except (OSError, ValueError, TypeError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{path}: source {source['path']!r} cannot be loaded ({said})") from error
