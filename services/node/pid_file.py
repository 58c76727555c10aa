"""Finds the processes again that an earlier incarnation of this host's agent started: by what it
wrote down, and by what they say themselves.
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

LOOKUP_TIMEOUT_S = 2.0  # a look for one process must not hold up a restart

ProcessTable = Mapping[str, tuple[int, int]]  # pid and start time, by name


class PidFile:
    """Which processes of one kind run, in a file. The registry is anybody's to write: what it tells
    of a process is held against the mark and command line that this has.
    """

    def __init__(
        self, mesh: Mesh, path: Path, command_words: Callable[[str], Sequence[str]]
    ) -> None:
        """`program`: words of the command line of the process with a name."""
        self._mesh, self._path, self._command_words = mesh, path, command_words

    def read(self) -> ProcessTable:
        """What was written last; nothing without a file."""
        try:
            notes = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        return {name: (int(pid), int(start)) for name, (pid, start) in notes.items()}

    def write(self, children: Iterable[ChildProcess]) -> None:
        notes = {child.name: (child.pid, child.start_time) for child in children}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._mesh.host.replace_file(self._path, json.dumps(notes).encode())

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    async def find_running(self, kinds: Iterable[str]) -> dict[str, ChildProcess]:
        """The processes that run, by name: the noted ones, and those of these kinds that the
        registry has on this host, as a full disk takes no notes.
        """
        mesh, wanted = self._mesh, set(kinds)
        entries = await retry(mesh.clock, lambda: registry.list_entries(mesh.state))
        registered = (
            self._adopt_entry(entry) for entry in entries if entry.name.partition("/")[0] in wanted
        )
        found = {child.name: child for child in registered if child is not None}
        for name, process in self.read().items():  # what is noted counts more
            if (child := mesh.host.adopt(*process, name=name)) is not None:
                found[name] = child
        return found

    async def evict_leases(self, child: ChildProcess, leases: LeaseWatch) -> None:
        """Takes a process that has ended off the registry, and whichever has its name unwatched."""
        await leases.evict(child)
        if (unwatched := await self.kill_unrecorded(child.name)) is not None:
            await leases.evict(unwatched)

    async def kill_unrecorded(self, name: str) -> ChildProcess | None:
        """Ends the process that holds this name and is nobody's: it was started when no note could
        be taken, and had not registered when its agent was followed by this one.
        """
        mesh = self._mesh
        with contextlib.suppress(StateUnavailable, DeadlineExceeded):
            async with mesh.clock.timeout(LOOKUP_TIMEOUT_S, "a look for a process"):
                entry = await registry.lookup(mesh.state, name)
            if entry is not None and (child := self._adopt_entry(entry)) is not None:
                child.kill()
                return child
        return None

    def _adopt_entry(self, entry: registry.RegistryEntry) -> ChildProcess | None:
        """The process of an entry, if it runs here and is what the entry says."""
        if entry.host != self._mesh.settings.host:
            return None
        program = self._command_words(entry.name)
        process = entry.pid, int(entry.start_time)
        return self._mesh.host.adopt(*process, name=entry.name, program=program)
