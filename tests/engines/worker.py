"""Train the runs of a list one after the other, in one process of each rank.

    python -m torch.distributed.run --nproc_per_node 2 -m tests.engines.worker RUNS.json

Because ms-swift and an engine take 20 seconds to import, and a tiny run takes 5. A run that raises leaves its traceback
in the output directory, and the next one begins: so the ranks have to raise together.
"""

import gc
import json
import os
import sys
import traceback
from pathlib import Path

from tests.environment import packing_options, restored_environment
from tests.host.runs import train


def train_one(run: dict) -> None:
    """Train a run of the list by its flags and packing options."""
    try:
        with restored_environment():
            packing_options(**run["options"])
            train(run["flags"])
    except Exception:
        rank = os.environ["RANK"]
        Path(run["output"], f"error_rank{rank}.txt").write_text(traceback.format_exc())
    gc.collect()


if __name__ == "__main__":
    for run in json.loads(Path(sys.argv[1]).read_text()):
        print(f"== {run['name']}", flush=True)
        train_one(run)
