"""Prints the devices of this host that are ours, and the driver's version, as JSON: `python -m
meshrl.common.hardware.gpus`. Who must not wait for a driver that hangs asks this process.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from meshrl.common.base.errors import MeshError
from meshrl.common.hardware.gpus import nvml
from meshrl.common.hardware.gpus.selection import select_devices


def main() -> int:
    """0, or 1 with why there are none on stderr."""
    try:
        found = select_devices()
        with nvml.open_driver() as opened:
            version = opened.version
    except MeshError as error:
        print(error.message, file=sys.stderr)
        return 1
    print(json.dumps({"driver": version, "devices": [asdict(device) for device in found]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
