"""The same flags give the same rows: against plain ms-swift, by the method that plain `swift sft` loads with."""

import json
from collections import Counter
from pathlib import Path

import pytest
from swift.arguments import BaseArguments
from swift.arguments.base_args.data_args import DataArguments
from swift.dataset import DATASET_MAPPING, AutoPreprocessor, DatasetMeta, ResponsePreprocessor, register_dataset

from swift_vlpack import PackingConfig
from swift_vlpack.errors import DataError
from swift_vlpack.host.sources import load_sources, load_stream
from tests.data_rows import text_row, write_jsonl
from tests.marks import quick_only

NUM_ROWS = {"a": 20, "b": 7, "c": 13}
UNUSABLE = {"a": (3, 11), "b": (), "c": (0,)}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Rows that say which they are; some of them are deleted by ms-swift's loader, those of c have a column more."""
    folder = tmp_path_factory.mktemp("files")
    paths = {}
    for name, num_rows in NUM_ROWS.items():
        rows = [text_row(f"{name}{number}?", f"{name}{number}.") for number in range(num_rows)]
        for number in UNUSABLE[name]:
            rows[number] = {"messages": []}
        if name == "c":
            rows = [{**row, "channel": "web"} for row in rows]
        paths[name] = write_jsonl(folder / f"{name}.jsonl", rows)
    return paths


def arguments(**options):
    args = DataArguments(**{"load_from_cache_file": False, **options})
    args.use_hf, args.hub_token = True, None
    return args


def with_plugin(args, **options):
    return load_sources(args, PackingConfig(packing_length=512, **options))


def without_nothing(row):
    return json.dumps({key: value for key, value in row.items() if value is not None}, sort_keys=True)


def rows_of(datasets):
    return Counter(without_nothing(row) for rows in datasets for row in rows)


def assert_same(args, sources, val_dataset):
    """As plain ms-swift: the training rows, the validation rows with their order and columns."""
    plain_train, plain_val = BaseArguments.load_dataset(args)
    assert rows_of(source.rows for source in sources) == rows_of([plain_train])
    assert sum(len(source.rows) for source in sources) == len(plain_train)
    if plain_val is None:
        assert val_dataset is None
    else:
        assert json.dumps(val_dataset.to_list()) == json.dumps(plain_val.to_list())


def assert_numbers_are_right(sources):
    """What a row says is what stands in its file at the line that its id means."""
    for source in sources:
        for index, row in enumerate(source.rows):
            path, line = source.where(index).rsplit(":", 1)
            there = json.loads(Path(path).read_text().splitlines()[int(line) - 1])
            assert row["messages"][0]["content"] == there["messages"][0]["content"]
            assert str(source.sample_id(index)) == f"{source.name}:{int(line) - 1}"


CASES = {
    "all": (["a", "b"], {}),
    "split": (["a"], {"split_dataset_ratio": 0.2}),
    "split of several": (["a", "b", "c"], {"split_dataset_ratio": 0.3}),
    "fewer": (["a#5"], {}),
    "more": (["b#17"], {}),
    "exactly twice": (["b#14"], {}),
    "several drawn": (["a#5", "b", "c#30", "b#2"], {}),
    "drawn and split": (["a#10", "c"], {"split_dataset_ratio": 0.25}),
    "repeated and split": (["b#19", "c#4"], {"split_dataset_ratio": 0.25}),
    "not shuffled": (["a#5", "b"], {"dataset_shuffle": False, "split_dataset_ratio": 0.2}),
    "another seed": (["a#5", "b", "c"], {"data_seed": 7, "split_dataset_ratio": 0.2}),
    "validation": (["a#5", "b"], {"val_dataset": ["c#6", "b"]}),
    "validation shuffled": (["a"], {"val_dataset": ["c#6", "b"], "val_dataset_shuffle": True}),
    "validation and split": (["a", "b#3"], {"val_dataset": ["c"], "split_dataset_ratio": 0.5}),
    "processes": (["a#5", "b#9"], {"dataset_num_proc": 2, "split_dataset_ratio": 0.2}),
    "from the cache": (["a#5", "b#9"], {"load_from_cache_file": True, "split_dataset_ratio": 0.2}),
    "unused columns": (["a", "c#5"], {"remove_unused_columns": False}),
}


FORKED = {"all", "validation", "from the cache"}
"""Cases that are mapped in other processes, as in a user's run."""
LONG = {"split of several", "another seed", "validation shuffled", "validation and split", "processes"}


@pytest.mark.parametrize("case", quick_only(CASES.keys() - LONG, CASES))
def test_rows_are_those_of_plain_ms_swift(case, files, request):
    """DATA-13 DATA-2"""
    if case in FORKED:
        request.getfixturevalue("forked_maps")
    datasets, options = CASES[case]
    options = {"dataset": datasets, **options}
    for key in ("dataset", "val_dataset"):
        names = [name.partition("#") for name in options.get(key, [])]
        options[key] = [files[name] + mark + count for name, mark, count in names]
    args = arguments(**options)
    sources, val_dataset = with_plugin(args)
    assert_same(args, sources, val_dataset)
    assert_numbers_are_right(sources)
    if case == "from the cache":
        again, val_again = with_plugin(args)
        assert_same(args, again, val_again)
        assert_numbers_are_right(again)


def test_one_source_is_in_the_order_of_ms_swift(files):
    """DATA-13"""
    args = arguments(dataset=[f"{files['a']}#9"])
    [source], _ = with_plugin(args)
    plain, _ = BaseArguments.load_dataset(args)
    assert [row["messages"] for row in source.rows] == [row["messages"] for row in plain]


def test_fusion_without_ratios_has_the_rows_of_the_command_line(files, tmp_path):
    """DATA-13: `dataset_shuffle`, `#N` and the split mean the same there."""
    listed = [f"{files['a']}#6", files["c"], f"{files['b']}#9"]
    config = tmp_path / "mix.yaml"
    config.write_text(
        "sources:\n" + "".join(f"  - {{dataset: '{name}', name: s{n}}}\n" for n, name in enumerate(listed))
    )
    args = arguments(dataset=listed, split_dataset_ratio=0.2)
    sources, val_dataset = with_plugin(arguments(split_dataset_ratio=0.2), fusion_config=str(config))
    assert_same(args, sources, val_dataset)
    assert_numbers_are_right(sources)
    assert [source.num_lost for source in sources] == [2, 1, 0]


def test_a_source_keeps_its_own_columns_beside_others(files):
    """DATA-13: so that a length is found in the cache however the source is mixed."""
    [alone], _ = with_plugin(arguments(dataset=[files["a"]]))
    beside, _ = with_plugin(arguments(dataset=[files["c"], files["a"]]))
    assert beside[1].rows.column_names == alone.rows.column_names
    assert "channel" in beside[0].rows.column_names


def test_split_that_leaves_nothing_to_train_on_is_a_clear_error(files):
    """DATA-13"""
    with pytest.raises(DataError, match=r"split_dataset_ratio 1\.0 leaves no row"):
        with_plugin(arguments(dataset=[files["b"]], split_dataset_ratio=1.0))


def test_validation_rows_of_a_stream_are_those_of_ms_swift(files):
    """DATA-13: `#N` takes the first ones there, and the order is that of the buffer."""
    args = arguments(
        dataset=[files["a"]], streaming=True, val_dataset=[f"{files['c']}#6", files["b"]], val_dataset_shuffle=True
    )
    _, val_rows = load_stream(args, None)
    _, plain = BaseArguments.load_dataset(args)
    assert [row["messages"] for row in val_rows] == [row["messages"] for row in plain]


# -- registered data sets ---------------------------------------------------------------------------------------------


@pytest.fixture
def registered(tmp_path):
    """Register a data set of 40 rows with a `preprocess_func`; its path."""
    from swift.dataset import dataset_syntax

    added = []
    dataset_syntax._dataset_meta_mapping = (
        None  # Because ms-swift 4.5 keeps the mapping that an earlier file asked for.
    )

    def register(preprocess_func, **options):
        rows = [{"query": f"q{number}", "response": f"r{number % 9}", "number": number} for number in range(40)]
        path = write_jsonl(tmp_path / "raw.jsonl", rows)
        before = set(DATASET_MAPPING)
        register_dataset(DatasetMeta(dataset_path=path, preprocess_func=preprocess_func, **options), exist_ok=True)
        added.extend(set(DATASET_MAPPING) - before)
        return path

    yield register
    for name in added:
        DATASET_MAPPING.pop(name)
    dataset_syntax._dataset_meta_mapping = None


class Rewritten(ResponsePreprocessor):
    """Returns new rows, drops some, makes two of others."""

    def preprocess(self, row):
        assert "vlpack_row" not in row
        if row["number"] % 10 == 3:
            return None
        new = super().preprocess({"query": row["query"], "response": f"new {row['number']}"})
        return [new, super().preprocess({"query": row["query"], "response": "more"})] if row["number"] == 7 else new


class Prepared(Rewritten):
    """Filters the data set as a whole first."""

    def prepare_dataset(self, dataset):
        return dataset.filter(lambda row: row["number"] % 4 != 1)


def filtering(dataset, **kwargs):
    return AutoPreprocessor()(dataset.filter(lambda row: row["number"] % 7 != 2), **kwargs)


def turning(dataset, **kwargs):
    return AutoPreprocessor()(dataset.select(range(39, 9, -1)), **kwargs)


def repeating(dataset, **kwargs):
    return AutoPreprocessor()(dataset.select([*range(20), *range(10)]), **kwargs)


@pytest.mark.parametrize("preprocess_func", [Rewritten()])
@pytest.mark.parametrize("marks", ["", "#9"])
def test_ids_survive_a_preprocess_func(preprocess_func, marks, registered, request):
    """DATA-2 DATA-14"""
    if marks:
        request.getfixturevalue("forked_maps")
    path = registered(preprocess_func)
    args = arguments(dataset=[path + marks], split_dataset_ratio=0.2)
    [source], val_dataset = with_plugin(args)
    assert_same(args, [source], val_dataset)
    assert source.is_numbered
    for index, row in enumerate(source.rows):
        assert row["messages"][0]["content"] == f"q{source.sample_id(index).row}"
        assert source.where(index) == f"{path}:{source.sample_id(index).row + 1}"
    assert source.num_lost == 4


def distinct(dataset, **kwargs):
    """Counts a column of numbers as content: with it, nothing is a duplicate."""
    seen = {}
    for row in dataset:
        seen.setdefault(json.dumps({key: row[key] for key in row if key not in ("number", "query")}), row)
    return AutoPreprocessor()(type(dataset).from_list(list(seen.values())), **kwargs)


def another(dataset, **kwargs):
    made = [{"messages": text_row(f"made {number}")["messages"]} for number in range(5)]
    return type(dataset).from_list(made)


def strict_about_columns(dataset, **kwargs):
    assert dataset.column_names == ["query", "response", "number"]
    return AutoPreprocessor()(dataset, **kwargs)


@pytest.mark.parametrize(
    "preprocess_func", [Prepared(), filtering, turning, repeating, distinct, another, strict_about_columns]
)
def test_source_that_cannot_name_its_rows_says_so(preprocess_func, registered, caplog, monkeypatch):
    """DATA-14: its rows are those of ms-swift, and nothing is called the number of a row in the file."""
    warnings = []
    monkeypatch.setattr("swift_vlpack.host.sources.logger.warning", warnings.append)
    path = registered(preprocess_func)
    args = arguments(dataset=[path])
    [source], val_dataset = with_plugin(args)
    assert_same(args, [source], val_dataset)
    assert (source.is_numbered, source.num_lost) == (False, None)
    assert sorted(source.sample_id(index).row for index in range(len(source.rows))) == list(range(len(source.rows)))
    assert str(source.sample_id(0)) == f"raw:loaded-{source.row_numbers[0]}"
    assert source.where(0) == f"{path} loaded row {source.row_numbers[0] + 1}"
    [warning] = warnings
    assert f"(40 rows went into it and {len(source.rows)} came out)" in warning
    assert "how many were lost is unknown" in warning


def test_loader_of_its_own_cannot_name_its_rows(registered):
    """DATA-14"""
    from swift.dataset import DatasetLoader

    class Reversed(DatasetLoader):
        def load(self, *args, **kwargs):
            return super().load(*args, **kwargs).select(range(39, -1, -1))

    args = arguments(dataset=[registered(AutoPreprocessor(), loader=Reversed)])
    [source], val_dataset = with_plugin(args)
    assert_same(args, [source], val_dataset)
    assert (source.is_numbered, source.num_lost) == (False, None)


def test_data_set_known_by_name_with_subsets(registered, files):
    """DATA-13 DATA-14: numbers go on over what is loaded one after the other."""
    from swift.dataset import SubsetDataset

    folder = str(Path(registered(filtering)).parent)
    meta = DatasetMeta(
        dataset_path=folder, dataset_name="mine", preprocess_func=AutoPreprocessor(),
        subsets=[SubsetDataset("all", "default"), SubsetDataset("some", "default", preprocess_func=Rewritten())],
    )  # fmt: skip
    register_dataset(meta, exist_ok=True)
    try:
        args = arguments(dataset=[f"{folder}:all/some#60", files["b"]], split_dataset_ratio=0.1)
        sources, val_dataset = with_plugin(args)
    finally:
        del DATASET_MAPPING["mine"]
    assert sources[0].is_numbered
    register_dataset(meta, exist_ok=True)
    assert_same(args, sources, val_dataset)
    del DATASET_MAPPING["mine"]
    for index, row in enumerate(sources[0].rows):
        assert row["messages"][0]["content"] == f"q{sources[0].sample_id(index).row % 40}"
