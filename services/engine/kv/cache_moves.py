"""Transfer of a session's keys and values from one engine process to another.

The target engine requests them from the source and computes them from the front during the
transfer. The source copies chunks out in pauses between steps, some at a time, and sends them in
frames. Frames are small and few are in flight, so other messages of the two processes wait only
milliseconds. The target takes the chunks between its steps. After any error it retains the chunks
that arrived and computes the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api.engine import (
    CacheFrame,
    CacheHeader,
    CacheMove,
    CacheMoveResult,
    Engine,
    ExportCache,
)
from meshrl.common.base.errors import BadMessage, MeshError
from meshrl.common.generation.engine_contract import (
    NO_VERSION,
    SessionCache,
    SteppableEngine,
    TokenEngine,
)
from meshrl.common.generation.prefix_loading import CHUNK_TOKENS, CacheOrigin, PrefixLoad
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.services.engine.kv.offload_policy import TransferRate

R = TypeVar("R")

PAUSE_S = 0.01  # longest pause of the source; as many chunks are copied as fit
MAX_CHUNKS = 64  # in one pause
FRAME_BYTES = 1 << 20  # larger frames transfer at a third of the speed
MAX_CHUNK_BYTES = 1 << 30  # chunks of the largest models have a tenth of that
MAX_CONCURRENT_MOVES = 4  # moves to one engine at a time
MAX_UNREAD_BYTES = 256 << 20  # bytes of one move that the engine has not installed yet
POLL_S = 0.01  # interval of polls for installed chunks
UNKNOWN_LENGTH = 1 << 40  # tokens, for a cache of yet unknown length
BETWEEN_STEPS_TIMEOUT_S = 10.0  # for the engine to reach the end of its step
MOVE_TIMEOUT_S = 60.0

Chunk = tuple[int, int, NDArray[np.uint8]]  # keys and values of tokens [start, end)
NO_BYTES = np.zeros(0, np.uint8)


class RunBetweenSteps(Protocol):
    async def __call__(self, action: Callable[[], R], what: str, deadline_s: float) -> R:
        """Run `action` between two steps of the engine and return its result."""


class CacheMoves:
    """Source and target of cache moves at one engine.

    `get_loaded_manifest` names the weights that the engine computes with. `wake` makes its driver
    poll for arrived chunks. `run_soon` runs a function before the engine's next step.
    """

    def __init__(
        self,
        mesh: Mesh,
        engine: TokenEngine,
        steps: SteppableEngine,
        run_between_steps: RunBetweenSteps,
        get_loaded_manifest: Callable[[], str],
        wake: Callable[[], None],
        run_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        self._run_soon = run_soon
        self.chunks_per_stop, self.frame_bytes = 1, FRAME_BYTES
        self._mesh, self._engine, self._steps = mesh, engine, steps
        self._run_between_steps, self._get_loaded_manifest, self._wake = (
            run_between_steps,
            get_loaded_manifest,
            wake,
        )
        self._move_slots = asyncio.Semaphore(MAX_CONCURRENT_MOVES)
        self._transfer_rate = TransferRate()
        self.received_tokens = self.received_bytes = 0  # tokens and bytes that arrived in time
        self.exporting = set[int]()  # sessions that other engines fetch now
        self.on_exported: Callable[[int], None] = lambda session: None  # called at each end
        self.export_rate = TransferRate()  # to other engines

    # -- the source ------------------------------------------------------------------------------

    async def stream_frames(self, request: ExportCache) -> AsyncGenerator[CacheFrame, None]:
        """Yield the frames of an idle session's cache; none if the engine has nothing to send."""
        began_s, sent_bytes = self._mesh.clock.monotonic(), 0
        self.exporting.add(request.session)
        try:
            async with aclosing(self._read_frames(request)) as frames:
                async for frame in frames:
                    yield frame
                    sent_bytes += len(frame.content)
        finally:
            self.exporting.discard(request.session)
            self.on_exported(request.session)
            if sent_bytes:
                self.export_rate.add(sent_bytes, self._mesh.clock.monotonic() - began_s)

    async def _read_frames(self, request: ExportCache) -> AsyncGenerator[CacheFrame, None]:
        look = partial(self._describe_cache, request.session)
        head = await self._run_between_steps(
            look, "the engine's lookup of a cache", BETWEEN_STEPS_TIMEOUT_S
        )
        if head is None:
            return
        yield CacheFrame(head, 0, 0, 0, NO_BYTES)
        starts = list(range(0, len(head.tokens), CHUNK_TOKENS))
        if _is_computed_by(head, request.manifest):
            starts.reverse()
        while starts:
            now, starts = starts[: self.chunks_per_stop], starts[self.chunks_per_stop :]
            copy = partial(self._copy_chunks, request.session, len(head.tokens), now)
            chunks = await self._run_between_steps(
                copy, "the engine's copy of a cache", BETWEEN_STEPS_TIMEOUT_S
            )
            for start, end, content in chunks:
                for at in range(0, len(content), self.frame_bytes):
                    part = content[at : at + self.frame_bytes]
                    yield CacheFrame(None, start, end, len(content), part)
            if len(chunks) < len(now):
                return  # the engine no longer has the tokens

    def _describe_cache(self, session: int) -> CacheHeader | None:
        cache = self._engine.describe_session_cache(session)
        if cache is None:
            return None
        first = cache.first_sampled_index, cache.first_version
        about = cache.layout, cache.version, *first, self._get_loaded_manifest(), cache.adapter
        return CacheHeader(cache.tokens, *about)

    def _copy_chunks(self, session: int, token_count: int, starts: list[int]) -> list[Chunk]:
        began, chunks = self._mesh.clock.monotonic(), []
        for start in starts:
            end = min(start + CHUNK_TOKENS, token_count)
            content = self._engine.copy_session_cache(session, start, end)
            if content is None:
                break
            chunks.append((start, end, content))
        took_s = self._mesh.clock.monotonic() - began
        if chunks and took_s > 0:
            fitting = int(min(2.0, PAUSE_S / took_s) * len(chunks))
            self.chunks_per_stop = max(1, min(MAX_CHUNKS, fitting))
        elif chunks:
            self.chunks_per_stop = min(MAX_CHUNKS, 2 * self.chunks_per_stop)
        return chunks

    # -- the target ------------------------------------------------------------------------------

    async def fetch_cache(self, move: CacheMove) -> CacheMoveResult:
        """Fetch what `move.source` has loaded, as far as it is still useful on arrival."""
        load, came = PrefixLoad(0, UNKNOWN_LENGTH, self._mesh.clock.monotonic()), _ReceivedCache()
        load.expected_chunk_s = (
            self._transfer_rate.s_per_byte * CHUNK_TOKENS * self._engine.cache_bytes_per_token
        )
        self._run_soon(partial(self._engine.expect_load, move.session, load))
        try:
            async with (
                self._mesh.clock.timeout(
                    MOVE_TIMEOUT_S, f"the transfer of a cache from {move.source}"
                ),
                self._move_slots,
            ):
                began = self._mesh.clock.monotonic()
                try:
                    await self._fetch_chunks(move, load, came)
                finally:
                    came.duration_s = self._mesh.clock.monotonic() - began
        except MeshError as error:
            came.is_complete = False
            self._mesh.telemetry.count(f"moves_failed_{error.code}")
        finally:
            load.is_finished = True
            self.received_tokens, self.received_bytes = (
                self.received_tokens + came.tokens,
                self.received_bytes + came.bytes,
            )
            self._wake()
        return CacheMoveResult(
            came.tokens, came.bytes, came.duration_s, came.is_complete, came.first_s
        )

    async def _fetch_chunks(
        self, move: CacheMove, load: PrefixLoad, received: _ReceivedCache
    ) -> None:
        request, clock = ExportCache(move.session, self._get_loaded_manifest()), self._mesh.clock
        began_s = clock.monotonic()
        frames = self._mesh.ref(move.source).stream(Engine.export_cache, request)
        async with aclosing(frames):
            first = await anext(frames, None)
            if first is None:
                return
            head = _check_head(first)
            take = partial(self._offer_to_engine, move.session, head, load)
            if not await self._run_between_steps(
                take, "the engine's import of a cache", BETWEEN_STEPS_TIMEOUT_S
            ):
                return
            last_s = clock.monotonic()
            async with aclosing(_assemble_chunks(frames, received)) as chunks:
                async for start, end, content in chunks:
                    if not load.needs_chunk(start):
                        break
                    load.expected_chunk_s = clock.monotonic() - last_s
                    self._transfer_rate.add(len(content), load.expected_chunk_s)
                    load.add_chunk(start, end, content)
                    received.tokens += end - start
                    received.first_s = received.first_s or clock.monotonic() - began_s
                    self._wake()
                    while load.received_bytes > MAX_UNREAD_BYTES and load.needs_chunk(start):
                        await clock.sleep(POLL_S)
                    last_s = clock.monotonic()
            received.is_complete = True

    def _offer_to_engine(self, session: int, head: CacheHeader, load: PrefixLoad) -> bool:
        """Offer the cache to the engine if the weights have the same name on both sides.

        Two lineages number their weights equally, so equal numbers do not suffice.
        """
        adapters = self._engine.adapter_versions
        own = adapters.get(head.adapter, NO_VERSION) if head.adapter else self._engine.version
        pure = _is_computed_by(head, self._get_loaded_manifest())
        if not pure:  # a mixed cache can only be loaded, which may take longer than computing it
            size, rate = self._engine.cache_bytes_per_token, self._steps.prefill_tokens_per_s
            slow = bool(rate) and self._transfer_rate.s_per_byte * size > 1 / rate
            if head.version == own or slow:
                return False
        load.is_front_first = not pure
        load.origin = CacheOrigin(head.first_sampled, head.first_version)
        cache = SessionCache(
            head.tokens,
            head.layout,
            head.version,
            head.first_sampled,
            head.first_version,
            head.adapter,
        )
        return self._engine.offer_load(session, cache, load)


class _ReceivedCache:
    tokens = bytes = 0
    duration_s = first_s = 0.0
    is_complete = False


def _is_computed_by(head: CacheHeader, manifest: str) -> bool:
    """Return True if the weights of this manifest computed the whole cache."""
    return head.version >= 0 and head.manifest == manifest


async def _assemble_chunks(
    frames: AsyncIterator[CacheFrame], received: _ReceivedCache
) -> AsyncGenerator[Chunk, None]:
    """Yield each chunk once all of its bytes have arrived.

    Raise BadMessage if frames do not fit.
    """
    chunk_buffer, filled, of = NO_BYTES, 0, (0, 0, 0)
    async for frame in frames:
        if not filled:
            of = frame.start, frame.end, frame.size_bytes
            if frame.header is not None or not 0 < frame.size_bytes <= MAX_CHUNK_BYTES:
                raise BadMessage(
                    f"a chunk of a cache has an invalid size of {frame.size_bytes} bytes"
                )
            if (
                not 0 <= frame.start < frame.end <= frame.start + CHUNK_TOKENS
                or frame.start % CHUNK_TOKENS
            ):
                raise BadMessage(f"tokens {frame.start} to {frame.end} of a cache are not a chunk")
            chunk_buffer = np.empty(frame.size_bytes, np.uint8)
        end = filled + len(frame.content)
        fits = (frame.start, frame.end, frame.size_bytes) == of and end <= len(chunk_buffer)
        if not fits or not len(frame.content) or frame.content.dtype != np.uint8:
            raise BadMessage("a frame of a cache belongs to no chunk")
        chunk_buffer[filled:end] = frame.content
        received.bytes += end - filled
        filled = end
        if filled == len(chunk_buffer):
            yield frame.start, frame.end, chunk_buffer
            filled = 0


def _check_head(frame: CacheFrame) -> CacheHeader:
    head = frame.header
    if head is None or head.tokens.dtype != np.int32 or head.tokens.ndim != 1:
        raise BadMessage("the header of a cache lacks its tokens")
    return head
