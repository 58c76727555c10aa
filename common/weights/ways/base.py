"""Transports by which versions reach hosts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from common.weights.chunks.chunks import ChunkStore


@dataclass(frozen=True)
class WantedVersion:
    """A committed version, and what a host lacks of it."""

    job: str
    manifest: str  # digest
    lacking: Mapping[str, int]  # bytes of chunks by digest
    # All of its chunks that are wanted: those that are here do not go to make room for the others.
    needed: Collection[str] = frozenset()

    @property
    def bytes(self) -> int:
        """That the host lacks."""
        return sum(self.lacking.values())


class Way(Protocol):
    """All chunks of a published version are in the store, whatever the way."""

    @property
    def name(self) -> str:
        """For people and for `rollout.weights`."""

    async def receive(self, version: WantedVersion, into: ChunkStore) -> None:
        """Brings chunks that lack as files of `into`, each right before it has its name. It need
        not bring all: what came stays, whatever ends it. MeshError when it can bring no more.
        """
