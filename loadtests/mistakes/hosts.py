"""What the host does not have: GPUs, engines, addresses, Redis, room on a disk."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from loadtests.mistakes.job import Place
from loadtests.mistakes.mistake import Mistake, NotPreparedError

_ELSEWHERE = "203.0.113.7"  # an address for documentation (RFC 5737): no interface has it
_PASSWORD = "secret"
_PORTS = range(46_379, 46_383)  # of servers that trials start, one each: some run side by side
_DISK_KB = 700  # a file system that holds a start and not a run


@contextmanager
def _taken(place: Place) -> Iterator[None]:
    """Somebody else listens at the port."""
    with socket.create_server(("127.0.0.1", _PORTS[0])):
        yield


@contextmanager
def _web_server(place: Place) -> Iterator[None]:
    argv = [sys.executable, "-m", "http.server", str(_PORTS[1]), "--bind", "127.0.0.1"]
    with _serving(argv, _PORTS[1]):
        yield


@contextmanager
def _asks_for_password(place: Place) -> Iterator[None]:
    with _serving(_redis_server(_PORTS[2]), _PORTS[2]):
        yield


@contextmanager
def _has_another_password(place: Place) -> Iterator[None]:
    with _serving(_redis_server(_PORTS[3]), _PORTS[3]):
        yield


def _redis_server(port: int) -> list[str]:
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise NotPreparedError("apt-get install redis-server")
    return [program, "--port", str(port), "--requirepass", _PASSWORD, "--save", ""]


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
def _small_disk(place: Place) -> Iterator[None]:
    """`runs` is a file system with next to no room."""
    folder = place.path("runs")
    folder.mkdir()
    options = f"size={_DISK_KB}k"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def _not_executable(place: Place) -> Iterator[None]:
    place.write("python", "#!/bin/sh\n")
    os.chmod(place.path("python"), 0o644)
    yield


def _redis(url: str) -> dict[str, str]:
    return {"MESHRL_REDIS_URL": url}


MISTAKES = (
    Mistake(
        "host: cuda without a GPU", (r"mesh\.device", "GPU", "cpu"), set={"mesh.device": "cuda"}
    ),
    Mistake(
        "host: SGLang is not installed",
        ("meshrl engine install sglang",),
        set={"rollout.engine": "sglang"},
        environ={"MESHRL_ENGINES": "/nonexistent"},
    ),
    Mistake(
        "host: an interpreter without SGLang",
        ("sglang", "python"),
        set={"rollout.engine": "sglang", "rollout.sglang_python": sys.executable},
    ),
    Mistake(
        "host: an interpreter that does not exist",
        (r"rollout\.sglang_python", "nopython"),
        set={"rollout.engine": "sglang", "rollout.sglang_python": "nopython"},
    ),
    Mistake(
        "host: an interpreter that cannot be executed",
        (r"rollout\.sglang_python|python", "execut|permission"),
        set={"rollout.engine": "sglang", "rollout.sglang_python": "python"},
        prepare=_not_executable,
    ),
    Mistake(
        "host: an address of another host",
        (_ELSEWHERE.replace(".", r"\."), "mesh.bind|address"),
        set={"mesh.bind": f"tcp://{_ELSEWHERE}:*"},
    ),
    Mistake(
        "host: an endpoint that is none",
        (r"mesh\.bind", "localhost"),
        set={"mesh.bind": "localhost:5555"},
    ),
    Mistake(
        "host: a port for metrics that is taken",
        (r"mesh\.metrics", str(_PORTS[0])),
        set={"mesh.metrics": f"127.0.0.1:{_PORTS[0]}"},
        prepare=_taken,
    ),
    Mistake(
        "host: Redis without a scheme",
        ("redis://", "MESHRL_REDIS_URL"),
        environ=_redis("localhost:6379"),
    ),
    Mistake(
        "host: Redis that is not there",
        ("MESHRL_REDIS_URL|redis", "refused|connect"),
        environ=_redis("redis://127.0.0.1:46399"),
    ),
    Mistake(
        "host: Redis asks for a password",
        ("auth", "redis"),
        environ=_redis(f"redis://127.0.0.1:{_PORTS[2]}"),
        prepare=_asks_for_password,
    ),
    Mistake(
        "host: Redis has another password",
        ("WRONGPASS|password", "redis"),
        environ=_redis(f"redis://:wrong@127.0.0.1:{_PORTS[3]}"),
        prepare=_has_another_password,
    ),
    Mistake(
        "host: something else than Redis",
        ("redis", f"{_PORTS[1]}"),
        environ=_redis(f"redis://127.0.0.1:{_PORTS[1]}"),
        prepare=_web_server,
    ),
    Mistake(
        "host: an interpreter for the sandbox that does not exist",
        (r"sandbox\.python|job\.toml, line", "nopython"),
        set={"sandbox.python": "nopython"},
    ),
    Mistake(
        "host: an MCP server that does not exist",
        ("mcp", "noserver"),
        set={
            "environment.mcp": {"files": ["noserver"]},
            "environment.tools": {"read": "mcp:files/read"},
        },
    ),
    Mistake(
        "host: a judge without its key",
        ("JUDGE_KEY", r"reward\.judge|job\.toml, line"),
        set={
            "reward.use": None,
            "reward.judge.use": "https://judge.invalid/v1",
            "reward.judge.template": "{prompt} {answer}",
            "reward.judge.model": "judge",
            "reward.judge.key": "JUDGE_KEY",
        },
    ),
    Mistake(
        "host: out below a file", (r"mine\.py", "out|directory|folder"), set={"out": "mine.py/run"}
    ),
    Mistake(
        "host: out that cannot be written", ("/proc/run", "out|written"), set={"out": "/proc/run"}
    ),
    Mistake(
        "host: a full disk",
        ("full|no space|room", "runs"),
        running=True,
        ends=False,
        prepare=_small_disk,
        changes=("runs",),
    ),
)
