"""Names of Redis keys: those of a mesh start with `{mesh}`, those of a job with `{<job>}`."""

from __future__ import annotations

from meshrl.common.base.errors import Refused

MESH_PREFIX = "{mesh}"
EVENTS = f"{MESH_PREFIX}:events"
TRIMMED_KEY = f"{MESH_PREFIX}:trimmed"  # id of the last trimmed event
READERS = f"{MESH_PREFIX}:readers"
PLANNER_ELECTION = "planner"  # election of the planners' leader


def job_prefix(job: str) -> str:
    """Return `{job}`;

    Refused if the name would collide with the mesh's keys or break the braces.
    """
    if not job or job == "mesh" or any(c in "{}:" or c.isspace() for c in job):
        raise Refused(
            f"{job!r} is not a valid job name",
            fix="Choose a name without spaces, colons or braces, other than 'mesh'.",
        )
    return f"{{{job}}}"
