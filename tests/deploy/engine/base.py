"""Base image in place of official ones: a Debian with Python."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.deploy.engine.packages import MIRROR, EngineError, run

RELEASE = "bookworm"
PACKAGES = "ca-certificates,python3,python3-venv"
NAME = f"debian-python:{RELEASE}"
TAR = ("tar", "--numeric-owner", "--exclude=./var/cache/apt/archives/*.deb", "-cf")


def make(environment: dict[str, str]) -> str:
    """Build the base image with debootstrap if the engine of `environment` has none; return its
    name.

    The build takes about a minute.
    """
    docker = ("env", *(f"{name}={value}" for name, value in environment.items()), "docker")
    try:
        run(*docker, "image", "inspect", NAME)
    except EngineError:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
            root, packed = Path(scratch, "root"), Path(scratch, "root.tar")
            variant = ("--variant=minbase", f"--include={PACKAGES}")
            run("debootstrap", *variant, RELEASE, str(root), MIRROR)
            security = f"deb {MIRROR}-security {RELEASE}-security main\n"
            (root / "etc/apt/sources.list").write_text(f"deb {MIRROR} {RELEASE} main\n{security}")
            run(*TAR, str(packed), "-C", str(root), ".")
            run(*docker, "import", str(packed), NAME)
    return NAME
