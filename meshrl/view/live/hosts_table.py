"""Table of the hosts of a mesh, as `meshrl hosts` and `meshrl status` print it."""

from __future__ import annotations

from datetime import datetime

from rich.table import Table

from common.state.pool.placing.taking import ALL
from meshrl.view.live import printing
from meshrl.view.mesh.hosts import HostRow


def table(found: list[HostRow]) -> Table:
    """A row a host."""
    columns = (
        "host",
        "state",
        "address",
        "since",
        "workers",
        "services",
        "busy",
        "trip",
        "clock",
        "",
    )
    made = printing.table(*columns)
    for row in found:
        since = datetime.fromtimestamp(row.since_s).strftime("%m-%d %H:%M") if row.since_s else ""
        made.add_row(
            row.host,
            row.state,
            row.address,
            since,
            _workers(row),
            _services(row),
            "" if row.cores is None else f"{row.busy_cores:.1f} of {row.cores:g}",
            "" if row.trip_ms is None else f"{row.trip_ms:.1f} ms",
            "" if row.ahead_ms is None else f"{row.ahead_ms:+.0f} ms",
            ", ".join(_notes(row)),
        )
    return made


def _workers(row: HostRow) -> str:
    kinds = sorted({accelerator.partition(":")[0] for accelerator in row.accelerators})
    return f"{len(row.workers)} {'+'.join(kinds)}".strip()


def _services(row: HostRow) -> str:
    """How many there are, and what may be, where that is not all."""
    count = str(len(row.services))
    if set(row.takes) == set(ALL):
        return count
    return f"{count} {' '.join(row.takes) or 'none'}"


def _notes(row: HostRow) -> list[str]:
    notes = ["head" if row.head else "", f"{row.planner} stands by" if row.planner else ""]
    return [note for note in (*notes, row.draining) if note]
