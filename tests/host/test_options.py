"""Who decides about an option: flag, YAML, environment, default, in every command that trains or plans."""

import json
import sys
from itertools import product

import pytest
import yaml

from swift_vlpack.cli import parse
from swift_vlpack.cli.plan import config_of
from swift_vlpack.errors import ConfigError
from swift_vlpack.host.args import is_ours, make_config
from swift_vlpack.host.install import install
from swift_vlpack.host.launch import plugin_path, run_launch, train_launch
from tests.data_rows import text_row, write_jsonl
from tests.environment import packing_options
from tests.host.runs import epoch_report, packed_argv, train

# value of the flag, of the YAML key, of the variable, and the default (of the length: max_length, not known yet)
VALUES = {
    "packing_length": (101, 102, 103, None),
    "packing_strategy": ("binpack", "greedy", "exact", "binpack"),
    "packing_buffer": (11, 12, 13, 512),
}
SWIFTS_NAMES = {"greedy": "sequential"}  # what ms-swift's own flag takes


def wanted(option, given):
    *asked, default = VALUES[option]
    return next((value for value, is_given in zip(asked, given, strict=True) if is_given), default)


@pytest.fixture(autouse=True)
def clean():
    packing_options()


@pytest.fixture
def settled(monkeypatch):
    """The options as a training process with these flags and variables has them, as far as it knows without a model."""
    from swift.arguments import SftArguments
    from swift.utils import parse_args

    install()

    def read(flags, environ):
        with monkeypatch.context() as patch:
            patch.setattr(SftArguments, "__post_init__", lambda self: self._init_model_kwargs())
            for name, value in environ.items():
                patch.setenv(name, value)
            args, rest = parse_args(SftArguments, ["--model", "m", "--dataset", "d", *flags])
            assert rest == []
            if not is_ours(args):
                return {"packing": False}
            config = make_config(args) if args.packing_length else None
            return {"packing": True, "packing_length": args.packing_length, "config": config, "args": args}

    return read


def own(environ):
    """Only what matters here, not this process's."""
    return {name: value for name, value in environ.items() if name.startswith("VLPACK_")}


def file_with(tmp_path, **keys):
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump({"model": "m", **keys}))
    return str(path)


def run_of(command, option, given, tmp_path):
    """Flags and variables of the training process, where the user gave the option in these places."""
    flag, key, variable, _ = VALUES[option]
    environ = {f"VLPACK_{option.upper()}": str(variable)} if given[2] else {}
    if command == "swift sft":  # ms-swift makes flags of the keys, before those of the command line
        keys = ["--model", "m", *([f"--{option}", SWIFTS_NAMES.get(key, str(key))] if given[1] else [])]
        flags = [f"--{option}", str(flag)] if given[0] else []
        return [*keys, *flags, "--packing", "true"], environ
    argv = [file_with(tmp_path, **({option: key} if given[1] else {})), *([f"--{option}={flag}"] if given[0] else [])]
    if command == "vlpack sft":
        launch = train_launch(argv, environ)
        return launch.command[2:], own(launch.environ)
    launch = run_launch(argv, environ)
    return launch.flags, own(launch.environ)


@pytest.mark.parametrize("option", VALUES)
@pytest.mark.parametrize("command", ["swift sft", "vlpack sft", "vlpack plan"])
def test_one_precedence_in_every_command(command, option, settled, tmp_path):
    """CONF-9: flag, then YAML, then environment, then default; also where the flag is given its own default."""
    for given in product((True, False), repeat=3):
        if command == "swift sft" and option == "packing_buffer" and any(given[:2]):
            continue  # ms-swift has no such flag
        flags, environ = run_of(command, option, given, tmp_path)
        length = () if option == "packing_length" else ("--packing_length", "64")
        run = settled([*flags, *length], environ)
        found = run["packing_length"] if option == "packing_length" else getattr(run["config"], option)
        assert found == wanted(option, given), (command, option, given)


@pytest.mark.parametrize("given", list(product((True, False), repeat=2)))
@pytest.mark.parametrize("option", VALUES)
def test_one_precedence_where_lengths_are_planned(option, given, monkeypatch):
    """CONF-9 CLI-4"""
    flag, _, variable, _ = VALUES[option]
    if given[1]:
        monkeypatch.setenv(f"VLPACK_{option.upper()}", str(variable))
    argv = ["plan", "--lengths", "x", *([f"--{option}", str(flag)] if given[0] else [])]
    if option == "packing_length" and not any(given):
        with pytest.raises(ConfigError, match="packing_length is not set"):
            config_of(parse(argv))
        return
    argv += [] if option == "packing_length" else ["--packing_length", "64"]
    assert getattr(config_of(parse(argv)), option) == wanted(option, (given[0], False, given[1]))


@pytest.mark.parametrize(
    ("flags", "environ", "packs"),
    [
        ([], {}, False),
        ([], {"VLPACK_PACKING": "yes"}, True),
        (["--packing", "false"], {"VLPACK_PACKING": "true"}, False),
        (["--packing", "true"], {"VLPACK_PACKING": "false"}, True),
    ],
)
def test_packing_itself_has_the_same_precedence(flags, environ, packs, settled, tmp_path):
    """CONF-9 CONF-11: and the default of `vlpack sft` is to pack, which a variable turns off."""
    assert settled(flags, environ)["packing"] is packs
    launch = train_launch(flags, environ)
    expected = packs if flags or environ else True
    assert settled(launch.command[2:], own(launch.environ))["packing"] is expected
    assert ("false" in train_launch([], {"VLPACK_PACKING": "false"}).command) is True


def test_variables_of_a_run_that_does_not_pack_are_not_looked_at(settled):
    """TRAIN-2"""
    assert settled([], {"VLPACK_PACKING_STRATEGY": "magic", "VLPACK_NO_SUCH": "1"})["packing"] is False


@pytest.mark.parametrize(
    ("name", "value"), [("loss_scale", "all+reakt"), ("report_to", "wanbd"), ("optimizer", "muonn")]
)
def test_unknown_value_stops_before_a_model_is_looked_for(name, value, tmp_path, monkeypatch):
    """CLI-12: in plain `swift sft`, and with plugins; what a plugin registers is known."""
    from swift.loss_scale.mapping import loss_scale_map
    from swift.pipelines import sft_main

    mine = tmp_path / "mine.py"
    mine.write_text("from swift.loss_scale.mapping import loss_scale_map as m\nm['of_mine'] = m['base']\n")
    monkeypatch.setitem(loss_scale_map, "of_mine", None)  # so that it is taken back
    monkeypatch.setattr(sys, "path", [*sys.path])
    flags = ["--external_plugins", plugin_path(), mine, "--model", "no/such-model", "--packing", "true"]
    flags += ["--dataset", mine.with_suffix(".jsonl"), "--loss_scale", "of_mine", f"--{name}", value]
    with pytest.raises(ConfigError, match=f"--{name} must be one of .*got '{value.split('+')[-1]}'") as refused:
        sft_main(list(map(str, flags)))
    assert name != "loss_scale" or "of_mine" in str(refused.value)


def test_a_flag_wins_in_a_real_run(small_folder, tmp_path, monkeypatch):
    """CONF-9 CONF-10: `--packing_length` and `--packing_strategy` of plain `swift sft` over their variables."""
    rows = [text_row(f"question {number}", "word " * 20) for number in range(12)]
    monkeypatch.setenv("VLPACK_PACKING_LENGTH", "64")
    monkeypatch.setenv("VLPACK_PACKING_STRATEGY", "exact")
    monkeypatch.setenv("VLPACK_PACKING_DROP_LAST", "false")
    monkeypatch.setenv("VLPACK_RECORD_PACKS", "yes")
    flags = packed_argv(
        small_folder("qwen2_5_vl"), "qwen2_5_vl", tmp_path / "out", dataset=write_jsonl(tmp_path / "rows.jsonl", rows),
        max_steps=2, packing_length=256, packing_strategy="sequential", split_dataset_ratio=0,
    )  # fmt: skip
    train(flags)
    report = epoch_report(tmp_path / "out")
    assert report["num_samples"] / report["num_packs"] > 3, "64 tokens hold one of them"
    recorded = (tmp_path / "out" / "vlpack" / "packs_rank0.jsonl").read_text()
    assert recorded.count("\n") == 2, "VLPACK_RECORD_PACKS takes what every switch takes"
    args = json.loads((tmp_path / "out" / "args.json").read_text())
    assert (args["packing_length"], args["packing_strategy"]) == (256, "greedy")


@pytest.mark.parametrize(
    ("flags", "environ", "said"),
    [
        (["--dataset", "rowz.jsonl"], {}, "--dataset rowz.jsonl: no such file; did you mean rows.jsonl?"),
        (["--tuner_type", "lorra"], {}, "got 'lorra'; did you mean lora?"),
        (["--output_dir", "rows.jsonl"], {}, "--output_dir rows.jsonl: "),
        (["--group_by_length", "true"], {}, "--group_by_length true cannot be used with packing"),
        (["--streaming", "true"], {}, "set --max_steps"),
        (
            ["--model_type", "qwen25_vl"],
            {},
            "--model_type qwen25_vl is not known to ms-swift; did you",
        ),
        (
            ["--template", "qwen2_5_v"],
            {},
            "not known to ms-swift; did you mean qwen2_5_vl?",
        ),
        ([], {"SWIFT_CONFIG_FILE": "twice.yaml"}, "twice.yaml: seed is given 2 times, on lines 1 and 3"),
        ([], {"VLPACK_PACKING_STRATEGI": "exact"}, "did you mean VLPACK_PACKING_STRATEGY"),
        ([], {"VLPACK_PACKING_STRATEGY": "magic"}, "packing_strategy must be one of"),
        (["--truncation_strategy", "left"], {"VLPACK_PACKING_OVERFLOW": "split"}, "are two rules for long rows"),
    ],
)
def test_plain_swift_is_refused_before_a_model_is_looked_for(flags, environ, said, settled, tmp_path, monkeypatch):
    """CLI-30 CLI-31 CLI-12: when the plugin is loaded, which is before ms-swift looks at the model."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", [text_row(0)])
    (tmp_path / "twice.yaml").write_text("seed: 1\nmodel: m\nseed: 2\n")
    with pytest.raises(ConfigError) as refused:
        settled(["--packing", "true", "--packing_length", "64", *flags], environ)
    assert said in str(refused.value)
    assert settled(["--packing", "false", *flags], {})["packing"] is False, "it is ms-swift that judges other runs"
