"""`vlpack verify`, in process: what training relies on is proved, refuted, or cannot be looked at."""

import json
import re
import shutil
from pathlib import Path

import pytest
from swift.template import Template
from swift.template.templates.qwen import Qwen2VLTemplate
from swift.utils import utils as swift_utils

from swift_vlpack.cli.verify import verify_text
from swift_vlpack.feed.collate import Collator
from swift_vlpack.host.launch import plugin_path
from swift_vlpack.lengths.cache_folder import remembered_in
from tests.cli.in_process import run_here
from tests.data_rows import mixed_rows, text_row, write_jsonl
from tests.environment import packing_options
from tests.host.runs import packed_argv

FAMILY = "qwen2_5_vl"
SABOTAGE = Path(__file__).parent.parent / "plugins" / "sabotage.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two sources, one with images."""
    folder = tmp_path_factory.mktemp("data")
    photos = write_jsonl(folder / "photos.jsonl", mixed_rows(folder / "images", 12, largest=120))
    chat = write_jsonl(folder / "chat.jsonl", [text_row(f"question {n}", "word " * (5 * n + 1)) for n in range(8)])
    return [photos, chat]


@pytest.fixture
def verify(small_folder, data, tmp_path, monkeypatch, capfd):
    """Run it as its process does; the exit code, the report, and stderr."""
    packing_options()
    plugin = shutil.copy(SABOTAGE, tmp_path / "sabotage.py")  # ms-swift loads a file once in a process
    # The plugin puts its own in place of these, which must not outlive the test.
    for owner, name in ((Qwen2VLTemplate, "packing_row"), (Template, "encode"), (Collator, "sequence")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(swift_utils, "_external_files", list(swift_utils._external_files))
    monkeypatch.setenv("VLPACK_PACKING_CACHE_DIR", str(tmp_path / "lengths"))
    monkeypatch.setenv("SABOTAGE", str(tmp_path / "sabotage.txt"))

    def verified(sabotage="none", **flags):
        (tmp_path / "sabotage.txt").write_text(sabotage)
        plugins = {"external_plugins": [plugin_path(), plugin]}
        flags = {"dataset": data, "max_length": 256, **plugins, **flags}
        code = run_here(["verify", *packed_argv(small_folder(FAMILY), FAMILY, tmp_path / "out", **flags), "--json"])
        said = capfd.readouterr()
        return code, json.loads(said.out) if said.out else None, said.err

    return verified


@pytest.mark.slow
@pytest.mark.telling
def test_run_that_holds_and_lengths_that_do_not_any_more(verify, tmp_path, never_again):
    """CLI-16 CLI-17 CLI-19: remembered lengths that are wrong, where a start has not looked at them again."""
    code, report, said = verify()
    assert code == 0, said[-3000:]
    assert report["holds"] is report["isolation"]["holds"] is report["lengths"]["holds"] is True
    assert not (tmp_path / "out").exists(), "no output folder"
    assert (report["attention"]["name"], report["dtype"], report["device"]) == ("vlpack", "float32", "cpu")
    isolation = report["isolation"]
    assert isolation["said"].startswith("isolation verified: max difference 0.0 over")
    assert isolation["in_training"].startswith("isolation verified in training: the first batch of the trainer (")
    measured, limits = isolation["measured"], isolation["limits"]
    assert measured["moved_by_others"] == 0
    assert 0 < measured["packed_to_alone"] <= limits["packed_to_alone"]
    assert measured["in_float32"] == {name: measured[name] for name in ("packed_to_alone", "gradient")}
    assert isolation["not_compared"] == []
    assert 0 < measured["gradient"] <= limits["gradient"]
    photos, chat = report["lengths"]["sources"]
    names = ("source", "check", "num_rows", "num_compared")
    assert [photos[name] for name in names] == ["photos", "equal", 12, 12]
    assert [chat[name] for name in names] == ["chat", "equal", 8, 8]
    remembered = {group.about.source: group for group in remembered_in(tmp_path / "lengths")}
    assert {name: group.num_rows for name, group in remembered.items()} == {"photos": 12, "chat": 8}
    assert (remembered["chat"].about.template, remembered["chat"].about.model_type) == (FAMILY, FAMILY)
    said = verify_text(report)
    for part in (
        "isolation verified",
        "isolation verified in training",
        "photos: equal",
        "(12 rows of 12 compared)",
        "result       holds (",
    ):
        assert part in said

    code, report, _ = verify("lengths")
    assert code == 1
    assert (report["holds"], report["isolation"]["holds"], report["lengths"]["holds"]) == (False, True, False)
    photos, chat = report["lengths"]["sources"]
    assert (photos["check"], chat["check"], len(chat["differing"])) == ("differing", "differing", 8)
    assert re.search(r"chat\.jsonl:\d+: length \d+ where \d+ were planned$", chat["differing"][0])
    said = verify_text(report)
    for part in ("chat: differing", "8 rows, other sizes:", "DOES NOT HOLD: lengths"):
        assert part in said


def test_samples_that_are_not_kept_apart_are_a_refutation_with_its_cause(verify):
    """CLI-16"""
    code, report, _ = verify("positions")
    assert code == 1
    assert (report["holds"], report["isolation"]["holds"], report["lengths"]["holds"]) == (False, False, True)
    assert "; in its sample alone it has 0" in report["isolation"]["cause"]
    assert "DOES NOT HOLD: isolation" in verify_text(report)


def test_stream_has_no_lengths_to_check_and_is_proved_all_the_same(verify):
    """CLI-16 CLI-17"""
    code, report, _ = verify(streaming="true", max_steps=3)
    assert code == 0
    assert [(source["check"], source["num_rows"]) for source in report["lengths"]["sources"]] == [("as read", None)]
    assert report["isolation"]["measured"]["moved_by_others"] == 0


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ({"dataset": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"packing": "false"}, "--packing false has no packs"),
    ],
    ids=str,
)
def test_what_cannot_be_looked_at_is_a_mistake_and_no_refutation(flags, part, verify):
    """CLI-16"""
    code, report, said = verify(**flags)
    assert (code, report) == (2, None)
    assert part in said
