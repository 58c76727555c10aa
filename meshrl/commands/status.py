"""Commands that ask a running mesh something or tell it something, through its Redis."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from meshrl.common.base.errors import StateUnavailable
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.process.ends.failure import end_of
from meshrl.common.mesh.process.handle import usage_of
from meshrl.common.mesh.process.supervision import ended
from meshrl.common.state import jobs
from meshrl.common.state.events import Event
from meshrl.common.state.pool.store.explained import Explained
from meshrl.common.state.pool.store.store import explained
from meshrl.common.state.redis.client import State
from meshrl.common.state.redis.embedded import without_password
from meshrl.common.state.registry import Entry
from meshrl.directory.asking import ANSWER_S, ask
from meshrl.directory.places import MeshPlace, find_mesh
from meshrl.directory.target import may_live, place_of, run_in
from meshrl.run.outcome import outcome_of
from meshrl.view import storage
from meshrl.view.history import decisions, moves
from meshrl.view.live import printing, tables
from meshrl.view.mesh import gpus
from meshrl.view.mesh import hosts as standing
from meshrl.view.mesh.processes import owner
from meshrl.view.mesh.quiet import doing, working
from meshrl.view.mesh.snapshot import (
    read_mesh,
    read_with_troubles,
    read_writable,
    stopped_here,
)
from meshrl.view.mesh.stalled import JOB_WORD, Stall, diagnose, redis_silent
from meshrl.view.recording.recorded import judged_moves

QUICK_S = 3.0  # with the start of this program below the 5 s that a stall is named in


def status(chosen: Path | None, mesh: Path | None, as_json: bool) -> None:
    """Of a run: how it stands, and its mesh while that runs. Of a mesh: what is on it."""
    if told(chosen, mesh, as_json):
        return
    place = place_of(chosen, mesh)
    found = ask(place, read_with_troubles, ANSWER_S)
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
            "hosts": [asdict(host) for host in hosts],
            "ended": [ended.document(end) for end in found.ended],
        }
        print(json.dumps(content))
        return
    shown = [tables.jobs(found), tables.processes(found)]
    shown += [tables.workers(found), tables.hosts(hosts)]
    console = printing.console(*shown)
    console.print(shown[0])
    for line in tables.whys(found.jobs):
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if len(hosts) > 1:
        console.print(shown[3])
    console.print(shown[1], shown[2])
    troubles = [f"{row.id} failed: {row.error}" for row in found.jobs if row.error]
    troubles += [*tables.ends(found), *tables.copy_troubles(found.entries)]
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
    here = MeshSettings.from_file(place.settings).host
    pids = {entry.name: entry.pid for entry in entries if entry.host == here}
    if not found:
        print("nothing is stalled")
    for stall in found:
        who = f"{stall.waiter} waits for {stall.culprit}" if stall.waiter else stall.culprit
        who += f" (job {stall.job})" if stall.job and stall.job not in who else ""
        pid = pids.get(stall.culprit, 0)
        usage = usage_of(pid) if pid else None  # what this machine's kernel says of the culprit
        seen = "" if usage is None else f" Process {pid}"
        seen += (" is stopped by a signal." if usage.state == "T" else ".") if usage else ""
        print(f"{who}: {stall.what}, since {stall.since_s:.1f} s. {stall.reason}{seen}")
    quiet = {stall.job for stall in found if stall.culprit.startswith(JOB_WORD)}
    now_ms = max((entry.renewed_ms for entry in entries), default=0)
    for entry in working(entries):
        if quiet and owner(entry) in ("", *quiet):
            last = end_of(place.log(entry.name), 1)
            print(f"  {doing(entry, now_ms)}" + (f"; its log ends: {last}" if last else ""))


def diagnosed(place: MeshPlace) -> tuple[list[Stall], Sequence[Entry]]:
    """The stalls of a mesh, with all that its processes say; it takes a few seconds at most."""
    full = storage.full([place.root, place.redis])
    here = MeshSettings.from_file(place.settings).host
    try:
        mesh = ask(place, read_writable, QUICK_S)
    except StateUnavailable as error:
        return redis_silent(QUICK_S, f"{error.message}. {full}".strip()), []
    return diagnose(mesh, full, stopped_here(mesh, here)), mesh.entries
