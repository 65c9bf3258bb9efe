"""Reading YAML: a key that is given twice, and what is no YAML."""

import pytest

from swift_vlpack.errors import ConfigError
from swift_vlpack.host.launch import train_launch
from swift_vlpack.rows.fusion_config import read_fusion_config
from swift_vlpack.yaml_files import read_yaml


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: m\npacking_length: 8192\nmodel: n\n", "model is given 2 times, on lines 1 and 3; keep one of them"),
        ("ENV:\n  A: 1\n  B: 2\n  A: 3\nmodel: m\n", "A is given 2 times, on lines 2 and 4"),
        ("a: 1\n\na: 2\n# a\n'a': 3\n", "a is given 3 times, on lines 1 and 3 and 5"),
        ('{"model": "m",\n "model": "n"}', "model is given 2 times, on lines 1 and 2"),
        ("key: [1, {b: 1, b: 1}]\n", "b is given 2 times, on lines 1 and 1"),
    ],
)
def test_key_that_is_given_twice_is_refused_with_both_lines(text, said, tmp_path):
    """CLI-30"""
    path = tmp_path / "train.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        train_launch([str(path)], {})
    assert str(refused.value).startswith(f"{path}: {said}")


def test_sources_are_read_as_strictly(tmp_path):
    """CLI-30"""
    path = tmp_path / "sources.yaml"
    path.write_text("sources:\n  - dataset: a.jsonl\n    ratio: 0.5\n    ratio: 1\n")
    with pytest.raises(ConfigError, match=r"sources.yaml: ratio is given 2 times, on lines 3 and 4"):
        read_fusion_config(str(path))


def test_keys_of_other_mappings_and_merged_ones_are_no_repetition(tmp_path):
    """CLI-30"""
    path = tmp_path / "train.yaml"
    path.write_text("base: &base {a: 1, b: 2}\nother:\n  <<: *base\n  a: 3\nlist: [{a: 1}, {a: 2}]\nagain: *base\n")
    content = read_yaml(path, "it")
    assert content["other"] == {"a": 3, "b": 2}


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"\xff\xfe\x00", "not a text in UTF-8"), (b"a: [1", "not YAML"), (None, "cannot be read")],
)
def test_file_that_is_no_yaml_is_one_line(content, said, tmp_path):
    """CLI-5"""
    path = tmp_path / "train.yaml"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_yaml(path, str(path))
