"""Images of the trial: stand-ins for official ones, and settings by which compose builds ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.deploy.engine import index
from tests.deploy.engine.packages import run

CODE = Path(__file__).parents[4]
STAND_INS = {"redis": "meshrl-test-redis", "prometheus": "meshrl-test-prometheus"}
OURS = "meshrl:cpu"


def build_stand_ins(environment: dict[str, str], base: str) -> None:
    """Build the stand-ins on the engine named by `environment`, from the image `base`.

    EngineError if one cannot be built.
    """
    named = [f"{name}={value}" for name, value in environment.items()]
    for target, name in STAND_INS.items():
        run("env", *named, "docker", "buildx", "build", "--quiet", "--build-arg", f"BASE={base}",
            "--target", target, "--tag", name, str(Path(__file__).parent))  # fmt: skip


@contextlib.contextmanager
def serve_packages(environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """Provide the variables by which compose.yaml builds with this machine's package index."""
    with index.serve_secrets(environment) as files:
        yield {f"PIP_{'CONF' if name == 'pip' else 'CA'}": path for name, path in files.items()}
