import json
from types import SimpleNamespace

import pytest

from swift_vlpack import PackingConfig
from swift_vlpack.errors import ConfigError, DataError
from swift_vlpack.host.messages import Refused
from swift_vlpack.host.sources import load_sources
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.fusion_config import read_fusion_config, specs_of
from tests.data_rows import text_row, write_jsonl


def load_args(dataset, **changes):
    kwargs = {"num_proc": 1, "load_from_cache_file": False, "strict": False, "use_hf": True, "seed": 42}
    values = {"dataset": dataset, "val_dataset": [], "split_dataset_ratio": 0.0, "dataset_shuffle": True}
    values["get_dataset_kwargs"] = lambda: kwargs
    return SimpleNamespace(**{**values, **changes})


def config(**options):
    return PackingConfig(packing_length=1024, **options)


def test_alpaca_row_whose_answer_is_a_list_is_counted(tmp_path):
    """DATA-2"""
    rows = [{"instruction": f"do {n}", "input": "", "output": f"done {n}"} for n in range(6)]
    rows[3]["output"] = json.dumps(["a", "list"])
    rows[4]["output"] = ""
    [source], _ = load_sources(load_args([write_jsonl(tmp_path / "alpaca.jsonl", rows)]), config())
    assert len(source.rows) + source.num_lost == 6
    for index, number in enumerate(source.row_numbers):
        assert f"do {number}" in source.rows[index]["messages"][0]["content"]


@pytest.mark.parametrize("form", ["json", "jsonl", "parquet", "csv"])
def test_local_files_of_every_form_are_loaded(form, tmp_path):
    """DATA-2"""
    from datasets import Dataset

    rows = [{"query": f"q{n}", "response": f"r{n}"} for n in range(5)]
    path = tmp_path / f"rows.{form}"
    if form == "parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif form == "csv":
        Dataset.from_list(rows).to_csv(path)
    elif form == "json":
        path.write_text(json.dumps(rows))
    else:
        write_jsonl(path, rows)
    [source], _ = load_sources(load_args([str(path)]), config())
    assert sorted(source.row_numbers) == list(range(5))
    for row, number in zip(source.rows, source.row_numbers, strict=True):
        assert row["messages"][0]["content"] == f"q{number}"


@pytest.mark.usefixtures("forked_maps")
def test_ms_swift_is_left_as_it_was(tmp_path):
    """TRAIN-2: also after an error."""
    from swift.dataset import DATASET_MAPPING, DatasetMeta, RowPreprocessor

    def state():
        facts = (RowPreprocessor.__call__, RowPreprocessor.batched_preprocess, list(RowPreprocessor.standard_keys))
        return (
            facts,
            dict(DATASET_MAPPING),
            [vars(meta).copy() for meta in DATASET_MAPPING.values()],
            DatasetMeta().loader,
        )

    before = state()
    good, empty = (
        write_jsonl(tmp_path / "good.jsonl", [text_row()]),
        write_jsonl(tmp_path / "empty.jsonl", [{"messages": []}]),
    )
    load_sources(load_args([good]), config())
    with pytest.raises(DataError):
        load_sources(load_args([good, empty]), config())
    assert state() == before


def test_source_without_a_usable_row_is_a_clear_error(tmp_path):
    """DATA-2"""
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": []}, {"messages": []}])
    with pytest.raises(DataError, match=r"source 'rows' \(.*rows.jsonl\) has no usable row"):
        load_sources(load_args([path]), config())


def test_fusion_config_gives_every_key_to_its_source(tmp_path):
    """DATA-3"""
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"{name}.jsonl", [text_row(f"{name}{n}") for n in range(8)])
    (tmp_path / "mix.yaml").write_text(
        "sources:\n"
        "  - a.jsonl\n"  # beside the file
        f"  - {{dataset: {tmp_path}/b.jsonl, name: second, ratio: 2, sample_limit: 3, system: S,\n"
        "     max_pixels: 1000, seed: 9}\n"
    )
    sources, _ = load_sources(load_args([]), config(fusion_config=str(tmp_path / "mix.yaml")))
    first, second = sources
    assert (first.name, first.ratio, first.sample_limit, first.system, first.max_pixels) == ("a", 1.0, None, None, None)
    assert (second.name, second.ratio, second.sample_limit, second.system) == ("second", 2, 3, "S")
    assert (second.max_pixels, second.seed) == (1000, 9)
    fused = FusionCaptionDataset(sources, SimpleNamespace(max_pixels=None))
    assert fused.schedule.num_rows_per_source == (8, 6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("sources: [", "not YAML"),
        ("- a", "expected the key sources, which is a list"),
        ("sources: []\nratio: 1", "expected the key sources, which is a list, and no other key but ratio_by"),
        ("sources: []\nratio_by: words", "ratio_by must be one of rows, tokens, got 'words'"),
        ("sources: [{name: a}]", "source 1: expected a mapping with the key dataset"),
        ("sources: [{dataset: a, ration: 1}]", "source 1: unknown key 'ration'; known: dataset, name, ratio"),
        ("sources: [{dataset: a, ratio: -1}]", "ratio must be 0 or more, got -1"),
        ("sources: [{dataset: a, ratio: x}]", "ratio must be int or float, got 'x'"),
        ("sources: [{dataset: a, sample_limit: 0}]", "sample_limit must be at least 1, got 0"),
        ("sources: [{dataset: a, max_pixels: true}]", "max_pixels must be int, got True"),
        ("sources: [{dataset: a}, {dataset: a}]", "two sources are named 'a'"),
    ],
)
def test_mistakes_in_a_fusion_config_are_named(text, message, tmp_path):
    """DATA-3"""
    path = tmp_path / "mix.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_fusion_config(str(path))


def test_datasets_of_the_command_line_get_names_of_their_own():
    """DATA-2"""
    assert [spec.name for spec in specs_of(["x/chat#5", "x/chat", "y"])] == ["x/chat-0", "x/chat-1", "y"]


GOOD = json.dumps(text_row())


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.jsonl", f"{GOOD}\n\n{GOOD}\n{{'a': 1}}\n{GOOD}\n", ":4: not JSON (Expecting property name"),
        ("rows.jsonl", f"{GOOD}\n{GOOD[:-9]}", ":2: not JSON ("),
        ("rows.jsonl", f"{GOOD}\n[1, 2]\n", ":2: a row must be an object, got [1, 2]"),
        ("rows.json", f"[{GOOD},\n{GOOD},\n{{]\n", ":3: not JSON ("),
        ("rows.jsonl", f"{GOOD}\n".encode() + b'{"a": "\xff"}\n', ":2: not JSON ("),
        ("rows.jsonl", "\n \n", ":1: there is no row in it"),
        ("rows.json", "[]", ":1: there is no row in it"),
    ],
)
def test_file_that_is_no_json_is_named_with_its_line(name, content, said, tmp_path):
    """CLI-33: counted from 1, as editors do, also where another file is well."""
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    good = write_jsonl(tmp_path / "good.jsonl", [text_row()])
    with pytest.raises(DataError) as refused:
        load_sources(load_args([str(good), str(path)]), config())
    assert said in str(refused.value)
    assert str(path) in str(refused.value)
    assert refused.value.__cause__ is None


def test_hub_that_does_not_answer_is_said_with_what_was_looked_for_and_where(tmp_path, monkeypatch):
    """CLI-14"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("USE_HF", "1")
    good = write_jsonl(tmp_path / "good.jsonl", [text_row()])
    with pytest.raises(Refused) as refused:
        load_sources(load_args([str(good), "owner/rows_that_are_nowhere"]), config())
    said = str(refused.value)
    assert said.startswith("the hub cannot be reached: owner/rows_that_are_nowhere is not a file or folder in ")
    assert f"in {tmp_path}, so it was looked for on Hugging Face" in said
    assert "good.jsonl" not in said.partition("did not answer")[0]
