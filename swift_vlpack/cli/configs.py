"""`vlpack configs`: list the ready training files, and copy one into a folder of the user."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from swift_vlpack.cli.command import Command
from swift_vlpack.errors import ConfigError
from swift_vlpack.host.launch import plugin_path
from swift_vlpack.host.path_checks import check_folder
from swift_vlpack.words import did_you_mean

FOLDER = Path(__file__).parents[1] / "configs"
"""Folder of the ready files. The wheel contains it; in a checkout it is a link to the folder `configs`."""
_NAMED = re.compile(r"\$schema=(\S+)|^fusion_config: configs/(\S+)", re.MULTILINE)
_PLUGIN = "swift_vlpack/plugin/vlpack.py"


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--copy",
        metavar="NAME",
        help="copy this file, and those that it names, into configs/ of this folder; nothing there is overwritten",
    )


def _run(args: argparse.Namespace) -> int:
    names = sorted(path.name for path in FOLDER.glob("*.yaml"))
    if args.copy is None:
        width = max(map(len, names))
        for name in names:
            print(f"{name:{width}}  {about(FOLDER / name)}")
        print("\nvlpack configs --copy NAME copies one of them into configs/ of this folder")
        return 0
    name = args.copy if args.copy in names else f"{args.copy}.yaml"
    if name not in names:
        raise ConfigError(f"--copy {args.copy}: there is no such file{did_you_mean(name, names)}")
    for path in copied(name, Path("configs")):
        print(path)
    return 0


def about(path: Path) -> str:
    """Return the first sentence of the comment at the top of a file, below its commands."""
    lines = path.read_text(encoding="utf-8").splitlines()
    top = [line.removeprefix("#").strip() for line in lines[1:] if line.startswith("#")]
    words = top[top.index("") + 1 :] if "" in top else top
    return re.split(r"[.;] ", " ".join(words))[0].rstrip(".")


def copied(name: str, folder: Path) -> list[Path]:
    """Copy a ready file and the files that it names. Returns the paths of the copies."""
    check_folder("--copy", folder)
    files = [name, *_files_named(name)]
    for file in files:
        if (folder / file).exists() and (folder / file).read_text(encoding="utf-8") != _text(file):
            raise ConfigError(f"--copy {name}: {folder / file} exists and is another one; move it out of the way")
    folder.mkdir(exist_ok=True)
    for file in files:
        (folder / file).write_text(_text(file), encoding="utf-8")
    return [folder / file for file in files]


def _files_named(name: str) -> Iterator[str]:
    for groups in _NAMED.findall((FOLDER / name).read_text(encoding="utf-8")):
        for file in filter(None, groups):
            yield file
            if file.endswith(".yaml"):
                yield from _files_named(file)


def _text(file: str) -> str:
    """Return the content of a ready file, with the path of the installed plugin in place of the repository's."""
    return (FOLDER / file).read_text(encoding="utf-8").replace(f"- {_PLUGIN}", f"- {plugin_path()}")


CONFIGS = Command(
    name="configs",
    text="list ready training files, and copy one",
    usage="vlpack configs [--copy NAME]",
    description=(
        "List the ready training files, one for each kind of run, or copy one, with the files that it names, into "
        "configs/ of the current folder. Change its model, dataset and output_dir, and run it."
    ),
    add_flags=_add_flags,
    run=_run,
)
