"""`vlpack sft` and `vlpack pt`: check the run, then replace this process by its training process."""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import NoReturn

from swift_vlpack.cli.command import Command, add_packing_flags
from swift_vlpack.cli.in_run import need_ms_swift, replace_process
from swift_vlpack.host.launch import check_launch, train_launch


def _run(args: argparse.Namespace) -> NoReturn:
    need_ms_swift()
    launch = train_launch(args.flags, os.environ, command=args.command)
    check_launch(launch)
    print(f"run sh: `{' '.join(launch.command)}`", flush=True)  # the line that `swift sft` prints
    replace_process(launch.command, launch.environ)


def _command(name: str, text: str) -> Command:
    return Command(
        name=name,
        text=text,
        usage=f"vlpack {name} [CONFIG.yaml] [packing options] [any option of swift {name}]",
        description=(
            f"Train packed: the command of `swift {name}`, with the packing options as flags and YAML keys. Everything "
            f"else is handed to ms-swift unchanged (`swift {name} --help` lists it); NPROC_PER_NODE and friends start "
            "torchrun as there."
        ),
        add_flags=partial(add_packing_flags, packing_length="--max_length"),
        run=_run,
        takes_run_flags=True,
    )


SFT = _command("sft", "swift sft with packing, and with the packing options as flags and YAML keys")
PT = _command("pt", "the same for swift pt: text and interleaved documents, every token a target")
