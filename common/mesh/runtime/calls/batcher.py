"""Batching of small requests of one event loop iteration into one message."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Q = TypeVar("Q")
R = TypeVar("R")


class Batcher(Generic[Q, R]):
    """Batcher that collects requests and sends them together.

    While `max_in_flight` batches are in progress, later ones wait and grow. Cancelling a future
    before its request is sent prevents the send.

    `send` takes a batch and returns one answer for each request, in order; an answer that is an
    exception is raised to its caller.
    """

    def __init__(
        self,
        send: Callable[[list[Q]], Awaitable[list[R | Exception]]],
        *,
        max_batch_size: int = 256,
        max_in_flight: int = 1,
    ) -> None:
        self._send = send
        self._max_batch_size = max_batch_size
        self._max_in_flight = max_in_flight
        self._queue: deque[tuple[Q, asyncio.Future[R]]] = deque()
        self._unbatched: set[asyncio.Future[R]] = set()
        self._scheduled = False
        self._tasks: dict[asyncio.Task[None], list[tuple[Q, asyncio.Future[R]]]] = {}

    def submit(self, request: Q, *, unbatched: bool = False) -> asyncio.Future[R]:
        """Queue a request; the future resolves with its answer. `unbatched`: in a separate
        batch.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        if unbatched:
            self._unbatched.add(future)
            future.add_done_callback(self._unbatched.discard)
        self._queue.append((request, future))
        if not self._scheduled and len(self._tasks) < self._max_in_flight:
            self._scheduled = True
            loop.call_soon(self._send_batches)
        return future

    def _send_batches(self) -> None:
        self._scheduled = False
        while self._queue and len(self._tasks) < self._max_in_flight:
            batch: list[tuple[Q, asyncio.Future[R]]] = []
            while self._queue and len(batch) < (1 if self._unbatched else self._max_batch_size):
                request, future = self._queue.popleft()
                if not future.done():
                    batch.append((request, future))
            if not batch:
                continue
            task = asyncio.get_running_loop().create_task(self._run(batch))
            self._tasks[task] = batch
            task.add_done_callback(self._on_batch_done)

    def _on_batch_done(self, task: asyncio.Task[None]) -> None:
        for _, future in self._tasks.pop(task):
            future.cancel()  # if the task was cancelled before it answered
        self._send_batches()

    async def _run(self, batch: list[tuple[Q, asyncio.Future[R]]]) -> None:
        try:
            answers = await self._send([request for request, _ in batch])
        except Exception as error:
            answers = [error] * len(batch)
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    async def close(self) -> None:
        """Cancel waiting requests, so that nothing more is sent, and the batches in progress."""
        while self._queue:
            _, future = self._queue.popleft()
            future.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
