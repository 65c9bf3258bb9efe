"""`effective_batch_size`: a step of N packs, whatever the ranks, in `swift sft`, in commands and in PackingDataset."""

import json
import os

import pytest

from swift_vlpack import PackingConfig, PackingDataset
from swift_vlpack.cli import main
from swift_vlpack.cli.plan import training_report
from swift_vlpack.config import ENV_PREFIX
from swift_vlpack.errors import ConfigError
from swift_vlpack.host.launch import check_launch, run_launch, train_launch
from swift_vlpack.host.run import run_of
from tests.data_rows import text_row, write_jsonl
from tests.host.runs import packed_argv, train

FAMILY = "qwen2_5_vl"


@pytest.fixture(autouse=True)
def no_options(options):
    """No packing option of this process is set."""


@pytest.fixture
def dataset(tmp_path):
    rows = [text_row(f"question {number}", "word " * 20) for number in range(40)]
    return write_jsonl(tmp_path / "rows.jsonl", rows)


@pytest.fixture
def flags(small_folder, dataset, tmp_path):
    """Flags of a run that leaves the accumulation open; `more` win."""

    def made(**more):
        argv = packed_argv(
            small_folder(FAMILY), FAMILY, tmp_path / "out", dataset=dataset, split_dataset_ratio=0, packing_length=64,
            **more,
        )  # fmt: skip
        if "gradient_accumulation_steps" not in more:
            at = argv.index("--gradient_accumulation_steps")
            del argv[at : at + 2]
        return argv

    return made


@pytest.mark.parametrize(
    ("num_packs", "num_ranks", "batch_size", "expected"),
    [(32, 8, 1, 4), (32, 8, 2, 2), (6, 1, 1, 6), (8, 8, 1, 1), (None, 2, 1, 8), (None, 64, 1, 1)],
)
def test_accumulation_follows_from_the_ranks(num_packs, num_ranks, batch_size, expected):
    """CONF-12"""
    config = PackingConfig(packing_length=8, effective_batch_size=num_packs)
    assert config.accumulation(num_ranks, batch_size) == expected


@pytest.mark.parametrize(
    ("num_packs", "num_ranks", "batch_size", "said"),
    [
        (30, 8, 1, "effective_batch_size=30 cannot be shared by 8 ranks; give 24 or 32"),
        (5, 8, 1, "effective_batch_size=5 cannot be shared by 8 ranks; give 8"),
        (30, 2, 4, "effective_batch_size=30 cannot be shared by 2 ranks x batches of 4; give 24 or 32"),
    ],
)
def test_what_ranks_cannot_share_is_refused_with_the_nearest_numbers(num_packs, num_ranks, batch_size, said):
    """CONF-12"""
    config = PackingConfig(packing_length=8, effective_batch_size=num_packs)
    with pytest.raises(ConfigError) as refused:
        config.accumulation(num_ranks, batch_size)
    assert str(refused.value) == said
    with pytest.raises(ConfigError, match="effective_batch_size must be at least 1, got 0"):
        PackingConfig(packing_length=8, effective_batch_size=0)


@pytest.mark.parametrize("command", ["sft", "plan"])
def test_a_mistake_is_one_line_before_an_import(command, dataset, tmp_path, monkeypatch, capsys):
    """CONF-12 CLI-31: from a YAML key, with the ranks of the environment, and beside an accumulation."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execve", lambda *command: pytest.fail("it was started"))
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    for keys, said in (
        ("effective_batch_size: 5", "effective_batch_size=5 cannot be shared by 2 ranks; give 4 or 6"),
        (
            "effective_batch_size: 4\ngradient_accumulation_steps: 2",
            "effective_batch_size=4 and --gradient_accumulation_steps 2 both say what a step takes; leave one of them",
        ),
    ):
        (tmp_path / "run.yaml").write_text(f"model: no/model\ndataset: [{dataset}]\n{keys}\n")
        assert main([command, *(["--config"] if command == "plan" else []), "run.yaml"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert said in error


def test_launchers_that_leave_the_ranks_open_are_judged_later(dataset):
    """CONF-12: torchrun counts the devices of `gpu`."""
    launch = train_launch(["--model", "o/m", "--dataset", str(dataset), "--effective_batch_size", "7"], {})
    assert launch.num_ranks == 1
    for processes, nodes, expected in (("4", "2", 8), ("gpu", "2", 2), ("gpu", "1:4", 1)):
        launch.environ.update(NPROC_PER_NODE=processes, NNODES=nodes)
        assert launch.num_ranks == expected


def test_a_run_steps_after_so_many_packs(flags, tmp_path, options, monkeypatch):
    """CONF-12: `swift sft` itself; and its plan counts the same steps."""
    options(effective_batch_size=4, packing_drop_last="false", packing_verify="false")
    monkeypatch.setenv("VLPACK_RECORD_PACKS", "true")
    argv = flags(num_train_epochs=1, per_device_train_batch_size=2)
    report = training_report(argv, num_ranks=1, failures_file=tmp_path / "failures.jsonl")
    result = train(argv)
    args = json.loads((tmp_path / "out" / "args.json").read_text())
    assert (args["per_device_train_batch_size"], args["gradient_accumulation_steps"]) == (1, 4)
    lines = [json.loads(line) for line in (tmp_path / "out" / "vlpack" / "packs_rank0.jsonl").read_text().splitlines()]
    packs = [line["step"] for line in lines if "ids" in line]
    num_steps = len([line for line in result["log_history"] if "loss" in line])
    assert report["num_steps"] == num_steps == -(-len(packs) // 4) > 1
    assert [packs.count(step) for step in sorted(set(packs))[:-1]] == [4] * (num_steps - 1)


def test_ranks_batch_and_samples_decide_the_accumulation_of_a_run(flags, options):
    """CONF-12: on two and on four ranks; DeepSpeed's "auto" is filled in, another number is ms-swift's to refuse."""
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    class Filled(HfTrainerDeepSpeedConfig, HfDeepSpeedConfig):
        """What transformers fills in; its own base needs the package."""

        def __init__(self, **config):
            self.config, self.mismatches = config, []

    options(effective_batch_size=8)
    for num_ranks, accumulation in ((2, 4), (4, 2)):
        with run_of(flags(per_device_train_batch_size=2), num_ranks=num_ranks) as run:
            training = run.args.training_args
            assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (1, accumulation)
    filled, other = Filled(gradient_accumulation_steps="auto"), Filled(gradient_accumulation_steps=16)
    for one in (filled, other):
        one.trainer_config_process(training)
    assert (filled.config["gradient_accumulation_steps"], filled.mismatches) == (2, [])
    assert other.mismatches == ["- ds gradient_accumulation_steps=16 vs hf gradient_accumulation_steps=2"]
    options(effective_batch_size=8, packing_batch="samples")
    with run_of(flags(per_device_train_batch_size=2), num_ranks=2) as run:
        from swift_vlpack.host.args import unpacked_step

        assert unpacked_step(run.args).num_samples == 8
        assert unpacked_step(run.args).accumulation == 2


def test_an_unpacked_run_is_told_that_it_has_no_effect(flags, options, caplog):
    """CONF-12: once, and without a word where it is not given."""
    for number, said in (("none", 0), ("8", 1)):
        options(effective_batch_size=number)
        with run_of([*flags(), "--packing", "false"], num_ranks=1):
            warnings = [
                one for one in caplog.messages if one.startswith(f"effective_batch_size={number} has no effect")
            ]
            assert len(warnings) == said


def test_commands_that_train_in_one_process_take_the_steps_of_a_rank(dataset):
    """CONF-12: `vlpack bench` and `verify`, of which 128 packs a step would be 8 ranks' work."""
    argv = ["--model", "o/m", "--dataset", str(dataset), "--effective_batch_size", "128"]
    launch = run_launch(argv, {"NPROC_PER_NODE": "8"}, needs_gpu=True)
    assert launch.flags[-2:] == ["--gradient_accumulation_steps", "16"]
    assert launch.environ[f"{ENV_PREFIX}EFFECTIVE_BATCH_SIZE"] == "none"
    check_launch(launch)
    again = run_launch(argv, launch.environ, num_ranks=launch.num_ranks, needs_gpu=True)
    assert again == launch, "the command is executed twice"


class Template:
    """Stands for one of ms-swift's."""

    def encode(self, row, return_length=False):
        return {"input_ids": row["ids"], "labels": row["ids"]}


def test_a_trainer_of_ones_own_is_told_what_to_accumulate():
    """CONF-12 SAME-7: packs of a rank, or the samples of a step."""
    rows = [{"ids": [1] * number} for number in (5, 4, 7, 6, 3, 5, 2, 8)]
    config = PackingConfig(packing_length=10, effective_batch_size=4)
    assert PackingDataset(rows, Template(), config, num_ranks=2).accumulation == 2
    assert PackingDataset(rows, Template(), PackingConfig(packing_length=10), num_ranks=2).accumulation == 1
    with pytest.raises(ConfigError, match="effective_batch_size=4 cannot be shared by 3 ranks; give 3 or 6"):
        PackingDataset(rows, Template(), config, num_ranks=3)
    steps = PackingConfig(packing_length=10, effective_batch_size=3, packing_batch="samples")
    packs = PackingDataset(rows, Template(), steps, num_ranks=2)
    same = PackingDataset(
        rows, Template(), PackingConfig(packing_length=10, packing_batch="samples"), num_ranks=2, samples_per_step=3
    )
    assert packs.plan.digest() == same.plan.digest()
    assert len(packs.plan.batches) == 3
    with pytest.raises(ConfigError, match="both say what a step takes"):
        PackingDataset(rows, Template(), steps, samples_per_step=3)
