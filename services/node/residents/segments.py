"""Segments of memory that a worker owns for its role processes. What these keep there outlives
them, and ends with the worker.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from typing import Self

from meshrl.common.api.node import MakeSegment, Segment, Worker
from meshrl.common.base.errors import StorageFull
from meshrl.common.base.files.kept import segment_name
from meshrl.common.mesh.runtime.calls.actor import Actor, call

SPARE_BYTES = 64 << 20  # of the host's memory that no segment takes: something has to answer


class Segments:
    """Memory files, by key, of at most `budget` bytes together (0: as many as the host has).

    async with Segments(left, budget) as segments:
        segment = segments.make(MakeSegment("trainer/sums", 1 << 30))
    """

    def __init__(self, left: Callable[[], int], budget: int = 0, where: str = "") -> None:
        """`left` tells the bytes of memory that the host has left."""
        self._left, self._budget, self._where = left, budget, where
        self._open: dict[str, tuple[int, int]] = {}  # descriptor, bytes

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for key in list(self._open):
            self.drop(key)

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self._open.values())

    @property
    def keys(self) -> list[str]:
        return sorted(self._open)

    def make(self, request: MakeSegment) -> Segment:
        """A new one of zeros, in place of one of the same key. StorageFull, and the old one is
        there still, when the budget or the host has no room for it.
        """
        _, before = self._open.get(request.key, (-1, 0))
        others = self.bytes - before
        if self._budget and others + request.bytes > self._budget:
            raise StorageFull(
                f"{request.key} asks for {request.bytes} bytes of memory, and others have {others} "
                f"of the worker's {self._budget}",
                where=self._where,
                fix="raise the worker's budget of memory, or let it sleep on disk",
            )
        filled = {key: 512 * os.fstat(fd).st_blocks for key, (fd, _) in self._open.items()}
        # Others may still fill the rest of theirs; the one of this key gives back what it has.
        left = self._left() - (others - sum(filled.values()))
        if request.bytes + SPARE_BYTES > left:
            raise StorageFull(
                f"{request.key} asks for {request.bytes} bytes of memory, and the host has {left}",
                where=self._where,
                fix="end other processes, or let it sleep on disk",
            )
        self.drop(request.key)
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        descriptor = os.memfd_create(segment_name(request.key), flags)
        os.ftruncate(descriptor, request.bytes)
        # Whoever maps it can rely on its size.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._open[request.key] = descriptor, request.bytes
        return self._at(request.key)

    def find(self, key: str) -> Segment:
        """The one of this key; its path is empty if there is none."""
        return self._at(key) if key in self._open else Segment("", 0)

    def drop(self, key: str) -> None:
        """Gives one back; its memory is free once nobody maps it."""
        descriptor, _ = self._open.pop(key, (-1, 0))
        if descriptor >= 0:
            os.close(descriptor)

    def _at(self, key: str) -> Segment:
        descriptor, size = self._open[key]
        return Segment(f"/proc/{os.getpid()}/fd/{descriptor}", size)


class KeepsSegments(Actor):
    """The part of a worker that answers for its segments."""

    segments: Segments

    @call(Worker.make_segment)
    def make_segment(self, m: MakeSegment) -> Segment:
        return self.segments.make(m)

    @call(Worker.find_segment)
    def find_segment(self, m: str) -> Segment:
        return self.segments.find(m)

    @call(Worker.drop_segment)
    def drop_segment(self, m: str) -> None:
        return self.segments.drop(m)
