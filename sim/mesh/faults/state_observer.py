"""Observer of a run: it reads Redis, the store and the ledgers directly, and records state that is
gone by the end. It shares no code with the services.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshrl.common.api.transfer.bulk_permissions import GROUPS, WEIGHTS
from meshrl.common.api.weights import TrajectoryGroup
from meshrl.common.base.digest import compute_digest
from meshrl.common.base.encoding.blob import unpack
from meshrl.common.state.redis.keys import EVENTS
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.sim.mesh.faults.corruption import FileCorruption, read_without_atime
from meshrl.sim.mesh.runtime.virtual_redis import VirtualRedis, get_script_name

EventFields = tuple[str, dict[str, Any]]  # kind and fields of an event


@dataclass(frozen=True)
class ObservedGroup:
    """Group in the store at the commit of a step that trains on it."""

    oldest_version: int  # lowest version of a trained token; -1: none
    newest_version: int
    abandoned_above: int  # see meshrl.common.base.lineages


@dataclass
class FinalState:
    """Raw state of one job at the end."""

    name: str = ""
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # of Redis' stream
    # and those that Redis has lost
    history: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    job_row: dict[str, str] = field(default_factory=dict)
    group_rows: dict[int, dict[str, str]] = field(default_factory=dict)  # groups, by number
    groups_by_state: dict[str, list[int]] = field(default_factory=dict)
    leases: list[str] = field(default_factory=list)  # names of leases still held
    trained_groups: dict[tuple[int, int, int], ObservedGroup] = field(default_factory=dict)
    # as in `trained_groups`: unreadable
    unreadable_groups: set[tuple[int, int, int]] = field(default_factory=set)
    chunks: dict[str, bytes] = field(default_factory=dict)
    ledgers: dict[str, bytes] = field(default_factory=dict)
    checkpoints: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)  # left after the end of the mesh
    errors: list[str] = field(default_factory=list)  # unexpected errors that ended a process
    corruptions: list[FileCorruption] = field(default_factory=list)  # of files
    lost_files: set[str] = field(default_factory=set)  # files lost or cut by power cuts
    replaced_files: set[str] = field(default_factory=set)  # of those: in quarantine, and restored
    start_error: str = ""  # why the mesh was not restarted
    finished_late_s: float = 0.0  # beyond the limit; 0: in time


class StateObserver:
    def __init__(self, redis: VirtualRedis, root: Path, job: str) -> None:
        self._redis, self._root, self._name, self._job = redis, root, job, f"{{{job}}}"
        self._trained_groups: dict[tuple[int, int, int], ObservedGroup] = {}
        self._unreadable_groups: set[tuple[int, int, int]] = set()
        self._events: list[tuple[str, str, dict[str, Any]]] = []  # of the stream, with ids
        self._history: list[tuple[str, dict[str, Any]]] = []  # with events that Redis has lost
        self._known_events: set[tuple[str, str]] = set()  # their ids and contents
        redis.command_listeners.append(self._on_command)
        redis.reset_listeners.append(self._read_events)
        redis.restart_listeners.append(self._drop_lost_events)

    def _run_command(self, *words: Any) -> Any:
        return self._redis.sync_client.execute_command(*words)

    def _read_hash(self, key: str) -> dict[str, str]:
        found = self._run_command("HGETALL", key)
        if isinstance(found, dict):
            return found
        return dict(zip(found[::2], found[1::2], strict=True))

    def _on_command(self, words: tuple[Any, ...]) -> None:
        """Record the groups of a step that is about to be committed."""
        if get_script_name(words) != "commit_step" or words[3] != self._job:
            return
        self._read_events()
        request = json.loads(words[3 + int(words[2])])
        for group in request["groups"]:
            row = self._read_hash(f"{self._job}:group:{group}")
            if "digest" in row:
                key = request["lineage"], request["step"], group
                if (observed := self._read_group(row)) is not None:
                    self._trained_groups.setdefault(key, observed)
                else:
                    self._unreadable_groups.add(key)

    def _read_events(self) -> None:
        """Read the new events of the stream. Events that return with an older copy of Redis are not
        new.
        """
        since = f"({self._events[-1][0]}" if self._events else "-"
        for id_, fields in self._run_command("XRANGE", EVENTS, since, "+"):
            event_fields = json.loads(fields["fields"]) | json.loads(fields["extra"])
            self._events.append((id_, fields["kind"], event_fields))
            event = id_, str(sorted(fields.items()))
            if event not in self._known_events:
                self._known_events.add(event)
                self._history.append((fields["kind"], event_fields))

    def _drop_lost_events(self) -> None:
        """Drop events that a rolled-back stream no longer has."""
        newest = self._run_command("XREVRANGE", EVENTS, "+", "-", "COUNT", 1)
        last = newest[0][0] if newest else ""
        ids = [id_ for id_, _, _ in self._events]
        del self._events[ids.index(last) + 1 if last in ids else 0 :]

    def _filter_own(self, events: Iterable[EventFields]) -> list[EventFields]:
        return [(kind, row) for kind, row in events if row.get("job") in (None, "", self._name)]

    def _read_group(self, row: dict[str, str]) -> ObservedGroup | None:
        """Read a group of the store; return None if its file is missing or corrupt."""
        digest = row["digest"]
        path = ChunkStore(self._root / "store").open_space(GROUPS).chunk_path(digest)
        content = read_without_atime(path) if path.is_file() else b""
        if compute_digest(content) != digest:
            return None
        versions = unpack(TrajectoryGroup, content).sampled_versions
        oldest, newest = (int(versions.min()), int(versions.max())) if len(versions) else (-1, -1)
        return ObservedGroup(oldest, newest, int(row.get("abandoned_above", -1)))

    def read_final_state(self) -> FinalState:
        self._read_events()
        found = FinalState(
            self._name,
            trained_groups=self._trained_groups,
            job_row=self._read_hash(f"{self._job}:job"),
        )
        found.events = self._filter_own((kind, fields) for _, kind, fields in self._events)
        found.history, found.unreadable_groups = (
            self._filter_own(self._history),
            self._unreadable_groups,
        )
        for state in ("open", "ready", "leased"):
            members = self._run_command("ZRANGE", f"{self._job}:{state}", 0, -1)
            found.groups_by_state[state] = [int(member) for member in members]
        opened = (
            group for kind, fields in found.events if kind == "opened" for group in fields["groups"]
        )
        for group in opened:
            if row := self._read_hash(f"{self._job}:group:{group}"):
                found.group_rows[group] = row
        now_ms = self._redis.clock.wall() * 1000
        for name in sorted(
            {fields["name"] for _, kind, fields in self._events if kind == "registered"}
        ):
            entry = self._read_hash(f"{{mesh}}:entry:{name}")
            if entry.get("is_released") != "1" and float(entry.get("expires_ms", 0)) > now_ms:
                found.leases.append(name)
        for space in (WEIGHTS, GROUPS):
            for path in sorted((self._root / "store" / space).glob("??/*")):
                found.chunks[path.name] = read_without_atime(path)
        for path in sorted(self._root.rglob("*.ledger")):
            found.ledgers[str(path.relative_to(self._root))] = read_without_atime(path)
        checkpoints = self._root / "checkpoints"
        found.checkpoints = sorted(path.name for path in checkpoints.glob("*"))
        return found
