"""What `vlpack doctor` has to import to know: torch and ms-swift, in a process that may break without harm.

`python -m swift_vlpack.cli.doctor_imports` prints one JSON object, as its last line.
"""

from __future__ import annotations

import json
from typing import Any

from swift_vlpack.errors import VLPackError


def looked_at() -> dict[str, Any]:
    """Devices, and whether ms-swift has what packing holds on to; what cannot be imported says why."""
    try:
        found = _torch()
    except Exception as error:  # whatever a broken installation raises
        return {"torch_problem": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    return {**found, **_seam()}


def _torch() -> dict[str, Any]:
    import torch

    cuda = torch.cuda
    devices = [cuda.get_device_properties(at) for at in range(cuda.device_count() if cuda.is_available() else 0)]
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": [{"name": device.name, "memory": device.total_memory} for device in devices],
    }


def _seam() -> dict[str, Any]:
    try:
        from swift_vlpack.host.seam import SEAM, check_seam

        check_seam()
    except ModuleNotFoundError as error:
        return {} if error.name == "swift" else {"swift_problem": str(error)}
    except VLPackError as error:
        return {"swift_problem": str(error)}
    except Exception as error:  # of an import of ms-swift
        return {"swift_problem": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    return {"seam": len(SEAM), "swift_problem": None}


if __name__ == "__main__":
    print(json.dumps(looked_at()))
