"""The talk with the store while chunks are fetched: what has come and what has not, and who is to
be asked for what next.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from common.api.weights import STORE, FailedTransfer, Seek, Sources, Weights
from common.base.errors import MeshError
from common.mesh.runtime.mesh import Mesh
from common.mesh.runtime.patience import Patience
from common.state import registry

OVER_S = 1.0  # for the store to hear that it is over, which it notices itself


class Seeking:
    """One fetch, as the store knows it."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._store = mesh, mesh.ref(STORE)
        self._name = f"{mesh.name} {mesh.random.token(4)}"
        self._server = ""
        self._known = False
        self._held: list[str] = []
        self._failed: list[FailedTransfer] = []
        self._patience = Patience(mesh.clock)

    async def find_server(self) -> None:
        """Looks up who serves on what this host has; StateUnavailable."""
        name = f"node/{self._mesh.settings.host}"
        found = await registry.lookup(self._mesh.state, name)
        self._server = name if found is not None and found.alive and found.bulk else ""

    def holds(self, chunks: Iterable[str]) -> None:
        """Chunks are there, and served on."""
        self._held += chunks

    def fails(self, chunk: str, source: str, *, gone: bool) -> None:
        """A chunk has not come from a source. `gone`: that has not got it as it should be."""
        self._failed.append(FailedTransfer(chunk, source, gone))

    async def next(self, lacking: Iterable[str], room: int) -> Sources | None:
        """Who is to be asked for what; None while the store does not answer. Its error, once that
        has lasted for too long.
        """
        held, failed, self._held, self._failed = self._held, self._failed, [], []
        told = None if self._known else list(lacking)
        asked = Seek(self._name, self._mesh.settings.host, self._server, room, told, held, failed)
        try:
            answer: Sources = await self._store.call(Weights.sources, asked)
        except MeshError as error:
            self._held, self._failed, self._known = held + self._held, failed + self._failed, False
            self._patience.failed(error)
            return None
        self._patience.succeeded()
        self._known = answer.known
        if not answer.known:
            self._held, self._failed = held + self._held, failed + self._failed
        return answer

    async def over(self) -> None:
        """Tells the store that nothing more is fetched, and what has come last."""
        self._patience.over()
        host = self._mesh.settings.host
        if not (self._held or self._failed or self._known):
            return
        told = None if self._known else list[str]()
        last = Seek(self._name, host, self._server, 0, told, self._held, self._failed, over=True)
        with suppress(MeshError):
            await self._store.call(Weights.sources, last, deadline_s=OVER_S)
