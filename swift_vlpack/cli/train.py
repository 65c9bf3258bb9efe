"""`vlpack sft` and `vlpack pt`: become the training process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from swift_vlpack.cli.become import become, never
from swift_vlpack.cli.command import Command
from swift_vlpack.cli.packing_flags import add_packing_flags
from swift_vlpack.host.launch import check_launch, train_launch


def _command(name: str, text: str) -> Command:
    train = partial(_train, name)
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
        run=never,
        is_of_a_run=lambda argv: True,
        run_of=train,
    )


def _train(name: str, argv: Sequence[str]) -> NoReturn:
    launch = train_launch(argv, os.environ, command=name)
    check_launch(launch)
    print(f"run sh: `{' '.join(launch.command)}`", flush=True)  # as ms-swift says it
    become(launch.command, launch.environ)


SFT = _command("sft", "swift sft with packing, and with the packing options as flags and YAML keys")
PT = _command("pt", "the same for swift pt: text and interleaved documents, every token a target")
