"""The doors of a mesh: whose key is let in, as what, from where.

Redis keeps a hash for each role of each host, which only that host's user of that role may write:
to stand there is to have proved both. Keys are public halves, in hexadecimal digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from meshrl.common.api.calls.call_permissions import ROLES
from meshrl.common.state.redis.client import StateClient, SyncRedisClient, run_script_once
from meshrl.common.state.redis.keys import MESH_PREFIX

ADMITTED_HOSTS_KEY = f"{MESH_PREFIX}:admitted"
_ROLES = sorted(ROLES)


@dataclass(frozen=True, slots=True)
class Credential:
    """The identity of a process that is let in: what stands at a door."""

    role: str
    host: str
    public: str  # the key of its calls
    name: str
    bulk: str = (
        ""  # the key of its bulk port (`meshrl.common.mesh.transport.address.format_bulk_key`)
    )


async def admit_host(state: StateClient, host: str) -> bool:
    """Lets keys of this host in; whether it was not before. Its owner's to do."""
    return bool((await state.run_mesh_script("admit_host", host=host))["new"])


async def admit_if_first(state: StateClient, host: str) -> None:
    """Let in keys of this host if no host's are let in yet, as in a mesh without a launcher."""
    await state.run_mesh_script("admit_host", host=host, first=True)


async def admit_only(state: StateClient, host: str) -> None:
    """Let in keys of this host and of no other: a mesh of one host begins."""
    await state.run_mesh_script("admit_host", host=host, alone=True, roles=_ROLES)


async def list_admitted_hosts(state: StateClient) -> list[str]:
    """The hosts whose keys are let in."""
    return sorted(await state.run_command("SMEMBERS", ADMITTED_HOSTS_KEY))


async def register_key(state: StateClient, credential: Credential) -> int:
    """Shows the key of a process at the door of its role and host; the number of `revoke_*` so far.
    Keys of processes that have gone for long are removed. Refused: host or key is let in no more.
    """
    return int((await state.run_mesh_script("enter", **asdict(credential)))["doors"])


async def withdraw_key(state: StateClient, credential: Credential) -> None:
    """Takes it away again."""
    await state.run_mesh_script("withdraw", **asdict(credential))


def lookup_owners(client: SyncRedisClient, public_keys: Sequence[str]) -> list[tuple[str, ...]]:
    """Whose each of these keys is; nobody's who is let in: none. Of several holders one alone has
    the other half, and the others may have entered it to be taken for that one. Blocks;
    StateUnavailable.
    """
    answer = run_script_once(
        client, "who", [MESH_PREFIX], {"keys": list(public_keys), "roles": _ROLES}
    )
    return [tuple(sorted(holders.split())) for holders in answer["who"]]


async def revoke_host(state: StateClient, host: str) -> bool:
    """Lets no key of this host in from now on, nor those that are in; whether any was."""
    return bool((await state.run_mesh_script("revoke", host=host, roles=_ROLES))["revoked"])


async def revoke_key(state: StateClient, public_key: str) -> bool:
    """Lets this one key in no more; False when it was revoked before."""
    return bool((await state.run_mesh_script("revoke", public=public_key, roles=_ROLES))["revoked"])


async def list_credentials(state: StateClient) -> list[Credential]:
    """All keys that are let in, by host, role and name."""
    found = (await state.run_mesh_script("door_rows", roles=_ROLES))["rows"] or []
    return sorted(
        (Credential(**row) for row in found), key=lambda row: (row.host, row.role, row.name)
    )
