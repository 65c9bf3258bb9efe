"""Collect everything but the row that a length depends on. Its digest, the *context*, is part of every cache key.

A key that covers too much only costs cache misses; a key that covers too little gives wrong lengths. So there is no
list of settings that matter. Everything is taken, except for what is known not to matter: the template's attributes,
the state of its processor and parts, the vision settings of the model's config, the constants of qwen_vl_utils, the
environment variables that the template's source names, and that source itself, with the plugins that may have patched
it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from swift_vlpack.lengths.environment import is_of_launchers, is_of_ranks
from swift_vlpack.lengths.source_code import (
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
    r"packing|padding_free|model|dummy_model|processor|tokenizer|config|model_info"
    r"|\w*_cache|_handles|_deepspeed_initialize|TOKENIZERS_PARALLELISM|root_image_dir|ROOT_IMAGE_DIR"
)
"""Attributes and variables that change from run to run, or within a run, and do not change lengths. Folders of images
are among them, because the files that a row names are part of the row's key."""
_NOT_OF_PART = re.compile(
    r"model_info|model_meta|global_vars|\w*name_or_path|transformers_version|_commit_hash|auto_map|device|dtype|torch_dtype"
    r"|init_inputs|init_kwargs|_vocab|_merges|verbose|deprecation_warnings|files_loaded|_in_target_context_manager"
    r"|_processor_class|processor_class|_auto_class|padding_side|_should_update_post_processor"
)
"""Attributes of processors and tokenizers that are not in the key: they name an origin, or loading and training change
them."""
_NOT_OF_CONFIG = re.compile(
    r"_\w*|\w*dtype|attn_implementation|transformers_version|architectures|auto_map|use_cache|return_dict"
    r"|output_\w+|gradient_checkpointing|(pad|bos|eos)_token_id|num_labels|id2label|label2id|problem_type"
    r"|(text|llm|language|quantization|talker)_config"
)
"""Config values that are not in the key: training changes them, they say how a model computes, or they belong to the
language model."""
_OF_VISION = re.compile("vision|visual|vit|image|audio")
_VARIABLE = re.compile(r"""(?:get_env_args\(|getenv\(|environ\.get\(|environ\[)\s*['"](\w+)['"]""")
_LOADING = ("swift.template.vision_utils", "qwen_vl_utils.vision_process")  # the code that loads media


def dependencies_of(template: Any, plugins: Iterable[str]) -> dict[str, Any]:
    """Return everything that a length depends on, by name. `plugins` are the files of `--external_plugins`."""
    processor = template.processor
    parts = _parts_of(processor)
    folder = getattr(getattr(template, "model_info", None), "model_dir", None)
    settings = {name: value for name, value in vars(template).items() if not _NOT_OF_LENGTH.fullmatch(name)}
    helpers = [template.template_meta, template.loss_scale, *_agent_template(template)]
    makers = [template, *helpers, processor, template.tokenizer, *parts.values()]
    code = code_of(makers, plugins)
    return {
        "packages": {name: _version(name) for name in sorted({*_PACKAGES, *code.packages})},
        "working copies": {name: digest_of_package(name) for name in COVERED},
        "template": [f"{type(template).__module__}.{type(template).__qualname__}", _values_of_class(type(template))],
        "settings": settings,
        "meta": {name: value for name, value in vars(template.template_meta).items() if name != "template_cls"},
        "helpers": [[helper, _values_of_class(type(helper))] for helper in helpers],
        "code": [digest_of_files(code.files), digest_of_functions(makers)],
        "processor": _without(folder, {name: _state_of(part) for name, part in {"": processor, **parts}.items()}),
        "config": _without(folder, _state_of_config(getattr(template, "config", None))),
        "tokenizer": [_digest_of_tokenizer(template.tokenizer), _without(folder, _state_of(template.tokenizer))],
        "chat_templates": [getattr(part, "chat_template", None) for part in (processor, template.tokenizer)],
        "variables": {name: os.environ.get(name) for name in sorted(variables_read_by(type(template), code.files))},
        "constants": _constants("qwen_vl_utils.vision_process"),
    }


def _values_of_class(made: type) -> dict[str, Any]:
    """Return the plain attributes of a class and of its bases."""
    values = {name: value for base in reversed(made.__mro__) for name, value in vars(base).items() if is_plain(value)}
    # Sort and remove repeats, because ms-swift appends to this list for every template that it makes.
    values["placeholder_tokens"] = sorted({*map(str, values.get("placeholder_tokens", ()))})
    return {name: value for name, value in values.items() if name[:2] != "__" and not _NOT_OF_LENGTH.fullmatch(name)}


def _parts_of(processor: Any) -> dict[str, Any]:
    """Return the parts of a processor by name (`image_processor`), without its tokenizer."""
    parts = vars(processor).items()
    return {name: part for name, part in parts if hasattr(part, "to_dict") and not hasattr(part, "get_vocab")}


def _state_of(part: Any) -> dict[str, Any]:
    """Return the plain attributes of a processor or tokenizer, and what `to_dict` adds to them."""
    listed = part.to_dict() if hasattr(part, "to_dict") else {}
    # Filter by name first: `is_plain` would look through the whole vocabulary of a tokenizer, which takes long.
    own = {name: value for name, value in vars(part).items() if not _NOT_OF_PART.fullmatch(name)}
    own = {name: value for name, value in own.items() if is_plain(value) or isinstance(value, np.generic)}
    return {name: value for name, value in {**listed, **own}.items() if not _NOT_OF_PART.fullmatch(name)}


def _state_of_config(config: Any) -> dict[str, Any]:
    """Return the plain values of a model's config and of the configs in it, without the language model's.

    Reads the attributes, because `to_dict` may leave out defaults.
    """
    values = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    found = {}
    for name, value in values.items():
        if _NOT_OF_CONFIG.fullmatch(name):
            continue
        if isinstance(value, (list, tuple)) or (not isinstance(value, Mapping) and is_plain(value)):
            found[name] = value
        elif name.endswith("_config") or _OF_VISION.search(name):
            found[name] = _state_of_config(value)
    return found


def _without(folder: str | None, value: Any) -> Any:
    """Remove the model's folder from the paths in a state, so that a copy of the folder elsewhere has the same key."""
    if isinstance(value, Mapping):
        return {str(name): _without(folder, inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without(folder, inner) for inner in value]
    return value.replace(folder, "") if folder and isinstance(value, str) else value


def _agent_template(template: Any) -> list[Any]:
    """Return the agent template in a list; an empty list if none is chosen, because ms-swift's property raises then."""
    return [template.agent_template] if template._agent_template is not None else []


def variables_read_by(template_class: type, files: Iterable[str] = ()) -> set[str]:
    """Return the environment variables named in the source of the template, the user's files, or the media loaders."""
    own = [file for file in files if not is_installed(file)]
    found = set()
    for file in {*source_files(template_class), *own, *_files_of(*_LOADING)}:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
        # ms-swift looks up names in upper case.
        found |= {name.upper() for name in _VARIABLE.findall(text)}
    # Keep variables of the machine: if the source of a template or plugin names LANG, its prompt may depend on LANG.
    return {name for name in found if not _NOT_OF_LENGTH.fullmatch(name) and not is_of_ranks(name)}


def is_of_length(name: str) -> bool:
    """Tell whether a length may depend on a variable that was read while rows were encoded, judging by its name."""
    return not _NOT_OF_LENGTH.fullmatch(name) and not is_of_launchers(name)


def _files_of(*modules: str) -> Iterator[str]:
    for module in modules:
        if importlib.util.find_spec(module.split(".")[0]) is not None:
            found = importlib.util.find_spec(module)
            yield from [found.origin] if found is not None and found.origin is not None else []


def _constants(module: str) -> dict[str, Any]:
    """Return the upper-case settings of a module, each with the environment variable of the same name.

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
    # Digest the tokenizer in memory and not its file, because tokens may have been added since it was loaded.
    text = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# -- digests ----------------------------------------------------------------------------------------------------------


def digest_of(value: Any, num_bytes: int) -> str:
    """Return a digest of the value as JSON, `num_bytes` bytes in hexadecimal. It is the same in every process."""
    text = json.dumps(value, sort_keys=True, default=plain)
    return hashlib.blake2b(text.encode(), digest_size=num_bytes).hexdigest()


def plain(value: Any) -> Any:
    """Replace a value that JSON cannot hold: sets and arrays by lists, other objects by class and plain attributes."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    own = {name: inner for name, inner in getattr(value, "__dict__", {}).items() if is_plain(inner)}
    return [f"{type(value).__module__}.{type(value).__qualname__}", getattr(value, "__qualname__", None), own]


def is_plain(value: Any) -> bool:
    """Tell whether JSON can hold the value as it is."""
    if isinstance(value, dict):
        return all(map(is_plain, (*value, *value.values())))
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (str, int, float, bool))
