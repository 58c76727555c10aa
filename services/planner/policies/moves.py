"""Moves under way: complete when who arrives does what was wished; undone when that is late or has
failed. What the others did meanwhile is told, which shows that a move stops nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from meshrl.common.state.pool.demand.needs import PlannedJob
from meshrl.common.state.pool.placing.decisions import FinishMove, Why
from meshrl.common.state.pool.placing.snapshot import Move
from meshrl.common.state.pool.workers.rows import Doing, Role
from meshrl.services.planner.pool.draft import Draft
from meshrl.services.planner.pool.team import Seated


def move(
    draft: Draft,
    seated: Seated,
    role: Role,
    why: Why,
    details: dict[str, Any],
    *,
    worker: str = "",
    pinned: bool = False,
    op: str = "",
) -> Seated:
    """Another role for a resident's worker, of the same job, with a way back; who arrives. `worker`
    is which, where an engine has several.
    """
    before = seated.resident
    degrees = [len(seated.workers)]
    made = way_back(
        draft, before.job, before.role, details, degrees, pinned=before.pinned, leaves=[before.id]
    )
    draft.remove(seated, why)
    workers = [worker] if worker else seated.workers[:1]
    return draft.seat(workers, before.job, role, why, pinned=pinned, move=made, op=op)


def way_back(
    draft: Draft,
    job: str,
    role: Role,
    details: dict[str, Any],
    degrees: Sequence[int] = (1,),
    *,
    pinned: bool = False,
    leaves: Collection[str] = (),
) -> Callable[[str, str], Move]:
    """What makes the move of a new resident, from its id and its gang's, that is undone by engines
    of these `degrees` or by helpers on its workers. Those who leave for it are none of the others.
    """
    settings, now_ms = draft.snapshot.settings, draft.snapshot.now_ms
    done = progress(draft.snapshot.jobs, "")
    others = {resident: n for resident, n in done.items() if resident not in leaves}
    told = details | {"before": others}
    back = {"job": job, "role": role, "pinned": pinned, "degrees": list(degrees)}

    def made(resident: str, gang: str) -> Move:
        return Move(resident, gang, now_ms, now_ms + round(1000 * settings.move_s), back, told)

    return made


def finish(draft: Draft) -> None:
    """Says of each move when it is complete, and undoes those that will not be."""
    seats = _seats(draft)
    for under_way in draft.snapshot.moves:
        seated = seats.get(under_way.id)
        if seated is None:
            continue
        if seated.resident.settled:
            _tell(draft, under_way, "")
        elif seated.resident.doing == Doing.FAILED:
            _undo(draft, under_way, seated, f"it failed: {seated.resident.detail}")
        elif draft.snapshot.now_ms > under_way.until_ms:
            _undo(draft, under_way, seated, "it was not complete in time")


def abandon(draft: Draft) -> None:
    """Says of the other moves whose resident has left by now that they came to nothing."""
    seats = _seats(draft)
    told = {d.move.id for d in draft.decisions if isinstance(d, FinishMove)}
    for under_way in draft.snapshot.moves:
        if under_way.id not in told and under_way.id not in seats:
            _tell(draft, under_way, "who was to arrive has left")


def progress(jobs: Sequence[PlannedJob], but: str) -> dict[str, int]:
    """What each other resident has done so far: tokens of an engine, steps of a core, bins of a
    helper.
    """
    return {
        resident: done for job in jobs for resident, done in job.progress.items() if resident != but
    }


def _seats(draft: Draft) -> dict[str, Seated]:
    return {s.resident.id: s for seats in draft.of.values() for s in seats.values()}


def _undo(draft: Draft, under_way: Move, seated: Seated, reason: str) -> None:
    _tell(draft, under_way, reason)
    back = under_way.back
    why = Why("undo", back["job"], {"reason": reason})
    draft.remove(seated, why)
    role, start = Role(back["role"]), 0
    degrees = back.get("degrees", [1])
    if role != Role.ROLLOUT:
        degrees = [1] * len(seated.workers)
    elif (need := draft.needs.get(back["job"])) and not set(degrees) <= set(need.degrees):
        return
    elif sum(degrees) != len(seated.workers):
        return  # what there was had other workers, too: the job grows as it would
    for degree in degrees:
        workers = seated.workers[start : start + degree]
        draft.seat(workers, back["job"], role, why, pinned=back["pinned"])
        start += degree


def _tell(draft: Draft, under_way: Move, undone: str) -> None:
    details = dict(under_way.details)
    before = details.pop("before", {})
    after = progress(draft.snapshot.jobs, under_way.id)
    details["others"] = {
        other: {"before": done, "after": after[other]}
        for other, done in before.items()
        if other in after
    }
    if undone:
        details["reason"] = undone
    why = Why(details.get("policy", "move"), under_way.back.get("job", ""))
    draft.decide(FinishMove(under_way, bool(undone), details, why))
