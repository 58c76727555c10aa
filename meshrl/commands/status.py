"""Commands that ask a running mesh something or tell it something, through its Redis."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from common.base.errors import StateUnavailable
from common.base.host.settings import MeshSettings
from common.mesh.process.ends.failure import end_of
from common.mesh.process.handle import usage_of
from common.mesh.process.supervision import ended
from common.state import jobs
from common.state.events import Event
from common.state.pool.store.explained import Explained
from common.state.pool.store.store import explained
from common.state.redis.client import State
from common.state.redis.embedded import without_password
from common.state.registry import Entry
from meshrl.client import checked
from meshrl.client.blocking import request
from meshrl.directory.asking import ANSWER_S, ask
from meshrl.directory.places import MeshPlace, find_mesh
from meshrl.directory.target import may_live, place_of, run_in
from meshrl.run.outcome import outcome_of
from meshrl.view import storage
from meshrl.view.history import decisions, moves
from meshrl.view.live import hosts_table, printing, tables
from meshrl.view.mesh import gpus
from meshrl.view.mesh import hosts as standing
from meshrl.view.mesh.diagnosing import read_writable, stopped_here
from meshrl.view.mesh.processes import owner
from meshrl.view.mesh.quiet import doing, working
from meshrl.view.mesh.snapshot import MeshSnapshot, read_mesh, read_troubles
from meshrl.view.mesh.stalled import JOB_WORD, Stall, diagnose, redis_silent
from meshrl.view.recording.recorded import judged_moves

QUICK_S = 3.0  # with the start of this program below the 5 s that a stall is named in


def submit(
    job: Path, overrides: list[str], force: bool, mesh: Path | None, token: str | None
) -> None:
    found = checked.job_file(job, overrides, None)

    handle = request(lambda c: c.submit(found, job_file=job, force=force), mesh, token)
    print(f"submitted {handle.name}; its run directory is {handle.run_dir}")


def status(chosen: Path | None, mesh: Path | None, as_json: bool) -> None:
    """Of a run: how it stands, and its mesh while that runs. Of a mesh: what is on it."""
    if told(chosen, mesh, as_json):
        return
    place = place_of(chosen, mesh)

    async def look(state: State) -> MeshSnapshot:
        return await read_troubles(state, await read_mesh(state))

    found = ask(place, look, ANSWER_S)
    hosts = standing.rows(found, place)
    if as_json:
        rows = [{k: v for k, v in asdict(row).items() if k != "document"} for row in found.jobs]
        content = {
            "mesh": str(place.root),
            "redis": without_password(place.redis_url),
            "leader": found.leader,
            "jobs": rows,
            "processes": [asdict(entry) for entry in found.entries],
            **tables.document(found),
            "hosts": [host.document for host in hosts],
            "ended": [ended.document(end) for end in found.ended],
        }
        print(json.dumps(content))
        return
    shown = [tables.jobs(found), tables.processes(found)]
    shown += [tables.workers(found), hosts_table.table(hosts)]
    console = printing.console(*shown)
    console.print(shown[0])
    for line in tables.whys(found.jobs):
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if len(hosts) > 1:
        console.print(shown[3])
    console.print(shown[1], shown[2])
    troubles = [*tables.troubles(found), *tables.copy_troubles(found.entries)]
    troubles += [*tables.quota_troubles(found.entries), *gpus.troubles(found)]
    for line in troubles:
        console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)


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
    """Prints the workers of a mesh with all that resides on them."""
    found = ask(find_mesh(mesh), read_mesh, ANSWER_S)
    if as_json:
        print(json.dumps(tables.document(found)))
    else:
        table = tables.workers(found)
        printing.show(table)


def move(worker: str, role: str, job: str, mesh: Path | None) -> None:
    print(request(lambda client: client.move(worker, role, job), mesh))


def delete(job: str, mesh: Path | None, token: str | None) -> None:
    request(lambda client: client.delete(job), mesh, token)
    print(f"{job} is deleted; its run directory stays")


def why(subject: str, mesh: Path | None, as_json: bool) -> None:
    """Prints the last decisions about a job, a gang or a worker, each with its rule and inputs, and
    what came of its last moves; of a job what is predicted now, and why nothing moves.
    """

    async def look(state: State) -> tuple[list[Event], dict[str, Explained], list[jobs.JobRow]]:
        return await decisions.recent(state), await explained(state), await jobs.jobs(state)

    recent, told_of, rows = ask(find_mesh(mesh), look, ANSWER_S)
    known = [judged_moves(Path(row.run_dir)) for row in rows]
    judged = moves.judged(moves.merged(*known, recent), subject)
    found = decisions.about(recent, subject)
    present = told_of.get(subject)
    if as_json:
        content = {
            "decisions": [asdict(event) for event in found],
            "moves": [asdict(move) for move in judged],
            "now": present and asdict(present),
        }
        print(json.dumps(content))
        return
    if not found:
        print(f"nothing was decided about {subject} lately; `meshrl status` shows what there is")
    for event in found:
        print(decisions.told(event))
    if judged:
        print(f"\nWhat came of the last moves of {subject}, in seconds a step:")
        table = tables.moves(judged)
        printing.show(table)
    if present is not None and (lines := moves.present(present)):
        print("\nNow:")
        print("\n".join(f"  {line}" for line in lines))


def stalled(chosen: Path | None, mesh: Path | None, as_json: bool) -> None:
    """Prints who waits for whom; also when it is Redis itself that does not answer."""
    place = place_of(chosen, mesh)
    found, entries = diagnosed(place)
    if as_json:
        print(json.dumps([asdict(stall) for stall in found]))
        return
    pids = _pids_here(place, entries)
    if not found:
        print("nothing is stalled")
    for stall in found:
        who = f"{stall.waiter} waits for {stall.culprit}" if stall.waiter else stall.culprit
        who += f" (job {stall.job})" if stall.job and stall.job not in who else ""
        print(f"{who}: {stall.what}, since {stall.since_s:.1f} s. {stall.reason}", end="")
        print(_seen_from_here(pids.get(stall.culprit, 0)))
    quiet = {stall.job for stall in found if stall.culprit.startswith(JOB_WORD)}
    now_ms = max((entry.renewed_ms for entry in entries), default=0)
    for entry in working(entries):
        if quiet and owner(entry) in ("", *quiet):
            last = end_of(place.log(entry.name), 1)
            print(f"  {doing(entry, now_ms)}" + (f"; its log ends: {last}" if last else ""))


def _pids_here(place: MeshPlace, entries: Sequence[Entry]) -> dict[str, int]:
    """Pids of other hosts are of other processes here."""
    own = MeshSettings.from_file(place.settings).host
    return {entry.name: entry.pid for entry in entries if entry.host == own}


def diagnosed(place: MeshPlace) -> tuple[list[Stall], Sequence[Entry]]:
    """The stalls of a mesh, with all that its processes say; it takes a few seconds at most."""
    full = storage.full([place.root, place.redis])
    here = MeshSettings.from_file(place.settings).host
    try:
        mesh = ask(place, read_writable, QUICK_S)
    except StateUnavailable as error:
        return redis_silent(QUICK_S, f"{error.message}. {full}".strip()), []
    return diagnose(mesh, full, stopped_here(mesh, here)), mesh.entries


def _seen_from_here(pid: int) -> str:
    """What this machine's kernel says of the culprit, if it runs here."""
    usage = usage_of(pid) if pid else None
    if usage is None:
        return ""
    return f" Process {pid} is stopped by a signal." if usage.state == "T" else f" Process {pid}."
