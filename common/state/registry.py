"""Registry of processes: names with their leases, addresses, and what each process waits for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from meshrl.common.state.hosts.credentials import Credential
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import MESH_PREFIX

LEASE_MS = 6000
# Fields that a process publishes once, when it registers.
REGISTRATION_FIELDS = (
    "kind",
    "address",
    "bulk",
    "metrics",
    "host",
    "pid",
    "start_time",
    "run_root",
)
# Kinds of processes, and their stats, that the planners' leader reads at every snapshot. It reads
# thousands of rows, and Redis answers nothing else until it is done.
SNAPSHOT_KINDS = frozenset({"engine", "trainer", "hybrid", "rollout", "sandbox", "node", "rank"})
SNAPSHOT_STATS = (
    *("job", "gang", "instance", "draining", "safe_to_evict", "accepted_services"),
    "isolation_tiers",
    *("tokens", "step", "bins", "published"),
    *("work", "decode_curve", "lengths", "profile", "cores", "busy_cores"),
)


@dataclass
class RegistryEntry:
    """Process in the registry; `alive` is by the server's time when the entry was read."""

    name: str
    kind: str
    address: str = ""
    bulk: str = ""  # address that serves its bulk bytes
    metrics: str = ""  # address that serves its metrics and health
    host: str = ""
    pid: int = 0
    start_time: float = 0.0  # with the pid it identifies one process, even after the pid is reused
    incarnation: str = ""
    token: int = 0  # fencing token of the lease
    stats: dict[str, Any] = field(default_factory=dict)
    # what it waits for: {what, on, since_ms}
    waits: list[dict[str, Any]] = field(default_factory=list)
    renewed_ms: int = 0
    expires_ms: int = 0
    alive: bool = False
    run_root: str = ""


@dataclass(frozen=True, slots=True)
class LeaseRenewal:
    """Result of renewing a lease."""

    is_renewed: bool
    # revocations so far, as `credentials.register_key` returns them; 0 without a key
    revocations: int = 0
    loss_reason: str = ""  # why the lease is lost, if for another reason than time


async def register(state: StateClient, entry: RegistryEntry, ttl_ms: int = LEASE_MS) -> int:
    """Register a process and return the fencing token of its lease on `entry.name`.

    The same incarnation keeps its old token if no other process took the name. Refused while
    another incarnation holds the lease.
    """
    about = {name: getattr(entry, name) for name in REGISTRATION_FIELDS}
    answer = await state.run_mesh_script(
        "register",
        name=entry.name,
        kind=entry.kind,
        incarnation=entry.incarnation,
        ttl_ms=ttl_ms,
        about=json.dumps(about),
        stats=json.dumps(entry.stats),
        waits=json.dumps(entry.waits),
        **_encode_snapshot_stats(entry.name, entry.stats),
    )
    return int(answer["token"])


def renew_lease(
    state: StateClient,
    name: str,
    token: int,
    ttl_ms: int,
    stats: dict[str, Any],
    waits: list[dict[str, Any]],
    credential: Credential | None = None,
) -> LeaseRenewal:
    """Prolong the lease, and renew the registration of the process's key if it has one.

    Blocks, for the renewal thread; StateUnavailable while Redis does not answer. A lease that
    expired during an outage of Redis continues if no process took its name. The first process that
    returns raises the mesh's epoch, once per outage, which gives each lease that was live a grace
    of ten seconds. A lease is lost with a revoked key.
    """
    args = {
        "name": name,
        "token": token,
        "ttl_ms": ttl_ms,
        "stats": json.dumps(stats),
        "waits": json.dumps(waits),
        "away_ms": state.get_outage_ms(),
        **_encode_snapshot_stats(name, stats),
        **({"credential": asdict(credential)} if credential is not None else {}),
    }
    return LeaseRenewal(**state.run_script_sync("renew", [MESH_PREFIX], args))


async def release_lease(state: StateClient, name: str, token: int) -> bool:
    """End the caller's own lease; False if it was no longer its own."""
    return bool(
        (await state.run_mesh_script("end_lease", name=name, token=token, event="released"))[
            "ended"
        ]
    )


async def evict(state: StateClient, name: str, incarnation: str) -> bool:
    """End the lease of a process whose exit its supervisor observed.

    Return False if another process has the name by now.
    """
    args = {"name": name, "incarnation": incarnation, "event": "evicted"}
    return bool((await state.run_mesh_script("end_lease", **args))["ended"])


async def lookup(state: StateClient, name: str) -> RegistryEntry | None:
    """Return the entry of that name, dead or alive.

    None if it never existed or has been dead for ten minutes.
    """
    return (await lookup_all(state, [name])).get(name)


async def lookup_all(state: StateClient, names: Sequence[str]) -> dict[str, RegistryEntry]:
    """Return the entries of these names, by name, as `lookup` finds them."""
    found = (await state.run_mesh_script("list_entries", names=list(names)))["entries"]
    return {row["name"]: _decode_entry(row, json.loads(row["about"])) for row in found or []}


async def list_entries(state: StateClient, kind: str = "") -> list[RegistryEntry]:
    """Return all entries, of one kind if given, including those that died in the last ten
    minutes.
    """
    rows = (await state.run_mesh_script("list_entries"))["entries"]
    decoded = [(row, json.loads(row["about"])) for row in rows or []]
    return [
        _decode_entry(row, about) for row, about in decoded if not kind or about["kind"] == kind
    ]


def _encode_snapshot_stats(name: str, stats: dict[str, Any]) -> dict[str, str]:
    kind = name.partition("/")[0]
    if kind not in SNAPSHOT_KINDS:
        return {}
    counts = {key: stats[key] for key in SNAPSHOT_STATS if key in stats}
    return {"snapshot_stats": json.dumps({"name": name, "kind": kind, "stats": counts})}


def _decode_entry(row: dict[str, Any], registration: dict[str, Any]) -> RegistryEntry:
    return RegistryEntry(
        name=row["name"],
        incarnation=row["incarnation"],
        token=int(row["token"]),
        stats=json.loads(row["stats"]),
        waits=json.loads(row["waits"]),
        renewed_ms=int(row["renewed_ms"]),
        expires_ms=int(row["expires_ms"]),
        alive=row["alive"],
        **registration,
    )
