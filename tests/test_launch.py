import os
import sys
from pathlib import Path

import pytest
import yaml

from swift_vlpack import PackingConfig
from swift_vlpack.core.config import options_in_env
from swift_vlpack.core.errors import ConfigError
from swift_vlpack.launch import plan_launch, plugin_path, sft_launch, split_flags

ROOT = Path(__file__).parent.parent


def test_packing_flags_are_separated_from_the_others():
    """TRAIN-3"""
    argv = ["--model", "m", "--packing_buffer", "256", "--dataset", "a", "b", "--eval_packing", "--packing-max-carry=2"]
    flags, rest = split_flags(argv)
    assert flags == {"packing_buffer": "256", "eval_packing": "true", "packing_max_carry": "2"}
    assert rest == ["--model", "m", "--dataset", "a", "b"]


def test_launch_hands_the_rest_to_ms_swift_unchanged():
    """TRAIN-3"""
    launch = sft_launch(["--model", "m", "--packing_strategy", "exact", "--lora_rank", "8"], {"NPROC_PER_NODE": "2"})
    assert launch.command[:4] == [sys.executable, "-m", "swift.cli.main", "sft"]
    assert launch.command[4:8] == ["--model", "m", "--lora_rank", "8"]
    assert launch.command[8:] == ["--external_plugins", str(plugin_path()), "--packing", "true"]
    assert launch.environ == {"NPROC_PER_NODE": "2", "VLPACK_PACKING_STRATEGY": "exact"}


def test_ms_swifts_own_flags_go_to_it():
    """TRAIN-3"""
    command = sft_launch(["--packing_length", "4096", "--packing", "false"], {}).command
    assert command[command.index("--packing_length") + 1] == "4096"
    assert command[command.index("--packing") + 1] == "false"
    assert command.count("--packing") == 1


def test_plugins_of_the_user_stay_and_ours_comes_first():
    """TRAIN-3"""
    command = sft_launch(["--external_plugins", "mine.py", "--model", "m"], {}).command
    at = command.index("--external_plugins")
    assert command[at : at + 3] == ["--external_plugins", str(plugin_path()), "mine.py"]
    assert command.count("--external_plugins") == 1


def test_keys_of_a_training_file_are_options_and_flags_win(tmp_path):
    """TRAIN-3"""
    (tmp_path / "train.yaml").write_text(
        "model: m\npacking_min_fill_ratio: 0.7\npacking_drop_last: false\npacking_buffer: 8\n"
        "external_plugins: [mine.py]\nENV: {MAX_PIXELS: 1003520}\n"
    )
    launch = sft_launch([str(tmp_path / "train.yaml"), "--packing_buffer", "16"], {"VLPACK_PACKING_BUFFER": "4"})
    options = options_in_env(launch.environ)
    assert options == {"packing_min_fill_ratio": "0.7", "packing_drop_last": "false", "packing_buffer": "16"}
    handed = yaml.safe_load(Path(launch.command[4]).read_text())
    assert handed == {
        "model": "m",
        "external_plugins": ["mine.py", str(plugin_path())],
        "ENV": {"MAX_PIXELS": 1003520},
    }
    assert Path(launch.command[4]).name == "train.yaml"
    assert yaml.safe_load((tmp_path / "train.yaml").read_text())["packing_buffer"] == 8, "the user's file was changed"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--packing_strategy", "bfd"], "packing_strategy must be one of"),
        (["--packing_buffer", "0"], "packing_buffer must be at least 1"),
        (["nowhere.yaml"], "nowhere.yaml: cannot be read"),
    ],
)
def test_mistakes_stop_before_ms_swift_is_started(argv, message):
    """TRAIN-3"""
    with pytest.raises(ConfigError, match=message):
        sft_launch(argv, {})


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


def test_plan_takes_a_training_file_as_ms_swift_does(tmp_path, monkeypatch):
    """CLI-6: ms-swift's own reading of the file that `vlpack sft` hands to it is the standard."""
    from swift.cli.main import parse_yaml_args

    (tmp_path / "train.yaml").write_text(yaml.safe_dump(TRAINING, allow_unicode=True))
    argv = [str(tmp_path / "train.yaml"), "--lora_alpha", "8", "--packing_max_carry", "2"]
    environ = {"MAX_PIXELS": "1000", "VLPACK_PACKING_LENGTH": "64"}
    planned = plan_launch(argv, environ)

    launch = sft_launch(argv, environ)
    with monkeypatch.context() as patch:
        for name in ("NPROC_PER_NODE", "VLPACK_PACKING_STRATEGY", "SWIFT_CONFIG_FILE", *launch.environ):
            patch.setenv(name, launch.environ.get(name, ""))
            if name not in launch.environ:
                patch.delenv(name)
        flags = launch.command[4:]
        parse_yaml_args(flags)
        assert planned.flags == flags
        for name in ("NPROC_PER_NODE", "VLPACK_PACKING_STRATEGY", *launch.environ):
            assert planned.environ[name] == os.environ[name]
    assert planned.num_ranks == 4
    assert planned.environ["MAX_PIXELS"] == "1000", "what is set wins over the file"


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
    launch = plan_launch(["--model", "m"], environ, num_ranks=asked)
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
        plan_launch(argv, environ)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_of_the_project_is_valid(path, monkeypatch):
    """TRAIN-3 CONF-2"""
    monkeypatch.chdir(ROOT)
    content = yaml.safe_load(path.read_text())
    if "sources" in content:
        from swift_vlpack.host.fusion_config import read_fusion_config

        assert [spec.name for spec in read_fusion_config(str(path))]
        return
    launch = sft_launch([str(path)], {})
    environ = {**launch.environ, **{key: str(value) for key, value in content.get("ENV", {}).items()}}
    assert PackingConfig.from_env(environ, packing_length=content["max_length"])
    from swift.arguments import SftArguments

    known = set(SftArguments.__dataclass_fields__)
    assert set(yaml.safe_load(Path(launch.command[4]).read_text())) - {"ENV"} <= known
    if "external_plugins" in content:
        assert [(ROOT / plugin).resolve() for plugin in content["external_plugins"]] == [plugin_path().resolve()]
