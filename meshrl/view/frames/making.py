"""Makes the frame of a mesh of one snapshot: pure, without a clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.api.worker.stats import NodeStats, stats_of
from common.state.jobs import JobRow
from common.state.pool.placing.snapshot import Move
from common.state.pool.store.explained import Judged
from common.state.pool.workers.names import role_process
from common.state.pool.workers.rows import Gang, Resident, Role
from common.state.registry import Entry
from meshrl.view.frames.frame import Frame, HostFrame, JobFrame, MoveFrame, ResidentFrame
from meshrl.view.mesh.processes import owner
from meshrl.view.mesh.quiet import quiet_ms, told
from meshrl.view.mesh.rates import steps_per_min, trained_rate, wait_share
from meshrl.view.mesh.snapshot import MeshSnapshot, Rows
from meshrl.view.mesh.workers import WorkerLine, lines


def frame(
    mesh: MeshSnapshot,
    rolled_out: Mapping[str, float],
    root: str,
    judged: Sequence[Judged] = (),
) -> Frame:
    """The frame of a snapshot. `rolled_out`: tokens/s by job, which takes several snapshots."""
    placed = list(lines(mesh))
    jobs = {resident.id: resident.job for _, resident in mesh.residents}
    return Frame(
        root,
        jobs=tuple(_job(row, mesh, rolled_out.get(row.id, 0.0)) for row in mesh.jobs),
        residents=tuple(_residents(mesh, placed)),
        idle=tuple(line.worker for line in placed if line.state == "idle"),
        lost=tuple(dict.fromkeys(line.worker for line in placed if line.state == "lost")),
        hosts=tuple(hosts(mesh.entries)),
        moves=tuple(_move(move, jobs.get(move.id, ""), mesh.now_ms) for move in mesh.moves),
        judged=tuple(judged),
    )


def shards_of(mesh: MeshSnapshot, job: str) -> list[Entry]:
    """The rollout shards of a job that live."""
    return [e for e in mesh.entries if e.alive and e.kind == "rollout" and owner(e) == job]


def _job(row: JobRow, mesh: MeshSnapshot, rolled_out_s: float) -> JobFrame:
    rows: Rows = mesh.steps.get(row.id, ())
    shards = shards_of(mesh, row.id)
    engines = [e for e in mesh.entries if e.alive and e.kind == "engine" and owner(e) == row.id]
    stands = row.ended or bool(row.held)
    rewards = tuple(float(step["reward"]) for step in rows)
    quiet_s = quiet_ms(row, mesh.renewed_ms) / 1000
    return JobFrame(
        job=row.id,
        phase=row.phase.value,
        held="" if row.ended else row.held,
        quiet=f"for {quiet_s:.0f} s {told(row)}" if quiet_s else "",
        error=row.error,
        step=row.steps_done,
        steps=int(row.document["budget"]["steps"]),
        steps_per_min=None if stands else steps_per_min(_committed(rows), mesh.renewed_ms),
        reward=rewards[-1] if rewards else None,
        rewards=rewards,
        workers=len(mesh.workers_of(row.id)),
        entitled=None if row.ended else mesh.entitled.get(row.id),
        rolled_out_s=0.0 if row.ended else rolled_out_s,
        trained_s=0.0 if row.ended else trained_rate(rows),
        in_flight=_sum(shards, "in_flight"),
        running=_sum(engines, "running"),
        waiting=_sum([*engines, *shards], "waiting"),
        wait_share=wait_share(rows),
        now=None if stands else mesh.explained.get(row.id),
    )


def _sum(entries: Sequence[Entry], figure: str) -> int:
    return sum(int(entry.stats.get(figure, 0)) for entry in entries)


def _committed(rows: Rows) -> list[int]:
    return [int(row["committed_ms"]) for row in rows if "committed_ms" in row]


def _residents(mesh: MeshSnapshot, placed: Sequence[WorkerLine]) -> list[ResidentFrame]:
    said = mesh.stats
    by_resident: dict[str, list[WorkerLine]] = {}
    for line in placed:
        by_resident.setdefault(line.resident, []).append(line)
    return [
        _resident(gang, resident, by_resident.get(resident.id, ()), said)
        for gang, resident in mesh.residents
    ]


def _resident(
    gang: Gang,
    resident: Resident,
    ranks: Sequence[WorkerLine],
    said: Mapping[str, Mapping[str, Any]],
) -> ResidentFrame:
    core = resident.core and resident.role == Role.TRAINING
    tensor_parallel = said.get(role_process(resident), {}).get("tensor_parallel")
    lost = any(line.state == "lost" for line in ranks)
    return ResidentFrame(
        gang=gang.id,
        resident=resident.id,
        workers=tuple(gang.workers[rank] for rank in resident.ranks),
        job=resident.job,
        role="core" if core else str(resident.role),
        tier=next((str(line.tier) for line in ranks if line.tier != line.wanted), resident.tier),
        wanted=str(resident.tier),
        state="lost" if lost else str(resident.doing),
        tensor_parallel=None if tensor_parallel is None else int(tensor_parallel),
        doing=next((line.doing for line in ranks if line.doing), ""),
    )


def hosts(entries: Sequence[Entry]) -> list[HostFrame]:
    """The hosts whose agents tell of their processors, by name."""
    nodes = [e for e in entries if e.alive and e.kind == "node"]
    told = [(e.host, stats_of(NodeStats, e.stats)) for e in sorted(nodes, key=lambda e: e.host)]
    return [
        HostFrame(host, float(stats.cores), float(stats.busy_cores or 0.0))
        for host, stats in told
        if stats.cores
    ]


def _move(move: Move, job: str, now_ms: float) -> MoveFrame:
    told, predicted = move.details, move.details.get("predicted_s")
    return MoveFrame(
        gang=move.gang,
        resident=move.id,
        job=job or str(move.back.get("job", "")),
        was=str(told.get("from", move.back.get("role", ""))),
        to=str(told.get("to", "")),
        rule=str(told.get("policy", "")),
        since_s=round(max(0.0, now_ms - move.started_ms) / 1000, 1),
        left_s=round(max(0.0, move.until_ms - now_ms) / 1000, 1),
        predicted_s=None if predicted is None else float(predicted),
    )
