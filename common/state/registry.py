"""The registry of processes: names with their leases, their addresses, and what each waits for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from meshrl.common.state.hosts.credentials import Credential
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import MESH_PREFIX

LEASE_MS = 6000
# What a process says of itself once, when it registers.
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
# Of the stats of these processes the leader of the planners reads so much at every look: it has
# thousands of rows to read, and nothing else is answered meanwhile.
SNAPSHOT_KINDS = frozenset({"engine", "trainer", "hybrid", "rollout", "sandbox", "node", "rank"})
SNAPSHOT_STATS = (
    *("job", "gang", "resident", "draining", "rests", "takes", "tiers"),
    *("tokens", "step", "bins", "published"),
    *("work", "curve", "lengths", "profile", "cores", "busy_cores"),
)


@dataclass
class RegistryEntry:
    """A process as the registry knows it; `alive` is by the server's time when it was read."""

    name: str
    kind: str
    address: str = ""
    bulk: str = ""  # where its bulk bytes are served
    metrics: str = ""  # where its metrics and health are served
    host: str = ""
    pid: int = 0
    start_time: float = 0.0  # with the pid it names one process, even after the pid was reused
    incarnation: str = ""
    token: int = 0  # fencing token of the lease
    stats: dict[str, Any] = field(default_factory=dict)
    waits: list[dict[str, Any]] = field(
        default_factory=list
    )  # whom it waits for: {what, on, since_ms}
    renewed_ms: int = 0
    expires_ms: int = 0
    alive: bool = False
    run_root: str = ""


@dataclass(frozen=True, slots=True)
class LeaseRenewal:
    """What came of renewing a lease."""

    held: bool
    doors: int = 0  # revocations so far, as `doors.enter` returns them; 0 without a key
    why: str = ""  # it is not held, if it is for another reason than time


async def register(state: StateClient, entry: RegistryEntry, ttl_ms: int = LEASE_MS) -> int:
    """The fencing token of a new lease on `entry.name`; the old one for the same incarnation, if
    nobody took the name.

    Refused while another incarnation holds it.
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
    """Prolongs the lease, and shows the key of the process at its door if it has one. Blocks, for
    the renewal thread; StateUnavailable when Redis is away.

    A lease that ended while Redis was away, and that nobody took, goes on: the first process that
    returns raises the mesh's epoch, once per outage, which gives each lease that was live a grace
    of ten seconds. A lease is lost with a key that was revoked.
    """
    args = {
        "name": name,
        "token": token,
        "ttl_ms": ttl_ms,
        "stats": json.dumps(stats),
        "waits": json.dumps(waits),
        "away_ms": state.get_outage_ms(),
        **_encode_snapshot_stats(name, stats),
        **({"door": asdict(credential)} if credential is not None else {}),
    }
    return LeaseRenewal(**state.run_script_sync("renew", [MESH_PREFIX], args))


async def release_lease(state: StateClient, name: str, token: int) -> bool:
    """Ends the caller's own lease; False when it was no longer its own."""
    return bool(
        (await state.run_mesh_script("vacate", name=name, token=token, why="released"))["vacated"]
    )


async def evict(state: StateClient, name: str, incarnation: str) -> bool:
    """Ends the lease of a process that its supervisor saw end; False when the name is another's by
    now.
    """
    args = {"name": name, "incarnation": incarnation, "why": "evicted"}
    return bool((await state.run_mesh_script("vacate", **args))["vacated"])


async def lookup(state: StateClient, name: str) -> RegistryEntry | None:
    """The entry of that name, dead or alive; None when it was never there or has been dead for ten
    minutes.
    """
    return (await lookup_all(state, [name])).get(name)


async def lookup_all(state: StateClient, names: Sequence[str]) -> dict[str, RegistryEntry]:
    """What `lookup` finds of each of these, by name."""
    found = (await state.run_mesh_script("entries", names=list(names)))["entries"]
    return {row["name"]: _decode_entry(row, json.loads(row["about"])) for row in found or []}


async def list_entries(state: StateClient, kind: str = "") -> list[RegistryEntry]:
    """All entries, of one kind if asked, the dead of the last ten minutes among them."""
    rows = (await state.run_mesh_script("entries"))["entries"]
    told = [(row, json.loads(row["about"])) for row in rows or []]
    return [_decode_entry(row, about) for row, about in told if not kind or about["kind"] == kind]


def _encode_snapshot_stats(name: str, stats: dict[str, Any]) -> dict[str, str]:
    kind = name.partition("/")[0]
    if kind not in SNAPSHOT_KINDS:
        return {}
    counts = {key: stats[key] for key in SNAPSHOT_STATS if key in stats}
    return {"counted": json.dumps({"name": name, "kind": kind, "stats": counts})}


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
