"""What the tests of the length pass share."""

import base64
from pathlib import Path
from types import SimpleNamespace

from datasets import Dataset
from swift.template import get_template

from swift_vlpack.host import length_pass
from swift_vlpack.lengths import failures, measure
from swift_vlpack.lengths.cache import LengthCache
from swift_vlpack.lengths.context import dependencies_of, digest_of
from swift_vlpack.rows.contents import size_of
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.source import RowSource
from tests.data_rows import image_row, text_row
from tests.images import photo
from tests.lengths.test_measure import texts, unchecked

__all__ = ["texts", "unchecked"]
ARGS = SimpleNamespace(dataset_num_proc=1, strict=False)


FAMILY = "qwen2_5_vl"


def dataset(rows):
    """As ms-swift loads it: every row has every column."""
    return Dataset.from_list([{"images": [], **row} for row in rows])


def outcome(template, row):
    try:
        return size_of(template.encode(row, return_length=True))
    except Exception as error:
        return type(error).__name__


def variant(tiny, family, **options):
    """Another template on the same processor."""
    made = get_template(tiny(family).template.processor, template_type=family, **{"max_length": 2048, **options})
    made.set_mode("train")
    return made


def context_of(template):
    """What the key of every length of this template has in it."""
    return digest_of(dependencies_of(template, ()), 16)


def with_lengths(source, template, *args):
    """The lengths of a source, of rows as a template encodes them."""
    (measured,) = length_pass.with_all_lengths([source], RowEncoder(template), *args)
    return measured


def source(rows, name="rows", **options):
    return RowSource(name=name, rows=rows, **options)


def caches_of(monkeypatch):
    """The caches that passes open from now on."""
    made = []
    monkeypatch.setattr(length_pass, "LengthCache", lambda *args: made.append(LengthCache(*args)) or made[-1])
    return made


def warnings_of(monkeypatch):
    """What the pass says of a source, and of its rows that fail."""
    said = []
    for module in (measure, failures):
        monkeypatch.setattr(module.logger, "warning", lambda text, *args: said.append(text % args))
    return said


def odd_rows(folder):
    """Rows that a template treats in ways of their own."""
    path, wide = photo(folder, "photo", 320, 240), photo(folder, "wide", 700, 30)
    content = Path(path).read_bytes()
    text = base64.b64encode(content).decode()
    system = {"role": "system", "content": "You look at pictures."}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}}
    call = {"role": "tool_call", "content": '{"name": "look", "arguments": {"at": "door"}}'}
    found = {"role": "tool_response", "content": '{"seen": "a door"}'}
    ask, answer = text_row("<image>what is it?", "<think>\nhm\n</think>\n\nA picture.")["messages"]
    turns = [
        message for n in range(4) for message in text_row(f"question {n}", f"<think>n</think>answer {n}")["messages"]
    ]
    return {
        "text": text_row(),
        "empty": text_row("", ""),
        "special": text_row("<|im_end|> <|image_pad|> <image", "<|endoftext|> <bbox>"),
        "unicode": text_row("\u00e9\u4e2d\U0001f600 " * 9, "\t\n  x \u200b"),
        "system": {"messages": [system, ask, answer], "images": [path]},
        "tools": {"messages": [ask, call, found, answer], "images": [wide], "tools": [tool]},
        "turns": {"messages": turns},
        "turns with images": {"messages": [ask, answer, ask, answer], "images": [path, wide]},
        "not learned": {"messages": [ask, {**answer, "loss": False}, ask, answer], "images": [path, wide]},
        "two": image_row([path, wide]),
        "more tags": {**text_row("<image><image>two tags"), "images": [path]},
        "fewer tags": {**text_row("<image>one tag"), "images": [path, path]},
        "no tag": {**text_row("no tag"), "images": [path]},
        "tag in answer": {**text_row("draw", "<image>"), "images": [path]},
        "base64": image_row([text]),
        "url": image_row([f"data:image/jpeg;base64,{text}"]),
        "bytes": {**text_row("<image>in the row"), "images": [{"bytes": content, "path": None}]},
        "path": {**text_row("<image>as ms-swift loads it"), "images": [{"bytes": None, "path": path}]},
        "content": {"messages": [{"role": "user", "content": [{"type": "image", "image": path}]}, answer]},
        "tagged path": text_row(f"<img>{path}</img>what"),
        "missing, valid base64": image_row(["/photos/of/gone"]),
        "missing": image_row(["gone.jpg"]),
        "boxes": {
            **text_row("<image>where is <ref-object>?", "at <bbox>"),
            "images": [path],
            "objects": {"ref": ["the tree"], "bbox": [[10, 10, 50, 50]]},
        },
        "limited": {**image_row([path]), "chat_template_kwargs": {"max_pixels": 40000}},
        "exact": {**image_row([path]), "chat_template_kwargs": {"resized_height": 100, "resized_width": 300}},
        "channel": {**image_row([path]), "channel": "web"},
        "long": text_row("why? " * 100, "because " * 300),
        "long with images": image_row([path, wide], "why? " * 100, "because " * 100),
    }
