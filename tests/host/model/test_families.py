"""Families as they train packed; docs/families.md says what was found."""

import pytest

from swift_vlpack.errors import IsolationError
from swift_vlpack.proof.prove import run_proof
from tests.family_models import FAMILIES
from tests.host.model.family_checks import Checked
from tests.host.model.family_table import DOCS, UNTESTED, page, results_of, saved
from tests.host.proof.runners import template_model
from tests.marks import telling
from tests.sounds import sound

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning"),  # of ms-swift's InternVL
    pytest.mark.filterwarnings("ignore:'(aifc|audioop|sunau)' is deprecated:DeprecationWarning"),  # of audioread
]
BY_CI = ("InternVL (HF)", "LLaVA-NeXT (HF)", "Gemma 3", "GLM-4.5V", "gpt-oss")
NUM_IMAGES = 60


def case(name):
    """Some are tried by CI, the others when somebody asks."""
    return telling(name) if name in BY_CI else pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [case(name) for name in FAMILIES])
def test_family_is_what_its_row_in_the_docs_says(name, small_folder, tmp_path):
    """FAM-3: lengths, gradients, evaluation, proof, sabotages and a run."""
    if FAMILIES[name].has_sounds:
        pytest.importorskip("qwen_omni_utils")
    assert results_of(name, tmp_path / "family", NUM_IMAGES) == saved()[0][name]


def test_page_is_made_of_the_results_and_has_every_family():
    """FAM-3"""
    results, num_images = saved()
    untried = set(FAMILIES) - set(results)
    assert not untried, "".join(f"\nmake families NAMES='\"{name}\"'" for name in untried)
    assert set(results) == set(FAMILIES), "run `make families`, which forgets families that are gone"
    assert (DOCS / "families.md").read_text() == page(results, num_images), "run `make families`"
    untested = {name for names in UNTESTED for name in names.split(", ")}
    assert not untested & set(FAMILIES), "tried now: take it out of UNTESTED in tests/host/model/family_table.py"


def test_no_family_that_trains_is_wrong_and_no_sabotage_passes():
    """FAM-3 FAM-4: equal, proved and every sabotage stopped; or it does not train at all."""
    for name, found in saved()[0].items():
        if found["run"] == "trained":
            assert (found["gradients"], found["evaluation"], found["proof"]) == ("equal", "equal", "verified"), name
            stopped, _, tried = found["sabotages"].split()[:3]
            assert stopped == tried, f"{name}: the proof lets a sabotage pass: {found['sabotages']}"
            assert not found["lengths"].startswith("fails"), name


@pytest.mark.slow
def test_short_sounds_of_qwen3_omni_are_stopped(small_folder, tmp_path):
    """FAM-4: what its tower hears of less than a second depends on how long the others of the batch are."""
    pytest.importorskip("qwen_omni_utils")
    checked = Checked(FAMILIES["Qwen3-Omni"], tmp_path / "family")
    checked.rows["sound"]["audios"] = [sound(tmp_path, "short", 0.6)]
    with pytest.raises(IsolationError, match=r"on the others of its batch, without packing too.*sound:"):
        run_proof(template_model(checked), checked.samples())


@pytest.mark.slow
def test_images_side_by_side_of_idefics3_are_stopped(small_folder, tmp_path):
    """FAM-4: ms-swift gives two such images the tokens of one, and the rest of their features go to the next sample."""
    checked = Checked(FAMILIES["Idefics3"], tmp_path / "family")
    images = checked.rows["images"]
    images["messages"][0]["content"] = "<image><image>compare them"
    with pytest.raises(IsolationError, match="images, videos or sounds of one sample reach another"):
        run_proof(template_model(checked), checked.samples())
