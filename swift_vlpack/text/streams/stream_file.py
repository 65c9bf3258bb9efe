"""A stream and its batches by a YAML file, for `load_stream`:

source: data/corpus.txt  # a path, a list of paths, or arguments of datasets.load_dataset: {path: ..., split: train}
document: line  # of text files: line, paragraph, or row of JSON; by default row for .jsonl and line for others
text_key: text  # the field of a row that has its text
tokenizer: byte  # byte, or the name or folder of a tokenizer of transformers
seq_len: 1024  # inputs of a row, and targets
packing_mode: bin  # sequential (cut wherever a row is full) or bin (documents packed whole)
packing_strategy: best_fit  # of bins: how documents are packed
packing_buffer_docs: 128  # of bins: documents to choose from at a time
packing_max_docs_per_bin: null  # of bins: the most documents in a row
add_bos: true  # BOS before every document
add_eos: true  # EOS after every document
max_doc_tokens: null  # keep the first tokens of a document, count the rest
shuffle_buffer_size: 0  # documents to draw the next one from
seed: 0  # of the shuffling
repeat: false  # begin anew at the end, for ever
max_retries: 3  # how often a read that failed is tried again
retry_delay_sec: 1.0  # before the first retry, twice as long before each further one
rank: 0  # the reader that this is, of num_ranks that share the documents
num_ranks: 1  # how many readers there are
batch_size: 8  # rows of a batch
accumulation: 1  # batches of a step
drop_last: false  # drop the last batch that is not full, in place of padding it
mask_boundary_loss: true  # the first token of a document is no target
train_on_eos: true  # EOS is a target
prefetch: 0  # batches that a thread makes ahead
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swift_vlpack.errors import ConfigError
from swift_vlpack.text.streams.fixed import FixedBatches
from swift_vlpack.text.streams.local import local_text
from swift_vlpack.text.streams.stream import TextStream
from swift_vlpack.text.vocabulary import tokenizer_named
from swift_vlpack.yaml_files import read_yaml

KINDS: dict[str, tuple[type, ...]] = {
    "source": (str, list, dict),
    "document": (str,),
    "text_key": (str,),
    "tokenizer": (str,),
    "seq_len": (int,),
    "packing_mode": (str,),
    "packing_strategy": (str,),
    "packing_buffer_docs": (int,),
    "packing_max_docs_per_bin": (int, type(None)),
    "add_bos": (bool,),
    "add_eos": (bool,),
    "max_doc_tokens": (int, type(None)),
    "shuffle_buffer_size": (int,),
    "seed": (int,),
    "repeat": (bool,),
    "max_retries": (int,),
    "retry_delay_sec": (float, int),
    "rank": (int,),
    "num_ranks": (int,),
    "batch_size": (int,),
    "accumulation": (int,),
    "drop_last": (bool,),
    "mask_boundary_loss": (bool,),
    "train_on_eos": (bool,),
    "prefetch": (int,),
}
NEEDED = ("source", "tokenizer", "seq_len", "batch_size")


def load_stream(path: str | os.PathLike[str], **options: Any) -> FixedBatches:
    """Make the batches that a YAML file describes; `options` win over the file, as `rank` and `num_ranks` may have to.

    Paths in the file are meant from the current directory.
    """
    found = read_yaml(Path(path), str(path))
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path}: a stream is a mapping of options, got {type(found).__name__}")
    given = {**found, **options}
    _check(given, str(path))
    of_batches = {name for name in inspect.signature(FixedBatches).parameters if name != "stream"}
    batches = {name: value for name, value in given.items() if name in of_batches}
    stream = {
        name: value
        for name, value in given.items()
        if name not in of_batches and name not in ("source", "document", "tokenizer")
    }
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
        raise ConfigError(f"{path}: document is of text files, and source is a data set; leave document out")
    if "path" not in source:
        raise ConfigError(f"{path}: a source that is a data set needs its path, got {', '.join(map(str, source))}")
    from datasets import load_dataset

    try:
        return load_dataset(**{"split": "train", "streaming": True, **source})
    except (OSError, ValueError, TypeError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{path}: source {source['path']!r} cannot be loaded ({said})") from error
