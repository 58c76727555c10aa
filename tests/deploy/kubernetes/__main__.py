"""Validation and trial of the objects, with a JSON result and exit status 1 for invalid objects."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from tests.deploy.kubernetes import rendering, scenario, schemas


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.deploy.kubernetes")
    parser.add_argument("--image", default=os.environ.get("MESHRL_IMAGE", "meshrl:cpu"))
    parser.add_argument("--state", type=Path, help="where logs of pods stay")
    parser.add_argument(
        "--steps", type=int, default=600, help="of the job, which are to outlast the pods"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="meshrl-pods-") as temporary:
        scratch = asked.state or Path(temporary)
        checked = schemas.validate(
            rendering.render_all(rendering.copy_overlays(scratch / "checked"))
        )
        meshrl = str(Path(sys.executable).with_name("meshrl"))
        found = scenario.run_scenario(scratch, asked.image, meshrl, asked.steps)
    summary = {"invalid": checked["invalid"], "versions": checked["versions"]}
    print(json.dumps(summary | json.loads(scenario.format_result(found))))
    return 0 if found.is_good and not checked["invalid"] else 1


if __name__ == "__main__":
    sys.exit(main())
