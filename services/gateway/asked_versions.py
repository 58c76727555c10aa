"""What holders of tokens ask of their jobs' versions, answered by a process that looks at the
store's files.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from common.api.gateway import VersionsRequest
from common.base.errors import DeadlineExceeded, MeshError, Refused, from_wire
from common.mesh.process.answers import answer_of
from common.mesh.runtime.mesh import Mesh
from common.state.jobs import JobRow

ANSWER_S = 50.0  # below the call's deadline
ACTS = ("list", "pin", "unpin")
LONGEST = 1000  # characters of what a person types


async def on_versions(mesh: Mesh, row: JobRow, request: VersionsRequest) -> Any:
    """The answer, without this host's directories; the process' own error, Refused for anything
    else than these acts; DeadlineExceeded.
    """
    if request.act not in ACTS or max(len(request.version), len(request.note)) > LONGEST:
        raise Refused(
            f"{request.act!r:.100} is nothing that a token can ask of versions",
            fix=f"It can {', '.join(ACTS)}",
        )
    command = [sys.executable, "-m", "services.weights.versions", request.act]
    command += [f"--note={request.note}"] if request.note and request.act == "pin" else []
    command += ["--", row.run_dir] + ([request.version] if request.act != "list" else [])
    logs = Path(mesh.settings.run_root) / "mesh" / "logs"
    try:
        found = await answer_of(mesh.host, command, f"versions/{row.id}", logs, ANSWER_S)
    except DeadlineExceeded:
        raise
    except MeshError as unsaid:  # its words may name what is this host's alone
        raise MeshError("the versions could not be looked at", where=mesh.name) from unsaid
    if error := found.get("error"):
        text = error["text"].replace(row.run_dir, row.id).replace(mesh.settings.run_root, "")
        raise from_wire(error["code"], text)
    found.pop("run", None)
    return found
