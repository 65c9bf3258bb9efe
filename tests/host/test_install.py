import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from swift_vlpack.errors import ConfigError
from swift_vlpack.host import seam
from swift_vlpack.host.install import activate, deactivate, install
from swift_vlpack.host.launch import plugin_path
from swift_vlpack.host.messages import Refused, quiet_mistakes, said_by_swift
from swift_vlpack.host.seam import UnsupportedSwift, check_seam
from tests.data_rows import text_row, write_jsonl
from tests.host.runs import epoch_report, packed_argv, train
from tests.marks import quick_only


def test_seam_of_the_installed_version_holds():
    """TRAIN-1"""
    assert len(seam.SEAM) > 10
    assert check_seam() is None


def test_moved_seam_is_one_error_that_names_version_and_parts(monkeypatch):
    """TRAIN-1"""
    import swift
    from swift.pipelines.train.sft import SwiftSft

    monkeypatch.delattr(SwiftSft, "_save_val_dataset")
    monkeypatch.setattr("swift.template.Template.packing_row", lambda self, samples: None)
    with pytest.raises(UnsupportedSwift) as refused:
        check_seam()
    message = str(refused.value)
    assert swift.__version__ in message
    assert "SwiftSft._save_val_dataset is gone" in message
    assert "Template.packing_row lost row" in message
    assert seam.TESTED in message


def test_seam_check_stops_a_packed_run(monkeypatch, tmp_path):
    """TRAIN-1"""
    from swift.arguments import SftArguments
    from swift.pipelines.train.sft import SwiftSft

    install()
    monkeypatch.delattr(SwiftSft, "_prepare_dataset")
    args = object.__new__(SftArguments)
    args.packing = True
    with pytest.raises(UnsupportedSwift, match="_prepare_dataset is gone"):
        SftArguments._check_padding_free(args)


def test_install_twice_changes_nothing_more():
    """TRAIN-2"""
    from swift.arguments import SftArguments

    install()
    once = SftArguments._check_padding_free
    install()
    assert SftArguments._check_padding_free is once


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("RLHFArguments", "of `swift rlhf` is ms-swift's own packing, which needs the flash-attn package"),
    ],
)
def test_other_commands_keep_ms_swifts_own_check_and_say_what_is_served(name, said, caplog):
    """TRAIN-2 TRAIN-11: `swift rlhf` with packing and without flash-attn is refused as before."""
    import swift.arguments

    install()
    other = getattr(swift.arguments, name)
    args = object.__new__(other)
    args.packing, args.padding_free, args.attn_impl, args.rlhf_type = True, False, None, "dpo"
    with pytest.raises(ConfigError, match=said):
        args._check_padding_free()
    args.packing, args.padding_free = False, True
    with pytest.raises(ValueError, match='"padding_free" feature requires a flash attention'):
        args._check_padding_free()


def installed_anew(results):
    from swift.arguments import SftArguments

    for name in ("_check_padding_free", "_init_model_kwargs"):  # as in a child that starts from nothing
        setattr(SftArguments, name, getattr(SftArguments, name).__wrapped__)
    install()
    results.put(hasattr(SftArguments._check_padding_free, "_vlpack_original"))


def test_a_child_process_that_trains_gets_the_plugin():
    """TRAIN-12: `torch.multiprocessing.spawn` of a training function; unlike a dataloader worker it reads arguments."""
    install()
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=installed_anew, args=(results,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert results.get() is True


def train_in_child(_, flags):
    train(flags)


@pytest.mark.slow
@pytest.mark.telling
def test_training_function_that_torch_spawns_trains_packed(tiny_folder, tmp_path):
    """TRAIN-12"""
    data = write_jsonl(tmp_path / "rows.jsonl", [text_row(f"question {n}", "word " * (5 * n + 5)) for n in range(8)])
    flags = packed_argv(tiny_folder("qwen2_5_vl"), "qwen2_5_vl", tmp_path / "out", dataset=data, num_train_epochs=1)
    torch.multiprocessing.spawn(train_in_child, (flags,), nprocs=1)
    report = epoch_report(tmp_path / "out")
    assert report["num_samples"] == 8
    assert report["num_packs"] < 8


def uncaught(code, **environ):
    """What a process prints on stderr, and its exit code, that ends with an uncaught error."""
    before = "from swift_vlpack.host.messages import quiet_mistakes, join_log; quiet_mistakes(); quiet_mistakes()\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{before}from swift_vlpack.errors import ConfigError, DataError\n{code}"],
        capture_output=True, text=True, check=False, env={**os.environ, **environ},
    )  # fmt: skip
    return done.returncode, done.stderr


def test_mistake_is_one_line_and_a_bug_keeps_its_traceback():
    """CLI-12"""
    assert uncaught("raise ConfigError('no such thing;\\n give another')") == (
        2,
        "swift_vlpack: no such thing; give another\n",
    )
    assert uncaught("raise DataError('gone') from OSError('disk')", RANK="3") == (2, "swift_vlpack: gone (rank 3)\n")
    of_worker = (
        "Caught DataError in DataLoader worker process 0.\\nOriginal Traceback (most recent call last):\\n  File"
    )
    assert uncaught(f"raise DataError('{of_worker}\\nx.errors.DataError: 3 rows: gone\\n')") == (
        2,
        "swift_vlpack: 3 rows: gone\n",
    )
    for code in ("{}['a']", "raise DataError('odd') from KeyError('a')"):
        status, said = uncaught(code)
        assert (status, "Traceback" in said, "KeyError: 'a'" in said) == (1, True, True)
    status, said = uncaught("raise TimeoutError('a rank')")  # no hub was asked
    assert (status, said.splitlines()[-1]) == (1, "TimeoutError: a rank")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("no/such-model", "the hub cannot be reached: no/such-model is not a file or folder in "),
        ("FOLDER", "ms-swift refuses the options: "),
    ],
)
def test_what_ms_swift_refuses_while_it_reads_its_options_is_one_line(model, said, tmp_path, monkeypatch):
    """CLI-12 CLI-14: in plain `swift sft` too; an error of the user's own plugin keeps its traceback."""
    from swift.arguments import SftArguments

    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: shown.append("traceback"))
    monkeypatch.setattr(sys, "__stderr__", SimpleNamespace(write=shown.append, flush=lambda: None))
    install()
    quiet_mistakes()
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "vision_config": {}}')
    monkeypatch.setenv("USE_HF", "1")
    model = str(tmp_path) if model == "FOLDER" else model
    with pytest.raises(Exception) as raised:  # noqa: PT011 - of any library
        SftArguments(model=model, dataset=["owner/name"], packing=True, output_dir=str(tmp_path / "out"))
    with pytest.raises(SystemExit) as left:
        sys.excepthook(raised.type, raised.value, raised.tb)
    assert left.value.code == 2
    assert "".join(shown).startswith(f"swift_vlpack: {said}")
    shown.clear()
    monkeypatch.setattr(sys, "path", [*sys.path])
    # Where ms-swift remembers what dataloader workers import too.
    monkeypatch.setattr("swift.utils.utils._external_files", [], raising=False)
    (tmp_path / "mine.py").write_text("raise ValueError('a bug of mine')")
    with pytest.raises(ValueError, match="a bug of mine") as raised:
        SftArguments(model=model, dataset=["owner/name"], packing=True, external_plugins=[str(tmp_path / "mine.py")])
    sys.excepthook(raised.type, raised.value, raised.tb)
    assert shown == ["traceback"]


TUNER = """
from swift.tuner_plugin import PeftTuner, tuners_map
class Mine(PeftTuner):
    @staticmethod
    def prepare_model(args, model):
        return {}["a bug of mine"]
tuners_map["mine"] = Mine
"""
IN_STAGES = {
    "module": (
        {"tuner_type": "lora", "target_modules": "q_projj"},
        "cannot make the tuner: Target modules {'q_projj'} not found in the base model",
    ),
    "bf16": ({"bf16": "true", "torch_dtype": "bfloat16"}, "refuses the options: Your setup doesn't support bf16/gpu"),
    "package": ({"deepspeed": "zero2"}, "refuses the options: No package metadata was found for "),
    "flash": ({"attn_impl": "flash_attention_2"}, "cannot load the model: FlashAttention2 has been toggled on"),
    "optimizer": ({"optim": "lomo"}, "cannot make the optimizer: You need to install"),
    "metric": (
        {
            "metric_for_best_model": "acc",
            "load_best_model_at_end": "true",
            "split_dataset_ratio": 0.5,
            **{f"{what}_strategy": "steps" for what in ("eval", "save")},
            "eval_steps": 1,
            "save_steps": 1,
        },
        "cannot choose the best checkpoint: KeyError in ",
    ),
    "a bug": ({"tuner_type": "mine", "external_plugins": [plugin_path(), "mine.py"]}, None),
}


@pytest.mark.parametrize("mistake", quick_only(("module", "optimizer", "a bug"), IN_STAGES))
def test_error_while_ms_swift_makes_model_tuner_and_trainer_is_one_line(mistake, small_folder, tmp_path, monkeypatch):
    """CLI-12: in plain `swift sft`, and for what no check can know; code of the user keeps its traceback."""
    given, said = IN_STAGES[mistake]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TUNER)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("swift.utils.utils._external_files", [], raising=False)
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: shown.append("traceback"))
    monkeypatch.setattr(sys, "__stderr__", SimpleNamespace(write=shown.append, flush=lambda: None))
    quiet_mistakes()
    data = write_jsonl(tmp_path / "rows.jsonl", [text_row(f"question {n}") for n in range(8)])
    flags = packed_argv(small_folder("qwen2_5_vl"), "qwen2_5_vl", tmp_path / "out", dataset=data, max_steps=1, **given)
    with pytest.raises(Exception) as raised:  # noqa: PT011 - of any library
        train(flags)
    with nullcontext() if said is None else pytest.raises(SystemExit, match="2"):
        sys.excepthook(raised.type, raised.value, raised.tb)
    text = "".join(shown)
    assert text == "traceback" if said is None else text.startswith(f"swift_vlpack: ms-swift {said}"), text


def test_error_of_ms_swift_without_a_text_is_named_with_its_place():
    """CLI-12"""
    place = r"cannot load the data: AssertionError in tests\.host\.test_install\.test_error"
    with pytest.raises(Refused, match=place), said_by_swift("cannot load the data"):
        raise AssertionError
    with pytest.raises(KeyError, match="mine"), said_by_swift("cannot load the data"):
        raise KeyError("mine")


def test_full_disk_is_one_line_with_the_path():
    """CLI-12: the host writes a checkpoint, in Python or as safetensors does."""
    code = "def save(save_directory):\n    {}\nsave('out/checkpoint-4')"
    said = "swift_vlpack: the disk is full, out/checkpoint-4 cannot be written: "
    status, text = uncaught(code.format("file = open('/dev/full', 'wb', buffering=0); file.write(b'a')"))
    assert (status, text) == (2, f"{said}[Errno 28] No space left on device\n")
    error = "Error while serializing: I/O error: No space left on device (os error 28)"
    assert uncaught(code.format(f"raise Exception('{error}')")) == (2, f"{said}{error}\n")


def test_control_characters_of_a_name_never_reach_the_log():
    """CLI-12 CLI-13"""
    code = "import logging; join_log(); logging.getLogger('swift_vlpack.rows.a').warning('%s', 'a\\x1b[31mb.jpg')\n"
    status, text = uncaught(f"{code}raise ConfigError('no c\\x1b[0m.jpg')")
    assert status == 2
    assert "a\u241b[31mb.jpg" in text
    assert text.endswith("swift_vlpack: no c\u241b[0m.jpg\n")
    assert "\x1b" not in text


def test_interrupt_says_nothing():
    """CLI-10"""
    status, said = uncaught("raise KeyboardInterrupt")
    assert (status, said) == (-signal.SIGINT, "")


@pytest.mark.slow
@pytest.mark.telling
def test_lines_of_every_layer_have_ms_swifts_prefix():
    """CLI-13: and where another rank speaks, it is about its own rows."""
    code = (
        "import logging; from swift_vlpack.host.messages import join_log; join_log(); join_log()\n"
        "import sys; print('begin', file=sys.stderr)\n"
        "for layer in ('plan.packer', 'feed.packs'):\n"
        "    logging.getLogger(f'swift_vlpack.{layer}').warning('%s speaks', layer)\n"
        "    logging.getLogger(f'swift_vlpack.{layer}').debug('%s whispers', layer)\n"
        "logging.warning('others do as they did')\n"
    )
    for rank, spoken in (("0", ["plan.packer", "feed.packs"]), ("1", ["feed.packs"])):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={**os.environ, "LOCAL_RANK": rank, "RANK": rank},
        )  # fmt: skip
        lines = done.stderr.partition("begin\n")[2].splitlines()
        assert lines == [*(f"[WARNING:swift] {layer} speaks" for layer in spoken), "WARNING:root:others do as they did"]


def test_pipelines_of_other_commands_prepare_data_as_before():
    """TRAIN-2: for a subclass of SwiftSft, as rlhf and Megatron have, the wrapped method runs ms-swift's own code."""
    from swift.pipelines.train.sft import SwiftSft

    activate()
    encoded = []

    class Other(SwiftSft):
        def __init__(self):
            self.args = SimpleNamespace(
                packing=True, cached_dataset=[], cached_val_dataset=[], dataset=["rows"], val_dataset=[]
            )

        def _get_dataset(self):
            return "train", "val"

        def _encode_dataset(self, *datasets, pre_process):
            encoded.extend(datasets)
            raise InterruptedError  # far enough

    with pytest.raises(InterruptedError):
        Other()._prepare_dataset()
    assert encoded == ["train", "val"]
    deactivate()


@pytest.mark.slow
@pytest.mark.telling
def test_plugin_file_is_alone_in_its_folder_and_light_in_a_worker():
    """TRAIN-2: a spawned worker replays it without loading ms-swift's pipelines."""
    assert [path.name for path in plugin_path().parent.glob("*.py")] == ["vlpack.py"]
    code = (
        "import multiprocessing, runpy, sys\n"
        "multiprocessing.parent_process = lambda: object()\n"
        f"runpy.run_path({str(plugin_path())!r})\n"
        "print('swift' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
