import subprocess
import sys
from types import SimpleNamespace

import pytest

from swift_vlpack.data import attention
from swift_vlpack.host import seam
from swift_vlpack.host.install import activate, deactivate, install
from swift_vlpack.host.seam import UnsupportedSwift, check_seam
from swift_vlpack.launch import plugin_path


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


@pytest.mark.parametrize("name", ["PretrainArguments", "RLHFArguments"])
def test_other_commands_keep_ms_swifts_own_check(name):
    """TRAIN-2: `swift pt` and `swift rlhf` with packing and without flash-attn are refused as before."""
    import swift.arguments

    install()
    other = getattr(swift.arguments, name)
    args = object.__new__(other)
    args.packing, args.padding_free, args.attn_impl, args.rlhf_type = True, False, None, "dpo"
    with pytest.raises(ValueError, match="requires a flash attention implementation"):
        args._check_padding_free()


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


def test_attention_is_known_to_transformers_once_installed():
    """ISO-1"""
    from transformers import AttentionInterface

    install()
    assert attention.NAME in AttentionInterface().valid_keys()
