"""Whether the process that runs a mesh is alive on this host."""

from __future__ import annotations

from common.process.handle import start_time
from meshrl.launch.places import MeshPlace, read_json


def running_launcher(place: MeshPlace) -> int:
    """The pid of the process that runs the mesh; 0 when none does."""
    if not place.launcher.is_file():
        return 0
    marker = read_json(place.launcher)
    pid = int(marker["pid"])
    return pid if start_time(pid) == marker["start_time"] != 0 else 0
