"""Credentials of a mesh whose processes each have a key and whose roles are users of Redis.

A job runs on it, none of its processes sends Redis a command outside its role, and no secret is
exposed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import psutil
import pytest
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.common.base.host.settings import MeshSettings, derive_redis_password
from meshrl.common.mesh.access import owner
from meshrl.common.state import events, jobs
from meshrl.common.state.hosts import acl
from meshrl.common.state.redis import embedded_server
from meshrl.common.state.redis.client import StateClient
from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch import leftover_processes
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.head.mesh_shape import MeshShape
from meshrl.launch.redis.access import certificates
from tests.mesh.hosts.joined_host import submit, until

pytestmark = [pytest.mark.timeout(300), pytest.mark.needs("redis-server")]
HEAD = (MeshShape(workers=1, listen="tcp://127.0.0.1:*"),)
# files with secrets, which only the mesh's user can read
KEPT = ("settings.json", owner.OWNER_FILE, certificates.KEY_FILE, certificates.CA_KEY_FILE)


def list_secrets(place: MeshPaths) -> list[str]:
    """Return all secrets and passwords, and a part of each private key."""
    head = MeshSettings.from_file(place.settings).secret
    master = owner.read_owner(place.directory).secret
    found = [head, master, *(derive_redis_password(head, role) for role in acl.ROLES)]
    people = (owner.PERSON_ROLE, "default", embedded_server.OWNER_USER, embedded_server.MESH_USER)
    found += [derive_redis_password(master, user) for user in people]
    for name in (certificates.KEY_FILE, certificates.CA_KEY_FILE):
        found.append((place.directory / name).read_text().splitlines()[1])
    return found


def list_public_texts(place: MeshPaths) -> Iterator[tuple[str, bytes]]:
    """Yield each text that other users may read, with its location."""
    for pid in leftover_processes.find_leftovers(place.settings.resolve()):
        process = psutil.Process(pid)
        yield f"the command line of {pid}", " ".join(process.cmdline()).encode()
        yield f"the environment of {pid}", str(process.environ()).encode()
    for path in place.root.rglob("*"):
        if path.is_file() and path.name not in KEPT:
            yield str(path), path.read_bytes()


@pytest.mark.rotating(2)
async def test_job_runs_with_role_credentials_without_denials_or_exposed_secrets(
    mesh: Launcher,
) -> None:
    await submit(mesh, "digits", "budget.steps=2")

    async def has_ended() -> jobs.JobRow | None:
        row = await jobs.read_job(mesh.state, "digits")
        return row if row.is_terminal else None

    row = await until("the end of the job", has_ended)
    assert row.phase == "finished", row.error
    line = ["status", "--json", "--mesh", str(mesh.mesh_paths.root)]
    status = await asyncio.to_thread(CliRunner().invoke, app, line)
    assert status.exit_code == 0 and json.loads(status.output)["jobs"], status.output

    denied_commands = await list_denied_commands(mesh)
    secrets = list_secrets(mesh.mesh_paths)
    output = "".join(str(event) for event in await events.read_all(mesh.state))
    assert not [secret for secret in secrets if secret in output + status.output]
    found = await asyncio.to_thread(lambda: list(list_public_texts(mesh.mesh_paths)))
    # planners, store, agent and worker at least: processes of the job may have exited by now
    assert len([where for where, _ in found if where.startswith("the command line")]) >= 5
    exposures = {where for where, text in found if any(one.encode() in text for one in secrets)}
    assert not exposures
    assert denied_commands == []


async def list_denied_commands(mesh: Launcher) -> list[str]:
    """Return the commands that Redis has rejected since its start, each with its user."""
    master = owner.read_owner(mesh.mesh_paths.directory).secret
    scheme, _, bare = mesh.settings.redis_url.partition("://")
    user = (
        f"{embedded_server.OWNER_USER}:{derive_redis_password(master, embedded_server.OWNER_USER)}"
    )
    authority = f"?ssl_ca_certs={mesh.settings.authority}" if mesh.settings.authority else ""
    state = await StateClient.open(f"{scheme}://{user}@{bare}{authority}")
    try:
        rows = [
            dict(zip(*[iter(row)] * 2, strict=True))
            for row in await state.run_command("ACL", "LOG")
        ]
        return [f"{row['username']}: {row['object']} ({row['client-info']})" for row in rows]
    finally:
        await state.close()
