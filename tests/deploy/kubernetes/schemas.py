"""Validation of every object of every overlay, with a JSON result and exit status 1 for invalid
ones.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.deploy.kubernetes import rendering
from tests.deploy.kubernetes.rendering import Object
from tests.load import scaled

# The range starts with the first version with user namespaces of pods by default and ends with
# the newest: the versions that the project supports, and clouds support for a year longer.
VERSIONS = ("1.33", "1.34", "1.35", "1.36", "1.37")
VALIDATE_S = 120.0
# Interpreter with `kubernetes-validate`, which `make test-kubernetes` creates.
PYTHON = Path(__file__).parents[3] / ".venvs/kubernetes/bin/python"


def validate(objects: dict[str, list[Object]]) -> dict[str, Any]:
    """Return `overlays`, `versions`, `objects` (distinct ones), `validated`, `invalid`,
    `errors`.
    """
    listed = [(where, found) for where, all_of in objects.items() for found in all_of]
    asked = json.dumps({"versions": VERSIONS, "objects": listed})
    script = str(Path(__file__).with_name("validating.py"))
    found = subprocess.run(
        [str(PYTHON), script],
        input=asked,
        capture_output=True,
        text=True,
        timeout=scaled(VALIDATE_S),
    )
    if found.returncode:
        raise RuntimeError(found.stderr)
    document: dict[str, Any] = json.loads(found.stdout)
    return {"overlays": list(objects), "versions": VERSIONS} | document


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        told = validate(rendering.render_all(rendering.copy_overlays(Path(scratch, "kubernetes"))))
    print(json.dumps(told))
    return 1 if told["invalid"] else 0


if __name__ == "__main__":
    sys.exit(main())
