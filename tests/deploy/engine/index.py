"""Access to this machine's package index for pip inside a build.

Directories that this machine's pip uses are invisible in a build. They are served to the engine's
network for the duration of the build.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlparse

from tests.deploy.engine.daemon import READY_S, SHORT_S
from tests.deploy.engine.packages import EngineError, run
from tests.load import scaled

LISTS = ("find-links", "extra-index-url", "index-url")
AUTHORITIES = "ca"  # the secret's name in the Dockerfile
PORT = 8941


def settings() -> dict[str, str]:
    """Return pip's settings on this machine; environment variables override files."""
    found = {}
    for line in run(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if key not in found or section.strip(":") == "env":
            found[key] = value.strip("'\"")
    return found


@contextlib.contextmanager
def serve_secrets(environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """Provide the files of a build's secrets by name: `pip` (its configuration) and `ca`
    (authorities).

    `ca` exists if pip is configured with some. `environment` is that of the engine's programs.
    """
    told = settings()
    asked = ("docker", "network", "inspect", "bridge", "-f", "{{(index .IPAM.Config 0).Subnet}}")
    given = [f"{name}={value}" for name, value in environment.items()]
    subnet = ipaddress.ip_network(run("env", *given, *asked, timeout=SHORT_S).strip())
    gateway = str(subnet[1])  # the bridge's own address, unless configured otherwise
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        served_from = Path(scratch, "served")
        served_from.mkdir()
        lines = ["[global]", f"trusted-host = {gateway}"]
        for key in LISTS:
            places = [
                _get_build_address(place, served_from, gateway)
                for place in told.get(key, "").split()
            ]
            if places:
                lines.append(f"{key} =")
                lines += [f"    {place}" for place in places]
        files = {"pip": str(Path(scratch, "pip.conf"))}
        if "cert" in told:
            lines.append(f"cert = /run/secrets/{AUTHORITIES}")
            files[AUTHORITIES] = told["cert"]
        Path(scratch, "pip.conf").write_text("\n".join(lines) + "\n")
        if any(served_from.iterdir()):
            enter = shlex.split(environment.get("MESHRL_ENGINE_ENTER", ""))
            stack.enter_context(_server(served_from, gateway, enter))
        yield files


def _get_build_address(place: str, served_from: Path, gateway: str) -> str:
    """Return the address of a location in a build."""
    parsed = urlparse(place)
    if parsed.scheme not in ("", "file"):
        return place
    path = Path(unquote(parsed.path))
    # An index names its files relative to itself, one directory up.
    root, rest = (path.parent, path.name) if path.name == "simple" else (path, "")
    number = str(len(list(served_from.iterdir())))
    (served_from / number).symlink_to(root, target_is_directory=True)
    return f"http://{gateway}:{PORT}/{number}/{rest}"


@contextlib.contextmanager
def _server(folder: Path, address: str, enter: list[str]) -> Iterator[None]:
    begun = subprocess.Popen(
        [*enter, sys.executable, "-m", "http.server", "--bind", address, "--directory", str(folder),
         str(PORT)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=dict(os.environ),
    )  # fmt: skip
    try:
        probe = [*enter, sys.executable, "-c", _PROBE, f"http://{address}:{PORT}/"]
        until = time.monotonic() + scaled(READY_S)
        while subprocess.run(probe, capture_output=True, timeout=scaled(SHORT_S)).returncode:
            if begun.poll() is not None or time.monotonic() > until:
                raise EngineError(f"nothing serves packages at {address}:{PORT}")
        yield
    finally:
        begun.terminate()
        begun.wait(scaled(SHORT_S))


_PROBE = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)"
