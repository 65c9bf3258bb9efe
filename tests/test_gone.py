"""What earlier versions had is refused by name, wherever a person can write it (ARCH-12)."""

import pytest

from swift_vlpack.cli import parse
from swift_vlpack.config import PackingConfig, option_names, options_in_env
from swift_vlpack.errors import ConfigError
from swift_vlpack.gone import GONE
from swift_vlpack.host.launch import train_launch

OPTIONS = [what for what in GONE if not what.startswith("vlpack ") and "=" not in what]
VALUES = [what for what in GONE if "=" in what]
COMMANDS = [what for what in GONE if what.startswith("vlpack ")]


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_is_gone_is_refused_in_flags_files_variables_and_python(name, tmp_path):
    """ARCH-12."""
    file = tmp_path / "run.yaml"
    file.write_text(f"{name}: 1\n")
    ways = (
        lambda: train_launch([f"--{name}", "1"], {}),
        lambda: train_launch([str(file)], {}),
        lambda: options_in_env({f"VLPACK_{name.upper()}": "1"}),
        lambda: PackingConfig.from_mapping({name: 1}, packing_length=8),
    )
    assert name not in option_names()
    for way in ways:
        with pytest.raises(ConfigError, match=f"{name} is gone: "):
            way()


@pytest.mark.parametrize("written", VALUES)
def test_a_value_that_is_gone_is_refused(written):
    """ARCH-12."""
    name, _, value = written.partition("=")
    with pytest.raises(ConfigError, match=f"{written} is gone: "):
        PackingConfig(packing_length=8, **{name: value})


@pytest.mark.parametrize("written", COMMANDS)
def test_a_command_or_flag_that_is_gone_is_refused(written):
    """ARCH-12."""
    with pytest.raises(ConfigError, match=f"{written} is gone: "):
        parse(written.split()[1:])
