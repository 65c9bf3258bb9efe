"""The report as a page, and what it takes to make one."""

import subprocess
import sys

from swift_vlpack.core.account.run_log import RunLog
from swift_vlpack.view.report.report_page import report_page
from tests.view.report.test_legs import facts, report, train
from tests.view.test_page import Elements

NAME = "<script>alert(1)</script>"


def test_texts_of_a_run_cannot_become_markup(tmp_path):
    """REPORT-10: names of sources and folders are others' words."""
    folder = tmp_path / "<img src=x>"
    RunLog(folder).note("start", 0, **facts(1, sources={NAME: {"rows": 1, "ratio": 1, "asked_share": 1.0}}))
    made = report_page(report(folder))
    assert "<script>alert" not in made
    assert "<img" not in made
    assert [tag for tag, _ in Elements(made).found].count("script") == 1, "the page's own"


def test_page_asks_no_network_for_anything(tmp_path):
    """REPORT-10"""
    train(tmp_path, range(1, 4), 2, checkpoints=(2,), ends=True)
    elements = Elements(report_page(report(tmp_path)))
    assert not [attrs for _, attrs in elements.found if {"src", "href", "action"} & set(attrs)]


def test_report_loads_neither_torch_nor_ms_swift(tmp_path):
    """REPORT-9"""
    train(tmp_path, range(1, 4), 1)
    code = (
        "import sys; from swift_vlpack.cli import main; "
        f"main(['report', {str(tmp_path)!r}, '--html', {str(tmp_path / 'page.html')!r}]); "
        f"main(['report', {str(tmp_path)!r}]); "
        "print([name for name in ('torch', 'swift', 'transformers', 'datasets', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "3 packs, 6 samples, 300 tokens" in done.stdout
