"""Commands that ask a running mesh something or tell it something, through its Redis."""

from __future__ import annotations

import asyncio
import json
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from common.errors import NotFound, Refused, StateUnavailable
from common.job.config import JobConfig
from common.process.failure import end_of
from common.process.handle import usage_of
from common.state import ended, events, gangs, jobs, leader, registry
from common.state.client import State, server_ms
from common.state.embedded import without_password
from common.state.keys import MESH, PLANNER
from meshrl.asking import ANSWER_S, ask
from meshrl.launch.claims import claimed, writing
from meshrl.launch.places import MeshPlace, find_mesh
from meshrl.launch.session import pack_run
from meshrl.observe import storage
from meshrl.observe.quiet import doing, working
from meshrl.observe.stalled import JOB_WORD, Stall, diagnose, redis_silent
from meshrl.run.outcome import outcome_of
from meshrl.run.target import may_live, place_of, run_in

QUICK_S = 3.0  # with the start of this program below the 5 s that a stall is named in
VERDICT_S = 6.0
ASKED = f"{MESH}:asked"  # a key of a second, which shows whether Redis takes writes
POLL_S = 0.2
ROLES = (gangs.Role.ROLLOUT, gangs.Role.TRAINING, gangs.Role.IDLE)


def submit(
    config: JobConfig, base: Path, force: bool, mesh: Path | None, job_file: Path | None = None
) -> None:
    place = find_mesh(mesh)

    async def taken(state: State) -> set[str]:
        return {row.id for row in await jobs.jobs(state)}

    job = _free_name(config.name, ask(place, taken, ANSWER_S))
    with claimed(config, force) as claim:
        run_dir = claim.directory
        with writing(run_dir):
            about = {"job": job, "mesh": str(place.root)}
            document = pack_run(config, base, run_dir, about, job_file)
            (run_dir / "store").symlink_to(place.root / "store")  # where the mesh keeps its weights

        async def hand_over(state: State) -> None:
            await jobs.submit(state, job, document, str(run_dir), uuid.uuid4().hex)

        try:
            ask(place, hand_over, ANSWER_S)
        except StateUnavailable:  # perhaps the mesh has the job all the same
            claim.keep()
            raise
        claim.keep()
        claim.replace()
    print(f"submitted {job}; its run directory is {run_dir}")


def _free_name(name: str, taken: set[str]) -> str:
    number = 2
    chosen = name
    while chosen in taken:
        chosen, number = f"{name}-{number}", number + 1
    return chosen


def status(chosen: Path | None, mesh: Path | None, as_json: bool) -> None:
    """Of a run: how it stands, and its mesh while that runs. Of a mesh: what is on it."""
    if told(chosen, mesh, as_json):
        return
    place = place_of(chosen, mesh)

    async def look(state: State) -> Any:
        return (
            await jobs.jobs(state),
            await registry.entries(state),
            await gangs.gangs(state),
            await leader.leader(state, PLANNER),
            await server_ms(state),
            await ended.ended(state),
        )

    rows, entries, known, (leading, _), now_ms, gone = ask(place, look, ANSWER_S)
    if as_json:
        content = {
            "mesh": str(place.root),
            "redis": without_password(place.redis_url),
            "leader": leading,
            "jobs": [{k: v for k, v in asdict(row).items() if k != "document"} for row in rows],
            "processes": [asdict(entry) for entry in entries],
            "gangs": [asdict(gang) for gang in known],
            "ended": [ended.document(end) for end in gone],
        }
        print(json.dumps(content))
        return
    console = Console()
    table = _table("job", "phase", "steps", "version", "trained", "lost hosts", "run")
    for row in rows:
        steps = f"{row.steps_done}/{row.document['budget']['steps']}"
        table.add_row(
            row.id,
            row.phase,
            steps,
            str(row.version),
            str(row.trained),
            str(row.host_lost),
            row.run_dir,
        )
    console.print(table)
    table = _table("process", "pid", "renewed", "metrics", "waits for")
    for entry in sorted(entries, key=lambda e: e.name):
        if entry.alive:
            leads = " (leads)" if leading.startswith(entry.name) else ""
            renewed = f"{(now_ms - entry.renewed_ms) / 1000:.1f} s ago"
            waits = ", ".join(sorted({wait["on"] for wait in entry.waits}))
            table.add_row(entry.name + leads, str(entry.pid), renewed, entry.metrics, waits)
    console.print(table)
    console.print(_gang_table(known))
    for line in troubles(rows, gone, now_ms):
        console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)


def troubles(rows: list[jobs.JobRow], gone: list[ended.Ended], now_ms: float) -> list[str]:
    """Why jobs have failed, and which processes have ended unasked, a line each."""
    failed = [f"{row.id} failed: {row.error}" for row in rows if row.error]
    return failed + [
        f"{end.name} ended {(now_ms - end.at_ms) / 1000:.0f} s ago"
        + (f", {end.times} times in all" if end.times > 1 else "")
        + f": {end.told}"
        for end in gone
    ]


def told(chosen: Path | None, mesh: Path | None, as_json: bool) -> bool:
    """Says how a run stands; True when nothing is left to say, as its mesh does not run."""
    directory = chosen or mesh or find_mesh(None).root
    if not (directory / "job.json").is_file():
        return False
    run = run_in(directory)
    live = may_live(run.place)
    found = outcome_of(run, live)
    if not as_json:
        print("\n".join(found.lines()))
    elif not live:
        print(json.dumps({"run": found.document()}))
    return not live


def workers(mesh: Path | None, as_json: bool) -> None:
    known = ask(find_mesh(mesh), gangs.gangs, ANSWER_S)
    if as_json:
        print(json.dumps([asdict(gang) for gang in known]))
    else:
        Console().print(_gang_table(known))


def _gang_table(known: list[gangs.Gang]) -> Table:
    table = _table("worker", "on", "role", "state", "to be", "job", "")
    for gang in known:
        notes = [
            "core" if gang.desired_core and gang.desired_role == gangs.Role.TRAINING else "",
            "placed by hand" if gang.pinned else "",
            gang.detail,
        ]
        table.add_row(
            gang.id,
            gang.accelerator,
            gang.actual_role,
            gang.actual_state,
            gang.desired_role,
            gang.desired_job,
            ", ".join(note for note in notes if note),
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in columns:
        table.add_column(column, header_style="dim", overflow="fold")
    return table


def move(worker: str, role: str, mesh: Path | None) -> None:
    gang = worker.removeprefix("worker/")
    if role not in ROLES:
        raise Refused(f"{role!r} is no role", fix=f"Roles are {', '.join(ROLES)}")

    async def request(state: State) -> str:
        known = {found.id: found for found in await gangs.gangs(state)}
        if gang not in known:
            raise NotFound(f"there is no worker {worker}", fix=f"There are: {', '.join(known)}")
        last = await events.last_id(state)
        op_id = uuid.uuid4().hex
        await gangs.request_move(state, gang, role, op_id)
        return await _verdict(state, known[gang], op_id, last)

    print(ask(find_mesh(mesh), request, ANSWER_S))


async def _verdict(state: State, gang: gangs.Gang, op_id: str, since: str) -> str:
    """What the planner made of a move that was asked for; Refused with its reason."""
    for _ in range(round(VERDICT_S / POLL_S)):
        await asyncio.sleep(POLL_S)
        for event in await events.read_all(state, since):
            if event.kind == "move_declined" and event.fields["op"] == op_id:
                raise Refused(event.fields["reason"])
            if event.kind == "desired" and event.fields["gang"] == gang.id:
                role = event.fields["role"]
                return f"{gang.id} is to take the role {role}; `meshrl workers` shows when it has"
    return f"the planner has not decided on {gang.id} yet; `meshrl workers` shows it when it has"


def stalled(chosen: Path | None, mesh: Path | None, as_json: bool) -> None:
    """Prints who waits for whom; also when it is Redis itself that does not answer."""
    place = place_of(chosen, mesh)
    found, entries = diagnosed(place)
    if as_json:
        print(json.dumps([asdict(stall) for stall in found]))
        return
    pids = {entry.name: entry.pid for entry in entries}
    if not found:
        print("nothing is stalled")
    for stall in found:
        who = f"{stall.waiter} waits for {stall.culprit}" if stall.waiter else stall.culprit
        print(f"{who}: {stall.what}, since {stall.since_s:.1f} s. {stall.reason}", end="")
        print(_seen_from_here(pids.get(stall.culprit, 0)))
    if any(stall.culprit.startswith(JOB_WORD) for stall in found):
        now_ms = max((entry.renewed_ms for entry in entries), default=0)
        for entry in working(entries):
            last = end_of(place.log(entry.name), 1)
            print(f"  {doing(entry, now_ms)}" + (f"; its log ends: {last}" if last else ""))


def diagnosis(place: MeshPlace) -> tuple[list[Stall], dict[str, int]]:
    """The stalls of a mesh, and the pids of its processes; it takes a few seconds at most."""
    found, entries = diagnosed(place)
    return found, {entry.name: entry.pid for entry in entries}


def diagnosed(place: MeshPlace) -> tuple[list[Stall], list[registry.Entry]]:
    """The same with all that its processes say."""
    full = storage.full([place.root, place.redis])

    async def look(state: State) -> tuple[list[Stall], list[registry.Entry]]:
        # Reading says nothing of writes: without any, everybody seems to be late.
        await state.command("SET", ASKED, 1, "PX", 1000)
        entries = await registry.entries(state)
        known = await gangs.gangs(state)
        now_ms = await server_ms(state)
        gone = await ended.ended(state)
        rows = await jobs.jobs(state)
        return diagnose(entries, known, now_ms, gone, rows, full), entries

    try:
        return ask(place, look, QUICK_S)
    except StateUnavailable as error:
        return redis_silent(QUICK_S, f"{error.message}. {full}".strip()), []


def _seen_from_here(pid: int) -> str:
    """What this machine's kernel says of the culprit, if it runs here."""
    usage = usage_of(pid) if pid else None
    if usage is None:
        return ""
    return f" Process {pid} is stopped by a signal." if usage.state == "T" else f" Process {pid}."
