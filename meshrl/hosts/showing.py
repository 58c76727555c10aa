"""`meshrl hosts`, and the table of hosts that `meshrl status` has too."""

from __future__ import annotations

import json
from datetime import datetime
from functools import partial
from pathlib import Path

from rich.table import Table

from common.pool.taking import ALL
from meshrl.directory.asking import ANSWER_S, ask
from meshrl.directory.places import find_mesh
from meshrl.hosts.standing import HostRow, rows
from meshrl.observe.live import printing


def show(mesh: Path | None, as_json: bool) -> None:
    """Prints the hosts of a mesh."""
    place = find_mesh(mesh)
    found = ask(place, partial(rows, place=place), ANSWER_S)
    if as_json:
        print(json.dumps([row.document for row in found]))
    else:
        made = table(found)
        printing.console(made).print(made)


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
    made = printing.table(*columns, wraps=columns[-1:])
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
