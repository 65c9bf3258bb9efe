"""`vlpack report` as a command: what is wrong is one line."""

import pytest

from swift_vlpack.cli import main
from tests.runlog.test_segments import train


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: None, "no such directory"),
        (lambda path: path.mkdir(), "is no run: it has neither vlpack/ nor logging.jsonl, and no version folder"),
        (lambda path: path.write_text(""), "no such directory"),
    ],
    ids=["nothing", "empty", "file"],
)
def test_directory_that_is_no_run_is_one_clear_error(make, told, tmp_path, capsys):
    """REPORT-8"""
    make(tmp_path / "here")
    assert main(["report", str(tmp_path / "here")]) == 2
    assert told in capsys.readouterr().err


def test_page_that_cannot_be_written_is_one_clear_error(tmp_path, capsys):
    """REPORT-10"""
    train(tmp_path, range(1, 3), 1)
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "no such directory; name a file in one that exists" in capsys.readouterr().err
