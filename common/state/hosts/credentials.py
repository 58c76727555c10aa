"""Credentials of a mesh: admitted hosts, and the public keys of their processes.

Redis has a hash for each role of each host, which only that host's user of that role may write: an
entry proves role and host. Keys are public halves, in hexadecimal digits.
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
    """Identity of a process whose key is registered."""

    role: str
    host: str
    public_key: str  # key of its calls
    process: str
    bulk_public_key: str = (
        ""  # key of its bulk port (`meshrl.common.mesh.transport.address.format_bulk_key`)
    )


async def admit_host(state: StateClient, host: str) -> bool:
    """Admit the keys of this host; return True if it was not admitted before.

    For the owner only.
    """
    return bool((await state.run_mesh_script("admit_host", host=host))["new"])


async def admit_if_first(state: StateClient, host: str) -> None:
    """Admit the keys of this host if no host is admitted yet, as in a mesh without a launcher."""
    await state.run_mesh_script("admit_host", host=host, first=True)


async def admit_only(state: StateClient, host: str) -> None:
    """Admit the keys of this host and of no other, at the start of a mesh of one host."""
    await state.run_mesh_script("admit_host", host=host, alone=True, roles=_ROLES)


async def list_admitted_hosts(state: StateClient) -> list[str]:
    """Return the hosts whose keys are admitted."""
    return sorted(await state.run_command("SMEMBERS", ADMITTED_HOSTS_KEY))


async def register_key(state: StateClient, credential: Credential) -> int:
    """Register the key of a process under its role and host; return the number of revocations so
    far.

    Keys of processes that have gone for long are removed. Refused: host or key is not admitted any
    more.
    """
    return int((await state.run_mesh_script("register_key", **asdict(credential)))["revocations"])


async def withdraw_key(state: StateClient, credential: Credential) -> None:
    """Withdraw the key of a process."""
    await state.run_mesh_script("withdraw_key", **asdict(credential))


def lookup_owners(client: SyncRedisClient, public_keys: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the owners of each key; none for a key that is not registered.

    If a key has several owners, only one has the private half: the others may have registered it to
    impersonate that one. Blocks; StateUnavailable.
    """
    answer = run_script_once(
        client, "key_owners", [MESH_PREFIX], {"keys": list(public_keys), "roles": _ROLES}
    )
    return [tuple(sorted(holders.split())) for holders in answer["owners"]]


async def revoke_host(state: StateClient, host: str) -> bool:
    """Revoke all keys of this host, present and future; return True if any was registered."""
    return bool((await state.run_mesh_script("revoke_keys", host=host, roles=_ROLES))["revoked"])


async def revoke_key(state: StateClient, public_key: str) -> bool:
    """Revoke one key; False if it was revoked before."""
    return bool(
        (await state.run_mesh_script("revoke_keys", public_key=public_key, roles=_ROLES))["revoked"]
    )


async def list_credentials(state: StateClient) -> list[Credential]:
    """Return all registered keys, by host, role and name."""
    found = (await state.run_mesh_script("list_keys", roles=_ROLES))["rows"] or []
    return sorted(
        (Credential(**row) for row in found), key=lambda row: (row.host, row.role, row.process)
    )
