"""What breaks in the middle of a packed run, really broken: workers, images, the output directory."""

import json
import multiprocessing
import os
import re
import tempfile
from pathlib import Path

import pytest

from swift_vlpack.host.callback import PackingCallback
from swift_vlpack.host.state import FILE, StateNotSaved, save_state
from swift_vlpack.rows.samples import TooManyFailures
from tests.data_rows import image_row, text_row, write_jsonl
from tests.e2e.ranks import Run, trained
from tests.environment import packing_options
from tests.host.runs import argv, epoch_report, log_lines, packed_argv, train
from tests.images import photo
from tests.marks import telling
from tests.namespaces import why_no_namespace, with_shared_memory_of

FAMILY = "qwen2_5_vl"


@pytest.fixture(autouse=True)
def environment():
    packing_options(
        packing_strategy="exact", packing_verify="false", packing_drop_last="false", packing_max_samples="1"
    )


@pytest.fixture
def after_step(monkeypatch):
    """`after_step(2, do)` does something when the second optimizer step is taken."""

    def arrange(step, do):
        count = PackingCallback.on_optimizer_step

        def on_optimizer_step(self, args, state, control, **kwargs):
            count(self, args, state, control, **kwargs)
            if state.global_step + 1 == step:
                do()

        monkeypatch.setattr(PackingCallback, "on_optimizer_step", on_optimizer_step)

    return arrange


@pytest.fixture
def texts(tmp_path):
    return write_jsonl(tmp_path / "rows.jsonl", [text_row(f"question {n}") for n in range(16)])


def flags(small_folder, output, dataset, **options):
    return packed_argv(small_folder(FAMILY), FAMILY, output, dataset=dataset, **{"num_train_epochs": 1, **options})


@pytest.mark.slow
@pytest.mark.telling
def test_killed_worker_is_named(small_folder, tmp_path):
    """RANKS-6: kill -9, as the out-of-memory killer does it; in a process of its own, as it upsets all of it."""
    dataset = write_jsonl(tmp_path / "rows.jsonl", [text_row(f"question {n}") for n in range(200)])
    output = tmp_path / "out"
    options = {"packing_max_samples": 1, "packing_strategy": "exact", "record_packs": "true"}
    few = argv(small_folder(FAMILY), FAMILY, output, dataset=dataset, num_train_epochs=9, dataloader_num_workers=1)
    run = Run(few, tmp_path / "log.txt", num_ranks=1, **options)
    run.until(lambda: len(trained(output)) > 2)
    pid = run.kill_worker()
    assert run.wait(120) != 0
    told = rf"dataloader worker.*\(pid(\(s\))? {pid}\).*(killed by signal|exited unexpectedly)"
    assert re.search(told, run.output[-1500:], re.IGNORECASE), run.output[-3000:]


def test_worker_that_raises_brings_its_traceback(small_folder, texts, tmp_path, monkeypatch):
    """RANKS-6"""
    from swift_vlpack.rows.fusion import FusionCaptionDataset

    encode = FusionCaptionDataset.encode

    def broken_reader(self, address, *row):
        if multiprocessing.parent_process() is not None:
            raise ZeroDivisionError("a mistake in a reader")
        return encode(self, address, *row)

    monkeypatch.setattr(FusionCaptionDataset, "encode", broken_reader)
    with pytest.raises(ZeroDivisionError, match="a mistake in a reader") as stopped:
        train(flags(small_folder, tmp_path / "out", texts, dataloader_num_workers=1))
    assert "in DataLoader worker process 0" in str(stopped.value)
    assert "in broken_reader" in str(stopped.value)


def test_read_only_directory_is_an_error_that_names_the_file():
    """RESUME-9: as somebody who is not root, for whom nothing is read-only."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(StateNotSaved, match=rf"{folder / FILE} cannot be written: .*Permission denied"):
            save_state(folder, "plan", {}, {})
    finally:
        os.seteuid(user)
    assert list(folder.iterdir()) == []
    folder.rmdir()


def lines_of(output):
    return [json.loads(line) for line in (output / "vlpack" / "left_out.jsonl").read_text().splitlines()]


def test_every_row_that_is_left_out_is_listed(small_folder, tmp_path, after_step):
    """DATA-16: deleted by the loader, never there, too long, gone meanwhile; in one epoch and the next."""
    os.environ |= {"VLPACK_PACKING_ALLOW_SINGLE_LONG": "false", "VLPACK_PACKING_LENGTH": "100"}
    picture = photo(tmp_path, "gone", 60, 60)
    rows = [*(text_row(f"question {n}") for n in range(5)), {"messages": []}, image_row([picture])]
    rows += [image_row([str(tmp_path / "never.png")]), text_row("long", "word " * 150)]
    dataset = write_jsonl(tmp_path / "rows.jsonl", rows)
    once = {"rows:5": ("deleted_by_loader", {None})}
    always = {"rows:7": ("file_missing", {0, 1}), "rows:8": ("oversize", {0, 1})}
    output = tmp_path / "out"
    after_step(6, lambda: os.unlink(picture))  # it is loaded again in the second epoch only
    train(flags(small_folder, output, dataset, num_train_epochs=2, save_strategy="epoch", tuner_type="lora"))
    found = {}
    for line in lines_of(output):
        found.setdefault(line["id"], (line["reason"], set()))[1].add(line["epoch"])
        assert line["where"] == f"{dataset}:{1 + int(line['id'].split(':')[1])}"
        assert line["error"]
    assert found == {**once, **always, "rows:6": ("file_missing", {1})}
    assert "gone.jpg" in next(line["error"] for line in lines_of(output) if line["id"] == "rows:6")
    before = lines_of(output)
    photo(tmp_path, "gone", 60, 60)
    train(
        flags(
            small_folder, output, dataset, num_train_epochs=2, tuner_type="lora", add_version="false",
            resume_from_checkpoint=output / "checkpoint-6",
        )
    )  # fmt: skip
    assert lines_of(output) == before, "a resume into the same folder lists nothing twice"


@pytest.mark.parametrize("mode", ["plan", telling("buffer")])
def test_share_of_images_that_disappear_stops_the_run(mode, small_folder, tmp_path, after_step, caplog):
    """DATA-17: never many in a row, and still a quarter of all."""
    os.environ |= {"VLPACK_PACKING_MODE": mode, "VLPACK_PACKING_MAX_SAMPLES": "6", "VLPACK_PACKING_BUFFER": "12"}
    lasting = photo(tmp_path, "lasting", 40, 40)
    passing = [photo(tmp_path, f"passing_{n}", 40, 40, seed=n) for n in range(60)]
    rows = [image_row([passing[n // 2] if n % 2 else lasting], f"question {n}") for n in range(120)]
    dataset = write_jsonl(tmp_path / "rows.jsonl", [*rows, *rows])
    after_step(3, lambda: [os.unlink(path) for path in passing])
    with pytest.raises(
        TooManyFailures, match=r"of the last 1\d\d rows could not be read \(file_missing \d+\).*left_out"
    ):
        train(flags(small_folder, tmp_path / "out", dataset, max_steps=60))
    assert len(lines_of(tmp_path / "out")) > 20


@pytest.mark.slow
def test_training_goes_on_where_shared_memory_is_short(small_folder, tmp_path):
    """RANKS-9: packs of 3 MB and an evaluation through workers, and 2 MB of shared memory."""
    if reason := why_no_namespace():
        pytest.skip(reason)
    rows = [image_row([photo(tmp_path, f"picture_{n}", 400, 300, seed=n)]) for n in range(4)]
    dataset = write_jsonl(tmp_path / "rows.jsonl", rows)
    few = argv(
        small_folder(FAMILY), FAMILY, tmp_path / "out", dataset=dataset, val_dataset=dataset, num_train_epochs=1,
        dataloader_num_workers=2, eval_strategy="epoch",
    )  # fmt: skip
    done = with_shared_memory_of("2m", "-m", "swift_vlpack", "sft", *few, timeout_seconds=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (done.stdout + done.stderr).count("MB free and a batch takes") == 1
    assert epoch_report(tmp_path / "out")["num_samples"] == 4
    assert any("eval_loss" in line for line in log_lines(tmp_path / "out"))
