"""`vlpack inspect --dataset`: a saved data set of blocks, without a model; and positions by hand."""

import json

import numpy as np
import pytest

from swift_vlpack.cli import main
from swift_vlpack.errors import BoundaryError, DataError
from swift_vlpack.text import block_tokenize, document_starts_of, positions_of
from tests.text.vocabularies import EOS, text, words


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Blocks, and the folder of their tokenizer."""
    from datasets import Dataset

    folder, tokenizer = tmp_path_factory.mktemp("blocks"), words()
    tokenizer.save_pretrained(folder / "tokenizer")
    made = block_tokenize({"text": [text(0, 1), text(2), text(3, 4, 5)]}, tokenizer=tokenizer, max_length=8)
    Dataset.from_dict(made).save_to_disk(folder / "blocks")
    return folder


def test_blocks_are_shown_with_their_documents(saved, capsys):
    """TEXT-34"""
    assert main(["inspect", "--dataset", str(saved / "blocks"), "--tokenizer", str(saved / "tokenizer")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("blocks       2 of 8 tokens, 75.00% used\n")
    first, second = said[said.index("-----") :].split("\n------------- 1 ")
    assert first.splitlines() == [
        "------------- 0 Tokens: 8, Documents: 3, Features: input_ids, document_starts, block_counts -------------",
        "[0:4] <s> w0 w1 </s>",
        "[4:7] <s> w2 </s>",
        "[7:8] <s>",
    ]
    assert second.startswith("Tokens: 4, Documents: 1, Features: ")
    assert main(["inspect", f"--dataset={saved / 'blocks'}", "--examples", "1"]) == 0
    said = capsys.readouterr().out
    assert "[0:4] 0 4 5 1\n[4:7] 0 6 1\n" in said
    assert "Tokens: 4," not in said


def test_blocks_as_json(saved, capsys):
    """TEXT-34"""
    assert main(["inspect", "--dataset", str(saved / "blocks"), "--json", "--tokenizer", str(saved / "tokenizer")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["report"]["blocks"] == 2
    assert [[one["start"], one["end"]] for one in found["examples"][0]["documents"]] == [[0, 4], [4, 7], [7, 8]]
    assert found["examples"][0]["documents"][1] == {"start": 4, "end": 7, "input_ids": [0, 6, 1], "text": "<s> w2 </s>"}


def test_blocks_of_other_tools_and_byte_tokens(tmp_path, capsys):
    """TEXT-34: by TRL's column, and without any."""
    from datasets import Dataset

    Dataset.from_dict({"input_ids": [list(b"one two")], "seq_lengths": [[3, 4]]}).save_to_disk(tmp_path / "trl")
    Dataset.from_dict({"input_ids": [list(b"x" * 500)]}).save_to_disk(tmp_path / "plain")
    assert main(["inspect", "--dataset", str(tmp_path / "trl"), "--tokenizer", "byte"]) == 0
    assert "[0:3] one\n[3:7]  two\n" in capsys.readouterr().out
    assert main(["inspect", "--dataset", str(tmp_path / "plain"), "--tokenizer", "byte"]) == 0
    said = capsys.readouterr().out
    assert "no feature says where documents start" in said
    assert f"{'x' * 400} ... 500 characters" in said


def test_what_is_no_data_set_of_blocks_is_one_line(saved, tmp_path, capsys):
    """TEXT-34"""
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_dict({"text": ["a"]})
    rows.save_to_disk(tmp_path / "texts")
    DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "both")
    blocks = str(saved / "blocks")
    capsys.readouterr()  # the bars of datasets
    for flags, said in (
        (
            [str(tmp_path)],
            "is not a data set that `save_to_disk` wrote; name such a folder, or give the --model of the run",
        ),
        ([str(tmp_path / "none.jsonl")], "is not a data set that `save_to_disk` wrote"),
        ([str(tmp_path / "texts")], "has no blocks: there is no input_ids among its features (text)"),
        ([str(tmp_path / "both")], "these are several data sets; name one of them: test, train"),
        ([blocks, "--tokenizer", str(tmp_path / "none")], "cannot be loaded"),
        ([blocks, "--examples", "0"], "--examples must be at least 1, got 0"),
        ([blocks, "--pack", "3"], "--pack: of a run"),
    ):
        assert main(["inspect", "--dataset", *flags]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert said in line


@pytest.mark.parametrize("kind", [list, np.array])
def test_positions_by_hand(kind):
    """TEXT-35"""
    assert positions_of(kind([5, 6, EOS, 7, EOS]), EOS).tolist() == [0, 1, 2, 0, 1]
    assert positions_of(kind([5, 6, EOS, 7]), EOS).tolist() == [0, 1, 2, 0]
    assert positions_of(kind([5, 6, 7]), document_starts=[0, 1]).tolist() == [0, 0, 1]
    assert positions_of(kind([5, 6, 7]), EOS).tolist() == [0, 1, 2]
    assert document_starts_of(kind([EOS, EOS, 4]), EOS) == [0, 1, 2]
    assert (document_starts_of([], EOS), positions_of([], EOS).tolist()) == ([], [])
    with pytest.raises(DataError, match="documents are found by EOS, but eos_token_id is None"):
        positions_of(kind([5]))
    with pytest.raises(BoundaryError, match="must begin with 0 and ascend"):
        positions_of(kind([5, 6]), document_starts=[1])
