"""Keys of processes of this mesh: checked before they are called, and no longer once revoked."""

from __future__ import annotations

from common.base.errors import MeshError
from common.mesh.process.host import Host
from common.mesh.runtime.calls.directory import Directory, Route
from common.mesh.runtime.calls.serving import Server
from common.mesh.runtime.doorway import Doorway
from common.mesh.runtime.lease import Lease
from common.mesh.telemetry.logs import Telemetry
from common.state import registry


class Revocations:
    """Checks of the peers of one process. Without a doorway a peer proves no more than its role."""

    def __init__(
        self, doorway: Doorway | None, host: Host, directory: Directory, server: Server
    ) -> None:
        self._doorway, self._host = doorway, host
        self._directory, self._server = directory, server
        self._expelling = False  # keys may have been revoked since the last look at what runs
        if doorway is not None:
            doorway.keys.heed(self._doubt_all)

    def _doubt_all(self) -> None:
        """Keys may have been revoked; from any thread."""
        self._directory.doubt()
        self._expelling = True

    def doubt(self, route: Route) -> None:
        """Check a peer again that does not let this process call what it may."""
        if self._doorway is not None:
            self._doorway.doubt(route.address)
            self._directory.forget(route)

    def doubt_address(self, address: str) -> None:
        """Check the peer at an address again, whose key was refused."""
        if self._doorway is not None:
            self._doorway.doubt(address)

    async def check(self, entry: registry.Entry, bulk: bool = False) -> None:
        """Return once the process of an entry has proved to be that, with `bulk` by the key of its
        bulk port. StateUnavailable; HandshakeFailed.
        """
        if self._doorway is not None:
            await self._doorway.check(entry, self._host, bulk=bulk)

    async def keep(self, lease: Lease, telemetry: Telemetry) -> None:
        """End what runs for revoked keys, and show this process's key where no renewal does."""
        if self._doorway is None:
            return
        if self._expelling:
            self._expelling = False
            self._server.expel(self._doorway.keys.holders_now)
        if not lease.lapsed():  # a renewal shows the key
            return
        try:
            await self._doorway.keep()
        except MeshError as error:
            telemetry.count(f"keys_not_shown_{error.code}")
