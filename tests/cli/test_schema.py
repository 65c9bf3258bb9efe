"""`vlpack schema`: what editors complete and check by is what the commands take."""

import json
import re
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest
import yaml

from swift_vlpack import PackingConfig
from swift_vlpack.cli import main
from swift_vlpack.cli.schema import schema_text, training_schema
from swift_vlpack.config import RECORD_PACKS, RESTART, RESUME_DATA, option_names
from swift_vlpack.host.swift_flags import flag_names
from swift_vlpack.rows.fusion_config import SourceSpec

ROOT = Path(__file__).parent.parent.parent
FILES = {
    "training": ROOT / "configs" / "vlpack.schema.json",
    "fusion": ROOT / "configs" / "vlpack.fusion.schema.json",
}
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def validator():
    schema = training_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def problems(validator, content):
    return [error.message for error in validator.iter_errors(content)]


@pytest.mark.parametrize("form", FILES)
def test_files_in_configs_are_what_the_command_writes(form, capsys):
    """CLI-20: `vlpack schema > configs/vlpack.schema.json` after an option changed."""
    flags = [] if form == "training" else [f"--{form}"]
    assert main(["schema", *flags]) == 0
    assert FILES[form].read_text() == capsys.readouterr().out, f"run `vlpack schema {' '.join(flags)} > {FILES[form]}`"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_names_its_schema_and_fits_it(path):
    """CLI-20"""
    first = path.read_text().splitlines()[0]
    (name,) = re.findall(r"^# yaml-language-server: \$schema=(\S+)$", first)
    schema = json.loads((path.parent / name).read_text())
    assert problems(jsonschema.Draft7Validator(schema), yaml.safe_load(path.read_text())) == []


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("packing_mode: sometimes", "'sometimes' is not one of ['auto', 'plan', 'buffer']"),
        ("packing_buffer: many", "'many'"),
        ("packing_drop_last: maybe", "'maybe'"),
        ("ENV: {VLPACK_PACKING_LOSS: loud}", "'loud' is not one of"),
        ("ENV: MAX_PIXELS", "'MAX_PIXELS' is not of type 'object'"),
    ],
)
def test_mistakes_are_marked(content, part, validator):
    """CLI-20"""
    assert part in "\n".join(problems(validator, yaml.safe_load(content)))


def test_what_the_commands_take_is_not_marked(validator):
    """CLI-20: YAML knows no `1e-4`, a strategy may be one's own; and no key of ms-swift is an error."""
    content = yaml.safe_load(
        "{packing_strategy: 'my.module:mine', packing_pad_to: 64, packing_min_fill_ratio: 5e-1, "
        "packing_max_images: null, packing_drop_last: 'false', packing_length: '8192', "
        "ENV: {NPROC_PER_NODE: 8, ANY_OTHER: x, VLPACK_PACKING_BUFFER: '256'}}"
    )
    of_swift = {name: [1, "a", {"b": None}] for name in flag_names() - set(option_names())}
    assert len(of_swift) > 300
    assert problems(validator, {**of_swift, **content, "lerning_rate": 1}) == []


def test_every_option_has_its_help_and_default(validator):
    """CLI-20"""
    properties = validator.schema["properties"]
    assert set(properties) == {*option_names(), "ENV"}
    for spec in fields(PackingConfig):
        assert properties[spec.name]["description"] == spec.metadata["help"]
        if spec.name != "packing_length":
            assert properties[spec.name]["default"] == spec.default
    variables = properties["ENV"]["properties"]
    assert variables["VLPACK_PACKING_MODE"]["enum"] == ["auto", "plan", "buffer"]
    fusion = json.loads(schema_text("fusion"))
    sources = fusion["properties"]["sources"]["items"]["anyOf"][1]["properties"]
    assert list(sources) == [spec.name for spec in fields(SourceSpec)]


def test_fusion_file_with_a_mistake_is_marked():
    """CLI-20"""
    fusion = jsonschema.Draft7Validator(json.loads(schema_text("fusion")))
    assert problems(fusion, {"sources": ["a.jsonl", {"dataset": "b.jsonl", "ratio": 0.5}]}) == []
    for wrong in ({"sources": [{"ratio": 1}]}, {"sources": [{"dataset": "b", "rate": 1}]}, {}, {"sources": {}}):
        assert problems(fusion, wrong) != []


def test_variables_have_the_values_that_they_take():
    """CLI-20"""
    variables = training_schema()["properties"]["ENV"]["properties"]
    assert variables[RESUME_DATA]["enum"] == [RESTART]
    assert "false" in variables[RECORD_PACKS]["description"]
