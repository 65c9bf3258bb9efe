import os
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from swift_vlpack import PackingConfig
from swift_vlpack.config import options_in_env
from swift_vlpack.errors import ConfigError
from swift_vlpack.host.launch import plugin_path, run_launch, train_launch
from swift_vlpack.host.run_flags import split_flags
from swift_vlpack.host.swift_flags import flag_names

ROOT = Path(__file__).parents[2]


def test_packing_flags_are_separated_from_the_others():
    """TRAIN-3"""
    argv = [
        "--model",
        "m",
        "--packing_buffer",
        "256",
        "--dataset",
        "a",
        "b",
        "--eval_packing",
        "--packing-max-images=2",
    ]
    flags, rest = split_flags(argv)
    assert flags == {"packing_buffer": "256", "eval_packing": "true", "packing_max_images": "2"}
    assert rest == ["--model", "m", "--dataset", "a", "b"]


def test_launch_hands_the_rest_to_ms_swift_unchanged():
    """TRAIN-3 CLI-10"""
    launch = train_launch(["--model", "m", "--packing_strategy", "exact", "--lora_rank", "8"], {"A": "b"})
    assert launch.command[0] == sys.executable
    assert Path(launch.command[1]).parts[-3:] == ("swift", "cli", "sft.py")
    assert launch.command[2:6] == ["--model", "m", "--lora_rank", "8"]
    assert launch.command[6:] == ["--external_plugins", str(plugin_path()), "--packing", "true"]
    assert launch.environ == {"A": "b", "VLPACK_PACKING_STRATEGY": "exact"}


def test_ms_swifts_own_flags_go_to_it():
    """TRAIN-3"""
    command = train_launch(["--packing_length", "4096", "--packing", "false"], {}).command
    assert command[command.index("--packing_length") + 1] == "4096"
    assert command[command.index("--packing") + 1] == "false"
    assert command.count("--packing") == 1


@pytest.mark.parametrize("given", [["--external_plugins", "mine.py"], ["--external-plugins=mine.py"]])
def test_plugins_of_the_user_stay_and_ours_comes_first(given):
    """TRAIN-3"""
    command = train_launch([*given, "--model", "m"], {}).command
    at = command.index("--external_plugins")
    assert command[at : at + 3] == ["--external_plugins", str(plugin_path()), "mine.py"]
    assert sum("plugins" in part and part.startswith("--") for part in command) == 1


def test_keys_of_a_training_file_are_options_and_flags_win(tmp_path, monkeypatch):
    """TRAIN-3 CLI-10: no copy of the file is left anywhere, because none is made."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "train.yaml").write_text(
        "model: m\npacking_min_fill_ratio: 0.7\npacking_drop_last: false\npacking_buffer: 8\n"
        "external_plugins: [mine.py]\nENV: {MAX_PIXELS: 1003520}\n"
    )
    launch = train_launch([str(tmp_path / "train.yaml"), "--packing_buffer", "16"], {"VLPACK_PACKING_BUFFER": "4"})
    options = options_in_env(launch.environ)
    assert options == {"packing_min_fill_ratio": "0.7", "packing_drop_last": "false", "packing_buffer": "16"}
    assert launch.command[2:8] == ["--model", "m", "--external_plugins", str(plugin_path()), "mine.py", "--packing"]
    assert launch.environ["MAX_PIXELS"] == "1003520"
    assert launch.environ["SWIFT_CONFIG_FILE"] == str(tmp_path / "train.yaml"), "which is copied to the checkpoints"
    assert list((tmp_path / "temporary").iterdir()) == []


def test_mistyped_names_are_found_before_ms_swift_is_started(tmp_path):
    """CLI-11: flags and keys, ms-swift's and ours, all at once."""
    (tmp_path / "train.yaml").write_text("modle: m\nlora_rank: 8\npacking_bufer: 3\n")
    with pytest.raises(ConfigError) as refused:
        train_launch([str(tmp_path / "train.yaml"), "--learning_rat", "1", "--lerning_rate=1", "--Packing", "true"], {})
    said = str(refused.value)
    assert "unknown option --lerning_rate, did you mean --learning_rate?" in said
    assert "unknown option --Packing, did you mean --packing?" in said
    assert "unknown key modle, did you mean model?" in said
    assert "unknown key packing_bufer, did you mean packing_buffer?" in said
    assert "lora_rank" not in said
    assert "--learning_rat," not in said, "argparse knows the beginning of a flag"


@pytest.mark.parametrize(
    "argv",
    [
        ["--ignore_args_error", "true", "--notebook", "1"],
        ["--system", "--be brief and kind"],
        ["--no_gradient_checkpointing", "--learning-rate", "1e-4", "--dataset", "a", "b"],
    ],
)
def test_what_ms_swift_takes_is_not_refused(argv):
    """CLI-11"""
    assert train_launch(argv, {}).command[2 : 2 + len(argv)] == argv


def test_flags_are_those_of_ms_swifts_arguments():
    """CLI-11: read from source, and the same as the classes have when they are imported."""
    from dataclasses import fields

    from swift.arguments import PretrainArguments, SftArguments

    assert flag_names() == {spec.name for spec in fields(SftArguments) if spec.init}
    assert flag_names() == {spec.name for spec in fields(PretrainArguments) if spec.init}


def test_pretraining_is_launched_by_its_own_file():
    """TRAIN-27: everything else is as for `vlpack sft`."""
    argv = ["--model", "m", "--packing_strategy", "exact"]
    pt, sft = train_launch(argv, {}, command="pt"), train_launch(argv, {})
    assert Path(pt.command[1]).parts[-3:] == ("swift", "cli", "pt.py")
    assert (pt.command[2:], pt.environ) == (sft.command[2:], sft.environ)


TRAINING = {
    "model": "m",
    "dataset": ["a.jsonl", "b.jsonl#10"],
    "packing_buffer": 8,
    "lora_alpha": 32,
    "gradient_checkpointing": False,
    "model_kwargs": {"max_pixels": 1003520, "note": "naïve"},
    "deepspeed": None,
    "ENV": {"NPROC_PER_NODE": 4, "VLPACK_PACKING_STRATEGY": "exact", "MAX_PIXELS": 50176},
}


def test_a_training_file_means_what_it_means_to_ms_swift(tmp_path, monkeypatch):
    """CLI-6 CLI-10: ms-swift's own reading of the file, but for the packing keys, is the standard."""
    from swift.cli.main import get_torchrun_args, parse_yaml_args

    own = {name: value for name, value in TRAINING.items() if not name.startswith("packing")}
    for name, content in (("train.yaml", TRAINING), ("swifts.yaml", own)):
        (tmp_path / name).write_text(yaml.safe_dump(content, allow_unicode=True))
    argv = [str(tmp_path / "train.yaml"), "--lora_alpha", "8", "--packing_max_images", "2"]
    environ = {"MAX_PIXELS": "1000", "VLPACK_PACKING_LENGTH": "64", "MASTER_PORT": "29511"}
    planned, launch = run_launch(argv, environ), train_launch(argv, environ)

    with monkeypatch.context() as patch:
        for name in (*TRAINING["ENV"], "SWIFT_CONFIG_FILE", "NNODES", "NODE_RANK", "MASTER_ADDR"):
            patch.delenv(name, raising=False)
        for name, value in environ.items():
            patch.setenv(name, value)
        flags = [str(tmp_path / "swifts.yaml"), "--lora_alpha", "8"]
        parse_yaml_args(flags)
        flags += ["--external_plugins", str(plugin_path()), "--packing", "true"]
        assert planned.flags == flags
        assert launch.command[1:3] == ["-m", "torch.distributed.run"]
        assert launch.command[3:7] == get_torchrun_args()
        assert launch.command[8:] == flags
        for name in (*TRAINING["ENV"], *environ):
            assert planned.environ[name] == launch.environ[name] == os.environ[name]
    assert planned.num_ranks == 4
    assert run_launch(argv, planned.environ) == planned, "the same again in the environment of the run"
    assert planned.environ["MAX_PIXELS"] == "1000", "what is set wins over the file"
    options = options_in_env(launch.environ)
    assert options == options_in_env(planned.environ)
    assert options == {
        "packing_length": "64", "packing_strategy": "exact", "packing_buffer": "8", "packing_max_images": "2"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "asked", "num_ranks"),
    [
        ({}, None, 1),
        ({"NPROC_PER_NODE": "8"}, None, 8),
        ({"NPROC_PER_NODE": "8", "NNODES": "2"}, None, 16),
        ({"NPROC_PER_NODE": "8"}, 3, 3),
        ({"WORLD_SIZE": "8", "RANK": "1", "LOCAL_RANK": "1"}, None, 1),
    ],
)
def test_ranks_of_a_plan_are_those_asked_for_or_those_of_the_environment(environ, asked, num_ranks):
    """CLI-7"""
    launch = run_launch(["--model", "m"], environ, num_ranks=asked)
    assert launch.num_ranks == num_ranks
    assert not {"WORLD_SIZE", "RANK", "LOCAL_RANK"} & set(launch.environ), "one process, whoever starts it"
    assert launch.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["--model", "m"], {"NPROC_PER_NODE": "auto"}, "NPROC_PER_NODE=auto .* give --num_ranks"),
        (["list.yaml"], {}, "ENV must be a mapping"),
    ],
)
def test_environment_that_says_nothing_is_refused(argv, environ, message, tmp_path, monkeypatch):
    """CLI-5"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.yaml").write_text("model: m\nENV: [A, B]\n")
    with pytest.raises(ConfigError, match=message):
        run_launch(argv, environ)


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "configs").glob("*.yaml")),
    ids=lambda path: path.name,
)
def test_every_config_of_the_project_is_valid(path, monkeypatch):
    """TRAIN-3 CONF-2"""
    monkeypatch.chdir(ROOT)
    content = yaml.safe_load(path.read_text())
    if "sources" in content:
        from swift_vlpack.rows.fusion_config import read_fusion_config

        assert [spec.name for spec in read_fusion_config(str(path)).sources]
        return
    launch = train_launch([str(path)], {})
    environ = {**launch.environ, **{key: str(value) for key, value in content.get("ENV", {}).items()}}
    assert PackingConfig.from_env(environ, packing_length=content["max_length"])
    from swift.arguments import SftArguments

    known = set(SftArguments.__dataclass_fields__)
    script = next(at for at, part in enumerate(launch.command) if part.endswith(".py"))  # behind torchrun
    assert {part[2:] for part in launch.command[script:] if part.startswith("--")} <= known
    if "external_plugins" in content:
        assert [(ROOT / plugin).resolve() for plugin in content["external_plugins"]] == [plugin_path().resolve()]


@pytest.mark.parametrize("given", [["--external_plugins", "mine.py"], "external_plugins: [mine.py]\n"])
def test_a_strategy_that_a_plugin_registers_is_left_to_the_training_process(given, tmp_path):
    """STRAT-9"""
    file = tmp_path / "train.yaml"
    file.write_text("model: m\npacking_strategy: of_the_plugin\n" + (given if isinstance(given, str) else ""))
    launch = train_launch([str(file), *([] if isinstance(given, str) else given)], {})
    assert launch.environ["VLPACK_PACKING_STRATEGY"] == "of_the_plugin"
    with pytest.raises(ConfigError, match="packing_strategy must be one of"):
        train_launch(["--model", "m", "--packing_strategy", "of_the_plugin"], {})


def test_a_module_that_cannot_be_imported_stops_at_once_but_for_a_path_of_the_run(tmp_path):
    """STRAT-8"""
    file = tmp_path / "train.yaml"
    file.write_text("model: m\npacking_strategy: module_of_the_run:function\n")
    with pytest.raises(ConfigError, match="cannot import 'module_of_the_run'"):
        train_launch([str(file)], {})
    file.write_text(file.read_text() + f"ENV: {{PYTHONPATH: {tmp_path}}}\n")
    launch = train_launch([str(file)], {})
    assert launch.environ["VLPACK_PACKING_STRATEGY"] == "module_of_the_run:function"


@pytest.mark.parametrize(
    ("given", "needs_gpu", "seen"),
    [
        ({}, False, ""),
        ({}, True, None),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, True, "2,3"),
        ({"CUDA_VISIBLE_DEVICES": "2,3", "NPROC_PER_NODE": "2"}, True, "2"),
        ({"NPROC_PER_NODE": "2"}, True, "0"),
    ],
)
def test_command_about_a_run_sees_the_gpus_of_one_rank_or_none(given, needs_gpu, seen):
    """CLI-7 CLI-16: a run of one process spreads its model over all that it sees."""
    made = run_launch(["--model", "m"], {**given, "RANK": "1", "WORLD_SIZE": "2"}, needs_gpu=needs_gpu)
    assert made.environ.get("CUDA_VISIBLE_DEVICES") == seen
    assert not {"RANK", "WORLD_SIZE"} & set(made.environ)
