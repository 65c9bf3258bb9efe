import pytest

from swift_vlpack.lengths.progress import one_bar, stage

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
    with one_bar(30, is_shown=True):
        for name, num_rows in (("a", 10), ("b", 20)):
            for text, num in (("Looking up", num_rows), ("Checking", 3), ("Lengths", num_rows)):
                with stage(f"{text} of {name}", num, is_shown=True) as bar:
                    for _ in range(num):
                        bar.update(1)
        with stage("Checking of b", 5, is_shown=True) as bar:
            bar.update(2)  # and a difference ends it
    (line,) = lines(capsys.readouterr())
    assert "100%" in line
    assert "68/68" in line
    assert line.startswith("Checking of b: ")


def test_stage_of_its_own_has_its_own_bar_and_nothing_is_no_bar(capsys):
    """CLI-15"""
    with stage("Lengths of a", 4, is_shown=True) as bar:
        bar.update(4)
    with stage("Lengths of a", 0, is_shown=True), stage("Lengths of a", 4, is_shown=False) as bar:
        bar.update(4)
    with one_bar(9, is_shown=False), stage("Lengths of a", 4, is_shown=True) as bar:
        bar.update(4)
    (line,) = lines(capsys.readouterr())
    assert "4/4" in line
