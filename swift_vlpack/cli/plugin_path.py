"""`vlpack plugin-path`: print the plugin file, for ms-swift's `--external_plugins`."""

from __future__ import annotations

import argparse

from swift_vlpack.cli.command import Command
from swift_vlpack.host.launch import plugin_path


def _run(args: argparse.Namespace) -> int:
    print(plugin_path())
    return 0


PLUGIN_PATH = Command(name="plugin-path", text="print the file for swift's --external_plugins", run=_run)
