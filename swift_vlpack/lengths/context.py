"""Collect everything but the row that a length depends on. Its digest, the *context*, is part of every cache key.

The context has the state of the template, of its processor, tokenizer and model config; versions of packages; the bytes
of the user's own Python files; and environment variables: those that ms-swift's code reads, and those that the user's
files name. It is taken before any row is encoded, because encoding may change a counter in one of these.

Some causes are in no context (a data file that a plugin reads, a setting inside of an object, a name that is put
together). They show in the lengths themselves: every start encodes a few remembered rows again (`measure.py`).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

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
_MAY_BE_WORKING_COPIES = ("swift_vlpack", "swift", "transformers", "qwen_vl_utils")
"""Packages that people run from a checkout, where a version says nothing."""
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
    r"|router_aux_loss_coef|name_or_path|quantization_config"
)
"""Config values that are not compared: training and options, which are compared themselves, change them."""
_OF_LANGUAGE = re.compile(r"(text|llm|language|talker)_config")
"""Configs that are not in the key, because no length depends on the language model."""
_OF_VISION = re.compile("vision|visual|vit|image|audio")
_READ = re.compile(r"""(?:get_env_args\(|getenv\(|environ\.get\(|environ\[)\s*['"](\w+)['"]""")
"""The ways in which ms-swift reads a variable. `get_env_args` takes names in lower case as well."""
_QUOTED = re.compile(r"""(?<=['"])\w{2,}(?=['"])|(?<=\$)\w{2,}|(?<=\$\{)\w{2,}""")
_IMPORTED = re.compile(r"^\s*(?:from\s+(\w+)|import\s+([\w., ]+))", re.MULTILINE)
_LOADING = ("swift.template.vision_utils", "qwen_vl_utils.vision_process")  # the code that loads media
_OF_A_PROCESS = re.compile(
    # the ranks of a launcher
    r"((LOCAL|NODE|GROUP|ROLE)_)?RANK|((LOCAL|GROUP|ROLE)_)?WORLD_SIZE|ROLE_NAME|NPROC_PER_NODE|NNODES"
    r"|MASTER_(ADDR|PORT)|(TORCHELASTIC|SLURM|OMPI|PMI|PMIX|LSB|PBS|KUBERNETES|RAY)_\w+"
    # a shell and its user
    r"|_|USER|LOGNAME|HOSTNAME|SHELL|SHLVL|(OLD)?PWD|PATH|LD_\w+|LS_COLORS|TERM|COLUMNS|LINES|TMPDIR|TMP|TEMP"
    r"|(XDG|SSH|CONDA|VIRTUAL_ENV)\w*"
    # logs, devices and libraries
    r"|(NCCL|GLOO|CUDA|TORCH_NCCL|PYTEST|TQDM|WANDB|SWANLAB|MLFLOW|MODELSCOPE)_\w+|PYTHON[A-Z]+|\w*VERBOSITY"
    r"|(OMP|MKL|OPENBLAS)_NUM_THREADS|\w*LOG_?LEVEL|HF_(HOME|TOKEN|ENDPOINT|ASSETS_CACHE|(HUB|DATASETS|XET)_\w+)"
)
"""Variables by which launchers, shells and loggers tell processes apart: never in the key, whoever names them. They
differ between the ranks of a run, or between `vlpack plan` and the run, but lengths do not."""
MAY_DIFFER = ("variables of plugins", "files beside plugins")
"""Dependencies that may differ between ranks. Each rank then has keys of its own, and measures its rows under them."""


def dependencies_of(template: Any, plugins: Iterable[str]) -> dict[str, Any]:
    """Return everything that a length depends on, by name. `plugins` are the files of `--external_plugins`."""
    processor = template.processor
    parts = _parts_of(processor)
    folder = getattr(getattr(template, "model_info", None), "model_dir", None)
    settings = {name: value for name, value in vars(template).items() if not _NOT_OF_LENGTH.fullmatch(name)}
    helpers = [template.template_meta, template.loss_scale, *_agent_template(template)]
    own = own_files([template, *helpers, processor, template.tokenizer, *parts.values()], plugins)
    of_swift = variables_named_by(type(template))
    return {
        "packages": {
            name: _version(name) for name in sorted({*_PACKAGES, *chain.from_iterable(map(_imports_of, own))})
        },
        "template": [f"{type(template).__module__}.{type(template).__qualname__}", _values_of_class(type(template))],
        "settings": settings,
        "meta": {name: value for name, value in vars(template.template_meta).items() if name != "template_cls"},
        "helpers": [[helper, _values_of_class(type(helper))] for helper in helpers],
        "code": _digests_of_files({*own, *_files_of_working_copies()}),
        MAY_DIFFER[1]: _digests_of_files({*chain.from_iterable(map(_beside, own))} - own),
        "processor": _without(folder, {name: _state_of(part) for name, part in {"": processor, **parts}.items()}),
        "config": _without(folder, _state_of_config(getattr(template, "config", None))),
        "tokenizer": {
            "content": _digest_of_tokenizer(template.tokenizer),
            **_without(folder, _state_of(template.tokenizer)),
        },
        "chat_templates": [getattr(part, "chat_template", None) for part in (processor, template.tokenizer)],
        "variables": {name: os.environ[name] for name in sorted(of_swift)},
        MAY_DIFFER[0]: {name: os.environ[name] for name in sorted(_variables_quoted_in(own) - of_swift)},
        "constants": _constants("qwen_vl_utils.vision_process"),
    }


# -- the user's own code ----------------------------------------------------------------------------------------------


def own_files(objects: Iterable[Any], plugins: Iterable[str] = ()) -> set[str]:
    """Return the user's own Python files: of the objects' classes, of plugins, and of what any of these import.

    A file in a package stands for the whole package. An installed package is not followed: its version stands for it.
    """
    bases = [base for each in objects for base in type(each).__mro__]
    todo = [file for base in bases if (file := _file_of(base)) is not None]
    todo += [os.path.abspath(os.path.expanduser(plugin)) for plugin in plugins]
    found: set[str] = set()
    while todo:
        file = todo.pop()
        if file in found or _is_installed(file) or not os.path.isfile(file):
            continue
        found.add(file)
        if _is_in_package(file):
            todo += _beside(file)
        todo += [origin for name in _imports_of(file) if (origin := _origin(name)) is not None]
    return found


def _imports_of(file: str) -> set[str]:
    """Return the packages and modules that a file imports."""
    found = _IMPORTED.findall(_text_of(file))
    names = [name for one, several in found for name in (one, *several.split(","))]
    return {name.strip().partition(".")[0].partition(" ")[0] for name in names} - {""}


def _text_of(file: str) -> str:
    return Path(file).read_text(encoding="utf-8", errors="replace")


@cache
def _files_of_working_copies() -> tuple[str, ...]:
    origins = [origin for name in _MAY_BE_WORKING_COPIES if (origin := _origin(name)) is not None]
    return tuple(file for origin in origins if not _is_in_site(origin) for file in _beside(origin))


def _digests_of_files(files: Iterable[str]) -> list[str]:
    return sorted(hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest() for file in files)


def _beside(file: str) -> Iterator[str]:
    """Yield the files of a file's package; of a file in no package, those in its folder and in packages beside it."""
    folder = Path(file).parent
    if not _is_in_package(file):
        yield from map(str, folder.glob("*.py"))
        for made in folder.glob("*/__init__.py"):
            yield from _files_of_package(made.parent)
        return
    # transformers puts the code of all models and revisions that this machine has cached into one package.
    while (folder.parent / "__init__.py").is_file() and "transformers_modules" not in folder.parts:
        folder = folder.parent
    yield from _files_of_package(folder)


def _files_of_package(folder: Path) -> Iterator[str]:
    for where, folders, files in os.walk(folder):
        # What cannot be imported is none of the package: `.venv`, `site-packages`.
        folders[:] = [name for name in folders if name.isidentifier()]
        yield from (os.path.join(where, name) for name in files if name.endswith(".py"))


def _is_in_package(file: str) -> bool:
    return (Path(file).parent / "__init__.py").is_file()


def _file_of(made: type) -> str | None:
    return getattr(sys.modules.get(made.__module__), "__file__", None)


def _origin(package: str) -> str | None:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    return None if spec is None else spec.origin


@cache
def _is_installed(file: str) -> bool:
    """Tell whether a file is part of Python, of an installed package, or of a working copy of a package we know."""
    return _is_in_site(file) or file in _files_of_working_copies()


def _is_in_site(file: str) -> bool:
    parts = Path(file).parts
    own = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    return bool({"site-packages", "dist-packages"} & set(parts)) or any(Path(file).is_relative_to(one) for one in own)


def variables_named_by(template_class: type) -> set[str]:
    """Return the variables that are set and that the code of the template and of loading media reads."""
    of_template = [file for base in template_class.__mro__ if (file := _file_of(base)) is not None]
    loading = [file for module in _LOADING if (file := _origin_of_module(module)) is not None]
    return _of_length({name.upper() for file in {*of_template, *loading} for name in _READ.findall(_text_of(file))})


def _variables_quoted_in(files: Iterable[str]) -> set[str]:
    """Return the variables that are set and whose names stand in quotes: whoever reads one has to name it."""
    texts = list(map(_text_of, files))
    quoted = {name for text in texts for name in _QUOTED.findall(text)}
    return _of_length(quoted | {name.upper() for text in texts for name in _READ.findall(text)})


def _of_length(names: set[str]) -> set[str]:
    found = (name for name in names if not _NOT_OF_LENGTH.fullmatch(name) and not _OF_A_PROCESS.fullmatch(name))
    return {name for name in found if name in os.environ}


def _origin_of_module(module: str) -> str | None:
    return _origin(module) if _origin(module.partition(".")[0]) is not None else None


# -- state ------------------------------------------------------------------------------------------------------------


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
        if _NOT_OF_CONFIG.fullmatch(name) or _OF_LANGUAGE.fullmatch(name):
            continue
        if isinstance(value, (list, tuple)) or (not isinstance(value, Mapping) and is_plain(value)):
            found[name] = value
        elif name.endswith("_config") or _OF_VISION.search(name):
            found[name] = _state_of_config(value)
    return found


def values_of_config(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return all values of a model's config by dotted name, also those by which a language model computes."""
    found: dict[str, Any] = {}
    for name, value in vars(config).items() if config is not None else ():
        if _NOT_OF_CONFIG.fullmatch(name):
            continue
        if hasattr(value, "to_dict"):
            found |= values_of_config(value, f"{prefix}{name}.")
        elif is_plain(value):
            found[f"{prefix}{name}"] = value
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


def _constants(module: str) -> dict[str, Any]:
    """Return the upper-case settings of a module, each with the environment variable of the same name.

    ms-swift writes MAX_PIXELS and the like into the module when it loads a model, which may be before or after this.
    """
    if _origin_of_module(module) is None:
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
    # Digest the tokenizer in memory and not its file, because tokens may have been added since it was loaded. Leave out
    # what comes before the tokens: a call may set padding, and a saved copy keeps it.
    text = (
        backend.to_str().partition('"added_tokens"')[2]
        if backend is not None
        else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    )
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# -- digests ----------------------------------------------------------------------------------------------------------


def digest_of(value: Any, num_bytes: int) -> str:
    """Return a digest of the value as JSON, `num_bytes` bytes in hexadecimal. It is the same in every process."""
    text = json.dumps(value, sort_keys=True, default=plain)
    return hashlib.blake2b(text.encode(), digest_size=num_bytes).hexdigest()


def by_name(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted name, to name what differs. A long value becomes its digest."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= by_name(value, f"{prefix}{name}." if name else prefix)
            continue
        text = json.dumps(value, sort_keys=True, default=plain)
        found[f"{prefix}{name}"] = json.loads(text) if len(text) <= 80 else f"digest {digest_of(value, 4)}"
    return found


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
