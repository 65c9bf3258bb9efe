"""What is compared before a model is loaded: options, checkpoints and their files."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from swift_vlpack.comm import ALONE
from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import ConfigError, StateMismatch
from swift_vlpack.files import hold
from swift_vlpack.host.same_on_ranks import (
    RanksDiffer,
    check_same_parameters,
    check_same_validation,
    options_of_run,
    refuse_differences,
)
from swift_vlpack.host.state import FILE
from swift_vlpack.host.together import check_checkpoint, check_deepspeed, check_engine
from tests.data_rows import image_row, text_row, write_jsonl
from tests.host.lengths.support import ARGS, dataset, source, with_lengths
from tests.host.lengths.test_ranks import on_two_ranks
from tests.host.runs import packed_argv, train
from tests.images import photo
from tests.ranks_in_threads import on_ranks

FAMILY = "qwen2_5_vl"
OPTIONS = {"VLPACK_PACKING_VERIFY": "false", "VLPACK_PACKING_MAX_SAMPLES": "1", "VLPACK_PACKING_STRATEGY": "exact"}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name, value in OPTIONS.items():
        monkeypatch.setenv(name, value)


def flags(small_folder, output, data, **options):
    usual = {"tuner_type": "lora", "max_steps": 3, "save_strategy": "steps", "save_steps": 1, "split_dataset_ratio": 0}
    return packed_argv(small_folder(FAMILY), FAMILY, output, dataset=data, **{**usual, **options})


@pytest.fixture(scope="module")
def run(small_folder, tmp_path_factory):
    """A run of one rank with a checkpoint a step."""
    output = tmp_path_factory.mktemp("run")
    data = write_jsonl(output / "rows.jsonl", [text_row(f"question {n}") for n in range(8)])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in OPTIONS.items():
            patch.setenv(name, value)
        train(flags(small_folder, output, data))
    return output, data


def copied(run, step, folder):
    checkpoint = folder / f"checkpoint-{step}"
    shutil.copytree(run[0] / f"checkpoint-{step}", checkpoint)
    return checkpoint


# -- checkpoints ------------------------------------------------------------------------------------------------------


def refusal(checkpoints, **options):
    """What every rank says when each resumes from its own."""
    errors = on_ranks(len(checkpoints), lambda comm: check_checkpoint(checkpoints[comm.rank], comm, **options))
    assert len({type(error) for error in errors}) == 1
    if not isinstance(errors[0], Exception):
        return None
    assert len({str(error) for error in errors}) == 1
    assert isinstance(errors[0], RanksDiffer)
    return str(errors[0])


def test_ranks_that_resume_from_other_checkpoints_are_stopped(run, tmp_path):
    """RANKS-10: of other steps, of another state at the same step, one of them without any."""
    first, second = copied(run, 1, tmp_path / "a"), copied(run, 2, tmp_path / "b")
    assert refusal([first, first]) is None
    assert refusal([None, None]) is None
    said = refusal([first, second])
    assert "ranks 0 and 1 do not agree on the checkpoint to resume from: " in said
    assert "global_step of the trainer: 1 and 2" in said
    assert f"digest of {FILE}" in said
    assert "--resume_from_checkpoint: 'given' and 'not given'" in refusal([first, first, None])
    other = copied(run, 1, tmp_path / "c")
    state = json.loads((other / "trainer_state.json").read_text())
    (other / "trainer_state.json").write_text(json.dumps({**state, "best_global_step": 7}))
    assert "best_global_step of the trainer: None and 7" in refusal([first, other])


def test_nodes_may_have_their_own_log_lines_and_paths(run, tmp_path, monkeypatch):
    """RANKS-10"""
    monkeypatch.setenv("VLPACK_RESUME_FILES", "replaced")
    checkpoints = [copied(run, 1, tmp_path / name) for name in "ab"]
    state = json.loads((checkpoints[1] / "trainer_state.json").read_text())
    of_node = {"log_history": [], "best_model_checkpoint": "/elsewhere", "is_world_process_zero": False}
    (checkpoints[1] / "trainer_state.json").write_text(json.dumps({**state, **of_node}))
    assert refusal(checkpoints) is None


def test_checkpoint_without_a_state_is_compared_where_the_data_starts_anew(run, tmp_path):
    """RANKS-10 RESUME-7"""
    checkpoints = [copied(run, 1, tmp_path / name) for name in "ab"]
    (checkpoints[1] / FILE).unlink()
    for error in on_ranks(2, lambda comm: check_checkpoint(checkpoints[comm.rank], comm)):
        assert f"has no {FILE}: it is incomplete" in str(error)
    assert "'not there'" in refusal(checkpoints, needs_state=False)
    (checkpoints[0] / FILE).unlink()
    assert refusal(checkpoints, needs_state=False) is None


@pytest.mark.parametrize("is_shared", [True, False], ids=["one disk", "a disk each"])
def test_deepspeed_is_resumed_on_as_many_ranks_as_wrote_its_optimizer(is_shared, tmp_path):
    """RANKS-18: also where each node has the parts of its own ranks; another engine is not looked at."""
    checkpoints = [tmp_path / ("disk" if is_shared else f"disk{rank}") for rank in (0, 1)]
    for rank, checkpoint in enumerate(checkpoints):
        for step in (4, 8):  # `latest` is what counts
            parts = checkpoint / f"global_step{step}"
            parts.mkdir(parents=True, exist_ok=True)
            (parts / f"bf16_zero_pp_rank_{rank if step == 8 else rank + 7}_mp_rank_00_optim_states.pt").touch()
            (parts / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt").touch()
        (checkpoint / "latest").write_text("global_step8\n")

    def resumed(num_ranks, deepspeed=None, folders=checkpoints):
        config = {"zero_optimization": {"stage": 2}} if deepspeed is None else deepspeed
        return on_ranks(num_ranks, lambda comm: check_deepspeed(folders[comm.rank % 2], config, comm))

    assert resumed(2) == [None, None]
    assert resumed(3, {"checkpoint": {"load_universal": True}}) == [None] * 3
    assert resumed(3, {}) == [None] * 3
    assert resumed(3, folders=[tmp_path, tmp_path]) == [None] * 3
    for error in resumed(3):
        assert isinstance(error, ConfigError)
        assert "has DeepSpeed's optimizer in 2 parts, which it loads on 2 ranks only, and this run has 3" in str(error)
        assert "--resume_only_model true" in str(error)


@pytest.mark.parametrize(
    ("files", "engine"),
    [
        (["optimizer.pt", "scheduler.pt"], "DDP"),
        (["global_step8/zero_pp_rank_0_mp_rank_00_optim_states.pt", "latest", "scheduler.pt"], "DeepSpeed"),
        (["optimizer_0/__0_0.distcp", "pytorch_model_fsdp_0/__0_0.distcp", "scheduler.pt"], "FSDP"),
        (["optimizer.bin", "pytorch_model_fsdp.bin", "scheduler.pt"], "FSDP"),
        (["optimizer.pt"], None),
        (["model.safetensors"], None),
    ],
)
def test_an_optimizer_is_loaded_by_the_engine_that_saved_it(files, engine, tmp_path):
    """RESUME-21: on every rank; the other ways out are named, and both engines."""
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for mine in ("DDP", "DeepSpeed", "FSDP"):
        for error in on_ranks(2, lambda comm, mine=mine: check_engine(tmp_path, mine, comm)):
            if mine == engine:
                assert error is None
                continue
            assert isinstance(error, ConfigError)
            said = f"the optimizer of {engine}, which {mine} cannot load" if engine else "no optimizer and schedule"
            assert said in str(error)
            assert ("merge-weights" if engine == "FSDP" else "--resume_only_model true") in str(error)
            assert "\n" not in str(error)


def test_checkpoint_without_an_optimizer_is_refused_unless_only_its_model_is_wanted(small_folder, tmp_path):
    """RESUME-21: it went on with a new optimizer and a schedule from 0."""
    data = write_jsonl(tmp_path / "rows.jsonl", [text_row(f"question {n}") for n in range(8)])
    train(flags(small_folder, tmp_path, data, save_only_model="true", max_steps=1))
    again = {"resume_from_checkpoint": tmp_path / "checkpoint-1", "max_steps": 2}
    with pytest.raises(ConfigError, match=r"no optimizer and schedule \(--save_only_model true saves none\)"):
        train(flags(small_folder, tmp_path / "out", data, **again))
    result = train(flags(small_folder, tmp_path / "out", data, resume_only_model="true", **again))
    assert result["global_step"] == 2


def test_data_that_starts_anew_needs_none_of_our_files(run, tmp_path):
    """RESUME-7: the way out that a damaged state names gets past it."""
    checkpoint = copied(run, 1, tmp_path)
    for content in (b"", b"{", (checkpoint / FILE).read_bytes().replace(b'"version": 3', b'"version": 1')):
        (checkpoint / FILE).write_bytes(content)
        with pytest.raises(StateMismatch, match="restart"):
            check_checkpoint(checkpoint, ALONE)
        assert check_checkpoint(checkpoint, ALONE, needs_state=False) is None


DAMAGED = ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin")
DAMAGED = (*DAMAGED, "trainer_state.json", "adapter_config.json", "args.json")


@pytest.mark.parametrize("change", ["empty", "cut", "missing", "exchanged"])
def test_every_damaged_file_is_named_by_one_line_before_a_model_is_loaded(change, run, tmp_path):
    """RESUME-14: of everything that ms-swift and transformers wrote; the two that differ by step, exchanged."""
    checkpoint, other = copied(run, 2, tmp_path), copied(run, 1, tmp_path / "other")
    for name in ("adapter_model.safetensors", "optimizer.pt") if change == "exchanged" else DAMAGED:
        path = checkpoint / name
        content = path.read_bytes()
        new = {"empty": b"", "cut": content[: len(content) // 2], "exchanged": (other / name).read_bytes()}
        path.unlink() if change == "missing" else path.write_bytes(new[change])
        assert change != "exchanged" or len(new[change]) == len(content), "so its size says nothing"
        with pytest.raises(StateMismatch, match=re.escape(str(path))) as refused:
            check_checkpoint(checkpoint, ALONE)
        assert "\n" not in str(refused.value)
        path.write_bytes(content)
    check_checkpoint(checkpoint, ALONE)


def test_training_asks_before_it_loads_the_model(run, small_folder, tmp_path, monkeypatch, caplog):
    """RESUME-14: and takes the file where it was exchanged on purpose."""
    from swift.arguments import SftArguments

    checkpoint = copied(run, 2, tmp_path)
    shutil.copy(run[0] / "checkpoint-1" / "optimizer.pt", checkpoint)
    load = SftArguments.get_model_processor
    with monkeypatch.context() as patch:
        patch.setattr(SftArguments, "get_model_processor", lambda *args, **kwargs: pytest.fail("it loads the model"))
        with pytest.raises(StateMismatch, match=r"optimizer.pt is another file.*VLPACK_RESUME_FILES=replaced"):
            train(flags(small_folder, tmp_path / "out", run[1], resume_from_checkpoint=checkpoint))
    assert SftArguments.get_model_processor is load
    monkeypatch.setenv("VLPACK_RESUME_FILES", "replaced")
    result = train(flags(small_folder, tmp_path / "out", run[1], resume_from_checkpoint=checkpoint))
    assert result["global_step"] == 3
    assert f"files of {checkpoint} are not compared with what was written" in caplog.text
    monkeypatch.setenv("VLPACK_RESUME_FILES", "anything")
    with pytest.raises(ConfigError, match="VLPACK_RESUME_FILES can only be replaced, got 'anything'"):
        check_checkpoint(checkpoint, ALONE)


# -- options, models and rows -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Args:
    """Fields with every kind of value that ms-swift's arguments have."""

    training_args: "Args | None" = None
    torch_dtype: torch.dtype = torch.float32
    target_modules: tuple[str, ...] = ("all-linear",)
    lr_scheduler_kwargs: dict[str, float] | None = None
    external_plugins: list[str] = dataclasses.field(default_factory=list)
    system: str = "Say yes/no."
    model: str = "/models/a"
    model_type: str = "qwen2_5_vl"
    dataset: list[str] = dataclasses.field(default_factory=list)
    output_dir: str = "/out"
    max_memory: dict[int, str] | None = None
    dataloader_drop_last: bool = False
    dataloader_num_workers: int = 0


def options(**given):
    return options_of_run(Args(training_args=Args(), **given), PackingConfig(packing_length=8))


@pytest.mark.parametrize(
    "given",
    [
        {"torch_dtype": torch.bfloat16},
        {"target_modules": ["q_proj", "v_proj"]},
        {"lr_scheduler_kwargs": {"min_lr": 1e-6}},
        {"system": "Say yes/maybe."},
        {"model_type": "qwen2_vl"},
        {"dataloader_drop_last": True},
    ],
)
def test_options_without_a_plain_value_are_compared(given):
    """RANKS-2"""
    (name,) = given
    with pytest.raises(RanksDiffer, match=f"do not agree on the options: {name}: "):
        refuse_differences("options", [options(), options(**given)])


def test_files_are_compared_by_content_and_not_by_path(tmp_path):
    """RANKS-2: a plugin that lies elsewhere is the same one; data, models and outputs are compared in other ways."""
    paths = [tmp_path / name / "plugin.py" for name in "abc"]
    for path, content in zip(paths, ("x = 1", "x = 1", "x = 2"), strict=True):
        path.parent.mkdir()
        path.write_text(content)
    same, alike, other = (options(external_plugins=[str(path)]) for path in paths)
    refuse_differences("options", [same, alike])
    with pytest.raises(RanksDiffer, match=r"external_plugins: .*a file of digest"):
        refuse_differences("options", [same, other])
    elsewhere = {"model": "/other", "dataset": ["/other.jsonl"], "output_dir": "/else", "max_memory": {0: "1GB"}}
    elsewhere["dataloader_num_workers"] = 4
    refuse_differences("options", [options(), options(**elsewhere)])


def test_models_with_other_parameters_are_stopped():
    """RANKS-11: another shape, another type, another choice of what is trained."""

    def model(rank, case):
        built = nn.Sequential(nn.Linear(2, 3 if (rank, case) == (1, "shape") else 2))
        if rank == 1 and case == "type":
            built.to(torch.bfloat16)
        built[0].bias.requires_grad_((rank, case) != (1, "frozen"))
        return built

    assert on_ranks(2, lambda comm: check_same_parameters(model(comm.rank, ""), comm)) == [None, None]
    for case, told in (
        ("shape", r"0\.weight: '\[2, 2\] torch\.float32, trained' and '\[3, 2\] torch\.float32, trained'"),
        ("type", r"0\.bias: .*torch\.float32.* and .*torch\.bfloat16"),
        ("frozen", r"0\.bias: .*trained' and .*frozen'"),
    ):
        for error in on_ranks(2, lambda comm, case=case: check_same_parameters(model(comm.rank, case), comm)):
            assert isinstance(error, RanksDiffer)
            assert re.search(told, str(error))


@pytest.mark.parametrize("lacking", [0, 1])
def test_file_that_one_rank_lacks_costs_its_row_and_not_the_run(lacking, template, tmp_path):
    """RANKS-12: all ranks have the same sizes and so one plan; the row is left out when it is measured or loaded."""
    for node in "01":
        (tmp_path / node).mkdir()
        for number in range(4):
            photo(tmp_path / node, str(number), 90, 60, seed=number)
    rows = dataset(image_row([path.name]) for path in sorted((tmp_path / "0").iterdir()))
    (tmp_path / str(lacking) / rows[2]["images"][0]).unlink()

    def case(rank, template):
        os.chdir(tmp_path / str(rank))
        sizes = with_lengths(source(rows), template, ARGS, str(tmp_path / "cache")).sizes
        return sizes.columns.tolist(), sizes.failures

    one, other = on_two_ranks(case, template, tmp_path)
    assert one == other
    lengths, failures = one
    assert [length > 0 for length in lengths[0]] == [True, True, not failures, True]


def test_other_validation_rows_on_a_rank_are_a_difference():
    """RANKS-12: rows that are evaluated un-packed; none on one rank; a stream of them."""
    rows = [text_row(f"question {n}") for n in range(5)]
    for others in (rows[:4], [*rows[:4], text_row("another")], None):
        for error in on_ranks(2, lambda comm, others=others: check_same_validation((rows, others)[comm.rank], comm)):
            assert isinstance(error, RanksDiffer)
            assert "do not agree on the validation rows: " in str(error)
    streams = [iter(rows), iter(rows[1:])]
    assert all(on_ranks(2, lambda comm: check_same_validation(streams[comm.rank], comm)))


HOLDS = """
import sys, time
from pathlib import Path
from swift_vlpack.files import hold
hold(Path(sys.argv[1]), "trains into")
print("held", flush=True)
time.sleep(600)
"""


def test_second_run_in_an_output_folder_is_refused_and_a_killed_one_holds_nothing(small_folder, tmp_path, monkeypatch):
    """RESUME-19: before a model is loaded."""
    monkeypatch.setattr("swift_vlpack.files._SECONDS_TO_WAIT", 1.0)
    rows = write_jsonl(tmp_path / "rows.jsonl", [text_row()] * 4)
    output = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", HOLDS, output], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"another process trains into {output}; wait for it, or name another"):
            train(packed_argv(small_folder(FAMILY), FAMILY, output, dataset=rows))
        other.kill()
    hold(output, "trains into")
    hold(output, "trains into")
