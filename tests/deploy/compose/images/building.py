"""Builds of our images by `make images`, on a Debian without access to a registry."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.deploy.engine import index
from tests.deploy.engine.packages import EngineError, run
from tests.load import scaled

CODE = Path(__file__).parents[4]
STAND_INS = {"redis": "meshrl-test-redis", "prometheus": "meshrl-test-prometheus"}
IMAGES = ("meshrl:cpu", "meshrl:cuda")
BUILD_S = 3600.0


def build(environment: dict[str, str], base: str) -> None:
    """Build all missing images of the engine named by `environment`, from the image `base`.

    EngineError if one cannot be built.
    """
    with index.serve_secrets(environment) as files:
        given = [f"BASE={base}"]
        given += [f"PIP_{'CONF' if name == 'pip' else 'CA'}={path}" for name, path in files.items()]
        command = ["make", "-C", str(CODE), "images", *given]
        if subprocess.run(
            command, env=os.environ | environment, timeout=scaled(BUILD_S)
        ).returncode:
            raise EngineError(f"{' '.join(command)} fails")
    named = [f"{name}={value}" for name, value in environment.items()]
    for target, name in STAND_INS.items():
        run("env", *named, "docker", "buildx", "build", "--quiet", "--build-arg", f"BASE={base}",
            "--target", target, "--tag", name, str(Path(__file__).parent))  # fmt: skip
