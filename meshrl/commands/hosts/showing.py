"""`meshrl hosts`: prints the hosts of a mesh."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from meshrl.directory.asking import ANSWER_S, ask
from meshrl.directory.places import find_mesh
from meshrl.view.live import printing
from meshrl.view.live.hosts_table import table
from meshrl.view.mesh.hosts import read_hosts


def show(mesh: Path | None, as_json: bool) -> None:
    """Prints the hosts of a mesh."""
    place = find_mesh(mesh)
    found = ask(place, partial(read_hosts, place=place), ANSWER_S)
    if as_json:
        print(json.dumps([row.document for row in found]))
    else:
        made = table(found)
        printing.show(made)
