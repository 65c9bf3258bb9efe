import json
import os
import subprocess
import sys

import numpy as np
import pytest

from swift_vlpack import PackingConfig, plan
from swift_vlpack.cli import main
from swift_vlpack.config import kind_of, option_names
from tests.environment import packing_options

LENGTHS = [600, 500, 400, 500, 700, 250, 1500]


@pytest.fixture
def length_file(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(LENGTHS))
    return path


@pytest.fixture(autouse=True)
def no_packing_variables():
    packing_options()


def report(capsys, *argv):
    assert main(["plan", *map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def write(path, form):
    if form == "list":
        path.write_text(json.dumps(LENGTHS))
    elif form == "numbers":
        path.write_text("\n".join(map(str, LENGTHS)) + "\n\n")
    elif form == "objects":
        path.write_text("\n".join(json.dumps({"length": n, "images": 1}) for n in LENGTHS))
    elif form == "lists":
        path.write_text("\n".join(json.dumps({"lengths": [n - 1, 1]}) for n in LENGTHS))


@pytest.mark.parametrize("form", ["list", "numbers", "objects", "lists"])
def test_every_form_of_lengths_gives_the_same_plan(form, tmp_path, capsys):
    """CLI-1"""
    path = tmp_path / "lengths.jsonl"
    write(path, form)
    result = report(capsys, "--lengths", path, "--packing_length", 1000, "--packing_strategy", "exact")
    made = plan(LENGTHS, PackingConfig(packing_length=1000, packing_strategy="exact"))
    assert result["plan_digest"] == made.align(1).digest()
    assert result["num_packs"] == len(made) == 4


def test_json_has_the_promised_keys_and_true_values(length_file, capsys):
    """CLI-2 CLI-3"""
    result = report(
        capsys, "--lengths", length_file, "--packing_length", 1000, "--packing_strategy", "exact",
        "--packing_drop_last", "false", "--num_ranks", 2,
    )  # fmt: skip
    assert result["num_packs"] == 4  # 600+400, 500+500, 700+250, 1500
    assert result["lower_bound"] == 4  # ceil(2950 / 1000) and one for 1500
    assert result["mean_fill"] == pytest.approx((1000 + 1000 + 950) / 3000, abs=1e-4)
    assert (result["num_samples"], result["num_dropped"], result["single_long"]) == (7, 0, 1)
    assert result["packs_per_rank"] == 2
    assert result["balance"] >= 1
    assert isinstance(result["seconds"], float)


def test_readable_report_has_the_same_facts(length_file, capsys):
    """CLI-2"""
    argv = ["plan", "--lengths", str(length_file), "--packing_length", "1000", "--packing_strategy", "exact"]
    assert main([*argv, "--packing_allow_single_long", "false"]) == 0
    out = capsys.readouterr().out
    for part in (
        "3 packs of 1000 tokens",
        "98.33% mean",
        "1 (oversize 1)",
        "lower bound  3 packs",
        "7 rows, 6 samples",
    ):
        assert part in out


def test_plan_in_which_no_row_fits_says_so(length_file, capsys):
    """CLI-2: no fill and no bound to be proud of; rows that are left out instead leave nothing to train."""
    flags = ["plan", "--lengths", str(length_file), "--packing_length", "16"]
    assert main(flags) == 0
    out = capsys.readouterr().out
    assert "NO SAMPLE FITS a pack of 16 tokens: each is alone in a sequence of its own, and nothing is packed" in out
    assert "mean" not in out.partition("fill")[2].partition("\n")[0]
    assert "above it" not in out
    assert main([*flags, "--packing_allow_single_long", "false"]) == 2
    error = capsys.readouterr().err
    assert (
        f"nothing would be trained: {len(LENGTHS)} rows of {len(LENGTHS)} left out (oversize {len(LENGTHS)})" in error
    )


def test_every_packing_option_is_a_flag(capsys):
    """CLI-4"""
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for name in option_names():
        assert f"--{name} {kind_of(name)}" in text
    said = " ".join(text.split())
    assert "--packing_buffer INT samples that the packer may choose from at a time (default: 512)" in said
    assert "--packing_strategy {binpack,greedy," in said
    assert "--packing_drop_last {true,false}" in said
    assert "(default: the run's --max_length; needed with --lengths)" in said
    assert "VALUE" not in said
    assert "(required)" not in said


def test_help_of_training_has_its_own_defaults(capsys):
    """CLI-4: there packing is on, and the capacity is the model's."""
    with pytest.raises(SystemExit):
        main(["sft", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "--packing {true,false} turn packing on; this is ms-swift's own flag, too (default: true)" in said
    assert "after images are expanded (default: --max_length)" in said


@pytest.mark.parametrize(
    ("content", "flags", "parts"),
    [
        (None, [], ["no such file"]),
        ("", [], ["has no lengths"]),
        ("[1, 2", [], ["line 1", "not JSON"]),
        ("12\nx\n", [], ["line 2", "not JSON"]),
        ('{"tokens": 3}', [], ["row 1", "neither length nor lengths"]),
        ("[1, 2.5]", [], ["row 2", "integer", "2.5"]),
        ('[1, "a"]', [], ["row 2", "integer", "'a'"]),
        ("[1, true]", [], ["row 2", "integer", "True"]),
        ('[1, {"lengths": []}]', [], ["row 2", "lengths"]),
        ("[1, -4]", [], ["row 2", "at least 1", "-4"]),
        ("[1, 4]", ["--packing_buffer", "no"], ["packing_buffer", "'no'", "whole number"]),
        ("[1, 4]", ["--num_ranks", "0"], ["num_ranks", "0"]),
        ("[1, 4]", ["--packing_share", "media"], ["which lengths do not say; plan the run itself (--config)"]),
    ],
)
def test_mistake_is_one_line_and_exit_code_two(content, flags, parts, tmp_path, capsys):
    """CLI-5 SHARE-80"""
    path = tmp_path / "lengths.json"
    if content is not None:
        path.write_text(content)
    argv = ["plan", "--lengths", str(path), "--packing_length", "100", "--packing_strategy", "greedy", *flags]
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "give --lengths FILE, --config CONFIG.yaml, or the options of swift sft"),
        (["--json"], "nothing to plan"),
        (["--lengths", "a.json", "--config", "b.yaml"], "both --lengths and --config"),
        (["--lengths=a.json", "--config=b.yaml"], "both --lengths and --config"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["--model", "m", "--packing_strategy", "magic"], "packing_strategy must be one of"),
        (["--model", "m", "--num_ranks", "0"], "num_ranks must be at least 1, got 0"),
    ],
)
def test_mistake_in_what_to_plan_stops_before_ms_swift_is_started(argv, part, capsys):
    """CLI-5"""
    assert main(["plan", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert part in err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["plna", "--json"], "vlpack plna: there is no such command; did you mean plan?"),
        (["train.yaml"], "vlpack train.yaml: there is no such command; did you mean vlpack sft train.yaml?"),
        (["x"], "vlpack x: there is no such command (vlpack --help lists all)"),
        (["cache", "lst"], "; did you mean list?"),
        (["cache", "list", "--jsn"], "; did you mean --json?"),
        (["plan", "--lengths", "x.json", "--packing_bufer", "3"], "; did you mean --packing_buffer?"),
        (["plan", "--model", "m", "--dataset", "d", "--num_ranks", "many"], "invalid int value: 'many'"),
        ([], "required"),
    ],
)
def test_mistyped_word_is_one_line_with_what_was_meant(argv, said, capsys):
    """CLI-35"""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no/such/bad.jsonl", "--failures no/such/bad.jsonl: no such directory"),
        ("folder", "--failures folder is a directory; name a file in it"),
        ("/proc/bad.jsonl", "--failures /proc/bad.jsonl: folder /proc: /proc cannot be written"),
    ],
)
def test_list_that_cannot_be_written_is_known_before_the_length_pass(name, said, tmp_path, monkeypatch, capsys):
    """CLI-34"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert main(["plan", "--model", "owner/m", "--dataset", "owner/d", "--failures", name]) == 2
    assert capsys.readouterr().err.startswith(f"vlpack plan: {said}")


@pytest.mark.parametrize("kind", ["directory", "numpy", "binary"])
def test_file_of_another_kind_is_refused(kind, tmp_path, capsys):
    """CLI-5"""
    path = tmp_path / "lengths.npy"
    if kind == "directory":
        path.mkdir()
    elif kind == "numpy":
        np.save(path, np.array(LENGTHS))
    else:
        path.write_bytes(b"\xff\xfe\x00\x81 not a text")
    assert main(["plan", "--lengths", str(path), "--packing_length", "100"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_reader_that_has_seen_enough_is_no_error(length_file):
    """CLI-5: `vlpack plan ... | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "swift_vlpack", "plan", "--lengths", str(length_file), "--packing_length", "1000"]
    command += ["--packing_strategy", "exact"]  # `binpack` loads ms-swift
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 141, "as a shell counts SIGPIPE"
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
