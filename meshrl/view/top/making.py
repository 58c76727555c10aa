"""Makes the frame of `meshrl top` of one look at a mesh: pure, without a clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from common.pool.explained import Explained, Judged
from common.pool.names import role_process
from common.pool.rows import Gang, Resident, Role
from common.pool.snapshot import Move
from common.state.registry import Entry
from meshrl.view.history.run_snapshot import ETA_STEPS
from meshrl.view.live.mesh_view import JobLine, MeshShot
from meshrl.view.mesh.processes import owner
from meshrl.view.mesh.workers import WorkerLine, lines
from meshrl.view.top.frame import Frame, HostFrame, JobFrame, MoveFrame, ResidentFrame

Rows = Sequence[Mapping[str, Any]]  # of a job's last steps


@dataclass(frozen=True)
class Seen:
    """What one look at a mesh returned."""

    shot: MeshShot
    steps: Mapping[str, Rows]  # by job
    moves: Sequence[Move]
    explained: Mapping[str, Explained]
    judged: Sequence[Judged]


def frame(seen: Seen, mesh: str) -> Frame:
    """The frame of one look."""
    shot, entries = seen.shot, seen.shot.entries
    now_ms = max((entry.renewed_ms for entry in entries), default=0)
    placed = list(lines(shot.pool, entries))
    roles = {r.id: r.job for gang in shot.pool.gangs for r in gang.residents}
    return Frame(
        mesh,
        jobs=tuple(_job(line, seen, now_ms) for line in shot.jobs),
        residents=tuple(_residents(shot, placed)),
        idle=tuple(line.worker for line in placed if line.state == "idle"),
        lost=tuple(dict.fromkeys(line.worker for line in placed if line.state == "lost")),
        hosts=tuple(hosts(entries)),
        moves=tuple(_move(move, roles.get(move.id, ""), now_ms) for move in seen.moves),
        judged=tuple(seen.judged),
    )


def _job(line: JobLine, seen: Seen, now_ms: float) -> JobFrame:
    row, rows, pool = line.row, seen.steps.get(line.row.id, ()), seen.shot.pool
    own = [e for e in seen.shot.entries if e.alive and owner(e) == row.id]
    engines = [e for e in own if e.kind == "engine"]
    queued = [*engines, *(e for e in own if e.kind == "rollout")]
    stands = row.ended or bool(row.held)
    return JobFrame(
        job=row.id,
        phase=row.phase.value,
        held="" if row.ended else row.held,
        quiet=line.quiet,
        error=row.error,
        step=row.steps_done,
        steps=int(row.document["budget"]["steps"]),
        steps_per_min=None if stands else steps_per_min(_committed(rows), now_ms),
        reward=line.rewards[-1] if line.rewards else None,
        rewards=line.rewards,
        workers=len(pool.workers_of(row.id)),
        entitled=None if row.ended else pool.entitled.get(row.id),
        rolled_out_s=line.rolled_out_s,
        trained_s=line.trained_s,
        in_flight=line.in_flight,
        running=sum(int(e.stats.get("running", 0)) for e in engines),
        waiting=sum(int(e.stats.get("waiting", 0)) for e in queued),
        wait_share=wait_share(rows),
        now=None if stands else seen.explained.get(row.id),
    )


def _committed(rows: Rows) -> list[int]:
    return [int(row["committed_ms"]) for row in rows if "committed_ms" in row]


def steps_per_min(committed_ms: Sequence[int], now_ms: float) -> float | None:
    """Steps a minute, by the median of the last steps' durations, or by how long the one under way
    has taken where that is longer; None before the third step.
    """
    last = committed_ms[-ETA_STEPS - 1 :]
    if len(last) < 3:
        return None
    took_ms = median(b - a for a, b in pairwise(last))
    longest_ms = max(took_ms, now_ms - last[-1])
    return 60_000 / longest_ms if longest_ms > 0 else None


def wait_share(rows: Rows) -> float | None:
    """The share of the trainer's time in the last steps in which it waited for trajectories."""
    last = [row for row in rows[-ETA_STEPS:] if "wait_s" in row and "train_s" in row]
    waited = sum(float(row["wait_s"]) for row in last)
    whole = waited + sum(float(row["train_s"]) for row in last)
    return waited / whole if whole > 0 else None


def _residents(shot: MeshShot, placed: Sequence[WorkerLine]) -> list[ResidentFrame]:
    said = {entry.name: entry.stats for entry in shot.entries if entry.alive}
    by_resident: dict[str, list[WorkerLine]] = {}
    for line in placed:
        by_resident.setdefault(line.resident, []).append(line)
    return [
        _resident(gang, resident, by_resident.get(resident.id, ()), said)
        for gang in shot.pool.gangs
        for resident in gang.residents
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
    told = [e for e in entries if e.alive and e.kind == "node" and e.stats.get("cores")]
    return [
        HostFrame(e.host, float(e.stats["cores"]), float(e.stats.get("busy_cores", 0.0)))
        for e in sorted(told, key=lambda e: e.host)
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
