"""What a client needs of a mesh, whichever way it reaches it: as the mesh's own user through its
Redis (`local`), or with a token through its gateway (`remote`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from common.api.gateway import JobState, SubmittedJob
from common.state.events import Event
from meshrl.job.loaded import JobFile
from meshrl.view.mesh.snapshot import MeshSnapshot


class ClientTransport(Protocol):
    """The requests of a client; each raises a MeshError of its kind."""

    async def submit(self, found: JobFile, force: bool, job_file: Path | None) -> SubmittedJob:
        """Hands a checked job to the mesh."""

    async def jobs(self) -> list[JobState]:
        """The jobs that one may see, in the order of submission."""

    async def job(self, name: str) -> JobState:
        """One job. NotFound."""

    async def happened(self, name: str, since: str, wait_s: float) -> tuple[list[Event], str]:
        """Events of a job after `since`, and where to go on."""

    async def stop(self, name: str, op: str) -> bool:
        """Stops a job; False: it had ended. NotFound."""

    async def delete(self, name: str, op: str) -> None:
        """Removes a job that has ended from the mesh's records. Refused while it goes on; NotFound,
        also when it was deleted before.
        """

    async def workers(self) -> MeshSnapshot:
        """The workers, and what resides on them."""

    async def move(self, worker: str, role: str, job: str) -> str:
        """Asks the planner for a worker's other role; what it decided."""

    async def weights(self, name: str, step: int | None, best: bool, out: Path) -> Path:
        """Writes a version's Hugging Face directory to `out`. NotFound."""

    async def on_versions(self, name: str, act: str, version: str, note: str) -> dict[str, Any]:
        """What `meshrl weights` answers to `list`, `pin` and `unpin`."""

    async def close(self) -> None:
        """Ends the connection."""
