"""A mesh over hosts that share nothing: who joins trains with it, and is missed when it is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtests.hosts.mesh import ROOT, HostsMesh, mesh_over
from loadtests.namespaces.hosts import Hosts
from tests.load import scaled

JOB = Path(__file__).parents[1] / "mesh" / "jobs" / "digits.toml"
RUN_S = 420.0


def kinds_on(mesh: HostsMesh, number: int) -> set[str]:
    """Of all processes that a host has had."""
    there = mesh.names[number]
    return {one["kind"] for look in mesh.seen for one in look.processes if one["host"] == there}


@pytest.mark.deep
@pytest.mark.needs("redis-server")  # with TLS, which the wheel's has not
@pytest.mark.timeout(RUN_S)
async def test_a_host_joins_and_trains_and_is_missed_when_it_vanishes() -> None:
    async with Hosts(2) as hosts, mesh_over(hosts, (1, 1)) as mesh:
        await mesh.submit(JOB, "digits", "budget.steps=4")
        summary = await mesh.finished("digits")
        assert (summary["phase"], summary["lost"], summary["trained_twice"]) == ("finished", 0, 0)
        assert {"node", "worker"} < kinds_on(mesh, 1) and {"engine", "trainer"} & kinds_on(mesh, 1)
        assert {len(owners) for owners in mesh.leaders().values()} == {1}
        assert not (await hosts[1].run("ls", f"{ROOT}/mesh/redis", check=False)).out
        await hosts.kill(1)
        await mesh.until(lambda look: mesh.names[1] not in _alive(look.processes), scaled(60.0))


def _alive(processes: list[dict[str, str]]) -> set[str]:
    return {process["host"] for process in processes}
