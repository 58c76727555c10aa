"""Whether the process that runs a mesh is alive on this host."""

from __future__ import annotations

from common.mesh.process.handle import start_time
from meshrl.directory.places import MeshPlace, read_if_whole


def running_launcher(place: MeshPlace) -> int:
    """The pid of the process that runs the mesh; 0 when none does."""
    marker = read_if_whole(place.launcher)
    pid = int(marker.get("pid", 0))
    if not pid:
        return 0
    return pid if start_time(pid) == marker["start_time"] != 0 else 0
