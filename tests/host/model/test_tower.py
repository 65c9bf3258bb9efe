"""Which families enter their vision tower for a sequence without an image, once they are told that it is sharded."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from swift_vlpack.feed.sequence import layout, packed_sequence
from swift_vlpack.host.tower import tolerate_packs_without_images, towers_not_entered
from tests.family_models import FAMILIES
from tests.host.model.family_checks import NOT_OF_THE_MODEL, Checked
from tests.marks import TELLING

SEEN = [name for name, one in FAMILIES.items() if one.has_images and one.has_texts and not one.has_sounds]
"""Without Omni: ms-swift's empty sound has 128 bands, and the tiny models have fewer."""


SKIP_IT = (
    *("LLaVA 1.5 (HF)", "LLaVA-NeXT (HF)", "LLaVA-OneVision (HF)", "Gemma 3", "Gemma 4", "MiniCPM-V 4.6", "Idefics3"),
    *("Llama 3.2 Vision", "Llama 4", "Mistral 3"),
)
"""Families that docs/doors.md names: ms-swift shows their tower nothing where there is no image."""
BY_CI = ("InternVL (HF)", "GLM-4.1V", "LLaVA-NeXT (HF)", "MiniCPM-V 4.6")


def case(name):
    return pytest.param(name, marks=TELLING if name in BY_CI else pytest.mark.slow)


@pytest.mark.parametrize("name", [case(name) for name in SEEN])
def test_family_enters_its_tower_without_an_image_or_is_known_not_to(name, small_folder, tmp_path, monkeypatch):
    """RANKS-17"""
    checked = Checked(FAMILIES[name], tmp_path / "family")
    template, model = checked.template, checked.model
    args = SimpleNamespace(gradient_checkpointing_kwargs=None, ddp_find_unused_parameters=None, fsdp="full_shard")
    tolerate_packs_without_images(model, args)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")

    def run():
        inputs = packed_sequence(template, [])
        with layout(template, packed=True), torch.no_grad():
            model(**{key: value for key, value in inputs.items() if key not in NOT_OF_THE_MODEL})

    skipped = towers_not_entered(model, model.model_meta.model_arch.vision_tower, run)
    assert bool(skipped) == (name in SKIP_IT)
    said = (Path(__file__).parents[3] / "docs" / "doors.md").read_text()
    assert name.partition(" (")[0] in said
