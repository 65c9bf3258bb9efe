import ast
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from swift_vlpack import PackingConfig, plan
from swift_vlpack import config as config_room
from swift_vlpack.config import checked, is_planned, option_names
from swift_vlpack.errors import ConfigError
from tests.parsed import nodes_of

PACKAGE = Path(__file__).parents[1] / "swift_vlpack"
DESIGN_OPTIONS = {
    "packing": False,
    "packing_mode": "auto",
    "packing_strategy": "binpack",
    "packing_batch": "packs",
    "effective_batch_size": None,
    "packing_share": "none",
    "packing_share_max": 16,
    "packing_buffer": 512,
    "packing_min_fill_ratio": 0.65,
    "packing_drop_last": True,
    "packing_allow_single_long": True,
    "packing_overflow": "keep",
    "packing_stride": 0,
    "packing_min_len": 1,
    "packing_max_samples": None,
    "packing_max_images": None,
    "packing_max_patches": None,
    "packing_pad_to": None,
    "packing_balance": True,
    "packing_attention": "auto",
    "packing_verify": True,
    "mask_boundary_loss": True,
    "train_on_eos": True,
    "packing_any_family": False,
    "packing_loss": "token",
    "packing_max_failed_share": 0.2,
    "packing_cache_dir": None,
    "eval_packing": False,
    "fusion_config": None,
}


def test_every_option_is_there_with_its_default():
    """CONF-1"""
    config = PackingConfig(packing_length=8192)
    assert {name: getattr(config, name) for name in DESIGN_OPTIONS} == DESIGN_OPTIONS
    assert set(option_names()) == {*DESIGN_OPTIONS, "packing_length"}
    assert all(spec.metadata["help"] for spec in fields(PackingConfig))


def test_config_is_frozen_and_keyword_only():
    """CONF-1"""
    config = PackingConfig(packing_length=8)
    with pytest.raises(FrozenInstanceError):
        config.packing_length = 9
    with pytest.raises(TypeError):
        PackingConfig(True)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"packing_length": 0}, ["packing_length", "0", "at least 1"]),
        ({"packing_length": "many"}, ["packing_length", "'many'", "whole number"]),
        ({"packing_length": True}, ["packing_length", "True", "whole number"]),
        ({"packing_length": 8.5}, ["packing_length", "8.5", "whole number"]),
        ({"packing_buffer": -1}, ["packing_buffer", "-1", "at least 1"]),
        ({"packing_attention": "flash"}, ["packing_attention", "'flash'", "auto, segments", "--attn_impl"]),
        ({"packing_loss": "tokens"}, ["packing_loss", "'tokens'", "token, sample, sqrt"]),
        ({"packing_pad_to": "longest"}, ["packing_pad_to", "'longest'", "none, length or a number of tokens"]),
        ({"packing_pad_to": True}, ["packing_pad_to", "True", "a whole number or a text or none"]),
        ({"packing_pad_to": -8}, ["packing_pad_to", "-8", "none, length or a number of tokens"]),
        ({"packing_pad_to": 100}, ["packing_pad_to=100", "8192", "not a multiple", "8100 or 8200"]),
        ({"packing_pad_to": 10000}, ["packing_pad_to=10000", "packing_length to 10000"]),
        ({"packing_mode": "magic"}, ["packing_mode", "'magic'", "auto, plan, buffer"]),
        ({"packing_strategy": "bfd"}, ["packing_strategy", "'bfd'", "best_fit", "sequential"]),
        ({"packing_min_fill_ratio": 1.5}, ["packing_min_fill_ratio", "1.5", "between 0 and 1"]),
        ({"packing_drop_last": "perhaps"}, ["packing_drop_last", "'perhaps'", "true or false"]),
        ({"packing_max_images": 0, "packing_strategy": "exact"}, ["packing_max_images", "0", "no cap"]),
        ({"fusion_config": 3}, ["fusion_config", "3", "text"]),
    ],
)
def test_impossible_value_is_refused_by_name(options, parts):
    """CONF-1"""
    with pytest.raises(ConfigError) as refused:
        PackingConfig(**{"packing_length": 8192, **options})
    for part in parts:
        assert part in str(refused.value)


def test_unknown_key_is_refused_and_the_known_are_listed():
    """CONF-2"""
    with pytest.raises(ConfigError) as refused:
        PackingConfig.from_mapping({"packing_bufer": 3}, packing_length=8)
    message = str(refused.value)
    assert "'packing_bufer'" in message
    assert "did you mean packing_buffer?" in message
    for name in option_names():
        assert name in message


def test_defaults_of_the_caller_give_way_to_options():
    """CONF-2"""
    assert PackingConfig.from_mapping({}, packing_length=8).packing_length == 8
    assert PackingConfig.from_mapping({"packing_length": 16}, packing_length=8).packing_length == 16
    with pytest.raises(ConfigError, match="packing_length is not set"):
        PackingConfig.from_mapping({})


def test_environment_sets_options_and_stray_variables_are_refused():
    """CONF-3"""
    environ = {"VLPACK_PACKING_BUFFER": "256", "VLPACK_PACKING_DROP_LAST": "False", "PATH": "/bin"}
    config = PackingConfig.from_env(environ, packing_length=8)
    assert (config.packing_buffer, config.packing_drop_last) == (256, False)
    with pytest.raises(ConfigError, match=r"VLPACK_PACKING_WINDOW.*VLPACK_PACKING_BUFFER"):
        PackingConfig.from_env({"VLPACK_PACKING_WINDOW": "1"}, packing_length=8)


def test_text_and_typed_values_give_the_same_config():
    """CONF-4"""
    text = {
        "packing_length": "4096",
        "packing_min_fill_ratio": "0.7",
        "packing_strategy": "exact",
        "packing_max_images": "none",
        "packing_max_samples": "5",
        "packing_pad_to": "64",
        "eval_packing": "true",
    }
    typed = {
        "packing_length": 4096.0,
        "packing_min_fill_ratio": 0.7,
        "packing_strategy": "exact",
        "packing_max_images": None,
        "packing_max_samples": 5,
        "packing_pad_to": 64,
        "eval_packing": True,
    }
    assert PackingConfig.from_mapping(text) == PackingConfig.from_mapping(typed)
    assert PackingConfig.from_mapping(text).digest() == PackingConfig.from_mapping(typed).digest()


OTHER_VALUES = {
    "packing": True,
    "packing_length": 9,
    "packing_mode": "plan",
    "packing_batch": "samples",
    "effective_batch_size": 4,
    "packing_share": "none",
    "packing_share_max": 4,
    "packing_strategy": "greedy",
    "packing_buffer": 3,
    "packing_min_fill_ratio": 0.9,
    "packing_drop_last": False,
    "packing_allow_single_long": False,
    "packing_overflow": "drop",
    "packing_stride": 2,
    "packing_min_len": 2,
    "packing_max_samples": 4,
    "packing_max_images": 4,
    "packing_max_patches": 4,
    "packing_pad_to": "length",
    "packing_balance": False,
    "packing_attention": "grouped",
    "packing_verify": False,
    "mask_boundary_loss": False,
    "train_on_eos": False,
    "packing_any_family": True,
    "packing_loss": "sqrt",
    "packing_max_failed_share": 0.5,
    "packing_cache_dir": "elsewhere",
    "eval_packing": True,
    "fusion_config": "mix.yaml",
}


def test_digests_are_of_the_values_of_all_options():
    """CONF-5: one option changed at a time, each to something else than its default, gives so many digests."""
    base = {"packing_length": 8, "packing_strategy": "exact", "packing_overflow": "split", "packing_share": "media"}
    assert set(OTHER_VALUES) == set(option_names())
    assert all({**DESIGN_OPTIONS, **base}[name] != value for name, value in OTHER_VALUES.items())
    digests = {PackingConfig(**{**base, name: value}).digest() for name, value in OTHER_VALUES.items()}
    assert len(digests | {PackingConfig(**base).digest()}) == len(OTHER_VALUES) + 1


# What an option of the packer does to 60 items of 1 to 60 tokens, every seventh with three images and 30 patches.
EFFECTS = {
    "packing_length": 80,
    "packing_strategy": "greedy",
    "packing_buffer": 4,
    "packing_min_fill_ratio": 1.0,
    "packing_drop_last": True,
    "packing_allow_single_long": False,
    "packing_max_samples": 2,
    "packing_max_images": 2,
    "packing_max_patches": 29,
    "packing_balance": False,
}
SHOWN_ELSEWHERE = {
    *("packing", "packing_mode", "packing_attention", "packing_verify", "packing_any_family"),
    *("packing_max_failed_share", "packing_cache_dir", "eval_packing", "fusion_config"),
    *("packing_overflow", "packing_stride", "packing_min_len"),
    *("mask_boundary_loss", "train_on_eos", "packing_loss", "packing_pad_to", "packing_batch"),
    *("packing_share", "packing_share_max", "effective_batch_size"),
}
"""What these do is shown beside the code that does it."""


def outcome(**options):
    """The packs of every rank, in order, and what is left out."""
    base = {"packing_length": 60, "packing_strategy": "best_fit", "packing_buffer": 16, "packing_drop_last": False}
    lengths = [(37 * n) % 60 + 1 for n in range(61)]
    images = [3 * (n % 7 == 0) for n in range(61)]
    config = PackingConfig(**{**base, "packing_min_fill_ratio": 0.97, **options})
    made = plan(lengths, config, images=images, patches=[10 * count for count in images], seed=3)
    return list(made.align(2)), made.num_dropped


@pytest.mark.parametrize("name", EFFECTS)
def test_every_option_of_the_packer_changes_the_packs(name):
    """CONF-11"""
    assert outcome(**{name: EFFECTS[name]}) != outcome()


@pytest.mark.parametrize("name", option_names())
def test_every_option_is_read_where_it_acts(name):
    """CONF-11: an option that nobody reads has no effect, whatever its help text says."""
    read = {
        node.attr
        for path in PACKAGE.rglob("*.py")
        if path != PACKAGE / "config.py"
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and not is_of(node, "args", "template")
    }
    assert name in read
    assert (name in EFFECTS) != (name in SHOWN_ELSEWHERE)


def is_of(node, *names):
    return isinstance(node.value, ast.Name) and node.value.id in names


def test_options_are_checked_before_the_length_is_known():
    """PAD-6 CONF-4: it may be whatever the multiple goes into."""
    assert checked({"packing_pad_to": "48"}).packing_pad_to == 48
    assert checked({"packing_pad_to": "length", "packing_length": 10}).sequence_multiple == 10
    with pytest.raises(ConfigError, match=r"packing_pad_to=48 .* packing_length to 48 or 96"):
        checked({"packing_pad_to": "48", "packing_length": 50})
    with pytest.raises(ConfigError, match="packing_pad_to must be none, length"):
        checked({"packing_pad_to": "0"})


def test_digest_is_the_same_in_another_process_with_another_hash_seed():
    """CONF-5"""
    code = "from swift_vlpack import PackingConfig; print(PackingConfig(packing_length=8192).digest())"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert runs == {PackingConfig(packing_length=8192).digest()}


def test_sequential_is_greedy():
    """CONF-6"""
    assert PackingConfig(packing_length=8, packing_strategy="sequential") == PackingConfig(
        packing_length=8, packing_strategy="greedy"
    )


@pytest.mark.parametrize("cap", ["packing_max_samples", "packing_max_images", "packing_max_patches"])
def test_binpack_with_a_cap_is_refused_with_the_remedy(cap):
    """CONF-7"""
    with pytest.raises(ConfigError, match=f"{cap}=3.*packing_strategy=exact"):
        PackingConfig(packing_length=8, **{cap: 3})


def test_low_fill_ratio_is_accepted_with_a_warning(caplog):
    """CONF-8: one, however often a process reads its options."""
    for _ in range(3):  # 0.43 is of this test alone
        assert PackingConfig(packing_length=8, packing_min_fill_ratio=0.43).packing_min_fill_ratio == 0.43
    assert caplog.text.count("packing_min_fill_ratio=0.43 is below 0.6") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing_share": "images"}, "packing_share must be one of none, media, got 'images'"),
        ({"packing_share": "media", "packing_share_max": 1}, "must be at least 2, got 1; packing_share=none"),
        ({"packing_share": "media", "packing_mode": "buffer"}, "packing_mode=buffer packs rows as they come"),
    ],
)
def test_sharing_that_cannot_be_is_refused(options, message):
    """SHARE-2"""
    with pytest.raises(ConfigError, match=message):
        PackingConfig(packing_length=8, **options)


@pytest.mark.parametrize(
    ("other", "name", "value"),
    [
        ({"packing_batch": "samples"}, "packing_buffer", 77),
        ({"packing_batch": "samples"}, "packing_min_fill_ratio", 0.77),
        ({"packing_batch": "samples"}, "packing_drop_last", False),
        ({}, "packing_share_max", 7),
    ],
)
def test_option_without_effect_is_ignored_with_a_warning(other, name, value, caplog):
    """CONF-14: the plan and the state of a run are those without it."""
    config_room._warn.cache_clear()
    config = PackingConfig(packing_length=8, **other, **{name: value})
    assert config == PackingConfig(packing_length=8, **other)
    assert f"{name}={value} has no effect under packing_" in caplog.text


def test_streams_share_nothing():
    """SHARE-2: with the way out."""
    config = PackingConfig(packing_length=8, packing_share="media")
    assert is_planned(config, is_sized=True)
    with pytest.raises(ConfigError, match=r"packing_share=media needs data with a length.*load the data sized, or"):
        is_planned(config, is_sized=False)


NEW = {"packing_batch": "samples", "packing_share": "media", "packing_share_max": 4}


def test_every_option_says_what_it_decides_and_a_resume_keeps_all_but_those_of_the_run():
    """CONF-11: an option that decides packs and does not say so would be resumed under another value."""
    config = PackingConfig(packing_length=8, **NEW)
    kept = (config.pack_options(), config.step_options(), config.objective())
    steers_the_run = {spec.name for spec in fields(config) if spec.metadata["decides"] == "run"}
    assert steers_the_run.union(*kept) == set(option_names())
    assert steers_the_run == {
        "packing", "packing_mode", "packing_attention", "packing_verify", "packing_any_family", "packing_pad_to",
        "packing_max_failed_share", "packing_cache_dir", "eval_packing", "fusion_config", "effective_batch_size",
    }, "every other option is part of a saved state; see `decides` in swift_vlpack/config.py"  # fmt: skip
    assert config.step_options() == {"packing_batch": "samples", "packing_balance": True}
    assert not {*NEW} & {*PackingConfig(packing_length=8).pack_options()}, "older states have none of them"
    assert PackingConfig(packing_length=8).step_options() == {"packing_balance": True}, "as older states have it"
    assert config.objective() == {
        "packing_overflow": "keep", "packing_stride": 0, "packing_min_len": 1, "mask_boundary_loss": True,
        "train_on_eos": True, "packing_loss": "token",
    }  # fmt: skip
