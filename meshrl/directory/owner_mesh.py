"""Connection of a command to the processes of a running mesh, as the mesh's owner."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from meshrl.common.base.host.settings import METRICS_OFF, MeshSettings
from meshrl.common.mesh.access.owner import PERSON_ROLE, make_person_settings
from meshrl.directory.directory_paths import MeshPaths

if TYPE_CHECKING:
    from meshrl.common.mesh.runtime.mesh import Mesh


@asynccontextmanager
async def open_owner_mesh(place: MeshPaths) -> AsyncIterator[Mesh]:
    """Open the running mesh at `place` to call its processes, within the block."""
    from meshrl.common.mesh.runtime.mesh import Mesh  # only now is it sure that it is needed

    settings = make_person_settings(MeshSettings.from_file(place.settings), place.directory)
    name = f"{PERSON_ROLE}/{secrets.token_hex(4)}"
    mesh = await Mesh.open(name, PERSON_ROLE, replace(settings, metrics=METRICS_OFF))
    try:
        mesh.start()
        yield mesh
    finally:
        await mesh.leave()
