"""`meshrl logs`: the last lines of a mesh's log files, each with the name of its process.

Logs of other hosts of a running mesh are fetched from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from meshrl.common.base.errors import ConfigError, MeshError, NotFound, PeerLost
from meshrl.common.mesh.process.diagnosis.failure import TAIL_BYTES, read_tail
from meshrl.directory.command_target import resolve_mesh
from meshrl.directory.directory_paths import MeshPaths, find_root_pid, format_path
from meshrl.directory.owner_mesh import open_owner_mesh

if TYPE_CHECKING:
    from meshrl.common.mesh.runtime.mesh import Mesh
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from meshrl.common.api.node import LogFile, LogPart, Node, ReadLog
from meshrl.common.state import registry
from meshrl.common.state.pool.workers.process_names import agent_name

POLL_S = 0.3
READ_BYTES = 1 << 18
SILENCE_LIMIT_S = (
    60.0  # an agent is back within seconds, and one that was cut off rarely takes longer
)


def print_logs(
    targets: list[str], mesh: Path | None, lines: int, follow: bool, list_only: bool
) -> None:
    """Print logs. `targets`: a run or a mesh, a service of it, or both, in either order."""
    where = next((Path(word) for word in targets if Path(word).is_dir()), None)
    named = [word for word in targets if where is None or Path(word) != where]
    if len(named) > 1:
        raise ConfigError(
            f"{' and '.join(named)} are several services", fix="Name one, or none for all logs"
        )
    service = named[0] if named else None
    place = resolve_mesh(where, mesh)
    here = sorted(place.logs.glob("*.log"))
    if list_only:
        _list_logs(place, here)
    elif service is None:
        sizes = {path: path.stat().st_size for path in here}
        for path in here:
            _print_lines(path.stem, read_tail(path, lines), len(here) > 1)
        if not any(sizes.values()):
            _note(f"no process has written to a log in {format_path(place.logs)}")
        if follow:
            _follow_local(lambda: sorted(place.logs.glob("*.log")), sizes, True)
    else:
        path = place.log_path(service)
        may_be_elsewhere = path not in here or place.joined_hosts.is_file()
        if not (
            may_be_elsewhere and asyncio.run(_print_remote_log(place, service, lines, follow, here))
        ):
            found = read_tail(path, lines)
            _print_lines(path.stem, found, False)
            if not found and lines > 0:
                _note(f"the log of {service} is empty")
            if follow:
                _follow_local(lambda: [path], {path: path.stat().st_size}, False)


# -- of other hosts --------------------------------------------------------------------------------


def _list_logs(place: MeshPaths, local_logs: list[Path]) -> None:
    """Print host, bytes and name of each log."""
    for path in local_logs:
        print(f"{'here':<28} {path.stat().st_size:>10}  {path.stem}")
    if not find_root_pid(place):
        return

    async def others() -> None:
        async with RemoteLogs.connect(place) as remote:
            found, silent = await remote.list_logs()
        for log in found:
            print(f"{log.host:<28} {log.log_file.bytes:>10}  {log.log_file.name}")
        for host, why in silent.items():
            print(f"{host:<28} {'?':>10}  unavailable: {why}")

    asyncio.run(others())


async def _print_remote_log(
    place: MeshPaths, service: str, lines: int, follow: bool, local_logs: list[Path]
) -> bool:
    """Print the newest log of a process on any other host; return False if the log is local."""
    path, names = place.log_path(service), [path.stem for path in local_logs]
    silent: dict[str, str] = {}
    async with contextlib.AsyncExitStack() as opened:
        if find_root_pid(place):
            try:
                remote = await opened.enter_async_context(RemoteLogs.connect(place))
                found, silent = await remote.list_logs()
            except MeshError as error:  # perhaps an error that this host's log explains
                if path not in local_logs:
                    raise
                message = f"newer logs of {service} on other hosts cannot be checked"
                print(f"({message}: {error.message})", file=sys.stderr, flush=True)
                return False
            names += [log.log_file.name for log in found]
            same = [log for log in found if log.log_file.name == path.stem]
            newest = max(same, key=lambda log: log.log_file.modified_s, default=None)
            own = path.stat().st_mtime if path in local_logs else 0.0
            if newest is not None and newest.log_file.modified_s > own:
                await _print_from_host(remote, newest, lines, follow)
                return True
    if path in local_logs:
        return False
    message = "".join(
        f"; the logs of {host} are unavailable: {why}" for host, why in silent.items()
    )
    raise NotFound(
        f"there is no log of {service}{message}",
        fix=f"Choose one of: {', '.join(sorted(set(names))) or 'none yet'}",
    )


async def _print_from_host(remote: RemoteLogs, log: RemoteLog, lines: int, follow: bool) -> None:
    part = await remote.read_part(log, -TAIL_BYTES)
    found = part.text.splitlines()[-lines:] if lines > 0 else []
    _print_lines(log.log_file.name, found, False)
    if not found and lines > 0:
        _note(f"the log of {log.log_file.name} on {log.host} is empty")
    silent_s: float | None = None
    while follow:
        if part.next_offset >= part.file_size_bytes or silent_s is not None:
            await asyncio.sleep(POLL_S)
        try:
            before, part = part.next_offset, await remote.read_part(log, part.next_offset)
            if part.file_size_bytes < before:  # it was too long, and has started again
                part = await remote.read_part(log, 0)
        except MeshError as error:  # its agent restarts, or the host is gone
            now = time.monotonic()
            if silent_s is None:
                silent_s = now
                message = f"{log.host} cannot send {log.log_file.name} now: {error.message}"
                print(f"({message}; waiting)", file=sys.stderr, flush=True)
            if now - silent_s > SILENCE_LIMIT_S:
                raise PeerLost(
                    f"{log.host} has not sent {log.log_file.name} for {SILENCE_LIMIT_S:g} s",
                    where=error.where,
                    fix="Run `meshrl hosts` for its state, `meshrl logs --list` for the available "
                    "logs",
                ) from error
            continue
        silent_s = None
        _print_lines(log.log_file.name, part.text.splitlines(), False)


# -- of this one -----------------------------------------------------------------------------------


def _follow_local(
    paths: Callable[[], list[Path]], offsets: dict[Path, int], with_names: bool
) -> None:
    while True:
        time.sleep(POLL_S)
        for path in paths():
            start, size = offsets.get(path, 0), path.stat().st_size
            if size < start:  # it was too long, and has started again
                start = offsets[path] = 0
            if size > start:
                with path.open("rb") as file:
                    file.seek(start)
                    grown = file.read(size - start)
                complete_lines = grown[: grown.rfind(b"\n") + 1]
                offsets[path] = start + len(complete_lines)
                _print_lines(
                    path.stem, complete_lines.decode(errors="replace").splitlines(), with_names
                )


def _note(text: str) -> None:
    print(f"({text})", file=sys.stderr, flush=True)


def _print_lines(name: str, lines: list[str], with_names: bool) -> None:
    for line in lines:
        print(f"{name}: {line}" if with_names else line, flush=True)


@dataclass(frozen=True)
class RemoteLog:
    """Log file of another host."""

    host: str
    log_file: LogFile


class RemoteLogs:
    """Log files of all hosts of a mesh but this one."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    @classmethod
    @asynccontextmanager
    async def connect(cls, place: MeshPaths) -> AsyncIterator[RemoteLogs]:
        """Open the log files of the running mesh at `place`, as the mesh's owner."""
        async with open_owner_mesh(place) as mesh:
            yield cls(mesh)

    async def list_logs(self) -> tuple[list[RemoteLog], dict[str, str]]:
        """Return all of them, and why a host does not list its own."""
        entries = await registry.list_entries(self._mesh.state, "node")
        hosts = [e.host for e in entries if e.alive and e.host != self._mesh.settings.host]
        calls = (self._mesh.ref(agent_name(host)).call(Node.list_logs, None) for host in hosts)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        found: list[RemoteLog] = []
        silent: dict[str, str] = {}
        for host, answer in zip(hosts, answers, strict=True):
            if isinstance(answer, MeshError):
                silent[host] = answer.message
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found += [RemoteLog(host, file) for file in answer.files]
        return found, silent

    async def read_part(self, log: RemoteLog, offset: int) -> LogPart:
        """Return a part of a log; see `Node.read_log`."""
        request = ReadLog(log.log_file.name, offset, READ_BYTES)
        return await self._mesh.ref(agent_name(log.host)).call(Node.read_log, request)
