"""Sizes from image headers, trust in them, what is remembered, and several ranks."""

import base64
import logging
import os
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from datasets import Dataset
from swift.template import Template, get_template

from swift_vlpack.core.errors import DataError
from swift_vlpack.data.lengths import passes as length_pass
from swift_vlpack.data.lengths import trust
from swift_vlpack.data.lengths.sizes import size_of
from swift_vlpack.data.rows.fusion import RowSource
from swift_vlpack.host.lengths import headers
from swift_vlpack.host.lengths import measured as lengths
from swift_vlpack.host.lengths.context import context_of
from swift_vlpack.host.lengths.headers import HeaderImage, NoPixels, pixel_free
from swift_vlpack.host.lengths.measured import cache_path, measured
from swift_vlpack.host.ranks import RankFailed, RanksDiffer
from tests.data.rows.test_faults import bad_rows
from tests.host.runs import epoch_report, packed_argv, train
from tests.images import BROKEN, GOOD, KINDS, REASON_OF, make, noise, photo, wild
from tests.rows import image_row, text_row, write_jsonl
from tests.tiny import FAMILIES

ARGS = SimpleNamespace(dataset_num_proc=1, strict=False)
FAMILY = "qwen2_5_vl"
BROKEN_BEHIND_ITS_HEADER = {"truncated.jpg", "broken.png"}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    return {**make(folder / "good", GOOD), **make(folder / "broken", BROKEN)}


@pytest.fixture(scope="session")
def few_images(tmp_path_factory):
    return wild(tmp_path_factory.mktemp("few"), 4 * len(KINDS))


@pytest.fixture(scope="session")
def many_images(tmp_path_factory):
    return wild(tmp_path_factory.mktemp("many"), 20 * len(KINDS), seed=1)


@pytest.fixture
def template(tiny):
    return tiny(FAMILY).template


@pytest.fixture
def encoded(monkeypatch):
    """The rows that templates encode, with or without pixels, in this process."""
    calls, encode = [], Template.encode

    def noted(self, row, **options):
        calls.append(row["messages"][0]["content"])
        return encode(self, row, **options)

    monkeypatch.setattr(Template, "encode", noted)
    return calls


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


def source(rows, name="rows", **options):
    return RowSource(name=name, rows=rows, **options)


def texts(num_rows, first=0):
    return [text_row(f"row {number}", "word " * (number % 7 + 1)) for number in range(first, first + num_rows)]


def warnings_of(monkeypatch):
    said = []
    monkeypatch.setattr(lengths.logger, "warning", said.append)
    return said


def unchecked(monkeypatch):
    """No row is encoded both ways."""
    monkeypatch.setattr(lengths, "NUM_TRIED", 0)
    monkeypatch.setattr(lengths, "NUM_EXTREMES", 0)
    monkeypatch.setattr(trust, "NUM_PER_KIND", 0)


# -- to the token -----------------------------------------------------------------------------------------------------


def assert_headers_equal_encoding(template, paths):
    quick = pixel_free(template)
    outcomes = []
    for number, path in enumerate(paths):
        template.max_pixels = quick.max_pixels = (None, None, 20_000)[number % 3]
        full = outcome(template, image_row([path]))
        assert outcome(quick, image_row([path])) == full, path
        outcomes.append(full)
    assert sum(isinstance(one, str) for one in outcomes) < 0.1 * len(paths), "hardly any size was compared"
    assert len({one.length for one in outcomes if not isinstance(one, str)}) > 20


@pytest.mark.parametrize("family", FAMILIES)
def test_headers_give_the_length_that_encoding_gives(family, tiny, few_images):
    """LEN-1"""
    assert_headers_equal_encoding(variant(tiny, family, max_length=20_000), few_images)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.telling] * (family == "qwen2_5_vl")) for family in FAMILIES]
)
def test_headers_give_the_length_that_encoding_gives_for_1000_images(family, tiny, many_images):
    """LEN-1"""
    assert len(many_images) > 1000
    assert_headers_equal_encoding(variant(tiny, family, max_length=20_000), many_images)


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


VARIANTS = {
    "plain": {},
    "system": {"default_system": "You are a painter."},
    "delete": {"max_length": 150},
    "left": {"max_length": 150, "truncation_strategy": "left"},
    "right": {"max_length": 150, "truncation_strategy": "right"},
    "pixels": {"max_pixels": 30_000},
    "react": {"agent_template": "react_en"},
    "thinking": {"enable_thinking": True},
    "not thinking": {"enable_thinking": False},
    "no prefix": {"add_non_thinking_prefix": False},
    "prefix": {"response_prefix": "<think>\n"},
    "kept thoughts": {"preserve_thinking": True},
    "learned": {"loss_scale": "ignore_empty_think"},
    "weighted": {"loss_scale": "hermes", "is_binary_loss_scale": False},
    "all learned": {"loss_scale": "all"},
    "no chat": {"use_chat_template": False},
    "plain boxes": {"norm_bbox": "none"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_headers_agree_on_odd_rows_under_every_setting(family, tiny, tmp_path):
    """LEN-1 LEN-4: chat template, system prompt, tools, thinking, truncation, limits, forms of images."""
    rows = odd_rows(tmp_path)
    seen = {}
    for name, options in VARIANTS.items():
        template = variant(tiny, family, **options)
        quick = pixel_free(template)
        for kind, row in rows.items():
            full = outcome(template, row)
            assert outcome(quick, row) == full, (name, kind)
            seen[name, kind] = full
    failed = {kind for (name, kind), one in seen.items() if isinstance(one, str) and name == "plain"}
    assert failed <= {"missing", "missing, valid base64", "more tags", "special", "tag in answer"}, seen
    assert seen["delete", "long"] == "MaxLengthError"
    assert seen["left", "long"].length == seen["right", "long"].length == 150
    for changed, kind in [("system", "text"), ("pixels", "two"), ("react", "tools"), ("no chat", "text")]:
        assert seen[changed, kind] != seen["plain", kind], "a setting that changes nothing shows nothing"


@pytest.mark.parametrize("family", [FAMILY, "qwen3_vl"])
def test_headers_follow_the_limits_that_the_environment_set(family, tiny, tmp_path, monkeypatch):
    """LEN-1: ms-swift writes MAX_PIXELS and IMAGE_MAX_TOKEN_NUM into qwen_vl_utils once in a process."""
    from qwen_vl_utils import vision_process

    row = image_row([photo(tmp_path, "large", 900, 600)])
    template = tiny(family).template
    before = outcome(template, row)
    monkeypatch.setattr(vision_process, "IMAGE_MAX_TOKEN_NUM", 64)
    monkeypatch.setattr(vision_process, "IMAGE_MIN_TOKEN_NUM", 4)
    assert outcome(pixel_free(template), row) == outcome(template, row)
    assert outcome(template, row).length < before.length - 100


def test_sources_have_a_system_prompt_and_a_pixel_limit_of_their_own(tiny, tmp_path):
    """LEN-1 LEN-4"""
    template = tiny(FAMILY).template
    rows = dataset([image_row([photo(tmp_path, "large", 900, 600)]), text_row()])
    plain, prompted, limited = (
        measured(source(rows, name, **options), template, ARGS).sizes.lengths.tolist()
        for name, options in (
            ("plain", {}),
            ("prompted", {"system": "Be brief. " * 9}),
            ("limited", {"max_pixels": 50_000}),
        )
    )
    with_system = [
        {**row, "messages": [{"role": "system", "content": "Be brief. " * 9}, *row["messages"]]} for row in rows
    ]
    assert prompted == [outcome(template, row).length for row in with_system]
    assert prompted[0] > plain[0]
    assert limited[0] < plain[0]
    assert limited[1] == plain[1]


def test_no_image_is_decoded(template, images, monkeypatch):
    """LEN-2: with the decoder of every image format gone, headers still give the sizes."""
    from PIL import ImageFile

    decoded = []

    def no_decoder(self):
        decoded.append(self)
        raise AssertionError("an image was decoded")

    rows = dataset([image_row([images["photo.jpg"]]), text_row()])
    unchecked(monkeypatch)
    monkeypatch.setattr(ImageFile.ImageFile, "load", no_decoder)
    sizes = measured(source(rows, "undecoded"), template, ARGS).sizes
    assert (sizes.lengths > 0).all()
    assert sizes.images.tolist() == [1, 0]
    assert not decoded


def test_frames_of_a_video_are_no_headers(template, tmp_path, monkeypatch):
    """LEN-2: a video of frames, which needs no reader; a header would lie."""
    frames = [photo(tmp_path, f"frame {n}", 200, 160, seed=n) for n in range(4)]
    rows = [{**text_row("<video>what?"), "videos": [frames]}, *texts(3)]
    monkeypatch.setattr(headers, "_header_of", lambda image, load_images: HeaderImage((64, 64)))
    sizes = measured(source(rows), template, ARGS, str(tmp_path / "cache")).sizes
    assert tuple(sizes.columns[:, 0]) == tuple(outcome(template, rows[0]))
    assert sizes.patches[0] > 100


def test_asking_for_pixels_is_an_error():
    """LEN-2"""
    with pytest.raises(NoPixels):
        HeaderImage((4, 4)).load()
    assert HeaderImage((4, 4)).resize((8, 6)).size == (8, 6)


# -- trust ------------------------------------------------------------------------------------------------------------


def test_sizes_equal_the_encoded_ones_row_by_row_and_failures_have_their_reason(template, images, caplog):
    """LEN-1 LEN-3 LEN-11"""
    rows = dataset([image_row([path]) for path in images.values()])
    with caplog.at_level(logging.WARNING, logger="swift_vlpack"):
        sizes = measured(source(rows, "odd"), template, ARGS).sizes
    for index, (name, path) in enumerate(images.items()):
        full = outcome(template, rows[index])
        if name in BROKEN_BEHIND_ITS_HEADER:
            assert sizes.lengths[index] > 0, "found out when it is loaded"
        elif isinstance(full, str):
            assert sizes.lengths[index] == 0
            assert sizes.failures[index] == REASON_OF[name]
            (line,) = [record.message for record in caplog.records if record.message.startswith(f"odd:{index}:")]
            assert REASON_OF[name] in line
            assert path in line
        else:
            assert tuple(sizes.columns[:, index]) == tuple(full), name
    assert "odd: 5 of 17 rows cannot be encoded: " in caplog.text


@pytest.mark.parametrize("where", ["drawn", "extremes"])
def test_one_difference_sends_the_source_through_the_full_encoding(where, template, images, monkeypatch, tmp_path):
    """LEN-3 LEN-5: headers that lie."""
    rows = dataset([text_row(), image_row([images["photo.jpg"]]), image_row([images["wide.jpg"]])])
    right = [outcome(template, row).length for row in rows]
    said = warnings_of(monkeypatch)
    if where == "extremes":
        monkeypatch.setattr(lengths, "NUM_TRIED", 0)
    monkeypatch.setattr(headers, "_header_of", lambda image, load_images: HeaderImage((64, 64)))
    sizes = measured(source(rows), template, ARGS, str(tmp_path)).sizes
    assert sizes.lengths.tolist() == right
    (line,) = said
    assert "every row is encoded" in line
    number = 1 if "rows:1 " in line else 2
    assert f"rows:{number} has {right[number]} tokens, 1 image, " in line
    assert "from its header " in line
    assert line.count(" 1 image, ") == 2


@pytest.mark.parametrize(("true", "lie"), [((900, 700), (1000, 800)), ((1600, 40), (1700, 40)), ((30, 30), (90, 60))])
def test_extremes_of_size_and_aspect_are_compared(true, lie, template, monkeypatch, tmp_path):
    """LEN-3: one difference in 30 rows, of which none is drawn."""
    plain = [(300 + 4 * n, 300) for n in range(29)]
    rows = dataset([image_row([photo(tmp_path, f"{size}", *size)]) for size in [*plain[:9], true, *plain[9:]]])
    real = headers._header_of

    def lying(image, load_images):
        found = real(image, load_images)
        return HeaderImage(lie) if found.size == true else found

    said = warnings_of(monkeypatch)
    monkeypatch.setattr(lengths, "NUM_TRIED", 0)
    monkeypatch.setattr(headers, "_header_of", lying)
    sizes = measured(source(rows), template, ARGS, str(tmp_path)).sizes
    assert "rows:9 has " in said[0]
    assert sizes.lengths[9] == outcome(template, rows[9]).length


def test_extremes_are_the_ends_of_every_column():
    """LEN-3"""
    sizes = np.zeros(40, lengths.SIZE)
    sizes["length"] = np.roll(np.arange(40), 7)  # row 7 has none
    sizes["patches"] = np.roll(np.arange(40), 20)
    sizes["aspect"] = np.roll(np.arange(40), 30)
    assert set(lengths._extremes(sizes).tolist()) == {8, 6, 20, 19, 30, 29}
    assert len(lengths._extremes(np.zeros(5, lengths.SIZE))) == 0
    sizes["length"], sizes["patches"], sizes["aspect"] = 9, 9, 1
    assert len(lengths._extremes(sizes)) == 0, "where all are equal there is no end"


def test_what_was_compared_is_not_compared_again_and_what_is_new_is(template, tmp_path, monkeypatch):
    """LEN-4 LEN-6: counted are the full encodings."""
    full, encode = [], Template.encode

    def noted(self, row, **options):
        if not isinstance(row, headers._Row):
            full.append(row["messages"][0]["content"])
        return encode(self, row, **options)

    def compared(rows):
        full.clear()
        measured(source(dataset(rows)), template, ARGS, str(tmp_path))
        return list(full)

    monkeypatch.setattr(Template, "encode", noted)
    monkeypatch.setattr(lengths, "NUM_TRIED", 8)
    first = compared(texts(40))
    assert 8 <= len(first) <= 8 + 12
    assert len(set(first)) == len(first)
    assert compared(texts(40)) == []
    assert set(compared(texts(43))) >= {"row 40", "row 41", "row 42"}
    assert compared(texts(43)) == []


def test_source_that_fell_back_stays_correct_with_new_rows(template, tmp_path, monkeypatch):
    """LEN-5: the lie shows in one row only, which is not compared again."""
    liar, other = photo(tmp_path, "liar", 500, 400), photo(tmp_path, "other", 480, 400)
    real = headers._header_of

    def lying(image, load_images):
        found = real(image, load_images)
        return HeaderImage((64, 64)) if found.size in ((500, 400), (480, 400)) else found

    monkeypatch.setattr(headers, "_header_of", lying)
    rows = [*texts(5), image_row([liar])]
    measured(source(dataset(rows)), template, ARGS, str(tmp_path))
    said = warnings_of(monkeypatch)
    unchecked(monkeypatch)
    rows += [image_row([other])]
    sizes = measured(source(dataset(rows)), template, ARGS, str(tmp_path)).sizes
    assert sizes.lengths.tolist() == [outcome(template, row).length for row in rows]
    assert "found to differ at an earlier start" in said[0]


def test_row_whose_header_says_nothing_is_encoded_in_full(template, tmp_path, monkeypatch):
    """LEN-5: one that was not compared."""
    odd, real = photo(tmp_path, "odd", 100, 90), headers._header_of

    def failing(image, load_images):
        if "odd" in str(image):
            raise NoPixels("as a template of another family would")
        return real(image, load_images)

    monkeypatch.setattr(headers, "_header_of", failing)
    unchecked(monkeypatch)
    rows = dataset([image_row([odd]), text_row()])
    sizes = measured(source(rows), template, ARGS, str(tmp_path)).sizes
    assert sizes.failures == {}
    assert sizes.lengths.tolist() == [outcome(template, row).length for row in rows]


def test_limit_that_only_the_full_length_exceeds_is_a_difference(tiny, tmp_path, monkeypatch):
    """LEN-3: not taken for broken pixels."""
    template = variant(tiny, FAMILY, max_length=60)
    monkeypatch.setattr(headers, "_header_of", lambda image, load_images: HeaderImage((64, 64)))
    said = warnings_of(monkeypatch)
    sizes = measured(
        source(dataset([image_row([photo(tmp_path, "a", 400, 300)])])), template, ARGS, str(tmp_path)
    ).sizes
    assert sizes.failures == {0: "over_max_length"}
    assert "rows:0 has over_max_length, from its header " in said[0]


def test_header_that_cannot_be_had_for_a_moment_is_no_difference(template, tmp_path, monkeypatch):
    """LEN-3 LEN-10: it would be remembered for ever."""
    path, real, tries = photo(tmp_path, "photo", 100, 90), headers._header_of, []

    def flickering(image, load_images):
        tries.append(image)
        if len(tries) <= 3:  # as often as ms-swift tries
            raise OSError(5, "Input/output error")
        return real(image, load_images)

    monkeypatch.setattr(headers, "_header_of", flickering)
    said = warnings_of(monkeypatch)
    rows = dataset([image_row([path])])
    sizes = measured(source(rows), template, ARGS, str(tmp_path)).sizes
    assert len(tries) == 3
    assert sizes.lengths.tolist() == [outcome(template, rows[0]).length]
    assert said == []


# -- memory of sizes --------------------------------------------------------------------------------------------------


def test_appended_rows_alone_are_computed_and_an_order_is_no_matter(template, tmp_path, encoded):
    """LEN-6"""
    rows = texts(30)
    first = measured(source(dataset(rows)), template, ARGS, str(tmp_path)).sizes
    encoded.clear()
    again = measured(source(dataset(rows[::-1])), template, ARGS, str(tmp_path)).sizes
    assert encoded == []
    assert again.lengths.tolist() == first.lengths.tolist()[::-1]
    more = measured(source(dataset(rows[:10] + texts(3, first=90) + rows[10:])), template, ARGS, str(tmp_path)).sizes
    assert set(encoded) == {"row 90", "row 91", "row 92"}
    assert np.delete(more.lengths, [10, 11, 12]).tolist() == first.lengths.tolist()


def test_encoding_rows_does_not_change_what_they_are_remembered_under(tiny, tmp_path):
    """LEN-7: a template fills caches of its own while it works."""
    template = variant(tiny, "qwen3_vl", loss_scale="hermes")
    before = context_of(template)
    template.encode(odd_rows(tmp_path)["tools"])
    assert context_of(template) == before


@pytest.mark.parametrize(
    "change",
    ["size", "time", "max_length", "truncation", "default_system", "max_pixels", "source system", "source max_pixels",
     "environment", "constants", "version", "template", "thinking", "agent", "processor", "tokenizer", "tagged file"],
)  # fmt: skip
def test_what_changes_lengths_computes_them_again(change, tiny, tmp_path, monkeypatch, encoded):
    """LEN-7"""
    path = Path(photo(tmp_path, "photo", 300, 200))
    row = text_row(f"<img>{path}</img>what") if change == "tagged file" else image_row([str(path)])
    rows = dataset([row])
    template, options = variant(tiny, FAMILY), {}
    measured(source(rows), template, ARGS, str(tmp_path))
    encoded.clear()
    measured(source(rows), variant(tiny, FAMILY), ARGS, str(tmp_path))
    assert encoded == []
    if change in ("size", "tagged file"):
        noise(500, 300).save(path)
    elif change == "time":
        os.utime(path, ns=(0, 0))
    elif change in ("max_length", "truncation", "default_system", "max_pixels", "thinking", "agent"):
        value = {
            "max_length": {"max_length": 2000}, "truncation": {"truncation_strategy": "left"},
            "default_system": {"default_system": "Be brief."}, "max_pixels": {"max_pixels": 30_000},
            "thinking": {"response_prefix": "<think>"}, "agent": {"agent_template": "react_en"},
        }[change]  # fmt: skip
        template = variant(tiny, FAMILY, **value)
    elif change == "template":
        template = variant(tiny, "qwen2_vl")
    elif change.startswith("source"):
        options = {"source system": {"system": "Be brief."}, "source max_pixels": {"max_pixels": 30_000}}[change]
    elif change == "environment":
        monkeypatch.setenv("QWENVL_BBOX_FORMAT", "new")
    elif change == "constants":
        monkeypatch.setattr("qwen_vl_utils.vision_process.IMAGE_MAX_TOKEN_NUM", 64)
    elif change == "version":
        monkeypatch.setattr("importlib.metadata.version", lambda name: "99")
    elif change == "processor":
        monkeypatch.setattr(template.processor.image_processor, "merge_size", 4)
    else:
        monkeypatch.setattr(template.tokenizer, "chat_template", "another")
    sizes = measured(source(rows, **options), template, ARGS, str(tmp_path)).sizes
    assert len(encoded) > 0
    if change in (
        "size",
        "tagged file",
        "max_pixels",
        "default_system",
        "source system",
        "source max_pixels",
        "constants",
    ):
        full = template if not options else variant(tiny, FAMILY, default_system=options.get("system"),
                                                    max_pixels=options.get("max_pixels"))  # fmt: skip
        assert sizes.lengths[0] == outcome(full, rows[0]).length


def test_cache_that_cannot_be_written_costs_a_warning(template, tmp_path, caplog):
    """LEN-9"""
    (tmp_path / "file").write_text("in the way of a folder")
    with caplog.at_level(logging.WARNING, logger="swift_vlpack"):
        sizes = measured(source(dataset(texts(4))), template, ARGS, str(tmp_path / "file" / "cache")).sizes
    assert (sizes.lengths > 0).all()
    (line,) = [record.message for record in caplog.records if "cannot be used" in record.message]
    assert "packing_cache_dir names another directory" in line


def test_failures_that_may_pass_are_tried_again_and_lasting_ones_are_not(template, tmp_path, encoded, caplog):
    """LEN-10 LEN-11"""
    (tmp_path / "text.jpg").write_text("no image")
    rows = dataset([image_row([str(tmp_path / name)], f"row {name}") for name in ("gone.jpg", "text.jpg")])
    first = measured(source(rows), template, ARGS, str(tmp_path))
    assert first.sizes.failures == {0: "file_missing", 1: "image_unreadable"}
    encoded.clear()
    with caplog.at_level(logging.WARNING, logger="swift_vlpack"):
        again = measured(source(rows), template, ARGS, str(tmp_path))
    assert again.sizes.failures == first.sizes.failures
    assert {text.removeprefix("<image>") for text in encoded} == {"row gone.jpg"}
    path = tmp_path / "text.jpg"
    assert again.sizes.faults[1] == first.sizes.faults[1]
    assert (
        f"rows:1: left out: image_unreadable: UnidentifiedImageError: cannot identify image file {path}" in caplog.text
    )
    photo(tmp_path, "gone")
    assert measured(source(rows), template, ARGS, str(tmp_path)).sizes.lengths[0] > 0


def test_strict_stops_at_a_row_that_cannot_be_encoded_even_if_that_is_remembered(template, tmp_path):
    """LEN-11"""
    (tmp_path / "text.jpg").write_text("no image")
    rows = dataset([text_row(), image_row([str(tmp_path / "text.jpg")])])
    strict = SimpleNamespace(dataset_num_proc=1, strict=True)
    for args in (strict, ARGS, strict):
        if args is ARGS:
            assert measured(source(rows), template, args, str(tmp_path)).sizes.failures == {1: "image_unreadable"}
        else:
            with pytest.raises(DataError, match=r"rows:1: image_unreadable: .*text\.jpg"):
                measured(source(rows), template, args, str(tmp_path))


@pytest.mark.parametrize("num_processes", [1, 2])
def test_every_bad_row_is_one_counted_reason_with_its_id_and_path(num_processes, tiny, tmp_path, caplog, monkeypatch):
    """LEN-11: no crash, no hang, whatever a row is."""
    template = variant(tiny, FAMILY)
    rows, reasons = zip(*bad_rows(tmp_path), strict=True)
    rows = [row for bad in rows for row in (text_row(), bad)]
    monkeypatch.setattr(length_pass, "NUM_SHOWN", len(rows))
    args = SimpleNamespace(dataset_num_proc=num_processes, strict=False)
    with caplog.at_level(logging.WARNING, logger="swift_vlpack"):
        sizes = measured(source(rows), template, args, str(tmp_path / "cache")).sizes
    assert sizes.failures == {2 * n + 1: reason for n, reason in enumerate(reasons)}
    assert (sizes.lengths[::2] > 0).all()
    said = [record.message for record in caplog.records]
    for index, reason in sizes.failures.items():
        (line,) = [message for message in said if message.startswith(f"rows:{index}: ")]
        assert line.startswith(f"rows:{index}: left out: {reason}: ")
        assert all(path in line for path in sizes.faults[index].files)
    assert "cannot be encoded: " in said[-1]
    assert all(f"{reason} {reasons.count(reason)}" in said[-1] for reason in reasons)


def test_several_processes_give_what_one_gives(template, images, tmp_path):
    """LEN-6"""
    rows = dataset([*texts(300), *[image_row([path]) for path in images.values()]])
    one = measured(source(rows), template, ARGS, str(tmp_path / "one")).sizes
    two = measured(
        source(rows), template, SimpleNamespace(dataset_num_proc=2, strict=False), str(tmp_path / "two")
    ).sizes
    assert one.columns.tolist() == two.columns.tolist()
    assert one.failures == two.failures
    assert _num_records(template, rows, tmp_path / "one") == _num_records(template, rows, tmp_path / "two") > 300


def _num_records(template, rows, folder):
    context = context_of(template)
    cache = lengths.LengthCache(cache_path(source(rows), context, str(folder)), context)
    return int(cache.load().of(cache.keys(rows))[0].sum())


def test_process_that_is_killed_is_one_clear_error(template, tmp_path, monkeypatch):
    """LEN-8"""
    monkeypatch.setattr(length_pass.LengthPass, "_measured", lambda self, positions: os.kill(os.getpid(), 9))
    monkeypatch.setattr(lengths, "NUM_TRIED", 0)
    with pytest.raises(Exception, match=r"a process of the length pass was killed.*lower dataset_num_proc"):
        measured(
            source(dataset(texts(300))), template, SimpleNamespace(dataset_num_proc=2, strict=False), str(tmp_path)
        )


# -- several ranks ----------------------------------------------------------------------------------------------------


def on_two_ranks(case, template, folder):
    """Run `case(rank, template)` in two processes that talk over gloo; what each of them gave, or its error."""
    context = mp.get_context("fork")
    answers = context.SimpleQueue()
    ranks = [context.Process(target=_rank, args=(case, template, folder, rank, answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    given = dict(answers.get() for _ in ranks)
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0, "a rank hangs"
    return given[0], given[1]


def _rank(case, template, folder, rank, answers):
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    try:
        answer = case(rank, template)
    except Exception as error:
        answer = type(error).__name__, str(error)
    answers.put((rank, answer))
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_divide_the_rows_and_all_know_every_size(template, tmp_path, monkeypatch):
    """LEN-12"""
    rows = dataset([*texts(40), image_row([str(tmp_path / "gone.jpg")], "gone")])
    alone = measured(source(rows), template, ARGS, str(tmp_path / "one")).sizes
    unchecked(monkeypatch)

    def case(rank, template):
        calls, encode = [], Template.encode
        Template.encode = lambda self, row, **kw: calls.append(row["messages"][0]["content"]) or encode(self, row, **kw)
        sizes = measured(source(rows), template, ARGS, str(tmp_path / "two")).sizes
        return sizes.columns.tolist(), sizes.failures, set(calls)

    first, second = on_two_ranks(case, template, tmp_path)
    assert first[:2] == second[:2] == (alone.columns.tolist(), alone.failures)
    assert first[2] & second[2] == set()
    assert len(first[2]) == 21
    assert len(second[2]) == 20


def test_ranks_with_different_rows_stop(template, tmp_path):
    """LEN-12"""

    def case(rank, template):
        rows = texts(20)
        rows[7] = text_row(f"rank {rank}")
        return measured(source(dataset(rows)), template, ARGS, str(tmp_path))

    for kind, message in on_two_ranks(case, template, tmp_path):
        assert kind == RanksDiffer.__name__
        assert "do not agree on the rows of source 'rows'" in message
        assert "content: " in message


def test_ranks_with_copies_of_the_files_agree(template, tmp_path, monkeypatch):
    """LEN-12: on machines of their own, where files have another time."""
    rows = dataset([image_row(["photo.jpg"]), *texts(3)])

    def case(rank, template):
        os.environ["ROOT_IMAGE_DIR"] = str(tmp_path / str(rank))
        Path(os.environ["ROOT_IMAGE_DIR"]).mkdir()
        os.utime(photo(Path(os.environ["ROOT_IMAGE_DIR"]), "photo"), (rank + 1, rank + 1))
        return measured(source(rows), template, ARGS, str(tmp_path / "cache")).sizes.lengths.tolist()

    first, second = on_two_ranks(case, template, tmp_path)
    assert first == second
    assert all(length > 0 for length in first)


def test_ranks_with_other_settings_are_told_which(template, tmp_path, monkeypatch):
    """LEN-12: another version of a package, another limit of pixels."""
    rows = dataset(texts(4))

    def case(rank, template):
        if rank == 1:
            monkeypatch.setattr("swift_vlpack.host.lengths.context._version", lambda package: "0.0.1")
            monkeypatch.setattr(template, "max_pixels", 9999)
        return measured(source(rows), template, ARGS, str(tmp_path / "cache"))

    for kind, message in on_two_ranks(case, template, tmp_path):
        assert kind == RanksDiffer.__name__
        assert "packages: " in message
        assert "settings: " in message
        assert "content: " not in message


def test_error_on_one_rank_stops_both(template, tmp_path):
    """LEN-12: the row belongs to rank 1."""
    rows = dataset([*texts(5), image_row([str(tmp_path / "gone.jpg")])])
    strict = SimpleNamespace(dataset_num_proc=1, strict=True)
    answers = on_two_ranks(
        lambda rank, template: measured(source(rows), template, strict, str(tmp_path)), template, tmp_path
    )
    assert [kind for kind, _ in answers] == [RankFailed.__name__, DataError.__name__]
    assert all("rows:5: file_missing: " in message for _, message in answers)


def test_difference_on_one_rank_is_one_on_both(template, tmp_path, monkeypatch):
    """LEN-12 LEN-3"""
    rows = dataset([*texts(5), image_row([photo(tmp_path, "photo", 400, 300)])])
    right = [outcome(template, row).length for row in rows]
    monkeypatch.setattr(headers, "_header_of", lambda image, load_images: HeaderImage((64, 64)))
    case = lambda rank, template: measured(source(rows), template, ARGS, str(tmp_path)).sizes.lengths.tolist()  # noqa: E731
    assert on_two_ranks(case, template, tmp_path) == (right, right)


# -- killed -----------------------------------------------------------------------------------------------------------


def _slow_pass(template, rows, folder):
    """In a session of its own, so that whoever it leaves behind can be found."""
    os.setsid()
    real = length_pass.LengthPass._measured

    def slow(self, positions):
        time.sleep(0.03)
        return real(self, positions)

    length_pass.LengthPass._measured = slow
    length_pass._CHUNK_BY_HEADER = 4
    measured(source(rows), template, SimpleNamespace(dataset_num_proc=2, strict=False), str(folder))
    os._exit(0)


def _members(session):
    """Living processes of a session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, own = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:4]
        except OSError:
            continue
        if int(own) == session and state != "Z":
            found.append(int(folder.name))
    return found


def killed_again_and_again(template, folder, num_kills):
    """Start, kill -9 at a random moment, look at the file, and start again."""
    rows = dataset([*texts(500), *[image_row([photo(folder, str(n), 60 + n, 90)]) for n in range(20)]])
    right = measured(source(rows), template, ARGS, str(folder / "never killed")).sizes
    context, rng, sessions, num_known, num_part = context_of(template), random.Random(0), [], [0], 0
    start = time.monotonic()  # a run that nobody kills says how long one takes on this machine
    alone = mp.get_context("fork").Process(target=_slow_pass, args=(template, rows, folder / "alone"))
    alone.start()
    alone.join()
    seconds = time.monotonic() - start
    for number in range(num_kills):
        cached = folder / "killed" / str(len(num_known))
        process = mp.get_context("fork").Process(target=_slow_pass, args=(template, rows, cached))
        process.start()
        process.join(rng.uniform(0, seconds))
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        is_done = process.exitcode == 0
        sessions.append(process.pid)
        cache = lengths.LengthCache(cache_path(source(rows), context, str(cached)), context)
        is_known, sizes = cache.load().of(cache.keys(rows))
        assert is_known.sum() >= num_known[-1], f"kill {number} lost what was done"
        assert (sizes["length"][is_known] == right.lengths[is_known]).all(), f"kill {number} left a wrong size"
        num_part += bool(0 < is_known.sum() < len(rows))
        num_known[-1] = int(is_known.sum())
        if is_done:
            assert is_known.all()
            num_known.append(0)  # a new file
    last = measured(source(rows), template, ARGS, str(cached)).sizes
    assert last.columns.tolist() == right.columns.tolist()
    assert num_part > num_kills / 4, "hardly a run was hit in the middle"
    deadline = time.monotonic() + 10
    while (left := [pid for session in sessions for pid in _members(session)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == [], "processes are left behind"
    assert not list((folder / "killed").rglob("*damaged*"))


@pytest.mark.slow
@pytest.mark.telling
def test_killed_runs_keep_what_they_did_and_are_never_wrong(template, tmp_path):
    """LEN-8: 10 times."""
    killed_again_and_again(template, tmp_path, 10)


@pytest.mark.slow
def test_killed_runs_keep_what_they_did_and_are_never_wrong_50_times(template, tmp_path):
    """LEN-8"""
    killed_again_and_again(template, tmp_path, 50)


# -- memory -----------------------------------------------------------------------------------------------------------


class Numbered:
    """Rows that are made when they are asked for, so that memory is the pass's own."""

    def __init__(self, num_rows):
        self.num_rows = num_rows

    def __len__(self):
        return self.num_rows

    def __getitem__(self, index):
        return text_row(f"row {index}")


def _status(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def _peak(template, num_rows, folder, num_processes, answers):
    before = _status("VmRSS")
    args = SimpleNamespace(dataset_num_proc=num_processes, strict=False)
    sizes = measured(source(Numbered(num_rows)), template, args, str(folder)).sizes
    answers.put((_status("VmHWM") - before, int((sizes.lengths > 0).sum())))


def peak_megabytes(template, num_rows, folder, num_processes=2):
    """Most memory that the length pass takes above what there was."""
    context = mp.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_peak, args=(template, num_rows, folder, num_processes, answers))
    process.start()
    peak, num_measured = answers.get()
    process.join()
    assert num_measured == num_rows
    return peak


@pytest.mark.slow
def test_one_million_rows_take_less_than_300_megabytes(template, tmp_path):
    """LEN-14: cold with the real template in 2 processes, then from the file."""
    cold = {num_rows: peak_megabytes(template, num_rows, tmp_path) for num_rows in (50_000, 1_000_000)}
    warm = peak_megabytes(template, 1_000_000, tmp_path)
    print(f"cold {cold}, warm {warm}")
    assert max(*cold.values(), warm) < 300


# -- through `swift sft` ----------------------------------------------------------------------------------------------


@pytest.fixture
def options(monkeypatch):
    for name, value in (("DROP_LAST", "false"), ("VERIFY", "false"), ("STRATEGY", "exact")):
        monkeypatch.setenv(f"VLPACK_PACKING_{name}", value)


def _form(row):
    """Rows of one form go into one file: Arrow refuses others before anyone sees them."""
    images = row.get("images")
    inner = type(images[0]).__name__ if isinstance(images, list) and images and images[0] is not None else "str"
    return type(images or []).__name__, inner, type(row.get("messages") or []).__name__


def test_training_counts_every_bad_row_once(small_folder, tmp_path, options, caplog, monkeypatch):
    """LEN-11: what ms-swift's loader deletes is counted too, so that the account closes.

    Rows of another form are another run: ms-swift does not join data sets whose columns are of other types.
    """
    files, reasons = {}, Counter()
    for row, reason in bad_rows(tmp_path):
        files.setdefault("-".join(_form(row)), []).append(row)
        reasons[reason] += 1
    assert len(files) > 3
    monkeypatch.setenv("VLPACK_PACKING_MAX_FAILED_SHARE", "1")
    model, num_deleted, dropped = small_folder(FAMILY), 0, Counter()
    for number, rows in enumerate(files.values()):
        path = write_jsonl(tmp_path / f"s{number}.jsonl", [*texts(3), *rows, *texts(3)])
        output = tmp_path / f"out{number}"
        with caplog.at_level(logging.WARNING):
            train(packed_argv(model, FAMILY, output, dataset=path, num_train_epochs=1))
        report = epoch_report(output)
        assert report["is_closed"]
        assert report["num_samples"] == 6
        dropped.update(report["num_dropped"])
        num_deleted += sum(report["loader_deleted"].values())
    assert num_deleted == reasons.pop("no_messages") + reasons.pop("encode_failed")
    assert dropped == reasons
    named = Counter(re.findall(r"^(s\d+:\d+): left out: ", "\n".join(r.message for r in caplog.records), re.M))
    assert len(named) == reasons.total()
    assert set(named.values()) == {1}


def test_strict_training_stops_at_the_first_bad_row(tiny_folder, tmp_path, options):
    """LEN-11"""
    path = write_jsonl(tmp_path / "rows.jsonl", [*texts(5), image_row([str(tmp_path / "gone.jpg")])])
    flags = packed_argv(tiny_folder(FAMILY), FAMILY, tmp_path / "out", dataset=path, strict="true")
    with pytest.raises(Exception, match=r"rows:5: file_missing: .*gone\.jpg"):
        train(flags)


def test_training_on_nothing_is_one_clear_error(tiny_folder, tmp_path, options):
    """LEN-11"""
    path = write_jsonl(tmp_path / "rows.jsonl", [image_row([str(tmp_path / f"gone{n}.jpg")]) for n in range(3)])
    with pytest.raises(DataError, match="none of the 3 rows can be packed; the log has the reasons"):
        train(packed_argv(tiny_folder(FAMILY), FAMILY, tmp_path / "out", dataset=path))
