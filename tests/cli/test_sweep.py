"""Steps and tables of `vlpack plan`: what they say is what a single plan says, and the rows are measured once."""

import json
import shutil

import numpy as np
import pytest

from swift_vlpack import PackingConfig, plan
from swift_vlpack.cli import main
from swift_vlpack.cli.plan import training_report
from swift_vlpack.errors import ConfigError, PlanError
from swift_vlpack.host import run as host_run
from tests.cli.in_process import run_here
from tests.data_rows import text_row, write_jsonl
from tests.host.runs import packed_argv

LENGTHS = [(37 * number) % 290 + 11 for number in range(240)]
STEPS = ("--packing_batch", "samples", "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2")
FAMILY = "qwen2_5_vl"


@pytest.fixture(autouse=True)
def no_options(options):
    """No packing option of this process is set."""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(LENGTHS))
    return path


@pytest.fixture
def asked(file, capsys):
    """The JSON of `vlpack plan --lengths FILE`."""

    def report(*flags, length=1000):
        argv = ["plan", "--lengths", file, "--packing_strategy", "exact", "--packing_length", length, *flags, "--json"]
        assert main(list(map(str, argv))) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return report


def test_lengths_are_planned_in_steps_of_samples(asked, file, capsys):
    """CLI-42: no plan of packs in silence; ms-swift's default accumulation, or effective_batch_size."""
    report = asked(*STEPS, "--num_ranks", 2)
    assert report["kept_steps"]["num_samples"] == 16
    assert (report["steps_per_epoch"], report["num_samples"]) == (len(LENGTHS) // 16, len(LENGTHS))
    assert round(report["kept_steps"]["num_sequences"] * report["steps_per_epoch"]) == report["num_packs"]
    assert 0.3 < report["kept_steps"]["padding_saved"] < 0.6
    assert asked(*STEPS[:2])["kept_steps"]["num_samples"] == 16
    assert asked(*STEPS[:2], "--effective_batch_size", 60)["steps_per_epoch"] == 4
    argv = ["plan", "--lengths", str(file), "--packing_length", "1000", "--packing_strategy", "exact"]
    assert main([*argv, *STEPS]) == 0
    said = capsys.readouterr().out
    assert "steps        30 an epoch, gradient_accumulation_steps 2" in said
    assert "one step     the same 8 samples as un-packed, in " in said


def test_packs_of_lengths_have_steps_too(asked):
    """CLI-42"""
    report = asked("--num_ranks", 2, "--gradient_accumulation_steps", 3, "--per_device_train_batch_size", 2)
    assert report["steps_per_epoch"] == -(-report["packs_per_rank"] // 6)


@pytest.mark.parametrize("options", [{}, {"packing_batch": "samples", "effective_batch_size": 30}])
def test_no_ranks_are_refused(options):
    """CLI-42 CONF-12: by the plan, and by the packs of a step."""
    config = PackingConfig(packing_length=1000, **options)
    for act in (lambda: plan(LENGTHS, config, num_ranks=0), lambda: config.accumulation(0)):
        with pytest.raises(ConfigError, match="num_ranks must be at least 1, got 0"):
            act()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_python_plans_steps_of_samples(num_ranks):
    """CLI-42: of the items in their order; every sequence within one step, equally many for all ranks."""
    config = PackingConfig(
        packing_length=1000, packing_strategy="exact", packing_batch="samples", effective_batch_size=30
    )
    made = plan(LENGTHS, config, num_ranks=num_ranks)
    assert len(made.batches) == 8
    ends = np.cumsum(made.batches) * num_ranks
    for step, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
        inside = sorted(item for pack in made[first:end] for item in pack)
        assert inside == list(range(30 * step, 30 * step + 30))
    with pytest.raises(PlanError, match="give num_ranks to plan"):
        made.align(2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"packing_batch": "samples"}, "packing_batch=samples plans optimizer steps: give effective_batch_size"),
        ({"packing_share": "media"}, "packing_share=media needs to know where the media of a row are"),
        ({"packing_overflow": "split"}, "packing_overflow=split needs to know where the media of a row are"),
    ],
)
def test_python_refuses_what_lengths_do_not_say(options, said):
    """CLI-42"""
    with pytest.raises(ConfigError, match=said):
        plan(LENGTHS, PackingConfig(packing_length=1000, **options))


def test_every_row_of_a_table_is_what_a_single_plan_says(asked):
    """CLI-43: packs of two capacities, on two numbers of ranks; and steps of samples."""
    batch = ("--per_device_train_batch_size", 4)
    table = asked("--sweep", "packing_length=600,1200", "--ranks", "1,3", *batch)
    assert [(case["packing_length"], case["num_ranks"]) for case in table["cases"]] == [
        (600, 1), (600, 3), (1200, 1), (1200, 3)
    ]  # fmt: skip
    for case in table["cases"]:
        single = asked("--num_ranks", case["num_ranks"], *batch, length=case["packing_length"])
        assert (case["steps"], case["fill"]) == (single["steps_per_epoch"], single["mean_fill"])
        assert case["work_over_bound"] == single["balance"]
        assert case["gradient_accumulation_steps"] == single["gradient_accumulation_steps"]
        accumulated = case["num_ranks"] * case["gradient_accumulation_steps"] * 4
        assert case["sequences_per_step"] == accumulated
        assert case["samples_per_step"] == pytest.approx(single["num_samples"] / case["steps"], abs=1e-3)
        assert 0.3 < case["padding_saved"] < 0.6
    table = asked("--sweep", "packing_batch=packs,samples", "effective_batch_size=12,48", "--num_ranks", 3, *batch)
    assert len(table["cases"]) == 4
    for case in table["cases"][2:]:
        size = case["effective_batch_size"]
        single = asked("--packing_batch", "samples", "--effective_batch_size", size, "--num_ranks", 3, *batch)
        assert case["padding_saved"] == single["kept_steps"]["padding_saved"]
        assert case["sequences_per_step"] == single["kept_steps"]["num_sequences"]
        assert (case["steps"], case["work_over_bound"]) == (single["steps_per_epoch"], single["balance"])


def test_padding_is_of_the_batches_that_are_asked_for(file, asked):
    """CLI-43: batches of one row, ms-swift's default, pad nothing; of two kinds of rows a batch pads what is known."""
    assert asked("--ranks", "1")["cases"][0]["padding_saved"] == 0
    file.write_text(json.dumps([100] * 50))
    assert asked("--ranks", "1", "--per_device_train_batch_size", 5)["cases"][0]["padding_saved"] == 0
    file.write_text(json.dumps([100, 20] * 50))
    [case] = asked("--ranks", "1", "--per_device_train_batch_size", 100)["cases"]
    assert case["padding_saved"] == 0.4


def test_table_is_printed_with_what_it_means(file, capsys):
    """CLI-43"""
    argv = ["plan", "--lengths", str(file), "--packing_length", "8", "--packing_strategy", "exact"]
    assert main([*argv, "--sweep", "packing_length=600,1200", "--ranks", "8,64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "packing length"
    assert [line.split()[:2] for line in lines[1:5]] == [["600", "8"], ["600", "64"], ["1200", "8"], ["1200", "64"]]
    for part in ("fill", "padding saved", "work over bound", "sequences a step", "samples a step"):
        assert part in lines[0]
    assert lines[-1].endswith(" s for 4 plans")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--sweep", "packing_lenght=1,2"], "got 'packing_lenght'; did you mean packing_length?"),
        (["--sweep", "packing_share=media"], "--sweep takes effective_batch_size, packing_allow_single_long, "),
        (["--sweep", "packing_length"], "give the values of packing_length once, such as packing_length=X,Y"),
        (["--sweep", "packing_length=1", "packing_length=2"], "give the values of packing_length once"),
        (["--sweep", "packing_length=1,x"], "packing_length must be a whole number, got 'x'"),
        (["--sweep", "packing_batch=packs,sample"], "did you mean samples?"),
        (["--ranks", "8,x"], "--ranks takes whole numbers, such as 8,64, got '8,x'"),
        (["--ranks", "0"], "num_ranks must be at least 1, got 0"),
        (["--ranks", "8", "--num_ranks", "8"], "both --ranks and --num_ranks"),
        (
            ["--ranks", "2,3", "--effective_batch_size", "8"],
            "num_ranks=3: effective_batch_size=8 cannot be shared by 3",
        ),
        (["--per_device_train_batch_size", "x"], "invalid int value: 'x'"),
        (["--per_device_train_batch_size", "0"], "--per_device_train_batch_size must be at least 1, got 0"),
        (["--gradient_accumulation_steps", "2", "--effective_batch_size", "8"], "both say what a step takes"),
    ],
)
def test_mistake_in_a_table_is_one_line(flags, said, tmp_path, capsys):
    """CLI-43 CLI-42 CLI-5"""
    path = tmp_path / "few.json"
    path.write_text(json.dumps([100] * 8))
    argv = ["plan", "--lengths", str(path), "--packing_length", "100", "--packing_strategy", "exact", *flags]
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_rows_of_a_run_are_measured_once(small_folder, tmp_path, options, capfd, monkeypatch):
    """CLI-43: its table says what `vlpack plan` of each case says, samples in the steps of ms-swift's own order."""
    model = tmp_path / "model"
    shutil.copytree(small_folder(FAMILY), model, ignore=shutil.ignore_patterns("*.safetensors*"))
    rows = [text_row(f"question {number}", "word " * (7 * number % 90 + 1)) for number in range(60)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    options(packing_strategy="exact", packing_cache_dir=tmp_path / "lengths")
    flags = {"dataset": data, "split_dataset_ratio": 0, "per_device_train_batch_size": 2}

    def argv(**more):
        return packed_argv(model, FAMILY, tmp_path / "out", **flags, **more)

    measured, measure = [], host_run.measured_rows
    monkeypatch.setattr(host_run, "measured_rows", lambda *args: measured.append(1) or measure(*args))
    command = ["plan", *argv(), "--failures", tmp_path / "failures.jsonl", "--json"]
    sweep = ["--sweep", "packing_length=128,256", "packing_batch=packs,samples", "--ranks", "1,2"]
    assert run_here([*command, *sweep]) == 0
    table = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert len(measured) == 1
    assert len(table["cases"]) == 8
    assert {"seconds_lengths", "seconds_plan"} <= set(table)
    for case in table["cases"][2:5]:
        options(packing_strategy="exact", packing_cache_dir=tmp_path / "lengths", packing_batch=case["packing_batch"])
        single = training_report(
            argv(packing_length=case["packing_length"]), num_ranks=case["num_ranks"], failures_file=tmp_path / "f.jsonl"
        )
        assert (case["steps"], case["fill"]) == (single["steps_per_epoch"], single["mean_fill"])
        if case["packing_batch"] == "samples":
            assert case["padding_saved"] == single["kept_steps"]["padding_saved"]
            assert case["sequences_per_step"] == single["kept_steps"]["num_sequences"]
    monkeypatch.setenv("NPROC_PER_NODE", "3")  # the ranks of a table are its own
    at = command.index("--gradient_accumulation_steps")
    del command[at : at + 2]
    assert run_here([*command, "--ranks", "8,2", "--effective_batch_size", "16"]) == 0
    table = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert [case["gradient_accumulation_steps"] for case in table["cases"]] == [1, 4]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--ranks", "8,3", "--effective_batch_size", "8"], "effective_batch_size=8 cannot be shared by 3 ranks"),
        (["--packing_overflow", "split"], "packing_length under packing_overflow=split would measure the rows anew"),
        (["--packing_share", "media"], "packing_length under packing_share=media would measure the rows anew"),
        (["--neftune_noise_alpha", "5"], "--neftune_noise_alpha sizes its noise by the longest row"),
    ],
)
def test_table_of_a_run_is_refused_before_it_is_started(flags, said, tmp_path, capsys):
    """CLI-43 CLI-31"""
    data = write_jsonl(tmp_path / "rows.jsonl", [text_row()])
    argv = ["plan", "--model", "o/m", "--dataset", str(data), *flags]
    assert main([*argv, "--sweep", "packing_length=128,256", "packing_batch=packs,samples"]) == 2
    assert said in capsys.readouterr().err
