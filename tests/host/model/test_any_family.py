"""Families that ms-swift does not pack: let through where asked, and only for a run that proves its rows."""

import pytest

from swift_vlpack import PackingConfig, prepare_model
from swift_vlpack.errors import ConfigError, IsolationError
from swift_vlpack.feed.sequence import completed
from tests.data_rows import image_row, text_row, write_jsonl
from tests.family_models import FAMILIES, load
from tests.host import runs
from tests.images import photo

LLAVA = FAMILIES["LLaVA 1.5 (HF)"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("llava")
    LLAVA.build(made)
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    rows = [text_row("how are you", "fine, thanks")] * 2
    rows += [image_row([photo(folder, str(n), 80 + n, 60, seed=n)], "what is it", f"picture {n}") for n in range(6)]
    return write_jsonl(folder / "rows.jsonl", rows)


@pytest.fixture
def run(folder, data, tmp_path, monkeypatch):
    def start(**options):
        for name, value in options.items():
            monkeypatch.setenv(f"VLPACK_{name.upper()}", value)
        flags = {"dataset": data, "split_dataset_ratio": 0, "packing_length": 200, "max_steps": 2}
        return runs.train(runs.packed_argv(folder, LLAVA.model_type, tmp_path / "run", **flags))

    return start


def test_family_that_swift_does_not_pack_is_refused_with_the_way_out(run):
    """FAM-1"""
    with pytest.raises(ConfigError, match=r"ms-swift does not pack the template 'llava1_5_hf'.*packing_any_family=tr"):
        run()


def test_any_family_packs_it_once_its_rows_are_proved(run, caplog):
    """FAM-1"""
    result = run(packing_any_family="true")
    assert result["log_history"][0]["loss"] > 0
    assert caplog.text.index("ms-swift does not pack the template 'llava1_5_hf'") < caplog.text.index("isolation veri")


def test_any_family_trains_nothing_when_the_proof_fails(run, monkeypatch):
    """FAM-1: the images of a row exchanged, as a template might."""
    from swift.template import TEMPLATE_MAPPING

    kind = TEMPLATE_MAPPING["llava1_5_hf"].template_cls
    collate = kind._data_collator_mm_data

    def exchanged(self, batch):
        made = collate(self, batch)
        if "pixel_values" in made:
            made["pixel_values"] = made["pixel_values"].roll(1, 0)
        return made

    monkeypatch.setattr(kind, "_data_collator_mm_data", exchanged)
    with pytest.raises(IsolationError):
        run(packing_any_family="true")


def test_any_family_needs_the_proof():
    """FAM-1"""
    with pytest.raises(ConfigError, match="packing_any_family=true with packing_verify=false"):
        PackingConfig(packing_length=8, packing_any_family=True, packing_verify=False)


def test_prepare_model_lets_it_through_when_asked(folder):
    """FAM-1: and says no to media that the template itself says no to."""
    model, template = load(folder, LLAVA)
    with pytest.raises(ConfigError, match=r"prepare_model\(model, template, any_family=True\), then prove"):
        prepare_model(model, template)
    template.support_padding_free = False
    with pytest.raises(ConfigError, match="declares that it cannot be packed"):
        prepare_model(model, template, any_family=True)
    template.support_padding_free = None
    assert prepare_model(model, template, any_family=True) is model
    assert model.config.text_config._attn_implementation == "vlpack"


@pytest.mark.parametrize("shapes", [((1, 2, 3, 4, 4), (2, 3, 3, 4, 4)), ((1, 3, 6, 4), (1, 3, 4, 8))])
def test_pictures_of_many_shapes_are_filled_up_as_a_processor_does(shapes):
    """FAM-2: tiles that differ in number, pictures that differ in size."""
    import torch

    samples = [
        {"input_ids": [1], "pixel_values": torch.randn(shape), "image_sizes": torch.ones(shape[0], 2)}
        for shape in shapes
    ]
    pixels = [sample["pixel_values"] for sample in samples]
    completed(samples)
    assert "pixel_values" not in samples[1]
    joined, at = samples[0]["pixel_values"], 0
    for picture in pixels:
        here = joined[at : at + len(picture)]
        at += len(picture)
        inside = tuple(slice(size) for size in picture.shape)
        assert torch.equal(here[inside], picture)
        assert here.abs().sum() == picture.abs().sum()
    assert at == len(joined)


def test_types_of_tokens_are_completed_or_left_out():
    """FAM-2: a text has none; types of the media alone, as GLM's template gives them, fit no row."""
    import torch

    text = {"input_ids": [1, 2]}
    media = {"input_ids": [3, 4, 5], "mm_token_type_ids": torch.tensor([0, 1, 0])}
    completed([text, media])
    assert text["mm_token_type_ids"].tolist() == [0, 0]
    wrong = {"input_ids": [3, 4, 5], "mm_token_type_ids": torch.tensor([[0, 1]])}
    completed([text, wrong])
    assert "mm_token_type_ids" not in {**text, **wrong}
