"""Recovery of the processes that an earlier incarnation of this host's agent started.

It uses the pid file, and the processes' registry entries.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from meshrl.common.base.errors import DeadlineExceeded, StateUnavailable
from meshrl.common.mesh.process.child_handle import ChildProcess
from meshrl.common.mesh.process.supervision.lease_watch import LeaseWatch
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.state import registry

LOOKUP_TIMEOUT_S = 2.0  # a slow check of one process must not delay a restart

ProcessTable = Mapping[str, tuple[int, int]]  # pid and start time, by name


class PidFile:
    """File of the running processes of one kind.

    Any process may write to the registry, so an entry is checked against the process's mesh tag and
    command line.
    """

    def __init__(
        self, mesh: Mesh, path: Path, command_words: Callable[[str], Sequence[str]]
    ) -> None:
        """Create a pid file; `command_words` identify the command line of a process by its name."""
        self._mesh, self._path, self._command_words = mesh, path, command_words

    def read(self) -> ProcessTable:
        """Return the table that was written last; empty without a file."""
        try:
            document = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        return {name: (int(pid), int(start)) for name, (pid, start) in document.items()}

    def write(self, children: Iterable[ChildProcess]) -> None:
        """Replace the file with the pids and start times of these processes, atomically."""
        document = {child.name: (child.pid, child.start_time) for child in children}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._mesh.host.replace_file(self._path, json.dumps(document).encode())

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    async def find_running(self, kinds: Iterable[str]) -> dict[str, ChildProcess]:
        """Return the processes that still run, by name: those on file, and registered ones of these
        kinds.

        The registry covers processes that a full disk kept out of the file. Retries while Redis is
        unavailable.
        """
        mesh, kind_names = self._mesh, set(kinds)
        entries = await retry(mesh.clock, lambda: registry.list_entries(mesh.state))
        registered = (
            self._adopt_entry(entry)
            for entry in entries
            if entry.name.partition("/")[0] in kind_names
        )
        running = {child.name: child for child in registered if child is not None}
        for name, process in self.read().items():  # the file takes precedence
            if (child := mesh.host.adopt(*process, name=name)) is not None:
                running[name] = child
        return running

    async def free_name(self, child: ChildProcess, leases: LeaseWatch) -> None:
        """Free the registry name of an exited process; kill an unrecorded process that holds the
        name.
        """
        await leases.evict(child)
        if (unwatched := await self.kill_unrecorded(child.name)) is not None:
            await leases.evict(unwatched)

    async def kill_unrecorded(self, name: str) -> ChildProcess | None:
        """Kill the process that is registered here under this name, and return it; None if there is
        none.

        Call it only after the recorded process has exited. The killed process was started when the
        pid file could not be written, and registered after its agent was replaced by this one. If
        Redis does not answer within LOOKUP_TIMEOUT_S, nothing is killed.
        """
        mesh = self._mesh
        with contextlib.suppress(StateUnavailable, DeadlineExceeded):
            async with mesh.clock.timeout(LOOKUP_TIMEOUT_S, "looking up a process"):
                entry = await registry.lookup(mesh.state, name)
            if entry is not None and (child := self._adopt_entry(entry)) is not None:
                child.kill()
                return child
        return None

    def _adopt_entry(self, entry: registry.RegistryEntry) -> ChildProcess | None:
        """Return the process of an entry, if it runs here and matches the entry."""
        if entry.host != self._mesh.settings.host:
            return None
        program = self._command_words(entry.name)
        process = entry.pid, int(entry.start_time)
        return self._mesh.host.adopt(*process, name=entry.name, program=program)
