"""A witness of a run: it reads Redis, the store and the ledgers raw, and keeps what would be gone
by the end. It shares nothing with the services.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.api.weights import Group
from common.wire.blob import unpack
from sim.mesh.redis import VirtualRedis, script_of


@dataclass(frozen=True)
class Seen:
    """A group as it lay in the store when a step that trains on it was about to be committed."""

    oldest: int  # lowest version of a token that was trained; -1: none was
    foreign_above: int  # see common.records.lineages


@dataclass
class Facts:
    """What there is at the end, as it lies there."""

    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    job: dict[str, str] = field(default_factory=dict)
    rows: dict[int, dict[str, str]] = field(default_factory=dict)  # groups, by number
    indexes: dict[str, list[int]] = field(default_factory=dict)
    leases: list[str] = field(default_factory=list)  # names that are still held
    trained: dict[tuple[int, int, int], Seen] = field(default_factory=dict)
    chunks: dict[str, bytes] = field(default_factory=dict)
    ledgers: dict[str, bytes] = field(default_factory=dict)
    checkpoints: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # what was still there after the mesh had ended
    errors: list[str] = field(default_factory=list)  # that ended a process, and should not have
    finished_late_s: float = 0.0  # beyond the bound; 0: in time


class Witness:
    def __init__(self, redis: VirtualRedis, root: Path, job: str) -> None:
        self._redis, self._root, self._job = redis, root, f"{{{job}}}"
        self._trained: dict[tuple[int, int, int], Seen] = {}
        redis.before = self._before

    def _ask(self, *words: Any) -> Any:
        return self._redis.sync_client.execute_command(*words)

    def _hash(self, key: str) -> dict[str, str]:
        found = self._ask("HGETALL", key)
        if isinstance(found, dict):
            return found
        return dict(zip(found[::2], found[1::2], strict=True))

    def _before(self, words: tuple[Any, ...]) -> None:
        """Looks at what a step that is about to be committed was trained on."""
        if script_of(words) != "commit_step":
            return
        asked = json.loads(words[3 + int(words[2])])
        for group in asked["groups"]:
            row = self._hash(f"{self._job}:group:{group}")
            if "digest" in row:
                key = asked["lineage"], asked["step"], group
                self._trained.setdefault(key, self._seen(row))

    def _seen(self, row: dict[str, str]) -> Seen:
        digest = row["digest"]
        content = (self._root / "store" / digest[:2] / digest).read_bytes()
        versions = unpack(Group, content).sampled_versions
        oldest = int(versions.min()) if len(versions) else -1
        return Seen(oldest, int(row.get("foreign_above", -1)))

    def facts(self) -> Facts:
        """What lies in Redis and on the disk now."""
        found = Facts(trained=self._trained, job=self._hash(f"{self._job}:job"))
        for _, fields in self._ask("XRANGE", "{mesh}:events", "-", "+"):
            told = json.loads(fields["fields"]) | json.loads(fields["extra"])
            found.events.append((fields["kind"], told))
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
        for name in sorted({told["name"] for kind, told in found.events if kind == "registered"}):
            if float(self._hash(f"{{mesh}}:entry:{name}").get("expires_ms", 0)) > now_ms:
                found.leases.append(name)
        for path in sorted((self._root / "store").glob("??/*")):
            found.chunks[path.name] = path.read_bytes()
        for path in sorted(self._root.rglob("*.ledger")):
            found.ledgers[str(path.relative_to(self._root))] = path.read_bytes()
        checkpoints = self._root / "checkpoints"
        found.checkpoints = sorted(path.name for path in checkpoints.glob("*"))
        return found
