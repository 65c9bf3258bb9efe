"""Declare the packing options in one frozen dataclass, which checks their values when it is made.

>>> PackingConfig(packing_length=8192, packing_strategy="sequential").packing_strategy
'greedy'

The flags of `vlpack`, the keys of training files, the `VLPACK_*` variables, `docs/options.md` and the JSON schema are
all derived from the fields of `PackingConfig` and their help texts. So a new option is a new field.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cache
from typing import Any, get_type_hints

from swift_vlpack.errors import ConfigError
from swift_vlpack.gone import refuse_gone
from swift_vlpack.plan.registry import ALIASES, strategy_named
from swift_vlpack.plan.strategies import STRATEGIES
from swift_vlpack.words import counted, did_you_mean

logger = logging.getLogger(__name__)

ENV_PREFIX = "VLPACK_"
RESUME_DATA, RESTART = "VLPACK_RESUME_DATA", "restart"
RESUME_FILES, REPLACED = "VLPACK_RESUME_FILES", "replaced"
RECORD_PACKS = "VLPACK_RECORD_PACKS"
NO_OPTIONS = (RESUME_DATA, RESUME_FILES, RECORD_PACKS)
"""Variables with our prefix that are no packing options: they concern one start of a run, not its packs."""
PACKS, SAMPLES = "packs", "samples"
MEDIA = "media"
PAD_TO_LENGTH = "length"
LEAST_FILL_RATIO = 0.6
"""With a lower `packing_min_fill_ratio`, packs may leave nearly half empty. That is allowed, with a warning."""
CAPS = ("packing_max_samples", "packing_max_images", "packing_max_patches")
"""The options that limit a pack in something other than tokens."""
_HINTS = {"packing_attention": "; flash-attn is asked for by ms-swift's --attn_impl"}
"""Hints to add to the error about a value that is not among the choices of an option."""
_NEED_A_LENGTH = {
    "packing_batch": (SAMPLES, "which samples a step of a stream trains depends on how ranks and workers share it"),
    "packing_share": (MEDIA, "which rows begin alike is found out before training"),
}
"""The options with a value that needs data with a length, and why."""
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
_NONE = ("none", "null", "")


_OF_PACKS, _OF_STEPS, _OF_OBJECTIVE, _OF_RUN = "packs", "steps", "objective", "run"
"""Values of `decides`. An option decides which samples share a pack (`packs`), which planned packs a step trains
(`steps`), or what of the samples is trained (`objective`): a resume must not change these. An option that only steers a
run (`run`) may change at a resume."""


def _option(
    default: Any,
    text: str,
    choices: tuple[str, ...] = (),
    *,
    decides: str,
    takes_others: bool = False,
    is_new: bool = False,
) -> Any:
    """Declare an option: its default, its help text, and the choices that command line and documentation show.

    With `takes_others`, the choices are not all that the option takes. `is_new` marks an option that older saved states
    do not have: at its default it is not compared with them.
    """
    said = {"help": text, "choices": choices, "decides": decides, "takes_others": takes_others, "is_new": is_new}
    return field(default=default, metadata=said)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingConfig:
    """All packing options. A field's name is its flag and YAML key; in upper case after `VLPACK_`, its variable."""

    packing: bool = _option(False, "turn packing on; this is ms-swift's own flag, too", decides=_OF_RUN)
    packing_length: int = _option(MISSING, "capacity of a pack in tokens, after images are expanded", decides=_OF_PACKS)
    packing_mode: str = _option(
        "auto",
        "plan: plan all packs ahead of time, which needs data with a length; buffer: pack rows as they come; auto: "
        "plan if the data has a length, else buffer",
        ("auto", "plan", "buffer"),
        decides=_OF_RUN,
    )
    packing_strategy: str = _option(
        "binpack",
        "binpack: ms-swift's own; greedy: keeps the order (ms-swift calls it sequential); exact: packs tightest; "
        "module:function: one of your own",
        tuple(STRATEGIES),
        decides=_OF_PACKS,
        takes_others=True,
    )
    # `exact` is within hundredths of a per cent of the bound from 256 on (docs/strategies.md); the others gain by more.
    packing_batch: str = _option(
        PACKS,
        "what a batch counts: packs, so that a step trains more samples than un-packed; or samples, so that every "
        "optimizer step trains exactly the samples that it trains un-packed, packed within the step",
        (PACKS, SAMPLES),
        decides=_OF_STEPS,
        is_new=True,
    )
    effective_batch_size: int | None = _option(
        None,
        "packs of an optimizer step over all ranks (samples, under packing_batch=samples): gradient_accumulation_steps "
        "follows from it; none: from gradient_accumulation_steps",
        decides=_OF_RUN,
    )
    packing_share: str = _option(
        "none",
        "media: rows that begin with the same images or videos share these: they are computed once, and each row goes "
        "on as a branch of its own; none: every row is computed whole",
        ("none", MEDIA),
        decides=_OF_PACKS,
        is_new=True,
    )
    packing_share_max: int = _option(
        16,
        "most rows that share one beginning; more rows make more than one group, because rows of one image in one step "
        "are less random",
        decides=_OF_PACKS,
        is_new=True,
    )
    packing_buffer: int = _option(512, "samples that the packer may choose from at a time", decides=_OF_PACKS)
    packing_min_fill_ratio: float = _option(
        0.65,
        "a pack at least this full does not wait for more samples; a value below 0.6 is accepted with a warning",
        decides=_OF_PACKS,
    )
    packing_drop_last: bool = _option(
        True, "drop the underfilled last pack of an epoch, if it has at most 1 in 50 of the samples", decides=_OF_PACKS
    )
    packing_allow_single_long: bool = _option(
        True,
        "a sample of packing_length tokens or more becomes a pack of its own; false: it is left out",
        decides=_OF_PACKS,
    )
    packing_overflow: str = _option(
        "keep",
        "rows longer than packing_length: keep each whole, alone in a sequence; split them into parts, never inside an "
        "image; truncate them; or drop them",
        ("keep", "split", "truncate", "drop"),
        decides=_OF_OBJECTIVE,
    )
    packing_stride: int = _option(
        0,
        "tokens at the end of a part that the next part of the row repeats, as context without loss; never an image",
        decides=_OF_OBJECTIVE,
    )
    packing_min_len: int = _option(
        1, "fewest tokens of a part of a cut row; shorter ones are left out", decides=_OF_OBJECTIVE
    )
    packing_max_samples: int | None = _option(None, "most samples in a pack", decides=_OF_PACKS)
    packing_max_images: int | None = _option(None, "most images in a pack", decides=_OF_PACKS)
    packing_max_patches: int | None = _option(None, "most vision patches in a pack", decides=_OF_PACKS)
    packing_pad_to: int | str | None = _option(
        None,
        "give sequences a fixed shape: pad each to packing_length (length), or to the next multiple of INT tokens; the "
        "padding is a segment of its own, without loss",
        ("none", PAD_TO_LENGTH, "INT"),
        decides=_OF_RUN,
        takes_others=True,
    )
    packing_balance: bool = _option(
        True, "match the cost of the packs that ranks consume in the same step", decides=_OF_STEPS
    )
    packing_attention: str = _option(
        "auto",
        "how attention is computed: sample by sample (segments), samples of similar length together (grouped), or by "
        "one kernel for the whole sequence on CUDA (varlen, flex); auto takes varlen if it is right",
        ("auto", "segments", "grouped", "varlen", "flex"),
        decides=_OF_RUN,
    )
    packing_verify: bool = _option(
        True, "prove before step 1 that samples of a pack do not see each other", decides=_OF_RUN
    )
    mask_boundary_loss: bool = _option(
        True,
        "never train on the first token of a sample; false: train on it where the template says so",
        decides=_OF_OBJECTIVE,
    )
    train_on_eos: bool = _option(True, "train on EOS where the template says so; false: never", decides=_OF_OBJECTIVE)
    packing_any_family: bool = _option(
        False,
        "pack model families that ms-swift does not pack, if the proof passes; needs packing_verify",
        decides=_OF_RUN,
    )
    packing_loss: str = _option(
        "token",
        "what has the same weight in the loss of a step: every target token (token), every sample (sample); sqrt "
        "weighs a sample by the square root of its target tokens",
        ("token", "sample", "sqrt"),
        decides=_OF_OBJECTIVE,
    )
    packing_max_failed_share: float = _option(
        0.2, "share of the last 1,000 rows that may be unreadable, from 0 to 1; above it the run stops", decides=_OF_RUN
    )
    packing_cache_dir: str | None = _option(
        None,
        "folder in which the lengths of rows are remembered; none: vlpack/lengths in ms-swift's cache folder",
        decides=_OF_RUN,
    )
    eval_packing: bool = _option(
        False, "pack the evaluation data too; eval_loss is then the mean over all target tokens", decides=_OF_RUN
    )
    fusion_config: str | None = _option(
        None, "YAML file of sources and their ratios; none: --dataset, ratio 1 each", decides=_OF_RUN
    )

    def __post_init__(self) -> None:
        for spec in fields(self):
            object.__setattr__(self, spec.name, _typed(spec.name, getattr(self, spec.name), _TYPES[spec.name]))
        refuse_gone(*(f"{spec.name}={getattr(self, spec.name)}" for spec in fields(self)))
        alias = ALIASES.get(self.packing_strategy, self.packing_strategy)
        object.__setattr__(self, "packing_strategy", alias)
        if self.packing_mode == "static":  # CoordExp's word
            object.__setattr__(self, "packing_mode", "plan")
        strategy_named(self.packing_strategy)  # raises for an unknown strategy
        for refusal in _refusals(self):
            raise ConfigError(refusal)
        for name, why in _without_effect(self).items():
            if name in self.changed():
                _warn(f"{name}={getattr(self, name)} has no effect under {why}")
                object.__setattr__(self, name, self.__dataclass_fields__[name].default)
        if self.packing_min_fill_ratio < LEAST_FILL_RATIO:
            # Only warn: the default is higher, so the user chose this value.
            ratio = self.packing_min_fill_ratio
            _warn(f"packing_min_fill_ratio={ratio} is below {LEAST_FILL_RATIO}: packs may leave half empty")

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any], **defaults: Any) -> PackingConfig:
        """Build a config from options by name, with `defaults` for absent ones. Raises `ConfigError`."""
        known = option_names()
        refuse_gone(*options)
        for key in options:
            if key not in known:
                raise ConfigError(_unknown(key, known))
        merged = {**defaults, **options}
        if "packing_length" not in merged:
            raise ConfigError(
                "packing_length is not set: give the capacity of a pack in tokens, e.g. packing_length=8192"
            )
        return cls(**merged)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **defaults: Any) -> PackingConfig:
        """Build a config from `VLPACK_*` variables, by default those of the process; `defaults` replace absent ones."""
        return cls.from_mapping(options_in_env(environ), **defaults)

    def digest(self) -> str:
        """Return 16 hexadecimal digits that are equal if all options are equal, on every machine and Python version."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def pack_options(self) -> dict[str, Any]:
        """Return the options that decide which samples share a pack; a resume must not change them."""
        return self._deciding(_OF_PACKS)

    def step_options(self) -> dict[str, Any]:
        """Return the options that decide which planned packs are trained in a step; a resume must not change them."""
        return self._deciding(_OF_STEPS)

    def objective(self) -> dict[str, Any]:
        """Return the options that decide what of the samples is trained; a resume must not change them."""
        return self._deciding(_OF_OBJECTIVE)

    def _deciding(self, what: str) -> dict[str, Any]:
        return {
            spec.name: getattr(self, spec.name)
            for spec in fields(self)
            if spec.metadata["decides"] == what
            and not (spec.metadata["is_new"] and getattr(self, spec.name) == spec.default)
        }

    def changed(self) -> dict[str, Any]:
        """Return the options that are not at their default."""
        chosen = {spec.name: (getattr(self, spec.name), spec.default) for spec in fields(self)}
        return {name: value for name, (value, default) in chosen.items() if value != default}

    def accumulation(self, num_ranks: int, batch_size: int = 1, given: int | None = None) -> int:
        """Return how many batches of `batch_size` each rank accumulates for an optimizer step.

        It is `given`, or what `effective_batch_size` needs, or ms-swift's default, which is about 16 samples in a step.
        Raises `ConfigError` if the ranks cannot share `effective_batch_size`, or there is none.

        >>> PackingConfig(packing_length=8, effective_batch_size=32).accumulation(num_ranks=8)
        4
        """
        wanted, in_one = self.effective_batch_size, batch_size * checked_num_ranks(num_ranks)
        if wanted is None:
            return given or max(1, math.ceil(16 / in_one))
        if given is not None:
            raise ConfigError(
                f"effective_batch_size={wanted} and --gradient_accumulation_steps {given} both say what a step takes; "
                "leave one of them out"
            )
        if rest := wanted % in_one:
            shared = f"{counted(num_ranks, 'rank')}" + (f" x batches of {batch_size}" if batch_size > 1 else "")
            nearest = " or ".join(str(number) for number in (wanted - rest, wanted - rest + in_one) if number)
            raise ConfigError(f"effective_batch_size={wanted} cannot be shared by {shared}; give {nearest}")
        return wanted // in_one

    @property
    def sequence_multiple(self) -> int:
        """Return the number of tokens to whose multiple sequences are padded; 1 means no padding.

        >>> [PackingConfig(packing_length=4096, packing_pad_to=to).sequence_multiple for to in ("length", 64, None)]
        [4096, 64, 1]
        """
        if self.packing_pad_to is None:
            return 1
        return self.packing_length if self.packing_pad_to == PAD_TO_LENGTH else int(self.packing_pad_to)

    @property
    def cuts_rows(self) -> bool:
        """Tell whether rows can be cut, so that a sample may be a part of a row."""
        return self.packing_overflow != "keep"

    @property
    def shares_media(self) -> bool:
        """Tell whether rows that begin with the same media share them."""
        return self.packing_share == MEDIA

    def without_sharing(self) -> PackingConfig:
        """Return the same options under `packing_share=none`."""
        names = ("packing_share", "packing_share_max")
        usual: dict[str, Any] = {spec.name: spec.default for spec in fields(self) if spec.name in names}
        return replace(self, **usual)

    @property
    def what_is_packed(self) -> str:
        """Return the noun for what an epoch counts: "samples" if rows can be cut into several, else "rows"."""
        return "samples" if self.cuts_rows else "rows"

    @property
    def has_caps(self) -> bool:
        """Tell whether packs have a cap other than tokens."""
        return bool(self.caps)

    @property
    def caps(self) -> dict[str, int]:
        """Return the caps that are set, by option, in the order of `CAPS`."""
        return {name: cap for name in CAPS if (cap := getattr(self, name)) is not None}


_TYPES: dict[str, Any] = get_type_hints(PackingConfig)


def option_names() -> tuple[str, ...]:
    """Return all option names, in the order of declaration."""
    return tuple(spec.name for spec in fields(PackingConfig))


def chosen_options(
    environ: Mapping[str, str], file: Mapping[str, Any] | None = None, flags: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Merge the given options: a flag wins over a key of the training file, a key over a `VLPACK_*` variable.

    Options that are not given are absent from the result; their defaults apply.

    >>> chosen_options({"VLPACK_PACKING_BUFFER": "1", "VLPACK_PACKING_MAX_IMAGES": "2"}, {"packing_buffer": 3})
    {'packing_buffer': 3, 'packing_max_images': '2'}
    """
    return {**options_in_env(environ), **(file or {}), **(flags or {})}


def checked(options: Mapping[str, Any]) -> PackingConfig:
    """Check the options of a run whose `packing_length` may not be known yet, because it can come from the model."""
    pad_to = _typed("packing_pad_to", options.get("packing_pad_to"), _TYPES["packing_pad_to"])
    # Use any valid length in place of an unknown one: `packing_pad_to` has to divide it.
    any_length = pad_to if isinstance(pad_to, int) and pad_to > 0 else 1
    return PackingConfig.from_mapping(options, packing_length=any_length)


def checked_num_ranks(num_ranks: int) -> int:
    """Return the number, or raise `ConfigError` if it is not at least 1."""
    if num_ranks < 1:
        raise ConfigError(f"num_ranks must be at least 1, got {num_ranks}")
    return num_ranks


def need_config(config: Any) -> None:
    """Raise `ConfigError` for anything but a `PackingConfig`, such as a number of tokens."""
    if not isinstance(config, PackingConfig):
        hint = f"; give PackingConfig(packing_length={config})" if isinstance(config, int) else ""
        raise ConfigError(f"the options of packing are a PackingConfig, got {config!r}{hint}")


def is_planned(config: PackingConfig, *, is_sized: bool) -> bool:
    """Decide whether packs are planned ahead of time, or made as rows come. No other code decides this.

    >>> [is_planned(PackingConfig(packing_length=8), is_sized=is_sized) for is_sized in (True, False)]
    [True, False]
    """
    if is_sized:
        return config.packing_mode != "buffer"
    this_has_none = "and this has none (--streaming true, or an iterable without len())"
    for name, (value, why) in _NEED_A_LENGTH.items():
        if getattr(config, name) == value:
            raise ConfigError(
                f"{name}={value} needs data with a length, {this_has_none}: {why}; load the data sized, or leave "
                f"{name} out"
            )
    if config.packing_mode == "plan":
        raise ConfigError(
            f"packing_mode=plan needs data with a length, {this_has_none}; set packing_mode=buffer and --max_steps, or "
            "load the data sized"
        )
    return False


def is_switched_on(variable: str, environ: Mapping[str, str]) -> bool:
    """Tell whether a boolean variable that is no packing option is true, in any spelling that options accept."""
    return bool(_typed(variable, environ.get(variable) or "false", bool))


def kind_of(name: str) -> str:
    """Return the values that an option takes, as the command line shows them.

    >>> kind_of("packing_drop_last"), kind_of("packing_max_images"), kind_of("packing_mode")
    ('{true,false}', 'INT', '{auto,plan,buffer}')
    """
    (spec,) = (spec for spec in fields(PackingConfig) if spec.name == name)
    if choices := spec.metadata["choices"]:
        return "{" + ",".join(choices) + "}"
    kinds = getattr(_TYPES[name], "__args__", (_TYPES[name],))
    shown = {bool: "{true,false}", int: "INT", float: "FLOAT", str: "PATH"}
    return next(shown[kind] for kind in kinds if kind in shown)


def options_in_env(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the options that `VLPACK_*` variables set, by name. Raises `ConfigError` if a variable names no option."""
    environ = os.environ if environ is None else environ
    known = {ENV_PREFIX + name.upper(): name for name in option_names()}
    found = {key: value for key, value in environ.items() if key.startswith(ENV_PREFIX) and key not in NO_OPTIONS}
    for key in found:
        refuse_gone(key.removeprefix(ENV_PREFIX).lower())
        if key not in known:
            raise ConfigError(_unknown(key, (*known, *NO_OPTIONS)))
    return {known[key]: value for key, value in found.items()}


def _unknown(key: str, known: tuple[str, ...]) -> str:
    return f"unknown packing option {key!r}{did_you_mean(key, known) or '.'} Known: {', '.join(known)}"


def _typed(name: str, value: Any, kind: Any) -> Any:
    """Convert a value from YAML, a flag or the environment to the option's type. Raises `ConfigError`."""
    kinds = getattr(kind, "__args__", (kind,))
    if type(None) in kinds and (value is None or (isinstance(value, str) and value.strip().lower() in _NONE)):
        return None
    for one in kinds:
        if one is type(None):
            continue
        try:
            return _converted(value, one)
        except (TypeError, ValueError):
            pass
    wanted = " or ".join("none" if one is type(None) else _NOUNS[one] for one in kinds)
    raise ConfigError(f"{name} must be {wanted}, got {value!r}")


def _converted(value: Any, kind: Any) -> Any:
    """Return a value as bool, int, float or str. Raises `TypeError` or `ValueError`."""
    if kind is bool:
        text = str(value).strip().lower()
        if text in _TRUE + _FALSE:
            return text in _TRUE
    elif kind is str:
        if isinstance(value, str):
            return value
    elif not isinstance(value, bool) and (kind is float or isinstance(value, str) or int(value) == value):
        return kind(value)
    raise ValueError(value)


_NOUNS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _refusals(config: PackingConfig) -> Iterator[str]:
    """Yield what is wrong with the options, and the way out."""
    for spec in fields(config):
        choices, value = spec.metadata["choices"], getattr(config, spec.name)
        if choices and value not in choices and not spec.metadata["takes_others"]:
            hint = did_you_mean(value, choices) or _HINTS.get(spec.name, "")
            yield f"{spec.name} must be one of {', '.join(choices)}, got {value!r}{hint}"
    for name in ("packing_length", "packing_buffer", "packing_min_len", "effective_batch_size", *CAPS):
        value = getattr(config, name)
        if value is not None and value <= 0:
            way_out = ", or leave it out for no cap" if name in CAPS else ""
            yield f"{name} must be at least 1, got {value}; give a positive number{way_out}"
    if config.packing_stride < 0:
        yield f"packing_stride must be at least 0, got {config.packing_stride}; 0 repeats nothing"
    for name in ("packing_min_fill_ratio", "packing_max_failed_share"):
        if not 0 <= getattr(config, name) <= 1:
            yield f"{name} must be between 0 and 1, got {getattr(config, name)}"
    if config.packing_any_family and not config.packing_verify:
        yield (
            "packing_any_family=true with packing_verify=false: only the proof can tell whether a family that ms-swift "
            "does not pack can be packed; leave packing_verify at true"
        )
    if config.packing_strategy == "binpack" and config.has_caps:
        given = ", ".join(f"{name}={cap}" for name, cap in config.caps.items())
        yield (
            f"packing_strategy=binpack has no caps other than tokens and would ignore {given}; set "
            "packing_strategy=exact (or best_fit, first_fit, greedy), or remove the cap"
        )
    multiple, length = config.packing_pad_to, config.packing_length
    if multiple not in (None, PAD_TO_LENGTH):
        if not isinstance(multiple, int) or multiple <= 0:
            yield f"packing_pad_to must be none, {PAD_TO_LENGTH} or a number of tokens, got {multiple!r}"
        elif length % multiple:
            fitting = [str(one) for one in (length - length % multiple, length + multiple - length % multiple) if one]
            yield (
                f"packing_pad_to={multiple} would make sequences longer than packing_length ({length}), which is not a "
                f"multiple of it; set packing_length to {' or '.join(fitting)}"
            )
    for name, (value, why) in _NEED_A_LENGTH.items():
        if getattr(config, name) == value and config.packing_mode == "buffer":
            yield (
                f"packing_mode=buffer packs rows as they come, and {name}={value} plans them: {why}; leave "
                f"packing_mode out, or {name}"
            )
    if config.packing_share_max < 2:
        yield f"packing_share_max must be at least 2, got {config.packing_share_max}; packing_share=none shares nothing"


def _without_effect(config: PackingConfig) -> dict[str, str]:
    """Return the options that another option makes useless, with that option in words. They keep their defaults."""
    useless = {}
    if config.packing_batch == SAMPLES:
        why = "packing_batch=samples, which packs each step by itself and drops nothing"
        useless = dict.fromkeys(("packing_buffer", "packing_min_fill_ratio", "packing_drop_last"), why)
    if not config.shares_media:
        useless["packing_share_max"] = "packing_share=none; packing_share=media shares"
    return useless


@cache
def _warn(said: str) -> None:
    """Warn once in a process, which may make its config many times."""
    logger.warning("%s", said)
