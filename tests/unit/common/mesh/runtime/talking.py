"""Actor that the runtime's tests call."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import pytest

from meshrl.common.api.calls.interface import Call, Cast, Interface, Stream
from meshrl.common.base.encoding.messages import Array, message
from meshrl.common.base.errors import DeadlineExceeded, Refused
from meshrl.common.mesh.runtime.actor_ref import ActorRef
from meshrl.common.mesh.runtime.calls.actor import Actor, call, cast, stream
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.telemetry.tracing import read_trace_id
from tests.load import scaled

Q = TypeVar("Q")
Join = Callable[..., Coroutine[Any, Any, Mesh]]  # type of the fixture `join`
HANG_S = 300.0  # a longer wait means that no reply will arrive, even on a busy machine


@message
class Text:
    text: str


@message
class Number:
    value: int


@message
class Block:
    block: Array


class Talk(Interface):
    echo = Call(Text, Text, HANG_S)
    block = Call(Block, Block, HANG_S)
    count = Call(Number, Number, HANG_S)
    count_idempotent = Call(Number, Number, HANG_S, idempotent=True)
    sleep = Call(Number, Text, HANG_S)
    fail = Call(Text, Text, HANG_S)
    trace = Call(Text, Text, HANG_S)
    relay = Call(Text, Text, HANG_S)
    numbers = Stream(Number, Number, credits=8, idle_s=HANG_S)
    silent = Stream(Number, Number, idle_s=1.0)
    patient = Stream(Number, Number, credits=8, idle_s=math.inf)
    tell = Cast(Text)


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait until `condition()` is true."""
    async with asyncio.timeout(scaled(within_s)):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


async def cancel(task: asyncio.Future[Any]) -> None:
    """Cancel a task and check that it ends by that."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def call_until_refused(ref: ActorRef, method: Call[Q, Any], request: Q) -> None:
    """Repeat a call until it fails by another error than its deadline.

    A deadline may interrupt the last of several tries, whose error is then unknown.
    """
    deadline_s = 0.5
    async with asyncio.timeout(scaled(60.0)):
        while True:
            try:
                await ref.call(method, request, deadline_s=deadline_s)
            except DeadlineExceeded:
                deadline_s = min(8.0, 2 * deadline_s)


class Talker(Actor):
    interface = Talk

    def __init__(self, start_s: float = 0.0) -> None:
        self.mesh: Mesh | None = None
        self.start_s = start_s
        self.counted: list[int] = []
        self.received_texts: list[str] = []
        self.sleeping = self.max_sleeping = 0
        self.produced = 0
        self.closed = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.awake = asyncio.Event()

    async def start(self) -> None:
        await asyncio.sleep(self.start_s)

    @call(Talk.echo)
    def echo(self, m: Text) -> Text:
        return m

    @call(Talk.block)
    def block(self, m: Block) -> Block:
        return m

    @call(Talk.count)
    def count(self, m: Number) -> Number:
        self.counted.append(m.value)
        return Number(len(self.counted))

    @call(Talk.count_idempotent)
    def count_again(self, m: Number) -> Number:
        counted: Number = self.count(m)
        return counted

    @call(Talk.sleep)
    async def sleep(self, m: Number) -> Text:
        self.sleeping += 1
        self.max_sleeping = max(self.max_sleeping, self.sleeping)
        try:
            async with asyncio.timeout(m.value):
                await self.awake.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.sleeping -= 1
        return Text("slept")

    @call(Talk.fail)
    async def fail(self, m: Text) -> Text:
        if m.text == "refuse":
            raise Refused("not today", fix="come again")
        if m.text == "lie":
            return Number(1)  # type: ignore[return-value]
        raise ValueError(m.text)

    @call(Talk.trace)
    def trace(self, m: Text) -> Text:
        return Text(read_trace_id())

    @call(Talk.relay)
    async def relay(self, m: Text) -> Text:
        assert self.mesh is not None
        if m.text == "trace":
            inner = await self.mesh.ref("inner").call(Talk.trace, m)
            return Text(f"{read_trace_id()} {inner.text}")
        return await self.mesh.ref("inner").call(Talk.sleep, Number(30))

    @stream(Talk.numbers)
    async def numbers(self, m: Number) -> AsyncIterator[Number]:
        try:
            for value in range(m.value):
                self.produced = value + 1
                yield Number(value)
        finally:
            self.closed.set()

    @stream(Talk.patient)
    async def patient(self, m: Number) -> AsyncIterator[Number]:
        for value in range(m.value):
            yield Number(value)
            await asyncio.sleep(1.0)

    @stream(Talk.silent)
    async def silent(self, m: Number) -> AsyncIterator[Number]:
        try:
            await asyncio.sleep(30)
            yield m
        finally:
            self.closed.set()

    @cast(Talk.tell)
    def record_text(self, m: Text) -> None:
        self.received_texts.append(m.text)
