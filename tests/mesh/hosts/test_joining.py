"""Hosts that join and leave a listening mesh by the command line.

Every process has its own key, and Redis is reached by TLS.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshrl import health
from meshrl.common.base.host.settings import REDIS_ENV, MeshSettings
from meshrl.directory.directory_paths import MeshPaths, read_json_or_empty
from meshrl.launch import leftover_processes
from tests.load import scaled
from tests.mesh.running import JOB, ROOT

pytestmark = [pytest.mark.timeout(900), pytest.mark.needs("redis-server")]
WITHIN_S = 240.0


class Commands:
    """Command line as a user runs it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.head = directory / "head"
        self.staying: list[subprocess.Popen[str]] = []
        self.environment = {k: v for k, v in os.environ.items() if k != REDIS_ENV}
        self.environment |= {"PYTHONPATH": str(ROOT), "MESHRL_HOME": str(directory / "home")}

    def run(self, *words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "meshrl", *words],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            input=given,
            timeout=scaled(WITHIN_S),
        )

    def run_for_output(self, *words: str, given: str | None = None) -> str:
        ran = self.run(*words, given=given)
        assert ran.returncode == 0, f"{words}: {ran.stdout}{ran.stderr}{self.logs()}"
        return ran.stdout

    def start_foreground(self, root: Path, *words: str, given: str = "") -> subprocess.Popen[str]:
        """Start a host in the foreground, and return once all of it runs."""
        with (self.directory / f"{root.name}.out").open("w") as out:
            foreground_hosts = subprocess.Popen(
                [sys.executable, "-m", "meshrl", *words, "--root", str(root), "--foreground"],
                cwd=self.directory,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=out,
                text=True,
            )
        self.staying.append(foreground_hosts)
        assert foreground_hosts.stdin is not None
        foreground_hosts.stdin.write(given)
        foreground_hosts.stdin.close()
        launcher = MeshPaths(root).root_marker
        self.until(f"{root.name} is up", lambda: read_json_or_empty(launcher).get("ready"))
        return foreground_hosts

    def list_rejections(self, *words: str) -> str:
        ran = self.run(*words)
        assert ran.returncode == 1, ran.stdout
        return ran.stderr

    def hosts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.at_head("hosts", "--json"))
        return found

    def at_head(self, *words: str) -> str:
        return self.run_for_output(*words, "--mesh", str(self.head))

    def logs(self) -> str:
        logs = sorted(self.directory.glob("*/mesh/logs/*.log"))
        return "\n".join(f"--- {f}\n{f.read_text(errors='replace')[-800:]}" for f in logs)

    def until(self, what: str, poll: Callable[[], Any]) -> None:
        end = time.monotonic() + scaled(WITHIN_S)
        while not poll():
            assert time.monotonic() < end, f"not {what}: {self.logs()}"
            time.sleep(0.2)


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    found = Commands(tmp_path)
    yield found
    for foreground_hosts in found.staying:
        foreground_hosts.kill()
        foreground_hosts.wait()
    for name in ("third", "second", "head"):
        place = MeshPaths(tmp_path / name)
        if place.settings.is_file():
            found.run("down", "--mesh", str(place.root))


@pytest.mark.deep
def test_hosts_join_compute_leave_and_are_expelled(commands: Commands) -> None:
    head, second = commands.head, commands.directory / "second"
    of_head, of_second = find_free_port(), find_free_port()
    up = ("up", "--root", str(head), "--workers", "1", "--listen", "127.0.0.1")
    output_text = commands.run_for_output(*up, "--health", of_head)
    token = head / "mesh/join.token"
    assert "meshrl join join.token" in output_text and token.read_text().strip() not in output_text
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    own = MeshSettings.from_file(head / "mesh/settings.json")
    assert own.joinable and own.host in own.make_redis_url("node")

    first = commands.start_foreground(second, "join", str(token), "--health", of_second)
    output_text = (output := commands.directory / "second.out").read_text()
    assert "requesting admission from the mesh at tcp://127.0.0.1:" in output_text, (
        "it may take a minute where nobody answers"
    )
    joined = MeshSettings.from_file(second / "mesh/settings.json")
    assert joined.redis_url.startswith("rediss://127.0.0.1:") and joined.secret != own.secret
    rows = commands.hosts()
    assert [(row["host"], row["state"]) for row in rows] == [(own.host, "up"), (joined.host, "up")]
    assert (rows[1]["workers"], rows[1]["planner"]) == (["h1w0"], "planner/2")
    keys = {row["name"] for row in json.loads(commands.at_head("keys", "--json"))}
    assert {f"node/{joined.host}", "worker/h1w0", "planner/2"} <= keys

    commands.until(
        "both ready", lambda: all(read_readiness(where) for where in (of_head, of_second))
    )
    ups = [f'kind="node",service="node/{joined.host}"', 'kind="worker",service="worker/h1w0"']
    commands.until(
        "both up", lambda: all(f'meshrl_up{{job="",{u}}} 1.0' in metrics(of_second) for u in ups)
    )
    page = metrics(of_second)
    assert "worker/w0" not in page and "meshrl_hosts" not in page
    commands.until("both shown", lambda: 'meshrl_hosts{state="up"} 2.0' in metrics(of_head))

    used = commands.list_rejections("join", str(token), "--root", str(commands.directory / "third"))
    assert f"has admitted {joined.host}" in used and "meshrl token create --host" in used
    assert not (commands.directory / "third/mesh/settings.json").exists()

    job = commands.run_for_output(
        "submit", str(JOB), "--mesh", str(head), "--set", "budget.steps=2"
    )
    assert "submitted digits" in job
    commands.run_for_output(
        "wait", "digits", "--mesh", str(head), "--timeout", str(scaled(WITHIN_S - 20))
    )

    first.send_signal(signal.SIGTERM)
    assert first.wait(scaled(WITHIN_S)) == 0
    assert f"{joined.host} is drained after" in output.read_text()
    away = commands.hosts()[1]
    assert away["draining"] == "is shutting down" and away["preempt_at_s"] > 0
    assert away["notice"].startswith("preempted ") and away["notice"].endswith("by its stop order")
    commands.run_for_output("join", "--root", str(second))  # as a member it needs no token
    commands.until("it is used again", lambda: not commands.hosts()[1]["draining"])
    assert commands.hosts()[1]["notice"] == ""
    assert commands.hosts()[1]["workers"] == ["h1w0"]

    commands.run_for_output("leave", "--root", str(second))
    assert not leftover_processes.find_leftovers((second / "mesh/settings.json").resolve())
    assert not [p for p in (second / "mesh").iterdir() if p.suffix in (".json", ".pem")]
    assert [row["host"] for row in commands.hosts()] == [own.host]

    third = commands.directory / "third"
    line = commands.at_head("token", "create", "--host")
    foreground_hosts = commands.start_foreground(third, "join", "-", given=line)
    name = commands.hosts()[1]["host"]
    assert commands.hosts()[1]["workers"] == ["h2w0"], "no worker's name comes twice"
    key = next(row for row in json.loads(commands.at_head("keys", "--json")) if row["host"] == name)
    output_text = commands.at_head("keys", "revoke", key["public"][:8])
    assert f"of {key['name']} on {name} is revoked" in output_text
    commands.at_head("keys", "revoke", name)
    assert foreground_hosts.wait(scaled(WITHIN_S)) == 2, "it is of no use to start it again"
    assert f"rejects {name}: it was removed" in (third / "mesh/logs/hosting.log").read_text()
    assert not running(third)
    assert "token create --host" in commands.list_rejections("join", "--root", str(third))


def find_free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"127.0.0.1:{found.getsockname()[1]}"


def read_readiness(where: str) -> bool:
    return health.probe_url(f"http://{where}/readyz") == (True, "ok")


def metrics(where: str) -> str:
    with urllib.request.urlopen(f"http://{where}/metrics", timeout=scaled(WITHIN_S)) as answer:
        return str(answer.read().decode())


def running(root: Path) -> list[int]:
    return leftover_processes.find_leftovers((root / "mesh/settings.json").resolve())
