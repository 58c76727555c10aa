"""Moves a session's keys and values from one engine process to another.

The engine that is to have them asks the one that has them, and takes them part by part between its
steps: a part is copied out in one stop of the source and in in one stop of the target, while the
next is on its way in frames. Frames are small, and few are out at once, so that what else the two
processes say waits for milliseconds. Whatever goes wrong, the target keeps the parts that came, and
the rest is computed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from common.api.engine import CacheFrame, CacheMove, CacheMoved, CachePart, Engine, Export
from common.errors import BadMessage, MeshError
from common.generation.contract import SessionCache, TokenEngine
from common.runtime.mesh import Mesh

R = TypeVar("R")

PAUSE_S = 0.01  # longest stop of the source to copy a part; parts are sized to it
PART_BYTES = 8 << 20  # size of the first part
LEAST_BYTES, MOST_BYTES = 1 << 20, 64 << 20  # sizes of later parts
FRAME_BYTES = 1 << 20  # larger ones travel at a third of the speed
LARGEST_PART_BYTES = 1 << 30  # a block of 16 tokens of the largest models takes a tenth of it
AT_ONCE = 4  # moves to one engine; each holds two parts
STOP_S = 10.0  # until an engine is between two steps
MOVE_S = 60.0


class BetweenSteps(Protocol):
    async def __call__(self, action: Callable[[], R], what: str, deadline_s: float) -> R:
        """What `action` answers between two steps of the engine."""


class CacheMoves:
    """Both ends of moves, at one engine. `loaded` names the weights that it computes with."""

    def __init__(
        self,
        mesh: Mesh,
        engine: TokenEngine,
        between_steps: BetweenSteps,
        loaded: Callable[[], str],
    ) -> None:
        self.part_bytes, self.frame_bytes = PART_BYTES, FRAME_BYTES
        self._mesh, self._engine = mesh, engine
        self._between_steps, self._loaded = between_steps, loaded
        self._places = asyncio.Semaphore(AT_ONCE)

    # -- the source ------------------------------------------------------------------------------

    async def frames(self, request: Export) -> AsyncGenerator[CacheFrame, None]:
        """What the engine has of an idle session; nothing if it has nothing to give."""
        start, more = 0, True
        while more:
            copy = partial(self._copy, request.session, start)
            cache, weights = await self._between_steps(copy, "the engine to copy a cache", STOP_S)
            if cache is None:
                return
            for frame in _framed(cache, weights, self.frame_bytes):
                yield frame
            start, more = cache.end, cache.end < len(cache.tokens)

    def _copy(self, session: int, start: int) -> tuple[SessionCache | None, str]:
        began = self._mesh.clock.monotonic()
        cache = self._engine.export(session, start, self.part_bytes)
        took = self._mesh.clock.monotonic() - began
        if cache is not None and took > 0 and 2 * len(cache.content) > self.part_bytes:
            fitting = min(2.0, PAUSE_S / took) * len(cache.content)
            self.part_bytes = max(LEAST_BYTES, min(MOST_BYTES, int(fitting)))
        return cache, self._loaded()

    # -- the target ------------------------------------------------------------------------------

    async def fetch(self, move: CacheMove) -> CacheMoved:
        """Takes over what `move.source` has, as far as that goes."""
        came = _Came()
        try:
            async with self._mesh.clock.timeout(MOVE_S, f"a cache of {move.source}"), self._places:
                began = self._mesh.clock.monotonic()
                try:
                    await self._fetch(move, came)
                finally:
                    came.seconds = self._mesh.clock.monotonic() - began
        except MeshError as error:
            came.whole = False
            self._mesh.telemetry.count(f"moves_failed_{error.code}")
        return CacheMoved(came.tokens, came.bytes, came.seconds, came.whole)

    async def _fetch(self, move: CacheMove, came: _Came) -> None:
        frames = self._mesh.ref(move.source).stream(Engine.export, Export(move.session))
        async with aclosing(frames), aclosing(_parts(frames, came)) as parts:
            async for part, content in parts:
                take = partial(self._adopt, move.session, part, content)
                if not await self._between_steps(take, "the engine to take over a cache", STOP_S):
                    return
                came.tokens = part.end
                came.whole = part.end == len(part.tokens)

    def _adopt(self, session: int, part: CachePart, content: NDArray[np.uint8]) -> bool:
        """Two lineages number their weights alike, so equal numbers must be of equal name."""
        adapters = self._engine.adapters
        version = adapters.get(part.adapter) if part.adapter else self._engine.version
        if part.version == version and part.weights != self._loaded():
            return False
        return self._engine.adopt(
            session,
            SessionCache(
                tokens=part.tokens,
                content=content,
                start=part.start,
                end=part.end,
                layout=part.layout,
                version=part.version,
                first_sampled=part.first_sampled,
                first_version=part.first_version,
                adapter=part.adapter,
            ),
        )


class _Came:
    """What a move has brought so far."""

    tokens = bytes = 0
    seconds = 0.0
    whole = False


def _framed(cache: SessionCache, weights: str, frame_bytes: int) -> list[CacheFrame]:
    part = CachePart(
        tokens=cache.tokens,
        start=cache.start,
        end=cache.end,
        layout=cache.layout,
        version=cache.version,
        first_sampled=cache.first_sampled,
        first_version=cache.first_version,
        weights=weights,
        size=len(cache.content),
        adapter=cache.adapter,
    )
    content = cache.content
    return [
        CacheFrame(part if at == 0 else None, content[at : at + frame_bytes])
        for at in range(0, len(content), frame_bytes)
    ]


async def _parts(
    frames: AsyncIterator[CacheFrame], came: _Came
) -> AsyncGenerator[tuple[CachePart, NDArray[np.uint8]], None]:
    """Each part with its bytes, once all of them are there, until the next; BadMessage if frames
    do not fit."""
    part: CachePart | None = None
    whole, filled = np.zeros(0, np.uint8), 0
    async for frame in frames:
        if frame.part is not None:
            part, filled = _checked(frame.part), 0
            if part.size > len(whole):  # fresh memory costs more than the copy
                whole = np.empty(part.size, np.uint8)
        end = filled + len(frame.content)
        if part is None or frame.content.dtype != np.uint8 or end > part.size:
            raise BadMessage("a frame of keys and values that belongs to no part")
        whole[filled:end] = frame.content
        came.bytes += end - filled
        filled = end
        if filled == part.size:
            yield part, whole[: part.size]
            part = None


def _checked(part: CachePart) -> CachePart:
    tokens = part.tokens
    if tokens.dtype != np.int32 or tokens.ndim != 1 or not 0 < part.size <= LARGEST_PART_BYTES:
        raise BadMessage(f"a part of {part.size} bytes, with tokens of {tokens.dtype}")
    return part
