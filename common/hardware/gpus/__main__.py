"""Program that prints this host's selected devices, and the driver's version, as JSON.

Run `python -m meshrl.common.hardware.gpus`. A caller that must not block on a hanging driver runs
this process.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from meshrl.common.base.errors import MeshError
from meshrl.common.hardware.gpus import nvml
from meshrl.common.hardware.gpus.selection import select_devices


def main() -> int:
    """Print the devices and return 0, or return 1 with the reason on stderr."""
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
