"""Spot hosts of a real mesh, which a provider on this machine starts and ends by demand."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch import leftover_processes
from tests.mesh.hosts import local_provider
from tests.mesh.hosts.test_joining import Commands
from tests.mesh.running import JOB, slow_pace

pytestmark = [pytest.mark.timeout(900), pytest.mark.needs("redis-server"), pytest.mark.deep]
MESH = """
[pool]
spot_price = 1.0
forget_after_s = 20.0

[pool.scaler]
command = [{python}, {provider}, {directory}, {token}]
most = 2
max_cost_per_hour = 2.5
release_after_s = 3.0
"""


class ScaledMesh(Commands):
    """Head whose provider keeps its hosts in `provider`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.provider = directory / "provider"
        self.provider.mkdir()
        token = directory / "host.token"
        values = {
            "python": sys.executable,
            "provider": local_provider.__file__,
            "directory": str(self.provider),
            "token": str(token),
        }
        mesh_file = directory / "mesh.toml"
        mesh_file.write_text(MESH.format(**{k: json.dumps(v) for k, v in values.items()}))
        up = ("up", "--root", str(self.head), "--workers", "2", "--listen", "127.0.0.1")
        self.run_for_output(*up, "--config", str(mesh_file))
        token.touch(0o600)
        token.write_text(self.at_head("token", "create", "--host", "--uses", "0").strip())

    def read_status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.at_head("status", "--json"))
        return found

    def list_spot_hosts(self) -> list[str]:
        return [row["host"] for row in self.hosts() if row["markets"] == ["spot"]]

    def list_working(self) -> list[str]:
        """List the spot hosts with instances."""
        rows = self.hosts()
        return [row["host"] for row in rows if row["markets"] == ["spot"] and row["instances"]]

    def list_starts(self) -> list[str]:
        path = self.provider / "starts"
        return path.read_text().split() if path.exists() else []

    def end_host(self, host: Path) -> None:
        """Kill everything of a host at once."""
        if (pid := local_provider.list_running(self.provider).get(host)) is not None:
            os.kill(pid, signal.SIGKILL)
        for left in leftover_processes.find_leftovers(MeshPaths(host).settings.resolve()):
            os.kill(left, signal.SIGKILL)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[ScaledMesh]:
    found = ScaledMesh(tmp_path)
    yield found
    found.run("down", "--mesh", str(found.head))
    for host in found.provider.glob("host-*"):
        found.end_host(host)


def test_provider_starts_replaces_and_ends_spot_hosts(mesh: ScaledMesh) -> None:
    # No step ends, so the demand stays as the job states it.
    pace, groups = slow_pace(200.0, 8, 20_000), "algorithm.groups_per_step=4000"
    words = (groups, "pool.workers.most_spot=2", f"rollout.emulate={pace}")
    mesh.at_head("submit", str(JOB), *(f"--set={word}" for word in ("name=digits", *words)))
    mesh.until("two spot hosts work", lambda: len(mesh.list_working()) == 2)
    scaler = mesh.read_status()["scaler"]
    assert (scaler["hosts"], scaler["present"], scaler["error"]) == (2, 2, "")
    # A host that cannot join in time ends, and another one is started instead.
    assert len(local_provider.list_running(mesh.provider)) == 2
    first_starts = mesh.list_starts()
    assert "spot hosts: 2 up, 2 requested (digits wants 2)" in mesh.at_head("hosts")

    lost = next(iter(local_provider.list_running(mesh.provider)))
    name = local_provider.read_name(lost)
    mesh.end_host(lost)
    mesh.until("another host works instead", lambda: len({*mesh.list_working()} - {name}) == 2)
    starts = mesh.list_starts()
    assert len(starts) > len(first_starts)
    assert len(local_provider.list_running(mesh.provider)) == 2

    mesh.at_head("cancel", "digits")
    mesh.until("all spot hosts are given back", lambda: not mesh.list_spot_hosts())
    mesh.until("their processes end", lambda: not local_provider.list_running(mesh.provider))
    assert mesh.list_starts() == starts, "nothing is started without demand"
    for host in starts:
        output = (mesh.provider / host / "output").read_text()
        assert "Traceback" not in output, output
    assert mesh.read_status()["scaler"]["hosts"] == 0
