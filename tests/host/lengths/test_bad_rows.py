"""Rows that cannot be encoded: one counted reason each, in a pass and in training."""

import json
import logging
import os
import re
from collections import Counter
from types import SimpleNamespace

import pytest

from swift_vlpack.errors import DataError
from swift_vlpack.lengths import failures
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.samples import SampleId, TooManyFailures
from tests.data_rows import image_row, text_row, write_jsonl
from tests.host.lengths.support import ARGS, FAMILY, dataset, source, texts, variant, warnings_of, with_lengths
from tests.host.rows.test_faults import bad_rows
from tests.host.runs import epoch_report, packed_argv, train
from tests.images import photo


def test_failures_that_may_pass_are_tried_again_and_lasting_ones_are_not(template, tmp_path, encoded, caplog):
    """LEN-10 LEN-11"""
    (tmp_path / "text.jpg").write_text("no image")
    rows = dataset([image_row([str(tmp_path / name)], f"row {name}") for name in ("gone.jpg", "text.jpg")])
    first = with_lengths(source(rows), template, ARGS, str(tmp_path))
    assert first.sizes.failures == {0: "file_missing", 1: "image_unreadable"}
    encoded.clear()
    with caplog.at_level(logging.WARNING, logger="swift_vlpack"):
        again = with_lengths(source(rows), template, ARGS, str(tmp_path))
    assert again.sizes.failures == first.sizes.failures
    assert {text.removeprefix("<image>") for text in encoded} == {"row gone.jpg"}
    path = tmp_path / "text.jpg"
    assert again.sizes.faults[1] == first.sizes.faults[1]
    assert (
        f"rows:1: left out: image_unreadable: UnidentifiedImageError: cannot identify image file {path}" in caplog.text
    )
    photo(tmp_path, "gone")
    assert with_lengths(source(rows), template, ARGS, str(tmp_path)).sizes.lengths[0] > 0


def test_strict_stops_at_a_row_that_cannot_be_encoded_even_if_that_is_remembered(template, tmp_path):
    """LEN-11"""
    (tmp_path / "text.jpg").write_text("no image")
    rows = dataset([text_row(), image_row([str(tmp_path / "text.jpg")])])
    strict = SimpleNamespace(dataset_num_proc=1, strict=True)
    for args in (strict, ARGS, strict):
        if args is ARGS:
            assert with_lengths(source(rows), template, args, str(tmp_path)).sizes.failures == {1: "image_unreadable"}
        else:
            with pytest.raises(DataError, match=r"rows:1: image_unreadable: .*text\.jpg"):
                with_lengths(source(rows), template, args, str(tmp_path))


@pytest.mark.parametrize("num_processes", [1, 2])
def test_every_bad_row_is_one_counted_reason_with_its_id_and_path(num_processes, tiny, tmp_path, caplog, monkeypatch):
    """LEN-11: no crash, no hang, whatever a row is."""
    template = variant(tiny, FAMILY)
    rows, reasons = zip(*bad_rows(tmp_path), strict=True)
    rows = [row for bad in rows for row in (text_row(), bad)]
    monkeypatch.setattr(failures, "NUM_FAILURES_NAMED", len(rows))
    args = SimpleNamespace(dataset_num_proc=num_processes, strict=False)
    with caplog.at_level(logging.WARNING, logger="swift_vlpack"):
        sizes = with_lengths(source(rows), template, args, str(tmp_path / "cache")).sizes
    assert sizes.failures == {2 * n + 1: reason for n, reason in enumerate(reasons)}
    assert (sizes.lengths[::2] > 0).all()
    said = [record.message for record in caplog.records]
    for index, reason in sizes.failures.items():
        (line,) = [message for message in said if message.startswith(f"rows:{index}: ")]
        assert line.startswith(f"rows:{index}: left out: {reason}: ")
        assert all(path in line for path in sizes.faults[index].files)
    assert "cannot be encoded: " in said[-1]
    assert all(f"{reason} {reasons.count(reason)}" in said[-1] for reason in reasons)


@pytest.fixture
def options(options):
    options(packing_drop_last="false", packing_verify="false", packing_strategy="exact")


def _form(row):
    """Rows of one form go into one file: Arrow refuses others before anyone sees them."""
    images = row.get("images")
    inner = type(images[0]).__name__ if isinstance(images, list) and images and images[0] is not None else "str"
    return type(images or []).__name__, inner, type(row.get("messages") or []).__name__


@pytest.mark.slow
@pytest.mark.telling
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


def test_strict_training_stops_at_the_first_bad_row(small_folder, tmp_path, options):
    """LEN-11"""
    path = write_jsonl(tmp_path / "rows.jsonl", [*texts(5), image_row([str(tmp_path / "gone.jpg")])])
    flags = packed_argv(small_folder(FAMILY), FAMILY, tmp_path / "out", dataset=path, strict="true")
    with pytest.raises(Exception, match=r"rows:5: file_missing: .*gone\.jpg"):
        train(flags)


def test_training_on_nothing_is_one_clear_error(small_folder, tmp_path, options):
    """LEN-11 DATA-16: with the counts, the first row, the folder of relative paths, and a list of all rows."""
    path = write_jsonl(tmp_path / "rows.jsonl", [image_row([f"gone{n}.jpg"]) for n in range(3)])
    with pytest.raises(TooManyFailures) as refused:
        train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path / "out", dataset=path))
    listed = tmp_path / "out" / "vlpack" / "left_out.jsonl"
    here = os.getcwd()
    assert str(refused.value) == (
        f"none of the 3 rows can be packed (file_missing 3); the first is {path}:1: no such file: {here}/gone0.jpg "
        f"(images[0] is 'gone0.jpg'); relative paths are looked for in {here}; all of them are listed in {listed}"
    )
    lines = [json.loads(line) for line in listed.read_text().splitlines()]
    assert [(line["id"], line["where"]) for line in lines] == [(f"rows:{n}", f"{path}:{n + 1}") for n in range(3)]


def test_rows_with_more_tags_than_media_are_counted_and_are_as_training_has_them(template, tmp_path, monkeypatch):
    """LEN-22: at every start; of other words in brackets nothing is said."""
    path = photo(tmp_path, "photo", 300, 200)
    rows = [image_row([path]), {**text_row("<image>two<image>"), "images": [path]}, text_row("<image>none")]
    rows += [{**text_row("no tag"), "images": [path]}, text_row("<video> and <audio> are words of HTML")]
    said = warnings_of(monkeypatch)
    for _ in range(2):
        said.clear()
        sizes = with_lengths(source(rows), template, ARGS, str(tmp_path / "cache")).sizes
        assert list(sizes.surplus_tags) == [1, 2]
        assert sizes.failures == {}
        assert [line for line in said if "tags" in line] == [
            "source rows: 2 of 5 rows have more tags (<image>) in their texts than media (images): rows:1, rows:2. "
            "ms-swift puts media in place of the first tags and trains the other tags as plain words; so does this "
            "run. Give every tag its medium, or remove it from the text"
        ]
    for row, length in zip(rows, sizes.lengths.tolist(), strict=True):
        trained = RowEncoder(template).sample(row, SampleId("rows", 0))
        plain = template.encode(row, return_length=True)
        assert trained["input_ids"] == plain["input_ids"]
        assert len(plain["input_ids"]) == length
    assert "two<image>" in template.tokenizer.decode(template.encode(rows[1])["input_ids"])
