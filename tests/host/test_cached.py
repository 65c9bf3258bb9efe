"""`--cached_dataset` as the data of a packed run."""

import json
import logging
from types import SimpleNamespace

import pytest
from datasets import load_from_disk

from swift_vlpack import PackingConfig
from swift_vlpack.errors import DataError
from swift_vlpack.host.sources import load_sources
from tests.cli.in_process import run_here
from tests.data_rows import mixed_rows, text_row, write_jsonl
from tests.host.runs import epoch_report, packed_argv, train
from tests.host.test_export import flags_of, ours, theirs

FAMILY = "qwen2_5_vl"

pytestmark = pytest.mark.usefixtures("options")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    long = [text_row("a long one", "word " * 300)]
    return write_jsonl(folder / "rows.jsonl", [*mixed_rows(folder / "images", 20, largest=160), *long])


@pytest.fixture(scope="module")
def cached(rows, small_folder, tmp_path_factory):
    """Ours, with validation rows, and ms-swift's."""
    folder = tmp_path_factory.mktemp("cached")
    flags = flags_of(small_folder(FAMILY), rows, split_dataset_ratio=0.2, max_length=1024)
    return {"ours": ours(flags, folder / "ours"), "theirs": theirs(flags, folder / "theirs")}


def without_data(flags):
    at = flags.index("--dataset")
    return [*flags[:at], *flags[at + 2 :]]


def args_of(**options):
    known = {
        "cached_dataset": [], "cached_val_dataset": [], "dataset": [], "val_dataset": [], "data_seed": 42,
        "dataset_shuffle": True, "max_length": 1024, "truncation_strategy": "delete",
    }  # fmt: skip
    return SimpleNamespace(**{**known, **options})


@pytest.mark.parametrize(
    "options",
    [{}, {"sample": "#5"}, {"sample": "#30"}, {"max_length": 90}, {"max_length": 90, "sample": "#4"},
     {"dataset_shuffle": False, "sample": "#5"}],
    ids=str,
)  # fmt: skip
def test_rows_are_those_of_plain_ms_swift_by_their_own_numbers(options, cached):
    """EXPORT-11"""
    from swift.pipelines.utils import get_cached_dataset

    options = dict(options)
    sample = options.pop("sample", "")
    folders = [cached[name] / "train" for name in ("ours", "theirs")]
    args = args_of(cached_dataset=[f"{folder}{sample}" for folder in folders], **options)
    plain, _ = get_cached_dataset(args)
    sources, val = load_sources(args, PackingConfig(packing_length=512))
    assert val is None
    assert [source.name for source in sources] == ["ours/train", "theirs/train"]
    for source, right, folder in zip(sources, plain, folders, strict=True):
        assert list(source.rows) == list(right.remove_columns("lengths"))
        assert source.cached_lengths.tolist() == [sum(lengths) for lengths in right["lengths"]]
        written = load_from_disk(str(folder))
        for index in range(len(source.rows)):
            number = source.row_number(index)
            assert written[number]["messages"] == source.rows[index]["messages"]
            assert source.where(index) == f"{folder} row {number + 1}"
        too_long = [n for n, (length,) in enumerate(written["lengths"]) if length > args.max_length]
        assert (source.num_lost, list(source.lost_rows)) == (len(too_long), too_long)


def test_no_row_is_deleted_where_long_rows_are_cut(cached):
    """EXPORT-11"""
    args = args_of(cached_dataset=[str(cached["ours"] / "train")], max_length=90)
    [source], _ = load_sources(args, PackingConfig(packing_length=64, packing_overflow="split"))
    assert len(source.rows) == len(load_from_disk(str(cached["ours"] / "train")))
    assert source.num_lost == 0


def test_data_set_without_lengths_is_refused(tmp_path):
    """EXPORT-11"""
    from datasets import Dataset

    Dataset.from_list([text_row()]).save_to_disk(str(tmp_path / "plain"))
    with pytest.raises(DataError, match="has no column lengths"):
        load_sources(args_of(cached_dataset=[str(tmp_path / "plain")]), PackingConfig(packing_length=64))


@pytest.fixture(params=["ours", "theirs"])
def of(request, cached):
    """Which export it is, its training rows and its validation rows."""
    return request.param, cached[request.param] / "train", cached[request.param] / "val"


def test_packed_run_trains_a_cached_data_set(of, rows, small_folder, tmp_path, options, caplog):
    """EXPORT-11 EXPORT-12: beside other data, with its validation rows, and without a word where lengths are equal."""
    name, folder, of_validation = of
    options(packing_drop_last="false", packing_cache_dir=tmp_path / "lengths")
    with caplog.at_level(logging.INFO):
        result = train(
            packed_argv(
                small_folder(FAMILY), FAMILY, tmp_path / "out", cached_dataset=folder,
                cached_val_dataset=of_validation, dataset=f"{rows}#7", max_length=1024, num_train_epochs=1,
                eval_strategy="epoch",
            )
        )  # fmt: skip
    report = epoch_report(tmp_path / "out")
    num_cached = len(load_from_disk(str(folder)))
    assert report["is_closed"]
    assert report["num_read"] == report["num_samples"] == num_cached + 7
    assert set(report["sources"]) == {f"{name}/train", "rows"}
    assert any("eval_loss" in line for line in result["log_history"])
    assert "in the cached data set" not in caplog.text


def test_rows_are_measured_anew_by_other_settings(of, small_folder, tmp_path, capfd, caplog):
    """EXPORT-12"""
    name, folder, _ = of
    given = without_data(flags_of(small_folder(FAMILY), "unused", cached_dataset=folder, max_length=1024))
    given += ["--packing_cache_dir", tmp_path / "lengths", "--packing_drop_last", "false"]
    plan = ["plan", *given, "--json", "--failures", tmp_path / "left_out.jsonl"]
    assert run_here(plan) == 0
    before = json.loads(capfd.readouterr().out)
    assert before["num_tokens"] == sum(map(sum, load_from_disk(str(folder))["lengths"]))
    assert "in the cached data set" not in caplog.text

    assert run_here([*plan, "--max_pixels", "12544"]) == 0
    after = json.loads(capfd.readouterr().out)
    assert after["num_tokens"] < before["num_tokens"]
    said = [record.getMessage() for record in caplog.records if "in the cached data set" in record.getMessage()]
    assert said[0].startswith(f"source {name}/train: ")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--cached_dataset", "{ours}"], "is not a cached data set; did you mean {ours}/train?"),
        (["--cached_dataset", "{ours}/trian"], "no such folder; did you mean {ours}/train?"),
        (
            ["--cached_dataset", "{ours}/train", "--streaming", "true", "--max_steps", "5"],
            "a cached data set has a length",
        ),
        (["--cached_dataset", "{ours}/train", "--fusion_config", "mix.yaml"], "a cached data set has no ratio"),
    ],
)
def test_what_is_no_cached_data_set_is_refused_in_one_line(more, said, cached, small_folder, capfd):
    """EXPORT-11 CLI-31"""
    flags = without_data(flags_of(small_folder(FAMILY), "unused"))
    more = [part.format(ours=cached["ours"]) for part in more]
    assert run_here(["plan", *flags, *more]) == 2
    assert said.format(ours=cached["ours"]) in capfd.readouterr().err
