"""What people see of a pass: one bar, whatever it takes."""

import pytest

from swift_vlpack.lengths.measure import Progress

pytestmark = pytest.mark.usefixtures("no_other_bars")


def lines(captured):
    """What is left on a terminal: a bar that is drawn again begins with a carriage return."""
    return [
        line.split("\r")[-1]
        for line in captured.err.split("\n")
        if "%|" in line and ("row/s" in line or "s/row" in line)
    ]


def test_stages_of_a_pass_share_one_bar(capsys):
    """CLI-15: what is looked at twice counts twice, and the bar is full at the end."""
    with Progress(30, is_shown=True) as progress:
        for name, num_rows in (("a", 10), ("b", 20)):
            for text, num in (("Looking up", num_rows), ("Checking", 3), ("Lengths", num_rows)):
                with progress.stage(f"{text} of {name}", num) as bar:
                    for _ in range(num):
                        bar.update(1)
        with progress.stage("Checking of b", 5) as bar:
            bar.update(2)  # and a difference ends it
    (line,) = lines(capsys.readouterr())
    assert "100%" in line
    assert "68/68" in line
    assert line.startswith("Checking of b: ")


def test_no_rows_or_another_rank_is_no_bar(capsys):
    """CLI-15"""
    for progress in (Progress(0, is_shown=True), Progress(4)):
        with progress, progress.stage("Lengths of a", 4) as bar:
            bar.update(4)
    assert lines(capsys.readouterr()) == []
