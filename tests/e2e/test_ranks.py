"""Two real ranks: killed, resumed by others, and with packs that differ in kind."""

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from swift_vlpack.host.launch import plugin_path
from swift_vlpack.host.state import FILE
from swift_vlpack.runlog.folder import find_run
from swift_vlpack.runlog.report import run_report
from tests.data_rows import image_row, text_row, write_jsonl
from tests.e2e.ranks import ROOT, Run, free_port, ids, last_complete, step_of, trained
from tests.host.runs import SMALL_VOCABULARY, argv, epoch_report, packed_argv, train
from tests.images import photo
from tests.marks import telling

FAMILY = "qwen3_vl"
NUM_ROWS = 21  # an odd number of packs of one sample, so that one rank has an empty pack at the end
OPTIONS = {
    "packing_strategy": "exact",
    "packing_balance": "false",
    "packing_max_samples": 1,
    "packing_drop_last": "false",
    "record_packs": "true",
}
ALL = sorted(f"train:{n}" for n in range(NUM_ROWS))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Every other row has no image."""
    folder = tmp_path_factory.mktemp("data")
    rows = [
        image_row([photo(folder, str(n), 80, 60, seed=n)], answer=f"picture {n}")
        if n % 2
        else text_row(f"question {n}")
        for n in range(NUM_ROWS)
    ]
    return write_jsonl(folder / "train.jsonl", rows)


def flags(small_folder, output, dataset, **options):
    """Everything is trained, the vision tower too, with gradient checkpointing, which is ms-swift's default."""
    return argv(
        small_folder(FAMILY), FAMILY, output, dataset=dataset, external_plugins=SMALL_VOCABULARY,
        **{"num_train_epochs": 1, "freeze_vit": "false", "freeze_aligner": "false", "save_strategy": "steps",
           "save_steps": 1, "split_dataset_ratio": 0, **options},
    )  # fmt: skip


@pytest.fixture(scope="module")
def killed(small_folder, dataset, tmp_path_factory):
    """Two ranks of which one was killed, in the middle of some step."""
    output = tmp_path_factory.mktemp("killed")
    step = random.Random(3).randint(2, 7)
    run = Run(flags(small_folder, output, dataset), output / "log.txt", **OPTIONS)
    run.until(lambda: bool(trained(output)) and trained(output)[-1]["step"] >= step)
    run.kill_rank(1)
    code = run.wait(120)
    print(f"killed rank 1 after step {step}")
    return output, code, run.output


@pytest.mark.slow
@pytest.mark.telling
def test_rank_that_is_killed_ends_the_run(killed):
    """RANKS-5"""
    output, code, text = killed
    assert code != 0
    assert "Signal 9" in text or "SIGKILL" in text
    assert last_complete(output)


@pytest.mark.slow
@pytest.mark.telling
@pytest.mark.parametrize("killed_one", ["rank", "worker"])
def test_run_with_a_killed_process_ends_and_leaves_no_process_and_no_file(killed_one, small_folder, tmp_path):
    """RANKS-19: with the host's own number of workers, and batches of texts that fill the pipe of a worker."""
    rows = [text_row(f"question {n}", "word " * 600) for n in range(2000)]
    dataset, before = write_jsonl(tmp_path / "texts.jsonl", rows), set(os.listdir("/dev/shm"))
    flags = argv(
        small_folder(FAMILY), FAMILY, tmp_path / "run", dataset=dataset, external_plugins=SMALL_VOCABULARY,
        max_length=8192, packing_length=8192, max_steps=100000, dataloader_num_workers=1,
        dataloader_persistent_workers="true",
    )  # fmt: skip
    run = Run(flags, tmp_path / "log.txt", record_packs="true", packing_verify="false")
    try:
        run.until(lambda: len(trained(tmp_path / "run")) > 6)
        run.kill_rank(1) if killed_one == "rank" else run.kill_worker()
        assert run.wait(60) != 0
        run.until_gone(20)
    finally:
        run.end()
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.slow
@pytest.mark.telling
def test_ranks_with_and_without_an_image_train_side_by_side(killed):
    """RANKS-4: Qwen3-VL, vision tower trained, gradient checkpointing: DDP must not wait for the tower."""
    output, _, text = killed
    assert "use_reentrant: False" in text
    kinds = {}
    for pack in trained(output):
        kinds.setdefault(pack["step"], {})[pack["rank"]] = any(int(key.split(":")[1]) % 2 for key in pack["ids"])
    mixed = [step for step, of_rank in kinds.items() if len(set(of_rank.values())) == 2]
    assert mixed, "no step had both kinds"
    assert step_of(last_complete(output)) >= min(mixed)


@pytest.mark.slow
@pytest.mark.telling
def test_killed_terminated_and_resumed_by_one_rank_every_sample_is_trained_once(
    killed, small_folder, dataset, tmp_path, monkeypatch
):
    """RANKS-3 RANKS-5 RESUME-4 RESUME-8 RESUME-9: two ranks, killed; two ranks, terminated; one rank, to the end."""
    first, *_ = killed
    checkpoint = last_complete(first)
    packs = trained(first, up_to_step=step_of(checkpoint))
    second = tmp_path / "second"
    second.mkdir()
    run = Run(flags(small_folder, second, dataset, resume_from_checkpoint=checkpoint), tmp_path / "log.txt", **OPTIONS)
    run.until(lambda: bool(list(second.glob(f"checkpoint-*/{FILE}"))))
    run.terminate()
    assert run.wait(120) != 0
    for path in second.glob(f"checkpoint-*/{FILE}"):
        assert json.loads(path.read_text())["kind"] == "plan"
    checkpoint = last_complete(second)
    packs += trained(second, up_to_step=step_of(checkpoint))
    assert len(packs) == 2 * step_of(checkpoint)
    for name, value in OPTIONS.items():
        monkeypatch.setenv(f"VLPACK_{name.upper()}", str(value))
    third = tmp_path / "third"
    train(
        packed_argv(
            small_folder(FAMILY), FAMILY, third, dataset=dataset, num_train_epochs=1, split_dataset_ratio=0,
            freeze_vit="false", freeze_aligner="false", resume_from_checkpoint=checkpoint,
        )
    )  # fmt: skip
    packs += trained(third)
    assert ids(packs) == ALL
    report = epoch_report(third)
    assert report["is_closed"]
    assert (report["num_read"], report["num_samples"], report["num_packs"]) == (NUM_ROWS, NUM_ROWS, NUM_ROWS)
    for folder, num_ranks, has_ended in ((first, 2, False), (second, 2, False), (third, 1, True)):
        report = run_report(find_run(folder))
        assert (report["run"]["has_ended"], report["run"]["num_ranks"]) == (has_ended, [num_ranks]), "REPORT-7"
        assert 0 < report["trained"]["num_samples"] <= len(ids(trained(folder)))


@pytest.mark.slow
@pytest.mark.telling
def test_two_ranks_train_to_the_end_with_an_empty_pack(killed, small_folder, dataset, tmp_path):
    """RANKS-1 RANKS-4 DATA-10: the zero-loss pack of one rank beside an image of the other."""
    checkpoint = last_complete(killed[0])
    output = tmp_path / "out"
    output.mkdir()
    run = Run(
        flags(
            small_folder, output, dataset, resume_from_checkpoint=checkpoint, save_strategy="no",
            dataloader_num_workers=1, gradient_accumulation_steps=2,
        ),
        tmp_path / "log.txt", **OPTIONS,
    )  # fmt: skip
    assert run.wait() == 0, run.output[-3000:]
    packs = trained(killed[0], up_to_step=step_of(checkpoint)) + trained(output)
    assert ids(packs) == ALL
    assert sum(not pack["ids"] for pack in packs) == 1
    assert epoch_report(output)["is_closed"]
    assert "NaN" not in (output / "logging.jsonl").read_text()


OTHER_OPTIONS = {  # flags, then variables, of rank 1 only
    "--gradient_accumulation_steps": 3, "--save_steps": 2, "--num_train_epochs": 4, "--learning_rate": "2e-3",
    "--logging_steps": 5, "--seed": 7, "--torch_dtype": "bfloat16", "--target_modules": "q_proj",
    "VLPACK_PACKING_VERIFY": "false", "VLPACK_PACKING_BUFFER": 9,
}  # fmt: skip
TOLD = (
    *("gradient_accumulation_steps: 1 and 3", "save_steps: 1(.0)? and 2(.0)?", "num_train_epochs: 1(.0)? and 4(.0)?"),
    *("learning_rate: 0.001 and 0.002", "logging_steps: 1(.0)? and 5(.0)?", "seed: 42 and 7"),
    *("torch_dtype: 'torch.float32' and 'torch.bfloat16'", r"target_modules: \['all-linear'\] and \['q_proj'\]"),
    *("packing_verify: True and False", "packing_buffer: 512 and 9"),
)


@pytest.mark.parametrize(
    ("word", "others", "told"),
    [
        telling("answer", {}, ["content: "], id="data"),
        telling("question", OTHER_OPTIONS, TOLD, id="options"),
    ],
)
def test_ranks_with_different_files_or_options_are_stopped_at_the_start(
    word, others, told, small_folder, dataset, tmp_path
):
    """RANKS-2: two machines, one of which has another version of the file, or other flags and another environment."""
    lines = Path(dataset).read_text().splitlines(keepends=True)
    folders = [tmp_path / str(rank) for rank in range(2)]
    for folder, content in zip(folders, [lines, [*lines[:-1], lines[-1].replace("question", word)]], strict=True):
        folder.mkdir()
        (folder / "train.jsonl").write_text("".join(content))
    outputs = stopped_apart(flags(small_folder, tmp_path / "out", "train.jsonl"), folders, others)
    for text in outputs:
        for part in told:
            assert re.search(rf"ranks 0 and 1 do not agree on the .*: .*{part}", text), text[-3000:]
    assert trained(tmp_path / "out") == []


def stopped_apart(shared, folders, others=()):
    """The output of two ranks, started each in a folder of its own, of which the second has flags and variables more.

    They have to stop, and none may wait for the other.
    """
    clean = {key: value for key, value in os.environ.items() if not key.startswith("VLPACK_")}
    clean |= {f"VLPACK_{name.upper()}": str(value) for name, value in OPTIONS.items()}
    clean |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    clean["MASTER_PORT"] = str(free_port())
    entry = importlib.util.find_spec("swift.cli.sft").origin
    plugins = ["--external_plugins", plugin_path(), SMALL_VOCABULARY]
    ours = [*plugins, "--packing", "true", "--ddp_backend", "gloo", "--use_cpu", "true"]
    processes = []
    for rank, folder in enumerate(folders):
        command = [sys.executable, entry, *shared, *ours]
        places = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        for name in others if rank else ():
            if name.startswith("--"):
                command += [name, others[name]]
            else:
                places[name] = str(others[name])
        processes.append(
            subprocess.Popen(
                [str(part) for part in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env={**clean, **places}, cwd=folder,
            )
        )  # fmt: skip
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert 0 not in [process.returncode for process in processes], outputs[0][-3000:]
    return outputs


THREADS = ROOT / "tests" / "plugins" / "threads_at_exit.py"


@pytest.mark.slow
@pytest.mark.telling
@pytest.mark.parametrize("streaming", ["false", "true"])
def test_threads_between_the_ranks_have_ended_or_wait_for_nothing_before_python_ends(
    streaming, small_folder, dataset, tmp_path
):
    """RANKS-14: one that lets go of a tensor while Python ends aborts a process that has trained and saved all."""
    training = flags(small_folder, tmp_path / "run", dataset, streaming=streaming, max_steps=2, save_strategy="no")
    at = training.index("--external_plugins")
    training[at + 1 : at + 2] = [SMALL_VOCABULARY, THREADS]
    run = Run(training, tmp_path / "log.txt", packing_length=200)
    assert run.wait() == 0, run.output[-3000:]
    left = re.findall("threads at exit: (.*)", run.output)
    assert len(left) == 2, run.output[-3000:]
    assert not any("gloo" in names for names in left), left


SABOTAGE = ROOT / "tests" / "plugins" / "sabotage.py"
PROVED = {
    "max_steps": 2,
    "tuner_type": "lora",
    "target_modules": "all-linear",
    "gradient_accumulation_steps": 2,
    "dataloader_num_workers": 1,
    "save_steps": 2,
}
"""With dropout 0.05, of which ms-swift makes the default."""


@pytest.mark.slow
@pytest.mark.telling
def test_first_batch_of_each_rank_is_proved_and_training_goes_on_as_without(small_folder, dataset, tmp_path):
    """ISO-21 ISO-23: both ranks do it, and no gradient, draw or metric is another one afterwards."""
    outputs = {is_proved: tmp_path / str(is_proved) for is_proved in ("true", "false")}
    options = {"packing_length": 200, "packing_drop_last": "false"}
    texts = {}
    for is_proved, output in outputs.items():
        output.mkdir()
        training = flags(small_folder, output, dataset, **PROVED, torch_dtype="bfloat16")
        run = Run(training, output / "log.txt", packing_verify=is_proved, **options)
        assert run.wait() == 0, run.output[-3000:]
        texts[is_proved] = run.output
    assert texts["true"].count("isolation verified in training: the first batch of the trainer (") == 1
    proved, plain = (
        [(line["loss"], line["grad_norm"], line["token_acc"]) for line in map(json.loads, lines) if "grad_norm" in line]
        for lines in ((output / "logging.jsonl").read_text().splitlines() for output in outputs.values())
    )
    assert proved == plain
    assert len(proved) == 2


@pytest.mark.slow
@pytest.mark.telling
def test_batch_that_is_wrong_on_one_rank_stops_all_before_a_checkpoint(small_folder, dataset, tmp_path, monkeypatch):
    """ISO-22 ISO-23"""
    word = tmp_path / "sabotage.txt"
    word.write_text("labels")
    monkeypatch.setenv("SABOTAGE", str(word))
    training = flags(small_folder, tmp_path / "run", dataset, **PROVED, output_dir=tmp_path / "run")
    at = training.index("--external_plugins")
    training[at + 1 : at + 2] = [str(SMALL_VOCABULARY), str(SABOTAGE)]
    run = Run(training, tmp_path / "log.txt", packing_length=200, packing_drop_last="false")
    assert run.wait() != 0
    said = r"dataloader worker, makes another batch than its samples are.*labels of train:"
    assert re.search(said, run.output), run.output[-3000:]
    assert "rank 1 failed" in run.output
    assert not list((tmp_path / "run").glob("checkpoint-*"))
