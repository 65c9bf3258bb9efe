"""Read a YAML file, with errors in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swift_vlpack.errors import ConfigError


def read_yaml(path: Path, what: str) -> Any:
    """Return the content of a file. `what` is its name in errors.

    Raises `ConfigError` if the file cannot be read, or gives a key twice: YAML itself silently lets the last one win.
    """
    import yaml  # here, because the package has to import in milliseconds

    try:
        text = path.read_text(encoding="utf-8")
        for key, lines in _repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader)):
            raise ConfigError(
                f"{what}: {key} is given {len(lines)} times, on lines {' and '.join(map(str, lines))}; keep one of them"
            )
        return yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{what}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what}: not a text in UTF-8 ({error.reason} at byte {error.start})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{what}: not YAML: {' '.join(str(error).split())}") from None


def _repeated_keys(root: Any) -> Iterator[tuple[str, list[int]]]:
    """Yield every key that a mapping has more than once, with its lines, counted from 1."""
    from yaml import MappingNode, ScalarNode, SequenceNode

    seen, left = set(), [root]
    while left:
        node = left.pop()
        if id(node) in seen:  # an alias, which may refer back to itself
            continue
        seen.add(id(node))
        if isinstance(node, SequenceNode):
            left += reversed(node.value)
        if not isinstance(node, MappingNode):
            continue
        lines: dict[tuple[str, str], list[int]] = {}
        for key, _ in node.value:
            if isinstance(key, ScalarNode):
                lines.setdefault((key.tag, key.value), []).append(key.start_mark.line + 1)
        yield from ((name, at) for (_, name), at in lines.items() if len(at) > 1)
        left += [value for _, value in reversed(node.value)]
