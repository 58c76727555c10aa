"""`meshrl engine install`: installs engines that need an interpreter of their own.

SGLang requires versions of torch and of other packages that are not MeshRL's.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

from meshrl.common.base.errors import ConfigError
from meshrl.common.mesh.process.engine_environments import locate_environment, locate_python

ENGINE_VERSIONS = {"sglang": "0.5.23"}  # version that the adapter is tested with


def install_engine(name: str, directory: Path | None) -> Path:
    """Install the engine and return its interpreter; an installed right version stays as it is."""
    if name not in ENGINE_VERSIONS:
        raise ConfigError(
            f"there is no engine {name}", fix=f"Choose one of: {', '.join(ENGINE_VERSIONS)}"
        )
    place = (directory.expanduser() if directory else locate_environment(name)).absolute()
    if place == Path(sys.prefix).absolute():
        raise ConfigError(
            f"{place} is MeshRL's own environment, and {name} would replace its packages",
            fix="Name another folder with --dir",
        )
    if find_installed_version(place, name) != ENGINE_VERSIONS[name]:
        if place.exists() and not (place / "pyvenv.cfg").is_file() and any(place.iterdir()):
            raise ConfigError(
                f"{place} is not empty and not a virtual environment",
                fix="Name another folder with --dir",
            )
        pip = [
            str(locate_python(place)),
            "-m",
            "pip",
            "install",
            f"{name}=={ENGINE_VERSIONS[name]}",
        ]
        for step in ([sys.executable, "-m", "venv", str(place)], pip):
            if code := subprocess.run(step).returncode:
                raise ConfigError(
                    f"`{' '.join(step)}` exited with status {code}",
                    fix="See its output for the reason; the same command continues from there",
                )
    return locate_python(place)


def find_installed_version(environment: Path, name: str) -> str:
    """Return the version in an environment; empty: none."""
    paths = [str(path) for path in environment.glob("lib/python*/site-packages")]
    found = next(iter(importlib.metadata.distributions(name=name, path=paths)), None)
    return found.version if found is not None and locate_python(environment).exists() else ""
