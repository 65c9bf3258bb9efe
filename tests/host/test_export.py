"""`vlpack export` beside ms-swift's own `swift export --to_cached_dataset true`, on the same rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import load_from_disk

from tests.cli.in_process import run_here
from tests.data_rows import image_row, mixed_rows, text_row, write_jsonl
from tests.environment import restored_environment
from tests.host.runs import SMALL_VOCABULARY, argv, log_lines
from tests.images import BROKEN, GOOD, make
from tests.marks import quick_only

FAMILY = "qwen2_5_vl"
OF_EXPORT = ("model", "model_type", "template", "max_length", "torch_dtype", "use_hf")
"""Flags of a small run that an export takes."""
RETRIED = ("missing.jpg",)
"""Images whose failure may pass, so that every start tries them."""
PLAIN = """
import atexit, sys
from swift.arguments import SftArguments
SftArguments._check_padding_free = lambda self: setattr(self, "padding_free", True)  # it asks for flash-attn
atexit.register(lambda: print("swift_vlpack" in sys.modules, file=open("imported.txt", "a")))
"""
PIXELS_BROKEN = ("truncated.jpg", "broken.png")
"""Images whose header can be read."""

pytestmark = pytest.mark.usefixtures("options")


def flags_of(model, dataset, **options):
    """Flags that both commands take."""
    all_flags = argv(model, FAMILY, "unused")
    kept = {name: all_flags[all_flags.index(f"--{name}") + 1] for name in OF_EXPORT if f"--{name}" in all_flags} | {
        "dataset": dataset,
        **options,
    }
    flags = []
    for name, value in kept.items():
        flags += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return flags


def theirs(flags, output):
    """The folder that ms-swift's own export writes."""
    from swift.pipelines import export_main

    with restored_environment():
        export_main([*flags, "--to_cached_dataset", "true", "--output_dir", str(output)])
    return output


def ours(flags, output, *more):
    assert run_here(["export", *flags, "--output", output, *more]) == 0
    return output


def assert_equal(one, other):
    """Columns, their types and order, rows, lengths."""
    one, other = load_from_disk(str(one)), load_from_disk(str(other))
    assert one.column_names == other.column_names
    assert one.features == other.features
    assert list(one) == list(other)


def named(rows):
    return [row["messages"][0]["content"] for row in rows]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two files: photos, texts, odd and broken images, rows that are too long or that the loader deletes; texts."""
    folder = tmp_path_factory.mktemp("files")
    images = {**make(folder / "good", GOOD), **make(folder / "broken", BROKEN)}
    odd = [image_row([path], f"this is {name}") for name, path in images.items()]
    long = [text_row("a long row", "word " * 600), image_row([images["photo.jpg"]], "and this", "word " * 600)]
    first = [*mixed_rows(folder / "mixed", 24, largest=160), *odd, *long, {"messages": []}]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}}
    second = [{**text_row(f"question {n}", "word " * n), "tools": [tool], "channel": "web"} for n in range(1, 12)]
    return {
        "mixed": write_jsonl(folder / "mixed.jsonl", first),
        "texts": write_jsonl(folder / "texts.jsonl", second),
    }


CASES = {
    "one file": (["mixed"], {}),
    "split": (["mixed", "texts"], {"split_dataset_ratio": 0.2}),
    "sampled, in its order": (["mixed#30", "texts#15"], {"dataset_shuffle": "false"}),
    "validation of its own": (["texts"], {"val_dataset": "mixed"}),
    "truncated": (["mixed"], {"truncation_strategy": "right"}),
}


def pair(number, images=()):
    """A conversation with a rejected answer, which may have images of its own."""
    words = "word " * number
    row = {**text_row("<image>" * len(images) + f"question {number}", words + "yes"), "rejected_response": words + "no"}
    return {**row, "images": list(images)} if images else row


def kto(number, images=()):
    row = pair(number, images)
    row.pop("rejected_response")
    return {**row, "label": number % 2 == 0}


def rated(number, images=()):
    row = {**text_row("<image>" * len(images) + f"question {number}"), "label": number % 3}
    return {**row, "images": list(images)} if images else row


MODES = {
    "rlhf": (pair, {"template_mode": "rlhf"}),
    "kto": (kto, {"template_mode": "kto"}),
    "reward model": (pair, {"template_mode": "rlhf", "task_type": "seq_cls", "num_labels": 1}),
    "classes": (rated, {"task_type": "seq_cls", "num_labels": 3, "problem_type": "single_label_classification"}),
    "decision": (rated, {"task_type": "decision"}),
}


@pytest.mark.parametrize("mode", quick_only(("rlhf", "kto"), MODES))
def test_every_mode_and_task_equals_that_of_ms_swift(mode, small_folder, tmp_path, capfd):
    """EXPORT-8: rows of several sequences, and what rows of one sequence are trained for."""
    make_row, options = MODES[mode]
    good = make(tmp_path / "images", {name: GOOD[name] for name in ("photo.jpg", "wide.jpg", "palette.png")})
    bad = make(tmp_path / "images", {name: BROKEN[name] for name in ("truncated.jpg", "missing.jpg")})
    images = [[], [good["photo.jpg"]], [good["wide.jpg"], good["palette.png"]], *([path] for path in bad.values())]
    rows = [make_row(number, images[number % len(images)]) for number in range(1, 21)]
    rows.append(make_row(700))
    given = flags_of(small_folder(FAMILY), write_jsonl(tmp_path / "rows.jsonl", rows), **options)
    right = theirs(given, tmp_path / "theirs") / "train"
    assert_equal(ours(given, tmp_path / "checked", "--check_pixels") / "train", right)
    capfd.readouterr()
    assert_equal(ours(given, tmp_path / "again", "--check_pixels", "--json") / "train", right)
    assert json.loads(capfd.readouterr().out)["train"]["num_images_not_decoded"] == 0
    ours(given, tmp_path / "in words")
    assert ("--loss_type apo_zero_unpaired" in capfd.readouterr().out) is (mode == "kto")

    cached = [*given, "--packing_cache_dir", tmp_path / "lengths"]
    for attempt in ("from headers", "remembered"):
        made = load_from_disk(str(ours(cached, tmp_path / attempt, "--json") / "train"))
        part = json.loads(capfd.readouterr().out)["train"]
        kept = [row for row in made if [image["path"] for image in row["images"] or ()] != [bad["truncated.jpg"]]]
        assert kept == list(load_from_disk(str(right)))
        assert len(made) > len(kept), "a good header, broken pixels"
        assert 0 < part["num_images_not_decoded"] < part["num_images"]


@pytest.fixture
def flags(small_folder, files):
    def made(names, **options):
        dataset = [f"{files[name.partition('#')[0]]}{''.join(name.partition('#')[1:])}" for name in names]
        if "val_dataset" in options:
            options["val_dataset"] = files[options["val_dataset"]]
        return flags_of(small_folder(FAMILY), dataset, **options)

    return made


@pytest.mark.parametrize("case", CASES)
def test_export_equals_that_of_ms_swift(case, flags, tmp_path):
    """EXPORT-1: with all pixels decoded, everything; without, the rows whose pixels decode."""
    names, options = CASES[case]
    given = flags(names, **options)
    right = theirs(given, tmp_path / "theirs")
    decoded = ours(given, tmp_path / "decoded", "--check_pixels")
    parts = sorted(path.name for path in right.iterdir())
    assert parts == sorted({path.name for path in decoded.iterdir()} - {"left_out.jsonl"})
    for part in ("train", "val"):
        if (right / part).exists():
            assert_equal(decoded / part, right / part)
    if (right / "val_dataset.jsonl").exists():
        assert (decoded / "val_dataset.jsonl").read_text() == (right / "val_dataset.jsonl").read_text()


def test_documents_that_are_split_equal_those_of_ms_swift(text_folder, tmp_path):
    """EXPORT-1: the command of ms-swift's example of pretraining, whose rows become tokens; and from a run of `pt`."""
    rows = [text_row("", "word " * (40 * number)) for number in range(1, 9)]
    given = {
        "model": text_folder, "model_type": "qwen2", "template": "qwen2_5", "torch_dtype": "float32", "use_hf": "true",
        "dataset": write_jsonl(tmp_path / "rows.jsonl", rows), "dataset_num_proc": 2, "truncation_strategy": "split",
        "max_length": 128, "split_dataset_ratio": 0.2,
    }  # fmt: skip
    plain = [str(part) for name, value in given.items() for part in (f"--{name}", value)]
    of_pretraining = ["--use_chat_template", "false", "--loss_scale", "all"]
    right = theirs([*plain, *of_pretraining], tmp_path / "theirs")
    for output, command in (("ours", [*plain, *of_pretraining]), ("pt", ["pt", *plain])):
        made = ours(command, tmp_path / output, "--to_cached_dataset", "true")
        assert_equal(made / "train", right / "train")
        assert_equal(made / "val", right / "val")


def test_headers_keep_only_rows_with_broken_pixels_in_addition(flags, tmp_path, capfd):
    """EXPORT-2 EXPORT-3: which the report counts."""
    given = flags(["mixed"], packing_cache_dir=tmp_path / "lengths")
    without_ours = [part for part in given if "packing_cache_dir" not in part and part != str(tmp_path / "lengths")]
    right = load_from_disk(str(theirs(without_ours, tmp_path / "theirs") / "train"))
    capfd.readouterr()
    made = load_from_disk(str(ours(given, tmp_path / "ours", "--json") / "train"))
    report = json.loads(capfd.readouterr().out)
    broken = {f"<image>this is {name}" for name in PIXELS_BROKEN}
    assert [row for row in made if row["messages"][0]["content"] not in broken] == list(right)
    assert broken <= set(named(made))
    assert made.features == right.features
    part = report["train"]
    assert (part["num_rows"], part["num_tokens"]) == (len(made), sum(map(sum, made["lengths"])))
    assert 0 < part["num_images_not_decoded"] < part["num_images"]

    lines = [json.loads(line) for line in (tmp_path / "ours" / "left_out.jsonl").read_text().splitlines()]
    assert len(lines) == sum(part["left_out"].values())
    assert {line["reason"] for line in lines} == set(part["left_out"])
    where = {line["where"].rpartition("/")[2]: line["reason"] for line in lines}
    content = [json.loads(line) for line in Path(given[given.index("--dataset") + 1]).read_text().splitlines()]
    for number, row in enumerate(content, start=1):
        is_left_out = not row["messages"] or row["messages"][0]["content"] not in named(made)
        assert (f"mixed.jsonl:{number}" in where) == is_left_out, number


def test_packs_of_plain_ms_swift_are_the_same(flags, tmp_path, tiny):
    """EXPORT-4"""
    from swift.dataset import PackingDataset

    given = flags(["mixed#30", "texts"])
    packs = []
    for folder in (theirs(given, tmp_path / "theirs"), ours(given, tmp_path / "ours", "--check_pixels")):
        packed = PackingDataset(tiny(FAMILY).template, load_from_disk(str(folder / "train")), packing_length=512)
        packs.append((packed.packed_idx, packed.packed_length))
    assert packs[0] == packs[1]
    assert len(packs[0][0]) > 3


def plainly_trained(command, flags, folder):
    """What plain ms-swift logs of a run in a process of its own."""
    plain, out = folder / "plain.py", folder / "out"
    folder.mkdir()
    plain.write_text(PLAIN)
    done = subprocess.run(
        [sys.executable, "-m", f"swift.cli.{command}", *flags(out, plain)],
        cwd=folder, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "imported.txt").read_text() == "False\n"
    return [(line.get("loss"), line.get("eval_loss")) for line in log_lines(out)]


@pytest.mark.slow
@pytest.mark.telling
@pytest.mark.parametrize("mode", ["train", "rlhf", "kto"])
def test_plain_ms_swift_trains_from_it_without_this_package(mode, flags, small_folder, tmp_path):
    """EXPORT-4 EXPORT-8: in processes that never import it; the same losses as from ms-swift's own export."""
    command = "sft" if mode == "train" else "rlhf"
    if command == "rlhf":
        make_row, _ = MODES[mode]
        image = make(tmp_path / "images", {"photo.jpg": GOOD["photo.jpg"]})["photo.jpg"]
        rows = write_jsonl(tmp_path / "pairs.jsonl", [make_row(n, [image] if n % 3 else []) for n in range(1, 17)])
        given = flags_of(small_folder(FAMILY), rows, split_dataset_ratio=0.2, template_mode=mode)
        more = {"rlhf": {"rlhf_type": "dpo"}, "kto": {"rlhf_type": "kto", "loss_type": "apo_zero_unpaired"}}[mode]
    else:
        given, more = flags(["mixed"], split_dataset_ratio=0.2), {}
    folders = theirs(given, tmp_path / "theirs"), ours(given, tmp_path / "ours", "--check_pixels")
    losses = []
    for folder in folders:

        def of_run(out, plugin, folder=folder):
            return argv(
                small_folder(FAMILY), FAMILY, out, cached_dataset=folder / "train", cached_val_dataset=folder / "val",
                packing="false" if mode == "kto" else "true", num_train_epochs=1, eval_strategy="epoch",
                external_plugins=[plugin, SMALL_VOCABULARY],
                **more,
            )  # fmt: skip

        losses.append(plainly_trained(command, of_run, tmp_path / f"of_{folder.name}"))
    assert losses[0] == losses[1]
    assert len(losses[0]) > 2


def test_folder_has_its_name_only_when_it_is_whole(flags, tmp_path, monkeypatch):
    """EXPORT-5: and a second start measures nothing that the first one measured."""
    from swift_vlpack import files
    from swift_vlpack.host import headers

    given = flags(["mixed"], packing_cache_dir=tmp_path / "lengths")
    output = tmp_path / "ours"
    # At the worst moment, when everything is written. As kill -9: nothing cleans up.
    monkeypatch.setattr(files, "sync_tree", lambda folder: os._exit(9))
    if (pid := os.fork()) == 0:
        try:
            run_here(["export", *given, "--output", output])
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".ours.partial", "lengths"]
    assert (tmp_path / ".ours.partial" / "train" / "state.json").exists()

    measured, encode = [], headers._encode
    monkeypatch.setattr(headers, "_encode", lambda *args, **kwargs: measured.append(1) or encode(*args, **kwargs))
    ours(given, output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lengths", "ours"]
    assert len(load_from_disk(str(output / "train"))) == 36
    assert len(measured) <= len(RETRIED) + 12, "a few rows are looked at again"


def test_output_that_is_there_is_never_lost(flags, tmp_path, capfd):
    """EXPORT-6: neither that of others, nor an earlier export, unless it is to be replaced."""
    given = flags(["texts#5"], packing_cache_dir=tmp_path / "lengths")
    output = tmp_path / "ours"
    output.mkdir()
    (output / "mine.txt").write_text("mine")
    assert run_here(["export", *given, "--output", output]) == 2
    assert "ours has mine.txt in it, which no export wrote; name a new folder" in capfd.readouterr().err
    (output / "mine.txt").unlink()
    ours(given, output)
    assert run_here(["export", *given, "--output", output]) == 2
    assert "has an export in it; name a new folder, or give --exist_ok true" in capfd.readouterr().err
    assert len(load_from_disk(str(output / "train"))) == 5
    ours(flags(["texts#7"]), output, "--exist_ok", "true")
    assert len(load_from_disk(str(output / "train"))) == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lengths", "ours"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--streaming", "true"], "--streaming true cannot be exported"),
        (["--to_cached_dataset", "false"], "--to_cached_dataset false leaves nothing to do"),
        (["--template_mode", "dpo"], "invalid choice: 'dpo'"),
        (["--fusion_config", "mix.yaml"], "fusion_config mix.yaml cannot be exported"),
        (["--task_type", "reranker"], "--task_type reranker is gone from vlpack export: use swift export"),
        (["--max_lenght", "5"], "did you mean --max_length"),
    ],
)
def test_what_cannot_be_exported_is_one_line(more, said, flags, tmp_path, capfd):
    """EXPORT-7"""
    assert run_here(["export", *flags(["texts"]), "--output", tmp_path / "ours", *more]) == 2
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("vlpack export: ")
    assert said in error
    assert list(tmp_path.iterdir()) == []
