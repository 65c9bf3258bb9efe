"""Several ranks of torch.distributed measure one source."""

import json
import os
import re
import shutil
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from swift.dataset import load_dataset
from swift.model import get_model_processor
from swift.template import get_template

from swift_vlpack.feed.saved_rows import Changes, RunRows, from_bytes
from swift_vlpack.host.ranks import RanksOfRun
from swift_vlpack.host.same_on_ranks import RanksDiffer, check_same_settings
from tests.data_rows import image_row, text_row
from tests.host.lengths.support import ARGS, FAMILY, dataset, source, texts, with_lengths
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


@pytest.mark.parametrize("setting", ["package", "pixels", "tokenizer", "processor", "chat template", "helper"])
def test_ranks_with_other_settings_are_told_which(setting, template, tmp_path, monkeypatch):
    """RANKS-20: with both values, where these are short. Of plugins, also what they import."""
    monkeypatch.syspath_prepend(tmp_path)
    plugin, helper = tmp_path / "plugin.py", tmp_path / f"helper_{setting.replace(' ', '_')}.py"
    plugin.write_text(f"import {helper.stem}")
    helper.write_text("x = 1")

    def case(rank, template):
        if rank == 1:
            if setting == "package":
                monkeypatch.setattr("swift_vlpack.lengths.context._version", lambda package: "0.0.1")
            elif setting == "pixels":
                monkeypatch.setattr(template, "max_pixels", 9999)
            elif setting == "tokenizer":
                template.tokenizer.add_tokens(["a token of one rank"])
            elif setting == "processor":
                template.processor.image_processor.image_mean = [0.5, 0.5, 0.5]
            elif setting == "chat template":
                template.tokenizer.chat_template = "{{ messages }}"
            else:
                (tmp_path / "1").mkdir()
                monkeypatch.syspath_prepend(tmp_path / "1")
                (tmp_path / "1" / helper.name).write_text("x = 2")
        return check_same_settings(template, [str(plugin)])

    said = {
        "package": "packages.pillow: '.*' and '0.0.1'",
        "pixels": "settings.max_pixels: None and 9999",
        "tokenizer": "tokenizer.content: '.*' and '.*'",
        "processor": r"processor.image_processor.image_mean: \[0.48145466, .*\] and \[0.5, 0.5, 0.5\]",
        "chat template": "chat_templates: ",
        "helper": "code: 'digest .*' and 'digest .*'",
    }
    for kind, message in on_two_ranks(case, template, tmp_path):
        assert kind == RanksDiffer.__name__
        assert "do not agree on the settings that rows are encoded by: " in message
        assert re.search(said[setting], message), message


def test_ranks_of_other_machines_have_the_same_settings(template, tmp_path):
    """RANKS-20: with plugins, models and caches in other places, and users, hosts and variables of their own."""
    folder = template.model_info.model_dir

    def case(rank, template):
        home = tmp_path / f"home of {rank}"
        shutil.copytree(folder, home / "model")
        plugin = home / "plugin.py"
        plugin.write_text("import os, helper_of_both\nos.environ.get('HOSTNAME'), os.environ.get('MY_NODE')\n")
        (home / "helper_of_both.py").write_text("x = 1")
        (home / f"notes_of_{rank}.py").write_text("")
        names = ("HOME", "HOSTNAME", "USER", "_", "TMPDIR", "HF_HOME", "HF_HUB_CACHE", "PYTHONPATH", "MY_NODE")
        os.environ |= dict.fromkeys((*names, "MODELSCOPE_CACHE", "VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES"), str(home))
        sys.path.insert(0, str(home))
        # The code of other models that this machine has cached, beside that of the one it trains.
        remote = home / "modules" / "transformers_modules" / "mine" / "a1b2"
        for package in (remote, remote.parent, remote.parent.parent, remote.parent.parent.parent):
            package.mkdir(parents=True, exist_ok=True)
            (package / "__init__.py").touch()
        (remote / "processing_mine.py").write_text("class Mine: pass")
        (remote.parent / f"model_of_{rank}.py").write_text(f"# {rank}")
        _, processor = get_model_processor(
            str(home / "model"), model_type=FAMILY, use_hf=True, load_model=False, torch_dtype=torch.float32
        )
        made = get_template(processor, template_type=FAMILY, max_length=2048)
        return sorted(check_same_settings(made, [str(plugin), str(remote / "processing_mine.py")]))

    first, second = on_two_ranks(case, template, tmp_path)
    assert first == second
    assert "tokenizer.content" in first, first


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
