"""Everything but the row that a length depends on, in one digest: the key of remembered lengths.

Too much of it only measures again; too little would be wrong. So what a template reads is found, not listed: its
attributes, its processor's settings, the constants of qwen_vl_utils, the environment variables that its source names,
and that source itself, with the plugins that may have patched it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from swift_vlpack.host.lengths.source_code import (
    COVERED,
    code_of,
    digest_of_files,
    digest_of_functions,
    digest_of_package,
    is_installed,
    source_files,
)

_PACKAGES = (
    "swift-vlpack",
    "ms-swift",
    "transformers",
    "tokenizers",
    "qwen-vl-utils",
    "pillow",
    "torch",
    "torchvision",
    "decord",
    "torchcodec",
)
_NOT_OF_LENGTH = re.compile(
    r"packing|padding_free|vlpack_row_cutter|model|dummy_model|processor|tokenizer|config|model_info"
    r"|\w*_cache|_handles|_deepspeed_initialize|TOKENIZERS_PARALLELISM|root_image_dir|ROOT_IMAGE_DIR"
)
"""Attributes and variables that change from run to run, or within one, and lengths do not. Where images are to be found
is in the state of the files that a row names."""
_VARIABLE = re.compile(r"""(?:get_env_args\(|getenv\(|environ\.get\(|environ\[)\s*['"](\w+)['"]""")


_LOADING = ("swift.template.vision_utils", "qwen_vl_utils.vision_process")


def context_of(template: Any, plugins: Iterable[str] = ()) -> str:
    """32 hexadecimal digits that are equal when all of it is; `plugins` are the files of `--external_plugins`."""
    return _digest_of(dependencies_of(template, plugins), 16)


def digests_of(template: Any, plugins: Iterable[str] = ()) -> dict[str, str]:
    """A digest of each part, so that ranks that differ can say in what."""
    return {name: _digest_of(part, 4) for name, part in dependencies_of(template, plugins).items()}


def _digest_of(value: Any, num_bytes: int) -> str:
    text = json.dumps(value, sort_keys=True, default=_plain)
    return hashlib.blake2b(text.encode(), digest_size=num_bytes).hexdigest()


def dependencies_of(template: Any, plugins: Iterable[str] = ()) -> dict[str, Any]:
    """What a length depends on, by name."""
    processor = template.processor
    parts = {
        name: getattr(processor, name, None) for name in ("image_processor", "video_processor", "feature_extractor")
    }
    settings = {name: value for name, value in vars(template).items() if not _NOT_OF_LENGTH.fullmatch(name)}
    helpers = [template.template_meta, template.loss_scale, *_agent_template(template)]
    makers = [template, *helpers, processor, template.tokenizer, *filter(None, parts.values())]
    code = code_of(makers, plugins)
    return {
        "packages": {name: _version(name) for name in sorted({*_PACKAGES, *code.packages})},
        "working copies": {name: digest_of_package(name) for name in COVERED},
        "template": f"{type(template).__module__}.{type(template).__qualname__}",
        "settings": settings,
        "meta": vars(template.template_meta),
        "helpers": helpers,
        "code": [digest_of_files(code.files), digest_of_functions(makers)],
        "processor": {name: part.to_dict() for name, part in parts.items() if hasattr(part, "to_dict")},
        "tokenizer": _digest_of_tokenizer(template.tokenizer),
        "chat_templates": [getattr(part, "chat_template", None) for part in (processor, template.tokenizer)],
        "variables": {name: os.environ.get(name) for name in sorted(variables_read_by(type(template), code.files))},
        "constants": _constants("qwen_vl_utils.vision_process"),
    }


def _agent_template(template: Any) -> list[Any]:
    """The one that is chosen, by flag or by the template's kind, if any is; asking for another one raises."""
    return [template.agent_template] if template._agent_template is not None else []


def variables_read_by(template_class: type, files: Iterable[str] = ()) -> set[str]:
    """Environment variables named by the source of the template, by files of the user's own and ms-swift's loading."""
    own = [file for file in files if not is_installed(file)]
    found = set()
    for file in {*source_files(template_class), *own, *_files_of(*_LOADING)}:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
        # In upper case, as ms-swift looks for the names that it is given.
        found |= {name.upper() for name in _VARIABLE.findall(text)}
    return {name for name in found if not _NOT_OF_LENGTH.fullmatch(name)}


def _files_of(*modules: str) -> Iterator[str]:
    for module in modules:
        if importlib.util.find_spec(module.split(".")[0]) is not None:
            found = importlib.util.find_spec(module)
            yield from [found.origin] if found is not None and found.origin is not None else []


def _constants(module: str) -> dict[str, Any]:
    """The upper-case numbers of a module and the variables of the same name.

    ms-swift writes MAX_PIXELS and the like into the module when it loads a model, which may be before or after this.
    """
    if importlib.util.find_spec(module.split(".")[0]) is None:
        return {}
    loaded = vars(importlib.import_module(module))
    numbers = {name: value for name, value in loaded.items() if name.isupper() and isinstance(value, (int, float, str))}
    return {name: (value, os.environ.get(name)) for name, value in numbers.items()}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _digest_of_tokenizer(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # As text: the file of a tokenizer may be the same while tokens were added in memory.
    text = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    """Of an object without a text of its own: its class, and its plain attributes."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    own = {name: inner for name, inner in getattr(value, "__dict__", {}).items() if _is_plain(inner)}
    return [f"{type(value).__module__}.{type(value).__qualname__}", getattr(value, "__qualname__", None), own]


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float, bool))
