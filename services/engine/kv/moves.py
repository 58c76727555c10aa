"""Sends a session's keys and values from one engine process to another, which computes them from
the front meanwhile.

The engine that is to have them asks the one that has them. Chunks are copied out in stops of the
source, some at a time, and go over in frames; frames are small, and few are out at once, so that
what else the two processes say waits for milliseconds. The target takes them between its steps.
Whatever goes wrong, it keeps what came, and computes the rest, as it does with all that it had
computed before it came.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api.engine import CacheFrame, CacheHead, CacheMove, CacheMoved, Engine, Export
from meshrl.common.base.errors import BadMessage, MeshError
from meshrl.common.generation.contract import NO_VERSION, EngineSteps, SessionCache, TokenEngine
from meshrl.common.generation.loading import CHUNK, Loading, Origin
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.services.engine.kv.rates import LoadingPace

R = TypeVar("R")

PAUSE_S = 0.01  # longest stop of the source to copy chunks; as many are copied as fit into it
MOST_CHUNKS = 64  # in one stop
FRAME_BYTES = 1 << 20  # larger ones travel at a third of the speed
LARGEST_CHUNK_BYTES = 1 << 30  # of the largest models it is a tenth of that
AT_ONCE = 4  # moves to one engine
AHEAD_BYTES = 256 << 20  # of one move, that its engine has not yet put in their place
LOOK_S = 0.01  # between two looks whether it has
WHOLE = 1 << 40  # tokens, of a cache of which nobody knows yet how long it is
STOP_S = 10.0  # until an engine is between two steps
MOVE_S = 60.0

Chunk = tuple[int, int, NDArray[np.uint8]]  # keys and values of tokens [start, end)
NOTHING = np.zeros(0, np.uint8)


class BetweenSteps(Protocol):
    async def __call__(self, action: Callable[[], R], what: str, deadline_s: float) -> R:
        """What `action` answers between two steps of the engine."""


class CacheMoves:
    """Both ends of moves, at one engine. `loaded` names the weights that it computes with; `wake`
    has its driver look at what has come, `soon` do something before its next step.
    """

    def __init__(
        self,
        mesh: Mesh,
        engine: TokenEngine,
        steps: EngineSteps,
        between_steps: BetweenSteps,
        loaded: Callable[[], str],
        wake: Callable[[], None],
        soon: Callable[[Callable[[], None]], None],
    ) -> None:
        self._soon = soon
        self.chunks, self.frame_bytes = 1, FRAME_BYTES
        self._mesh, self._engine, self._steps = mesh, engine, steps
        self._between_steps, self._loaded, self._wake = between_steps, loaded, wake
        self._places = asyncio.Semaphore(AT_ONCE)
        self._pace = LoadingPace()
        self.tokens = self.bytes = 0  # that came here in time

    # -- the source ------------------------------------------------------------------------------

    async def frames(self, request: Export) -> AsyncGenerator[CacheFrame, None]:
        """What the engine has of an idle session; nothing if it has nothing to give."""
        look = partial(self._head, request.session)
        head = await self._between_steps(look, "the engine to look for a cache", STOP_S)
        if head is None:
            return
        yield CacheFrame(head, 0, 0, 0, NOTHING)
        starts = list(range(0, len(head.tokens), CHUNK))
        if _pure(head, request.weights):
            starts.reverse()
        while starts:
            now, starts = starts[: self.chunks], starts[self.chunks :]
            copy = partial(self._copy, request.session, len(head.tokens), now)
            chunks = await self._between_steps(copy, "the engine to copy a cache", STOP_S)
            for start, end, content in chunks:
                for at in range(0, len(content), self.frame_bytes):
                    part = content[at : at + self.frame_bytes]
                    yield CacheFrame(None, start, end, len(content), part)
            if len(chunks) < len(now):
                return  # it has them no more

    def _head(self, session: int) -> CacheHead | None:
        cache = self._engine.cached(session)
        if cache is None:
            return None
        first = cache.first_sampled, cache.first_version
        about = cache.layout, cache.version, *first, self._loaded(), cache.adapter
        return CacheHead(cache.tokens, *about)

    def _copy(self, session: int, n: int, starts: list[int]) -> list[Chunk]:
        began, chunks = self._mesh.clock.monotonic(), []
        for start in starts:
            end = min(start + CHUNK, n)
            content = self._engine.copied(session, start, end)
            if content is None:
                break
            chunks.append((start, end, content))
        took_s = self._mesh.clock.monotonic() - began
        if chunks and took_s > 0:
            fitting = int(min(2.0, PAUSE_S / took_s) * len(chunks))
            self.chunks = max(1, min(MOST_CHUNKS, fitting))
        elif chunks:
            self.chunks = min(MOST_CHUNKS, 2 * self.chunks)
        return chunks

    # -- the target ------------------------------------------------------------------------------

    async def fetch(self, move: CacheMove) -> CacheMoved:
        """Has what `move.source` has loaded, as far as it is wanted when it comes."""
        load, came = Loading(0, WHOLE, self._mesh.clock.monotonic()), _Came()
        load.expected_s = self._pace.per_byte * CHUNK * self._engine.cache_bytes_per_token
        self._soon(partial(self._engine.expect, move.session, load))
        try:
            async with self._mesh.clock.timeout(MOVE_S, f"a cache of {move.source}"), self._places:
                began = self._mesh.clock.monotonic()
                try:
                    await self._fetch(move, load, came)
                finally:
                    came.seconds = self._mesh.clock.monotonic() - began
        except MeshError as error:
            came.whole = False
            self._mesh.telemetry.count(f"moves_failed_{error.code}")
        finally:
            load.over = True
            self.tokens, self.bytes = self.tokens + came.tokens, self.bytes + came.bytes
            self._wake()
        return CacheMoved(came.tokens, came.bytes, came.seconds, came.whole, came.first_s)

    async def _fetch(self, move: CacheMove, load: Loading, came: _Came) -> None:
        asked, clock = Export(move.session, self._loaded()), self._mesh.clock
        began_s = clock.monotonic()
        frames = self._mesh.ref(move.source).stream(Engine.export, asked)
        async with aclosing(frames):
            first = await anext(frames, None)
            if first is None:
                return
            head = _checked(first)
            take = partial(self._offer, move.session, head, load)
            if not await self._between_steps(take, "the engine to take over a cache", STOP_S):
                return
            last_s = clock.monotonic()
            async with aclosing(_chunks(frames, came)) as chunks:
                async for start, end, content in chunks:
                    if not load.wants(start):
                        break
                    load.expected_s = clock.monotonic() - last_s
                    self._pace.add(len(content), load.expected_s)
                    load.bring(start, end, content)
                    came.tokens += end - start
                    came.first_s = came.first_s or clock.monotonic() - began_s
                    self._wake()
                    while load.waiting_bytes > AHEAD_BYTES and load.wants(start):
                        await clock.sleep(LOOK_S)
                    last_s = clock.monotonic()
            came.whole = True

    def _offer(self, session: int, head: CacheHead, load: Loading) -> bool:
        """Two lineages number their weights alike, so equal numbers must be of equal name."""
        adapters = self._engine.adapters
        own = adapters.get(head.adapter, NO_VERSION) if head.adapter else self._engine.version
        pure = _pure(head, self._loaded())
        if not pure:  # it can only be loaded, which may take longer than computing it
            size, rate = self._engine.cache_bytes_per_token, self._steps.prefill_tokens_per_s
            slow = bool(rate) and self._pace.per_byte * size > 1 / rate
            if head.version == own or slow:
                return False
        load.alone = not pure
        load.origin = Origin(head.first_sampled, head.first_version)
        cache = SessionCache(
            head.tokens,
            head.layout,
            head.version,
            head.first_sampled,
            head.first_version,
            head.adapter,
        )
        return self._engine.offer(session, cache, load)


class _Came:
    tokens = bytes = 0
    seconds = first_s = 0.0
    whole = False


def _pure(head: CacheHead, weights: str) -> bool:
    """Whether these weights have computed all of a cache."""
    return head.version >= 0 and head.weights == weights


async def _chunks(frames: AsyncIterator[CacheFrame], came: _Came) -> AsyncGenerator[Chunk, None]:
    """Each chunk, once all of its bytes are there; BadMessage if frames do not fit."""
    whole, filled, of = NOTHING, 0, (0, 0, 0)
    async for frame in frames:
        if not filled:
            of = frame.start, frame.end, frame.size
            if frame.head is not None or not 0 < frame.size <= LARGEST_CHUNK_BYTES:
                raise BadMessage(f"a chunk of {frame.size} bytes of keys and values")
            if not 0 <= frame.start < frame.end <= frame.start + CHUNK or frame.start % CHUNK:
                raise BadMessage(f"no chunk is of tokens {frame.start} to {frame.end}")
            whole = np.empty(frame.size, np.uint8)
        end = filled + len(frame.content)
        fits = (frame.start, frame.end, frame.size) == of and end <= len(whole)
        if not fits or not len(frame.content) or frame.content.dtype != np.uint8:
            raise BadMessage("a frame of keys and values that belongs to no chunk")
        whole[filled:end] = frame.content
        came.bytes += end - filled
        filled = end
        if filled == len(whole):
            yield frame.start, frame.end, whole
            filled = 0


def _checked(frame: CacheFrame) -> CacheHead:
    head = frame.head
    if head is None or head.tokens.dtype != np.int32 or head.tokens.ndim != 1:
        raise BadMessage("keys and values of nobody knows which tokens")
    return head
