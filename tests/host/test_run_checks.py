"""What a person gets wrong is refused before anything heavy is imported: by the command line, as it is typed."""

import json
import os
import re
import socket
import sys
from importlib import import_module

import numpy as np
import pytest
from safetensors.numpy import save_file

from swift_vlpack.cli import main
from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import ConfigError
from swift_vlpack.host import launch, machine_checks, run_flags
from swift_vlpack.host.run_checks import Registered, check_run, refuse_combinations
from swift_vlpack.host.run_flags import given_options
from swift_vlpack.host.seam import CALLBACK
from swift_vlpack.host.swift_flags import VALUES, known_values
from tests.data_rows import text_row, write_jsonl
from tests.environment import packing_options


class Started(Exception):
    """The command would become the process that trains or plans."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with data, a model, a training file and a checkpoint; nothing of it is started."""

    def started(*command):
        raise Started

    monkeypatch.setattr(os, "execve", started)
    monkeypatch.setattr(os, "dup2", lambda *numbers: None)  # `vlpack plan` sends what is printed elsewhere
    packing_options()
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", [text_row(n) for n in range(12)])
    write_jsonl(tmp_path / "few.jsonl", [text_row(n) for n in range(4)])
    (tmp_path / "empty.jsonl").write_text("\n  \n")
    (tmp_path / "file.txt").write_text("no folder")
    (tmp_path / "rows.jsonl.gz").write_bytes(b"packed")
    (tmp_path / "rate.yaml").write_text("model: model\ndataset: rows.jsonl\nlearning_rate: fast\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "out" / "checkpoint-8").mkdir(parents=True)
    (tmp_path / "train.yaml").write_text("model: model\ndataset: rows.jsonl\n")
    return tmp_path


FILE = "train.yaml"
MISTAKES = {
    "second file": ([FILE, "other.yaml"], "other.yaml: give one training file, as the first word"),
    "file not first": (["--model", "model", FILE], "train.yaml: give one training file, as the first word"),
    "folder": (["model"], "model is a folder; name a training file in it (.yaml, .yml, .json), or --model model"),
    "data": (["rows.jsonl"], "rows.jsonl is not a training file; name data with --dataset rows.jsonl"),
    "word": ([FILE, "--seed", "3", "foo"], "no option takes 'foo'; a training file comes first"),
    "no training file": (["nowhere.yaml"], "nowhere.yaml: cannot be read"),
    "no epoch": ([FILE, "--num_train_epochs", "-1"], "--num_train_epochs must be above 0, got -1"),
    "no rank": ([FILE, "--lora_rank", "0"], "--lora_rank must be at least 1, got 0"),
    "no log": ([FILE, "--logging_steps", "0"], "--logging_steps must be above 0, got 0"),
    "workers": ([FILE, "--dataloader_num_workers", "-1"], "--dataloader_num_workers must be at least 0, got -1"),
    "no number": ([FILE, "--learning_rate", "fast"], "--learning_rate must be a number, got 'fast'"),
    "no whole number": ([FILE, "--lora_rank", "8.5"], "--lora_rank must be a whole number, got '8.5'"),
    "no share": ([FILE, "--split_dataset_ratio", "5"], "--split_dataset_ratio must be from 0 to 1, got 5"),
    "loss scale": ([FILE, "--loss_scale", "all+reakt"], "got 'reakt'; did you mean react?"),
    "optim": ([FILE, "--optim", "adamw"], "--optim must be one of adafactor, "),
    "optimizer": ([FILE, "--optimizer", "muonn"], "got 'muonn'; did you mean muon?"),
    "metric": ([FILE, "--metric_for_best_model", "eval_lss"], "got 'lss'; did you mean loss?"),
    "lazy": ([FILE, "--packing_batch", "samples", "--lazy_tokenize", "true"], "--lazy_tokenize true cannot be used"),
    "no model": (["--dataset", "rows.jsonl"], "there is no model to train: give --model"),
    "no data": (["--model", "model"], "there is no data to train on: give --dataset or fusion_config"),
    "no file": ([FILE, "--dataset", "rowz.jsonl"], "--dataset rowz.jsonl: no such file; did you mean rows.jsonl?"),
    "no file like it": ([FILE, "--dataset", "data/x.jsonl#5"], "--dataset data/x.jsonl#5: no such file in FOLDER"),
    "no row of it": ([FILE, "--dataset", "rows.jsonl#0"], "after # comes the number of rows to draw, at least 1"),
    "packed file": ([FILE, "--dataset", "rows.jsonl.gz"], "rows.jsonl.gz: ms-swift does not read such a file; unpack"),
    "rate in words in a file": (["rate.yaml"], "--learning_rate must be a number, got 'fast'"),
    "no validation": ([FILE, "--val_dataset", "/no/x"], "--val_dataset /no/x: no such file"),
    "empty file": ([FILE, "--dataset", "empty.jsonl"], "--dataset empty.jsonl: the file is empty"),
    "home": ([FILE, "--dataset", "~/rows.jsonl"], "ms-swift does not expand ~ here, write /"),
    "no model folder": ([FILE, "--model", "./modle"], "--model ./modle: no such folder; did you mean model?"),
    "model file": ([FILE, "--model", "file.txt"], "--model file.txt is a file"),
    "data as model": ([FILE, "--model", "out"], "--model out: there is no config.json in it"),
    "adapter as model": ([FILE, "--model", "adapter"], "it is an adapter: give it with --adapters"),
    "no adapter": ([FILE, "--adapters", "./adaptr"], "--adapters ./adaptr: no such folder; did you mean adapter?"),
    "no plugin": ([FILE, "--external_plugins", "mine.py"], "--external_plugins mine.py: no such file in FOLDER"),
    "no checkpoint": (
        [FILE, "--resume_from_checkpoint", "out/checkpoint-9"],
        "--resume_from_checkpoint out/checkpoint-9: no such checkpoint; there is out/checkpoint-8",
    ),
    "run as checkpoint": (
        [FILE, "--resume_from_checkpoint", "out"],
        "--resume_from_checkpoint out is not a checkpoint; there is out/checkpoint-8",
    ),
    "tuner meant": ([FILE, "--tuner_type", "lorra"], "got 'lorra'; did you mean lora?"),
    "dtype": ([FILE, "--torch_dtype", "bfloat"], "got 'bfloat'; did you mean bfloat16?"),
    "no deepspeed": (
        [FILE, "--deepspeed", "of_deepspeed.json"],
        "--deepspeed of_deepspeed.json: no such file in FOLDER",
    ),
    "groups": ([FILE, "--group_by_length", "true"], "--group_by_length true cannot be used with packing"),
    "no fusion": (["--model", "model", "--fusion_config", "no.yaml"], "fusion_config no.yaml: cannot be read"),
    "no steps": ([FILE, "--streaming", "true"], "set --max_steps"),
    "no value": ([FILE, "--packing_length", "--seed", "3"], "--packing_length needs a value: INT"),
    "strategy": ([FILE, "--packing_strategy", "exakt"], "got 'exakt'; did you mean exact?"),
}


@pytest.mark.parametrize("command", ["sft", "plan", "bench"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_one_line_before_anything_is_started(mistake, command, capsys, folder):
    """CLI-31"""
    argv, said = MISTAKES[mistake]
    assert main([command, *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"vlpack {command}: ")
    assert said.replace("FOLDER", str(folder)) in err


WEIGHTS = "model/model.safetensors"
OF_TRAINING = {
    "flash": (["--attn_impl", "flash_attn"], {}, "--attn_impl flash_attn: flash-attn is not installed"),
    "deepspeed": (["--deepspeed", "zero2"], {}, "run `pip install deepspeed`, or leave it out"),
    "wandb": (["--report_to", "tensorboard", "wandb"], {}, "--report_to wandb: wandb is not installed"),
    "bnb": (["--quant_method", "bnb", "--quant_bits", "4"], {}, "--quant_method bnb: bitsandbytes is not"),
    "liger": (["--use_liger_kernel", "true"], {}, "--use_liger_kernel True: liger-kernel is not installed"),
    "no process": ([], {"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE must be a number of processes, at least 1, or gpu"),
    "processes in words": ([], {"NPROC_PER_NODE": "two"}, "cpu or auto, got 'two'"),
    "no node": ([], {"NPROC_PER_NODE": "2", "NNODES": "0"}, "NNODES must be a number of nodes, at least 1, got '0'"),
    "no port": ([], {"NPROC_PER_NODE": "2", "MASTER_PORT": "http"}, "MASTER_PORT must be the number of a port"),
    "port too high": ([], {"NPROC_PER_NODE": "2", "MASTER_PORT": "99999"}, "MASTER_PORT=99999 cannot be used"),
}


@pytest.mark.parametrize("mistake", OF_TRAINING)
def test_machine_that_cannot_train_is_one_line_before_anything_is_started(mistake, capsys, monkeypatch):
    """CLI-41"""
    flags, environ, said = OF_TRAINING[mistake]
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machine_checks, "is_installed", lambda name: name == "tensorboard")
    assert main(["sft", FILE, *flags]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert said in err
    if not environ:  # a plan needs no such package
        with pytest.raises(Started):
            main(["plan", "--config", FILE, *flags])


def test_port_in_use_is_one_line(capsys, monkeypatch):
    """CLI-41: not where another node has it, nor where torchrun looks for a free one."""
    with socket.socket() as listening:
        listening.bind(("", 0))
        listening.listen()
        port = str(listening.getsockname()[1])
        for name, value in (("NPROC_PER_NODE", "2"), ("MASTER_PORT", port)):
            monkeypatch.setenv(name, value)
        assert main(["sft", FILE]) == 2
        assert f"the port MASTER_PORT={port} cannot be used (Address already in use)" in capsys.readouterr().err
        monkeypatch.setenv("NODE_RANK", "1")
        with pytest.raises(Started):
            main(["sft", FILE])
    monkeypatch.setenv("NODE_RANK", "0")
    with pytest.raises(Started):
        main(["sft", FILE])


@pytest.mark.parametrize("command", ["sft", "plan"])
def test_variable_that_is_no_number_is_named(command, capsys, monkeypatch):
    """CLI-41"""
    monkeypatch.setenv("MAX_PIXELS", "1M")
    assert main([command, FILE]) == 2
    assert capsys.readouterr().err == f"vlpack {command}: the variable MAX_PIXELS must be a whole number, got '1M'\n"


def test_weights_that_are_cut_or_missing_are_named(folder, capsys):
    """CLI-41: of a model and of an adapter, in one file or several; a plan needs no weights."""

    def said(*flags):
        with pytest.raises(Started):
            main(["plan", "--config", FILE])
        try:
            assert main(["sft", FILE, *flags]) == 2
        except Started:
            return None
        return capsys.readouterr().err

    file = folder / WEIGHTS
    save_file({"weight": np.zeros(100, np.float32)}, file)
    whole = file.read_bytes()
    assert said() is None
    for length in (len(whole) - 1, len(whole) - 400, 20, 3, 0):
        file.write_bytes(whole[:length])
        assert said().startswith("vlpack sft: --model model: model.safetensors is not whole, it has ")
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "has no header in its 43 bytes; download it again" in said()
    file.rename(folder / "model" / "model-1-of-2.safetensors")
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-1-of-2.safetensors is not whole" in said()
    (folder / "model" / "model-1-of-2.safetensors").write_bytes(whole)
    assert "model-2-of-2.safetensors is missing" in said()
    (folder / "model" / "model-2-of-2.safetensors").write_bytes(whole)
    assert said("--adapters", "adapter") is None
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(whole[:-4])
    assert "--adapters adapter: adapter_model.safetensors is not whole" in said("--adapters", "adapter")


def test_values_are_those_that_ms_swift_knows_when_it_is_imported():
    """CLI-31: so that none of them is refused."""
    for option, (module, name, more) in VALUES.items():
        known = getattr(import_module(module), name)
        named = {*more, *(known if isinstance(known, dict) else (one.value for one in known))}
        assert known_values(option) == named - {CALLBACK}, "ours, if an earlier test has loaded the plugin"


@pytest.mark.parametrize("given", ["file.txt", "file.txt/below", "/proc/none/of/it", "/dev/null/out"])
def test_output_folder_that_cannot_be_is_refused_and_none_is_left(given, folder, capsys):
    """CLI-31: by a training; a plan writes nothing there."""
    assert main(["sft", FILE, "--output_dir", given]) == 2
    assert f"--output_dir {given}: " in capsys.readouterr().err
    with pytest.raises(Started):
        main(["sft", FILE, "--output_dir", "new/folder"])
    assert not (folder / "new").exists()
    with pytest.raises(Started):
        main(["plan", "--config", FILE, "--output_dir", given])


@pytest.mark.parametrize(
    "argv",
    [
        [FILE],
        [
            FILE,
            "--dataset",
            "rows.jsonl#3",
            "AI-ModelScope/alpaca#5",
            "owner/name:a/b#9",
            "hf::owner/name",
            "name",
            "rows.jsonl",
        ],
        [FILE, "--model", "owner/name", "--adapters", "owner/adapter"],
        [FILE, "--dataset", "./of_the_plugin.jsonl", "--tuner_type", "mine", "--external_plugins", "plugin.py"],
        [FILE, "--system", "--be brief and kind", "--learning_rate", "1e-4", "--gradient_checkpointing"],
        [FILE, "--torch_dtype", "bfloat16", "--deepspeed", "zero3", "--resume_from_checkpoint", "out/checkpoint-7"],
        [FILE, "--streaming", "true", "--max_steps", "3", "--interleave_prob", "0.5"],
        [FILE, "--loss_scale", "last_round+hermes+react", "--metric_for_best_model", "eval_token_acc"],
        [FILE, "--report_to", "wandb", "--save_strategy", "best", "--lr_scheduler_type", "cosine_with_min_lr"],
        [FILE, "--external_plugins", "plugin.py", "--loss_scale", "mine", "--optimizer", "mine"],
        [FILE, "--target_modules", "all-linear", "more", "--no_gradient_checkpointing"],
        ["--adapters", "adapter", "--load_args", "true", "--load_data_args", "true"],
        [FILE, "--group_by_length", "true", "--packing", "false"],
        [FILE, "--use_ray", "true", "--dataset", "/data/of/the/cluster.jsonl"],
        [FILE, "--ignore_args_error", "true", "word"],
        [FILE, "--model", "~/model", "--adapters", "~/adapter:checkpoint-10"],
        [FILE, "--model", "./models:inner/model", "--adapters", "owner/adapter:runs/checkpoint-10"],
    ],
)
def test_what_may_be_right_is_started(argv, folder, monkeypatch):
    """CLI-31: a name that a hub, a plugin, a checkpoint or another machine may know is theirs to judge."""
    monkeypatch.setattr(machine_checks, "is_installed", lambda name: True)
    (folder / "plugin.py").write_text("")
    (folder / "out" / "checkpoint-7").mkdir()
    (folder / "out" / "checkpoint-7" / "trainer_state.json").write_text("{}")
    monkeypatch.setenv("HOME", str(folder / "home"))
    for place in ("home/model", "home/adapter/checkpoint-10", "models/inner/model"):
        (folder / place).mkdir(parents=True)
        (folder / place / "config.json").write_text("{}")
    with pytest.raises(Started):
        main(["sft", *argv])


def test_nothing_is_checked_where_the_flags_of_ms_swift_cannot_be_read(folder, monkeypatch):
    """CLI-31: without them nothing tells a list from a value."""
    monkeypatch.setattr(launch, "flag_names", frozenset)
    monkeypatch.setattr(run_flags, "flag_names", frozenset)
    monkeypatch.setattr(run_flags, "flags_of_swift", dict)
    (folder / "model").mkdir(exist_ok=True)
    with pytest.raises(Started):
        main(["sft", FILE, "--model", str(folder / "model"), "--max_steps", "100", "--streaming", "true"])


def test_path_that_may_not_be_looked_at_is_one_line(monkeypatch, capsys):
    """CLI-31: root may look at everything, so the system's refusal is made here."""

    def refused(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("swift_vlpack.host.path_checks._has_content", refused)
    assert main(["sft", FILE]) == 2
    assert capsys.readouterr().err == "vlpack sft: rows.jsonl cannot be looked at (Permission denied)\n"


def test_check_needs_neither_torch_nor_ms_swift(folder):
    """CLI-31"""
    import subprocess

    code = "import sys; from swift_vlpack.cli import main; main(['sft', 'rows.jsonl']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_shares_of_interleaving_are_ratios_of_a_fusion_config(capsys):
    """CLI-32"""
    argv = [FILE, "--dataset", "rows.jsonl", "few.jsonl", "--interleave_prob", "0.5", "0.5"]
    assert main(["sft", *argv]) == 2
    assert "give a fusion_config with a ratio for each data set" in capsys.readouterr().err
    with pytest.raises(Started):
        main(["sft", *argv, "--streaming", "true", "--max_steps", "3"])


def test_options_are_those_that_argparse_takes():
    """CLI-31: the beginning of a name, both kinds of dashes, a value behind =, the last of two."""
    given = given_options(
        ["--learning_rat=1e-4", "--torch-dtype", "float32", "--dataset", "a", "b", "--seed=1", "--seed", "2"]
    )
    assert given == {"learning_rate": 1e-4, "torch_dtype": "float32", "dataset": ["a", "b"], "seed": 2}


def test_data_set_that_ms_swift_knows_by_a_path_is_no_missing_file(folder):
    """CLI-31: in the training process, where plugins have registered theirs."""
    options = {"model": "model", "dataset": ["./mine.jsonl"], "tuner_type": "mine"}
    config = PackingConfig(packing=True, packing_length=8)
    check_run(options, config, Registered({"./mine.jsonl"}, {"tuner_type": {"mine"}}))
    with pytest.raises(ConfigError, match=r"--dataset ./mine.jsonl: no such file"):
        check_run(options, config, Registered((), {"tuner_type": {"mine"}}))
    with pytest.raises(ConfigError, match="--tuner_type must be one of lora, got 'mine'"):
        check_run(options, config, Registered({"./mine.jsonl"}, {"tuner_type": {"lora"}}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"attn_impl": "flash_attn"},
            "--attn_impl flash_attn cannot be used with packing_share=media: it takes a prefix",
        ),
        *(
            ({"attn_impl": name}, f"--attn_impl {name} cannot be used with packing_share=media: it takes a prefix")
            for name in (
                *("flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"),
                *("kernels-community/flash-attn2", "kernels-community/vllm-flash-attn3", "paged|flash_attention_2"),
            )
        ),
        ({"neftune_noise_alpha": 5.0}, "--neftune_noise_alpha cannot be used"),
        ({"router_aux_loss_coef": 0.01}, "--router_aux_loss_coef cannot be used"),
    ],
)
def test_options_that_train_rows_otherwise_are_refused_where_rows_share(options, said):
    """SHARE-49"""
    given = {"max_steps": 3, **options}
    with pytest.raises(ConfigError, match=re.escape(said)):
        refuse_combinations(given, PackingConfig(packing=True, packing_length=64, packing_share="media"))
    refuse_combinations(given, PackingConfig(packing=True, packing_length=64))
    usual = {"attn_impl": "sdpa", "router_aux_loss_coef": 0.0, "neftune_noise_alpha": None}
    refuse_combinations(usual, PackingConfig(packing=True, packing_length=64, packing_share="media"))
