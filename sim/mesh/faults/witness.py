"""A witness of a run: it reads Redis, the store and the ledgers raw, and keeps what would be gone
by the end. It shares nothing with the services.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshrl.common.api.transfer.bulk import GROUPS, WEIGHTS
from meshrl.common.api.weights import Group
from meshrl.common.base.digest import digest_of
from meshrl.common.base.encoding.blob import unpack
from meshrl.common.state.redis.keys import EVENTS
from meshrl.common.weights.chunks.chunks import ChunkStore
from meshrl.sim.mesh.faults.damage import Damage, unnoticed
from meshrl.sim.mesh.world.redis import VirtualRedis, script_of

Told = tuple[str, dict[str, Any]]  # kind and fields of an event


@dataclass(frozen=True)
class WitnessedGroup:
    """A group as it lay in the store when a step that trains on it was about to be committed."""

    oldest: int  # lowest version of a token that was trained; -1: none was
    foreign_above: int  # see meshrl.common.base.lineages


@dataclass
class Facts:
    """What there is of one job at the end, as it lies there."""

    name: str = ""
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # of Redis' stream
    history: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # and those it has lost
    job: dict[str, str] = field(default_factory=dict)
    rows: dict[int, dict[str, str]] = field(default_factory=dict)  # groups, by number
    indexes: dict[str, list[int]] = field(default_factory=dict)
    leases: list[str] = field(default_factory=list)  # names that are still held
    trained: dict[tuple[int, int, int], WitnessedGroup] = field(default_factory=dict)
    unseen: set[tuple[int, int, int]] = field(default_factory=set)  # as in `trained`: unreadable
    chunks: dict[str, bytes] = field(default_factory=dict)
    ledgers: dict[str, bytes] = field(default_factory=dict)
    checkpoints: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # what was still there after the mesh had ended
    errors: list[str] = field(default_factory=list)  # that ended a process, and should not have
    damages: list[Damage] = field(default_factory=list)  # what was done to files
    lost: set[str] = field(default_factory=set)  # files that power cuts took, or a part of them
    replaced: set[str] = field(default_factory=set)  # of those: in quarantine, and there again
    refused: str = ""  # why the mesh was not started again
    finished_late_s: float = 0.0  # beyond the bound; 0: in time


class Witness:
    def __init__(self, redis: VirtualRedis, root: Path, job: str) -> None:
        self._redis, self._root, self._name, self._job = redis, root, job, f"{{{job}}}"
        self._trained: dict[tuple[int, int, int], WitnessedGroup] = {}
        self._unseen: set[tuple[int, int, int]] = set()
        self._events: list[tuple[str, str, dict[str, Any]]] = []  # of the stream, with ids
        self._history: list[tuple[str, dict[str, Any]]] = []  # what Redis has lost since, too
        self._known: set[tuple[str, str]] = set()  # events that are in it, by id and content
        redis.before.append(self._before)
        redis.forgets.append(self._look)
        redis.returns.append(self._forget)

    def _ask(self, *words: Any) -> Any:
        return self._redis.sync_client.execute_command(*words)

    def _hash(self, key: str) -> dict[str, str]:
        found = self._ask("HGETALL", key)
        if isinstance(found, dict):
            return found
        return dict(zip(found[::2], found[1::2], strict=True))

    def _before(self, words: tuple[Any, ...]) -> None:
        """Looks at what a step that is about to be committed was trained on."""
        if script_of(words) != "commit_step" or words[3] != self._job:
            return
        self._look()
        asked = json.loads(words[3 + int(words[2])])
        for group in asked["groups"]:
            row = self._hash(f"{self._job}:group:{group}")
            if "digest" in row:
                key = asked["lineage"], asked["step"], group
                if (seen := self._seen(row)) is not None:
                    self._trained.setdefault(key, seen)
                else:
                    self._unseen.add(key)

    def _look(self) -> None:
        """Takes in what the stream has got since the last look. What comes back with an older copy
        of Redis is no news.
        """
        since = f"({self._events[-1][0]}" if self._events else "-"
        for id_, fields in self._ask("XRANGE", EVENTS, since, "+"):
            told = json.loads(fields["fields"]) | json.loads(fields["extra"])
            self._events.append((id_, fields["kind"], told))
            event = id_, str(sorted(fields.items()))
            if event not in self._known:
                self._known.add(event)
                self._history.append((fields["kind"], told))

    def _forget(self) -> None:
        """The stream is as it was some time ago."""
        newest = self._ask("XREVRANGE", EVENTS, "+", "-", "COUNT", 1)
        last = newest[0][0] if newest else ""
        ids = [id_ for id_, _, _ in self._events]
        del self._events[ids.index(last) + 1 if last in ids else 0 :]

    def _own(self, told: Iterable[Told]) -> list[Told]:
        return [(kind, row) for kind, row in told if row.get("job") in (None, "", self._name)]

    def _seen(self, row: dict[str, str]) -> WitnessedGroup | None:
        """None: the group's file is gone or damaged."""
        digest = row["digest"]
        path = ChunkStore(self._root / "store").space(GROUPS).path(digest)
        content = unnoticed(path) if path.is_file() else b""
        if digest_of(content) != digest:
            return None
        versions = unpack(Group, content).sampled_versions
        oldest = int(versions.min()) if len(versions) else -1
        return WitnessedGroup(oldest, int(row.get("foreign_above", -1)))

    def facts(self) -> Facts:
        self._look()
        found = Facts(self._name, trained=self._trained, job=self._hash(f"{self._job}:job"))
        found.events = self._own((kind, told) for _, kind, told in self._events)
        found.history, found.unseen = self._own(self._history), self._unseen
        for state in ("open", "ready", "leased"):
            members = self._ask("ZRANGE", f"{self._job}:{state}", 0, -1)
            found.indexes[state] = [int(member) for member in members]
        opened = (
            group for kind, told in found.events if kind == "opened" for group in told["groups"]
        )
        for group in opened:
            if row := self._hash(f"{self._job}:group:{group}"):
                found.rows[group] = row
        now_ms = self._redis.clock.wall() * 1000
        for name in sorted(
            {told["name"] for _, kind, told in self._events if kind == "registered"}
        ):
            entry = self._hash(f"{{mesh}}:entry:{name}")
            if entry.get("gone") != "1" and float(entry.get("expires_ms", 0)) > now_ms:
                found.leases.append(name)
        for space in (WEIGHTS, GROUPS):
            for path in sorted((self._root / "store" / space).glob("??/*")):
                found.chunks[path.name] = unnoticed(path)
        for path in sorted(self._root.rglob("*.ledger")):
            found.ledgers[str(path.relative_to(self._root))] = unnoticed(path)
        checkpoints = self._root / "checkpoints"
        found.checkpoints = sorted(path.name for path in checkpoints.glob("*"))
        return found
