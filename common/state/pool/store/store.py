"""The rows of the pool: what workers read and report, and what the leader looks at and writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

from meshrl.common.state import registry
from meshrl.common.state.pool.demand.measured import kind_of
from meshrl.common.state.pool.demand.planned import PublishedStats, planned
from meshrl.common.state.pool.placing.decisions import Decision
from meshrl.common.state.pool.placing.snapshot import Move, PoolHost, PoolRequest, Snapshot
from meshrl.common.state.pool.store.documents import (
    gang_of,
    numbered,
    report_document,
    worker_document,
    worker_of,
    written,
)
from meshrl.common.state.pool.store.explained import Explained, explained_of
from meshrl.common.state.pool.workers.names import PLACED
from meshrl.common.state.pool.workers.names import agent as agent_process
from meshrl.common.state.pool.workers.rows import Gang, Report, WorkerRow
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.common.state.redis.client import State
from meshrl.common.state.redis.keys import MESH, PLANNER
from meshrl.common.state.registry import Entry

WORKER = f"{MESH}:worker:"
SERVICES, HOSTS = f"{MESH}:services:", f"{MESH}:hosts"
LEADER = f"{MESH}:planner"  # what leaders leave to each other
MOVING = f"{MESH}:moving"  # moves under way, by the resident that arrives
# Decisions of one script: each takes up to some 50 us of Redis, which answers nobody meanwhile.
CHUNK = 128
ENDED_S = 3600.0  # for which the last end of a process is told whose resident is gone
PLACES, CORES = ("takes", "tiers"), ("cores", "busy_cores")  # what a host's agent says of it
_POLLED = ("about", "token", "gang", "membership", "revision")


@dataclass(frozen=True, slots=True)
class PoolLook:
    """All that a leader decides from."""

    snapshot: Snapshot
    memory: dict[str, Any] | None  # what leaders remember; None: there has been none
    written: int  # writes so far: a write of another look is refused


@dataclass(frozen=True, slots=True)
class RefusedDecision:
    """A decision that was not written, because what it presumes is no longer so."""

    decision: Decision
    reason: str


# -- workers -----------------------------------------------------------------------------------


async def join_worker(state: State, worker: WorkerRow) -> WorkerRow:
    """Puts a worker on record, or takes its record up again; its row.

    It stays in the gang that it is in, if any. A new start of it (another token) voids what it
    reported. Fenced without the live lease `worker.token` of its process.
    """
    answer = await state.run_mesh(
        "join_worker",
        worker=worker.id,
        token=worker.token,
        host=worker.host,
        accelerator=worker.accelerator,
        about=json.dumps(worker_document(worker)),
    )
    return worker_of(answer["row"])


async def worker_row(state: State, id: str) -> WorkerRow | None:
    """The record that a worker polls, in one cheap command; None when it is on record no more, as
    one that has been gone for long: it may join again. Whether it lives is not asked.
    """
    row = await state.command("HMGET", f"{WORKER}{id}", *_POLLED)
    if row[0] is None:
        return None
    found = dict(zip(_POLLED, row, strict=True))
    numbers = {name: int(found[name]) for name in ("token", "membership", "revision")}
    return worker_of(found | numbers | {"id": id, "about": json.loads(found["about"])})


async def workers(state: State) -> list[WorkerRow]:
    """All workers on record, w2 before w10."""
    rows = (await state.run_mesh("pool_rows", what="workers"))["rows"]
    return sorted(map(worker_of, rows), key=lambda worker: numbered(worker.id))


async def report(state: State, worker_id: str, gang: str, resident_id: str, report: Report) -> bool:
    """Records what a resident's process on a worker does; False when that is for another wish than
    the one on record, or the worker does not have this rank of this gang.

    Fenced when `report.token` is not the live lease of the worker's process.
    """
    answer = await state.run_mesh(
        "report",
        worker=worker_id,
        token=report.token,
        gang=gang,
        resident=resident_id,
        rank=report.rank,
        generation=report.generation,
        epoch=report.epoch,
        report=json.dumps(report_document(report)),
    )
    return bool(answer["accepted"])


# -- gangs and services --------------------------------------------------------------------------


async def gangs(state: State) -> list[Gang]:
    """All gangs, in the order in which they were formed."""
    rows = (await state.run_mesh("pool_rows", what="gangs"))["rows"]
    return [gang_of(row) for row in rows]


async def gang(state: State, id: str) -> Gang | None:
    """One gang; None when there is none of that id."""
    rows = (await state.run_mesh("pool_rows", gang=id))["rows"]
    return gang_of(rows[0]) if rows else None


async def remembered(state: State) -> dict[str, Any]:
    """What leaders leave to each other; nothing before there has been one."""
    text = await state.command("HGET", LEADER, "memory")
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


async def entitled(state: State) -> dict[str, int]:
    """Workers that each job is to have, as the leader divided them last."""
    found: dict[str, int] = (await remembered(state)).get("entitled", {})
    return found


async def explained(state: State) -> dict[str, Explained]:
    """What the leader predicted last of each job's steps, and why it moves nothing, by job; nothing
    of jobs that it has not judged.
    """
    return explained_of(await remembered(state))


async def under_way(state: State) -> list[Move]:
    """The moves that are decided and not complete, the oldest first."""
    flat = await state.command("HGETALL", MOVING)
    rows = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
    found = [Move(id, **json.loads(row)) for id, row in rows.items()]
    return sorted(found, key=lambda move: (move.started_ms, move.id))


async def services_of(state: State, host: str) -> tuple[str, ...]:
    """Names of the shards and sandboxes that a host is to run."""
    text = await state.command("GET", f"{SERVICES}{host}")
    return tuple(json.loads(text)) if text else ()


async def served(state: State) -> list[tuple[str, str]]:
    """(host, name) of all shards and sandboxes that are to run, by host."""
    hosts = await state.command("ZRANGE", HOSTS, 0, -1)
    return [(host, name) for host in sorted(hosts) for name in await services_of(state, host)]


# -- people ----------------------------------------------------------------------------------------


async def request(state: State, request: PoolRequest) -> None:
    """Asks the leader for something, once for `request.op`. It stays on record until it is granted,
    which the event of the decision tells by its `op`, or declined, as `move_declined`. A host that
    is to be drained is marked as draining at once.
    """
    await state.run_mesh("request", **asdict(request))


async def mark_host(state: State, host: str, why: str, was: str | None = None) -> bool:
    """Says why nothing new is placed on a host from now on; empty: something may be again. Only if
    what was said until now is `was`; None: in any case. Whether that changes anything.
    """
    args = {"host": host, "why": why} | ({} if was is None else {"was": was})
    return bool((await state.run_mesh("mark_host", **args))["changed"])


async def draining(state: State) -> dict[str, str]:
    """The hosts that are to become empty, each with the reason."""
    found = await state.command("HGETALL", f"{MESH}:draining")
    return found if isinstance(found, dict) else dict(zip(found[::2], found[1::2], strict=True))


async def drains(state: State, host: str) -> bool:
    """Whether a host is to become empty."""
    return bool(await state.command("HGET", f"{MESH}:draining", host))


async def write_settings(state: State, settings: PoolSettings) -> int:
    """Gives the planner the settings of a mesh that is up from now on; since when, in ms."""
    return int((await state.run_mesh("write_settings", pool=json.dumps(asdict(settings))))["up_ms"])


async def settings(state: State) -> PoolSettings:
    """Those of the mesh that is up; as they are by default before it is."""
    told = await state.command("GET", f"{MESH}:settings")
    return PoolSettings(**json.loads(told)["pool"]) if told else PoolSettings()


# -- the leader ------------------------------------------------------------------------------------

# Documents of jobs by their digests, of the last look over each connection: they are long, and
# hardly ever change.
_documents: WeakKeyDictionary[State, dict[str, dict[str, Any]]] = WeakKeyDictionary()


async def look(state: State, token: int) -> PoolLook:
    """One look at everything, in one script; Fenced for a leader that is no longer one."""
    known = _documents.setdefault(state, {})
    found = await state.run_mesh("look", election=PLANNER, token=token, known=list(known))
    documents = {}
    for row in found["jobs"]:
        row["document"] = row["document"] or known[row["digest"]]
        if row["digest"]:
            documents[row["digest"]] = row["document"]
    _documents[state] = documents
    return PoolLook(_snapshot(found), found["memory"], found["written"])


async def write(
    state: State,
    token: int,
    op: str,
    decisions: Sequence[Decision],
    memory: Mapping[str, Any] | None,
    after: int | None = None,
) -> list[RefusedDecision]:
    """Writes the decisions of one look, in chunks and once for `op`, and with the last of them the
    leaders' memory (None: it has not changed); those that no longer apply.

    Fenced for a leader that is no longer one, and when anything has been written since the look
    whose `written` is `after`. A leader that stops between two chunks leaves the rest undecided.
    """
    documents = [written(decision, index) for index, decision in enumerate(decisions)]
    # What a move's end strikes off the record must not be the move that begins beside it.
    documents.sort(key=lambda row: row["kind"] != "finish")
    chunks = [documents[i : i + CHUNK] for i in range(0, len(documents), CHUNK)]
    if not chunks and memory is not None:
        chunks = [[]]
    refused: list[RefusedDecision] = []
    for number, chunk in enumerate(chunks):
        args: dict[str, Any] = {
            "election": PLANNER,
            "token": token,
            "op": f"{op}.{number}",
            "decisions": chunk,
        }
        if after is not None:
            args["after"] = after + number
        if memory is not None and number == len(chunks) - 1:
            args["memory"] = json.dumps(memory)
        answer = await state.run("write", [MESH], args)
        refused += [
            RefusedDecision(decisions[r["index"]], r["reason"]) for r in answer["refused"] or []
        ]
    return refused


async def forget_gone(state: State, token: int, gone_s: float, ended_s: float = ENDED_S) -> int:
    """Removes the rows of idle workers and of hosts whose processes have been gone for so long; how
    many workers. And the last ends, `ended_s` ago or longer, of residents that are gone. Fenced
    for a leader that is no longer one.
    """
    answer = await state.run_mesh(
        "forget_gone",
        election=PLANNER,
        token=token,
        gone_ms=int(1000 * gone_s),
        ended_ms=int(1000 * ended_s),
        most=CHUNK,
    )
    return int(answer["removed"])


def _snapshot(found: dict[str, Any]) -> Snapshot:
    processes = [PublishedStats(**row) for row in found["processes"]]
    by_job: dict[str, list[PublishedStats]] = {}
    for process in processes:
        by_job.setdefault(process.stats.get("job", ""), []).append(process)
    alive = frozenset(found["alive"])
    rows = (worker_of(row | {"alive": row["id"] in alive}) for row in found["workers"])
    known = tuple(sorted(rows, key=lambda one: numbered(one.id)))
    kinds = {worker.gang: kind_of(worker.accelerator) for worker in known if worker.gang}
    requests = [PoolRequest(op, **row) for op, row in found["requests"].items()]
    settings = found["settings"]
    return Snapshot(
        now_ms=found["now_ms"],
        workers=known,
        gangs=tuple(sorted(map(gang_of, found["gangs"]), key=lambda one: numbered(one.id))),
        jobs=tuple(
            planned(row, row["document"], by_job.get(row["id"], ()), kinds) for row in found["jobs"]
        ),
        hosts=_hosts(found, known, processes),
        requests=tuple(sorted(requests, key=lambda one: (one.asked_ms, one.op))),
        moves=tuple(Move(id, **row) for id, row in sorted(found["moves"].items())),
        rests=frozenset(p.name for p in processes if p.stats.get("rests")),
        settings=PoolSettings(**settings.get("pool", {})),
        gangs_formed=found["formed"],
        up_ms=settings.get("up_ms", 0),
    )


def _hosts(
    found: dict[str, Any], known: Sequence[WorkerRow], processes: Sequence[PublishedStats]
) -> tuple[PoolHost, ...]:
    agents = {p.name.partition("/")[2]: p for p in processes if p.kind == "node"}
    said = {row["name"]: row["stats"] for row in found["away"]}
    said |= {agent.name: agent.stats for agent in agents.values()}
    services = {row["name"]: tuple(row["services"]) for row in found["hosts"]}
    draining = found["draining"]
    names = sorted({*agents, *services, *(worker.host for worker in known)})
    return tuple(
        PoolHost(
            name,
            alive=name in agents,
            draining=draining.get(name, "")
            or (str(agents[name].stats.get("draining") or "") if name in agents else ""),
            services=services.get(name, ()),
            **_offer(said.get(agent_process(name), {})),
        )
        for name in names
    )


def host_of(agent: Entry) -> PoolHost:
    """A host as its agent's entry in the registry tells of it, without its services."""
    draining = str(agent.stats.get("draining") or "")
    return PoolHost(agent.host, alive=agent.alive, draining=draining, **_offer(agent.stats))


def _offer(said: Mapping[str, Any]) -> dict[str, Any]:
    offer: dict[str, Any] = {key: float(said[key]) for key in CORES if key in said}
    return offer | {key: tuple(said[key]) for key in PLACES if said.get(key) is not None}


async def remaining_on(state: State, host: str) -> list[str]:
    """Names of residents, of shards and sandboxes that are to be there, and of processes of such
    that live there.
    """
    there = {worker.id for worker in await workers(state) if worker.host == host}
    found = set(await services_of(state, host))
    for gang in await gangs(state):
        for resident in gang.residents:
            if there.intersection(gang.workers[rank] for rank in resident.ranks):
                found.add(resident.id)
    entries = await registry.entries(state)
    found |= {e.name for e in entries if e.alive and e.host == host and e.kind in PLACED}
    return sorted(found)
