"""Several ranks of torch.distributed measure one source."""

import json
import os
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist
import torch.multiprocessing as mp
from swift.dataset import load_dataset

from swift_vlpack.feed.saved_rows import Changes, RunRows, from_bytes
from swift_vlpack.host.ranks import RanksOfRun
from swift_vlpack.host.same_on_ranks import RanksDiffer
from tests.data_rows import image_row, text_row
from tests.host.lengths.support import ARGS, dataset, source, texts, with_lengths
from tests.images import photo


def on_two_ranks(case, template, folder):
    """Run `case(rank, template)` in two processes that talk over gloo; what each of them gave, or its error."""
    context = mp.get_context("fork")
    answers = context.SimpleQueue()
    # A file for each meeting: a second one by the same file could find what the first has not removed yet.
    meeting = folder / f"meeting-{uuid.uuid4().hex}"
    ranks = [context.Process(target=_rank, args=(case, template, meeting, rank, answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    given = dict(_answer(answers, ranks) for _ in ranks)
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0, "a rank hangs"
    return given[0], given[1]


def _answer(answers, ranks):
    """The next answer; a rank that died without one ends the test, as the other would wait for it for ever."""
    deadline = time.monotonic() + 300
    while answers.empty():
        died = [process.exitcode for process in ranks if process.exitcode]
        if died or time.monotonic() > deadline:
            for process in ranks:
                process.kill()
            raise AssertionError(f"a rank died (exit codes {died})" if died else "a rank hangs")
        time.sleep(0.01)
    return answers.get()


def _rank(case, template, meeting, rank, answers):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    try:
        answer = case(rank, template)
    except Exception as error:
        answer = type(error).__name__, str(error)
    answers.put((rank, answer))
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_with_different_rows_stop(template, tmp_path):
    """LEN-12"""

    def case(rank, template):
        rows = texts(20)
        rows[7] = text_row(f"rank {rank}")
        return with_lengths(source(dataset(rows)), template, ARGS, str(tmp_path))

    for kind, message in on_two_ranks(case, template, tmp_path):
        assert kind == RanksDiffer.__name__
        assert "do not agree on the rows of source 'rows'" in message
        assert "content: " in message


def test_ranks_with_copies_of_the_files_agree(template, tmp_path, monkeypatch):
    """LEN-12: on machines of their own, where files have another time."""
    rows = dataset([image_row(["photo.jpg"]), *texts(3)])

    def case(rank, template):
        os.environ["ROOT_IMAGE_DIR"] = str(tmp_path / str(rank))
        Path(os.environ["ROOT_IMAGE_DIR"]).mkdir()
        os.utime(photo(Path(os.environ["ROOT_IMAGE_DIR"]), "photo"), (rank + 1, rank + 1))
        return with_lengths(source(rows), template, ARGS, str(tmp_path / "cache")).sizes.lengths.tolist()

    first, second = on_two_ranks(case, template, tmp_path)
    assert first == second
    assert all(length > 0 for length in first)


def test_ranks_with_the_same_file_below_other_folders_agree(template, tmp_path):
    """LEN-12 RESUME-10: ms-swift writes the path of its file into every row; a resume may read it elsewhere, too."""
    photo(tmp_path, "photo")
    rows = [image_row([str(tmp_path / "photo.jpg")]), *texts(5)]

    def case(rank, template):
        path = tmp_path / f"machine {rank}" / "rows.jsonl"
        path.parent.mkdir()
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        loaded, _ = load_dataset([str(path)], num_proc=1, shuffle=False)
        assert loaded["dataset"][0] == str(path)
        measured = with_lengths(source(loaded), template, ARGS, str(tmp_path / "cache"))
        of_run = RunRows([measured])
        saved = RanksOfRun().results_of_all(of_run.as_file)
        changes = [of_run.compared(from_bytes(content)) for content in saved]
        return measured.sizes.lengths.tolist(), [digests.tolist() for digests in of_run.contents], changes

    first, second = on_two_ranks(case, template, tmp_path)
    assert first == second
    assert first[2:] == ([Changes(), Changes()],), first


def test_ranks_with_other_settings_are_told_which(template, tmp_path, monkeypatch):
    """LEN-12: another version of a package, another limit of pixels."""
    rows = dataset(texts(4))

    def case(rank, template):
        if rank == 1:
            monkeypatch.setattr("swift_vlpack.lengths.context._version", lambda package: "0.0.1")
            monkeypatch.setattr(template, "max_pixels", 9999)
        return with_lengths(source(rows), template, ARGS, str(tmp_path / "cache"))

    for kind, message in on_two_ranks(case, template, tmp_path):
        assert kind == RanksDiffer.__name__
        assert "packages: " in message
        assert "settings: " in message
        assert "content: " not in message


def test_ranks_of_other_machines_and_users_agree(template, tmp_path):
    """LEN-12 LEN-21: what a plugin names or lies beside it may differ: each rank has keys of its own then."""
    rows = dataset(texts(20))
    plugins = [tmp_path / str(rank) / "plugin.py" for rank in range(2)]
    for rank, plugin in enumerate(plugins):
        plugin.parent.mkdir()
        plugin.write_text("names = 'HOSTNAME', 'USER', '_', 'MY_NODE'")
        (plugin.parent / "notes.py").write_text(f"# of rank {rank}")
    args = SimpleNamespace(**vars(ARGS), external_plugins=[])

    def case(rank, template):
        args.external_plugins[:] = [str(plugins[rank])]
        os.environ |= dict.fromkeys(("HOSTNAME", "USER", "_", "LS_COLORS", "MY_NODE"), f"of rank {rank}")
        found = [with_lengths(source(rows), template, args, str(tmp_path / "cache")).sizes for _ in range(2)]
        return [(sizes.lengths.tolist(), sizes.num_remembered) for sizes in found]

    first, second = on_two_ranks(case, template, tmp_path)
    right = [template.encode(row, return_length=True)["length"] for row in rows]
    assert first == second == [(right, 0), (right, 20)]
