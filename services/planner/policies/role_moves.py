"""Moves in progress: complete when the new instance reaches its desired state, undone on a deadline
or failure. Progress of the other instances is recorded, which shows that a move stops none of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.scheduling.decisions import FinishMove, Rationale
from meshrl.common.state.pool.scheduling.snapshot import Move
from meshrl.common.state.pool.workers.rows import InstancePhase, Role
from meshrl.services.planner.pool.draft import PoolDraft
from meshrl.services.planner.pool.job_instances import InstancePlacement


def move_worker(
    draft: PoolDraft,
    placement: InstancePlacement,
    role: Role,
    rationale: Rationale,
    details: dict[str, Any],
    *,
    worker: str = "",
    pinned: bool = False,
    op: str = "",
) -> InstancePlacement:
    """Change the role of an instance's worker, within the job, as a reversible move. Return the new
    placement. `worker` selects one of an engine's several workers.
    """
    before = placement.instance
    degrees = [len(placement.workers)]
    move_factory = make_reversible_move(
        draft,
        before.job,
        before.role,
        details,
        degrees,
        pinned=before.pinned,
        removed_instances=[before.id],
    )
    draft.remove_instance(placement, rationale)
    workers = [worker] if worker else placement.workers[:1]
    return draft.place_instance(
        workers, before.job, role, rationale, pinned=pinned, move=move_factory, op=op
    )


def make_reversible_move(
    draft: PoolDraft,
    job: str,
    role: Role,
    details: dict[str, Any],
    degrees: Sequence[int] = (1,),
    *,
    pinned: bool = False,
    removed_instances: Collection[str] = (),
) -> Callable[[str, str], Move]:
    """Return a function that makes the move of a new instance from its id and its gang's. Undoing
    the move places engines of these `degrees`, or hybrids, on its workers. Progress of
    `removed_instances` is not recorded.
    """
    settings, now_ms = draft.snapshot.settings, draft.snapshot.now_ms
    done = read_progress(draft.snapshot.jobs, "")
    others = {resident: n for resident, n in done.items() if resident not in removed_instances}
    move_details = details | {"before": others}
    back = {"job": job, "role": role, "pinned": pinned, "degrees": list(degrees)}

    def make_move(resident: str, gang: str) -> Move:
        return Move(
            resident,
            gang,
            now_ms,
            now_ms + round(1000 * settings.move_timeout_s),
            back,
            move_details,
        )

    return make_move


def finish_moves(draft: PoolDraft) -> None:
    """Report each completed move, and undo those that failed or are late."""
    seats = _index_placements(draft)
    for under_way in draft.snapshot.moves:
        seated = seats.get(under_way.id)
        if seated is None:
            continue
        if seated.instance.is_reconciled:
            _finish_move(draft, under_way, "")
        elif seated.instance.phase == InstancePhase.FAILED:
            _undo_move(draft, under_way, seated, f"the instance failed: {seated.instance.detail}")
        elif draft.snapshot.now_ms > under_way.deadline_ms:
            _undo_move(draft, under_way, seated, "the move was not complete in time")


def abandon_moves(draft: PoolDraft) -> None:
    """Report the other moves whose instance has left as abandoned."""
    seats = _index_placements(draft)
    finished_ids = {d.move.id for d in draft.decisions if isinstance(d, FinishMove)}
    for under_way in draft.snapshot.moves:
        if under_way.id not in finished_ids and under_way.id not in seats:
            _finish_move(draft, under_way, "the arriving instance has been removed")


def read_progress(jobs: Sequence[PlannedJob], excluded_instance: str) -> dict[str, int]:
    """Return the progress of all other instances: tokens of an engine, steps of a core, bins of a
    hybrid.
    """
    return {
        resident: done
        for job in jobs
        for resident, done in job.instance_progress.items()
        if resident != excluded_instance
    }


def _index_placements(draft: PoolDraft) -> dict[str, InstancePlacement]:
    return {s.instance.id: s for seats in draft.placements_by_job.values() for s in seats.values()}


def _undo_move(draft: PoolDraft, move: Move, placement: InstancePlacement, reason: str) -> None:
    _finish_move(draft, move, reason)
    back = move.rollback
    why = Rationale("undo", back["job"], {"reason": reason})
    draft.remove_instance(placement, why)
    role, start = Role(back["role"]), 0
    degrees = back.get("degrees", [1])
    if role != Role.ROLLOUT:
        degrees = [1] * len(placement.workers)
    elif (need := draft.requirements_by_job.get(back["job"])) and not set(degrees) <= set(
        need.tensor_parallel
    ):
        return
    elif sum(degrees) != len(placement.workers):
        return  # the former instance had other workers too: the job grows as usual
    for degree in degrees:
        workers = placement.workers[start : start + degree]
        draft.place_instance(workers, back["job"], role, why, pinned=back["pinned"])
        start += degree


def _finish_move(draft: PoolDraft, move: Move, undo_reason: str) -> None:
    details = dict(move.details)
    before = details.pop("before", {})
    after = read_progress(draft.snapshot.jobs, move.id)
    details["others"] = {
        other: {"before": done, "after": after[other]}
        for other, done in before.items()
        if other in after
    }
    if undo_reason:
        details["reason"] = undo_reason
    why = Rationale(details.get("policy", "move"), move.rollback.get("job", ""))
    draft.add_decision(FinishMove(move, bool(undo_reason), details, why))
