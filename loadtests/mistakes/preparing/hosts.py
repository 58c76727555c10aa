"""Conditions of a trial's host: ports, servers, an interpreter, room on a disk."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from loadtests.mistakes.job import Place
from loadtests.mistakes.mistake import NotPreparedError

_PASSWORD = "secret"


@contextmanager
def _take_port(place: Place, port: int) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", port)):
        yield


@contextmanager
def _serve_web(place: Place, port: int) -> Iterator[None]:
    with _serving([sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"], port):
        yield


@contextmanager
def _serve_redis(place: Place, port: int) -> Iterator[None]:
    """Serve Redis under a password."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise NotPreparedError("apt-get install redis-server")
    argv = [program, "--port", str(port), "--requirepass", _PASSWORD, "--save", ""]
    with _serving(argv, port):
        yield


@contextmanager
def _serving(argv: list[str], port: int) -> Iterator[None]:
    quiet = subprocess.DEVNULL
    with subprocess.Popen(argv, stdout=quiet, stderr=quiet, cwd="/") as server:
        try:
            for _ in range(1000):
                with socket.socket() as probe:
                    probe.settimeout(0.1)
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
            yield
        finally:
            server.terminate()


@contextmanager
def _mount_small_disk(place: Place, size_kb: int) -> Iterator[None]:
    """Make `runs` a file system that holds a start and not a run."""
    folder = place.path("runs")
    folder.mkdir()
    options = f"size={size_kb}k"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def _write_unexecutable(place: Place) -> Iterator[None]:
    place.write("python", "#!/bin/sh\n")
    os.chmod(place.path("python"), 0o644)
    yield


@contextmanager
def _use_own_interpreter(place: Place) -> Iterator[None]:
    """Have SGLang run by this interpreter, which lacks it."""
    place.set({"rollout.engine": "sglang", "rollout.sglang_python": sys.executable})
    yield


PREPARATIONS: Mapping[str, Callable[..., AbstractContextManager[None]]] = {
    "taken_port": _take_port,
    "web_server": _serve_web,
    "redis_server": _serve_redis,
    "small_disk": _mount_small_disk,
    "not_executable": _write_unexecutable,
    "own_interpreter": _use_own_interpreter,
}
