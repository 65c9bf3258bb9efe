"""The choice for a model, its template and its packs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from swift_vlpack import PackingDataset, choose_attention
from swift_vlpack.attention import attention
from swift_vlpack.attention.attention import NAME
from swift_vlpack.config import PackingConfig
from swift_vlpack.errors import ConfigError
from swift_vlpack.host.use_attention import use_attention
from tests.data_rows import text_row


def packs(**options):
    """All that is asked of packs."""
    return SimpleNamespace(config=PackingConfig(packing_length=200, **options))


def test_another_attention_is_left_alone_and_has_no_kernels_to_choose_from(tiny):
    """ATTN-9"""
    loaded = tiny("qwen2_5_vl")
    loaded.model.set_attn_implementation("sdpa")
    try:
        assert choose_attention(loaded.model, loaded.template, packs()) == "attention sdpa, as asked for"
        with pytest.raises(ConfigError, match=r"packing_attention=grouped is for the attention vlpack, .* has sdpa"):
            choose_attention(loaded.model, loaded.template, packs(packing_attention="grouped"))
    finally:
        loaded.model.set_attn_implementation(NAME)


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2"])
def test_attention_that_knows_no_prefixes_is_refused_where_rows_share(name, tiny, monkeypatch):
    """SHARE-49: in a trainer of one's own, whose model brings its attention; by the packs and by the choice."""
    loaded = tiny("qwen2_5_vl")
    monkeypatch.setattr(loaded.model.config.text_config, "_attn_implementation_internal", name)
    monkeypatch.setattr(loaded.template, "model", loaded.model, raising=False)
    rows, packing = [text_row()], PackingConfig(packing_length=200)
    PackingDataset(rows, loaded.template, packing)
    said = f"attention '{name}', which takes a prefix and its branches for one sample, so packing_share=media"
    with pytest.raises(ConfigError, match=said):
        PackingDataset(rows, loaded.template, replace(packing, packing_share="media"))
    with pytest.raises(ConfigError, match=said):
        choose_attention(loaded.model, loaded.template, packs(packing_share="media"))
    assert choose_attention(loaded.model, loaded.template, packs()) == f"attention {name}, as asked for"


def test_attention_that_a_model_brings_is_replaced_unless_it_was_asked_for(tiny, monkeypatch):
    """SHARE-49: so a saved config that names flash-attn brings none into a run in which rows share."""
    model = tiny("qwen2_5_vl").model
    for config in (model.config, model.config.text_config):
        monkeypatch.setattr(config, "_attn_implementation_internal", "flash_attention_2")
    use_attention(model, "flash_attention_2")
    assert attention.name_of(model.config) == "flash_attention_2"
    use_attention(model, None)
    assert attention.name_of(model.config) == NAME
