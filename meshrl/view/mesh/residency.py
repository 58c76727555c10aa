"""What a job has of the accelerators of a mesh, as its workers report it."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from common.state.pool.workers.rows import Doing, Gang, Resident, Tier
from meshrl.view.mesh.snapshot import MeshSnapshot

AWAY = (Doing.GONE, Doing.FAILED)


def there(resident: Resident, rank: int) -> bool:
    """Whether a resident's tensors are on the accelerator of a rank, or on their way there."""
    report = resident.reports.get(rank)
    if report is None or report.generation != resident.generation or report.doing in AWAY:
        return False
    return report.tier == Tier.ACCELERATOR


def accelerators(mesh: MeshSnapshot, job: str, measured: Collection[str] = ()) -> float:
    """Accelerators that a job has now: one that several residents are on is divided equally. Those
    that say how long they compute by turns are `measured`, and not counted here.
    """
    return sum(
        1 / beside
        for gang in mesh.gangs
        for resident, beside in _places(gang)
        if resident.job == job and resident.id not in measured
    )


def _places(gang: Gang) -> Iterator[tuple[Resident, int]]:
    """Each resident on each accelerator of a gang, with how many are on that one."""
    for rank in range(len(gang.workers)):
        on_it = [r for r in gang.residents if rank in r.ranks and there(r, rank)]
        yield from ((resident, len(on_it)) for resident in on_it)
