"""Logs of processes on other hosts of a running mesh, through the agents of these."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from common.api.node import ListLogs, LogFile, LogPart, Node, ReadLog
from common.base.errors import MeshError
from common.base.host.settings import OFF, MeshSettings
from common.mesh.access.owner import PERSON, person_settings
from common.mesh.runtime.mesh import Mesh
from common.state import registry
from common.state.pool.workers.names import agent
from meshrl.directory.places import MeshPlace

PART_BYTES = 1 << 18


@dataclass(frozen=True)
class RemoteLog:
    """A log file of another host."""

    host: str
    file: LogFile


class RemoteLogs:
    """The log files of all hosts of a mesh but this one."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    @classmethod
    @asynccontextmanager
    async def of(cls, place: MeshPlace) -> AsyncIterator[RemoteLogs]:
        """Those of the mesh at `place`, which runs, asked as the mesh's owner."""
        settings = person_settings(MeshSettings.from_file(place.settings), place.directory)
        name = f"{PERSON}/{secrets.token_hex(4)}"
        mesh = await Mesh.open(name, PERSON, replace(settings, metrics=OFF))
        try:
            mesh.start()
            yield cls(mesh)
        finally:
            await mesh.leave()

    async def listed(self) -> tuple[list[RemoteLog], dict[str, str]]:
        """All of them, and why a host does not tell of its own."""
        entries = await registry.entries(self._mesh.state, "node")
        hosts = [e.host for e in entries if e.alive and e.host != self._mesh.settings.host]
        answers = await asyncio.gather(*map(self._of, hosts), return_exceptions=True)
        found: list[RemoteLog] = []
        silent: dict[str, str] = {}
        for host, answer in zip(hosts, answers, strict=True):
            if isinstance(answer, MeshError):
                silent[host] = answer.message
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found += [RemoteLog(host, file) for file in answer]
        return found, silent

    async def _of(self, host: str) -> list[LogFile]:
        return (await self._mesh.ref(agent(host)).call(Node.logs, ListLogs())).files

    async def read(self, log: RemoteLog, offset: int) -> LogPart:
        """A part of it; see `Node.read_log`."""
        asked = ReadLog(log.file.name, offset, PART_BYTES)
        return await self._mesh.ref(agent(log.host)).call(Node.read_log, asked)
