"""Calls and streams over real sockets: answers, errors, deadlines, order, credits."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import aclosing

import numpy as np
import pytest

from meshrl.common.api.calls.interface import Call, Interface
from meshrl.common.base.errors import (
    BadMessage,
    DeadlineExceeded,
    MeshError,
    PeerLost,
    Refused,
    RemoteFailure,
    UnknownMethod,
)
from meshrl.common.mesh.runtime.calls.actor import call
from meshrl.common.mesh.runtime.calls.caller import CREDITS_PER_PEER
from meshrl.common.state import registry
from tests.load import scaled
from tests.unit.common.mesh.runtime.talking import Block, Join, Number, Talk, Talker, Text, until


async def test_call_returns_its_reply(join: Join) -> None:
    await join("a", Talker())
    ref = (await join("b")).ref("a")
    assert await ref.call(Talk.echo, Text("hello")) == Text("hello")


async def test_arrays_are_sent_outside_the_body(join: Join) -> None:
    await join("a", Talker())
    array = np.arange(1 << 20, dtype=np.int32).reshape(1024, 1024)
    reply = await (await join("b")).ref("a").call(Talk.block, Block(array))
    assert np.array_equal(reply.block, array)


async def test_errors_arrive_as_the_raised_class(join: Join) -> None:
    await join("a", Talker())
    ref = (await join("b")).ref("a")
    with pytest.raises(Refused, match=r"not today.*come again"):
        await ref.call(Talk.fail, Text("refuse"))
    with pytest.raises(RemoteFailure, match="ValueError: boom"):
        await ref.call(Talk.fail, Text("boom"))
    with pytest.raises(RemoteFailure, match="returned a Number"):
        await ref.call(Talk.fail, Text("lie"))


class UnbuildableError(MeshError):
    code = "unmakeable"

    def __init__(self, message: str, *, where: str, needed: str) -> None:
        super().__init__(message, where=where, fix=needed)


async def test_error_that_cannot_be_rebuilt_still_ends_its_call(join: Join) -> None:
    class FailingTalker(Talker):
        @call(Talk.fail)
        async def fail(self, m: Text) -> Text:
            raise UnbuildableError(m.text, where="here", needed="this")

    await join("a", FailingTalker())
    ref = (await join("b")).ref("a")
    async with asyncio.timeout(scaled(10.0)):
        with pytest.raises(BadMessage, match="an error from a cannot be decoded: TypeError"):
            await ref.call(Talk.fail, Text("x"), deadline_s=scaled(2.0))


async def test_unknown_method_error_names_only_that_method(join: Join) -> None:
    class Other(Interface):
        nonsense = Call(Text, Text)
        numbers = Call(Text, Text)  # a stream in Talk

    await join("a", Talker())
    ref = (await join("b")).ref("a")
    with pytest.raises(UnknownMethod, match="a has no method 'nonsense'") as raised:
        await ref.call(Other.nonsense, Text(""))
    assert "echo" not in str(raised.value)
    with pytest.raises(BadMessage):
        await ref.call(Other.numbers, Text(""))


async def test_oversized_request_fails_at_the_caller(join: Join) -> None:
    await join("a", Talker())
    ref = (await join("b")).ref("a")
    with pytest.raises(BadMessage, match="limit"):
        await ref.call(Talk.echo, Text("x" * (17 << 20)))
    assert await ref.call(Talk.echo, Text("still here")) == Text("still here")


async def test_deadline_ends_both_sides(join: Join) -> None:
    actor = Talker()
    await join("a", actor)
    ref = (await join("b")).ref("a")
    with pytest.raises(DeadlineExceeded, match=r"Talk\.sleep.*at a"):
        await ref.call(Talk.sleep, Number(30), deadline_s=scaled(1.5))
    await until(actor.cancelled.is_set)


async def test_cancelling_the_caller_cancels_the_callee(join: Join) -> None:
    actor = Talker()
    await join("a", actor)
    task = asyncio.create_task((await join("b")).ref("a").call(Talk.sleep, Number(30)))
    await until(lambda: actor.sleeping)
    task.cancel()
    await until(actor.cancelled.is_set)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_nested_call_inherits_deadline_and_trace(join: Join) -> None:
    inner = Talker()
    await join("inner", inner)
    await join("outer", Talker())
    ref = (await join("caller")).ref("outer")
    outer_trace, inner_trace = (await ref.call(Talk.relay, Text("trace"))).text.split()
    assert outer_trace == inner_trace and len(outer_trace) == 32
    with pytest.raises(DeadlineExceeded):
        await ref.call(Talk.relay, Text("sleep"), deadline_s=scaled(1.5))
    await until(inner.cancelled.is_set)


async def test_calls_beyond_the_credits_wait_and_are_answered(join: Join) -> None:
    actor = Talker()
    await join("a", actor)
    ref = (await join("b")).ref("a")
    calls = [
        asyncio.create_task(ref.call(Talk.sleep, Number(600))) for _ in range(CREDITS_PER_PEER + 50)
    ]
    await until(lambda: actor.sleeping == CREDITS_PER_PEER)
    await asyncio.sleep(0.05)
    actor.awake.set()
    assert {reply.text for reply in await asyncio.gather(*calls)} == {"slept"}
    assert actor.max_sleeping == CREDITS_PER_PEER


async def test_requests_wait_while_an_actor_starts(join: Join) -> None:
    starting = asyncio.create_task(join("a", Talker(start_s=0.2)))
    reply = await (await join("b")).ref("a").call(Talk.echo, Text("early"))
    assert reply == Text("early") and (await starting).name == "a"


async def test_request_cancelled_while_an_actor_starts_never_runs(join: Join) -> None:
    class LateTalker(Talker):
        async def start(self) -> None:
            await may_start.wait()

    may_start, actor = asyncio.Event(), LateTalker()
    starting = asyncio.create_task(join("a", actor))
    ref = (await join("b")).ref("a")
    with pytest.raises(DeadlineExceeded):
        await ref.call(Talk.count, Number(1), deadline_s=scaled(0.3))
    # Messages arrive in order: this later call shows that the cancellation has arrived.
    later_call = asyncio.create_task(ref.call(Talk.echo, Text("")))
    assert actor.mesh is not None
    server = actor.mesh._server
    await until(lambda: [header[4] for _, header, *_ in server._early_requests] == ["echo"])
    may_start.set()
    await asyncio.gather(starting, later_call)
    assert await ref.call(Talk.count, Number(2)) == Number(1)
    assert actor.counted == [2]


async def test_cast_arrives_or_its_drop_is_counted(join: Join) -> None:
    actor = Talker()
    await join("a", actor)
    mesh = await join("b")
    await mesh.ref("a").cast(Talk.tell, Text("look"))
    await mesh.ref("nobody").cast(Talk.tell, Text("look"))
    await until(lambda: actor.received_texts)
    assert actor.received_texts == ["look"]
    assert mesh.telemetry.counters["casts_dropped_peer_lost"] == 1


async def test_call_to_an_unregistered_name_raises_peer_lost_at_the_deadline(join: Join) -> None:
    ref = (await join("b")).ref("nobody")
    with pytest.raises(PeerLost, match="nobody"):
        await ref.call(Talk.echo, Text(""), deadline_s=scaled(0.1))


async def test_restarted_actor_is_found_again(join: Join) -> None:
    first, second = Talker(), Talker()
    old_mesh = await join("a", first)
    ref = (await join("b")).ref("a")
    assert await ref.call(Talk.count, Number(1)) == Number(1)
    await old_mesh.leave()

    async def count() -> Number:
        """Repeat a call that was sent before the old actor's exit was noticed."""
        while True:
            with contextlib.suppress(PeerLost):
                return await ref.call(Talk.count, Number(2))

    counting = asyncio.create_task(count())
    await asyncio.sleep(0.05)
    await join("a", second)
    async with asyncio.timeout(scaled(30.0)):
        assert await counting == Number(1)
    assert (first.counted, second.counted) == ([1], [2])


async def test_registry_entry_lists_waits_and_their_targets(join: Join) -> None:
    actor = Talker()
    await join("a", actor)
    mesh = await join("b")
    call = asyncio.create_task(mesh.ref("a").call(Talk.sleep, Number(600)))
    with mesh.wait("a reply of the operator", on="operator"):
        waits: set[tuple[str, str]] = set()
        while ("a", "Talk.sleep") not in waits:
            await asyncio.sleep(0.1)
            await mesh.publish()
            entry = await registry.lookup(mesh.state, "b")
            assert entry is not None
            waits = {(w["on"], w["what"]) for w in entry.waits}
    assert waits == {("a", "Talk.sleep"), ("operator", "a reply of the operator")}
    assert entry is not None
    assert {"loop_lag_ms", "rss_mb", "cpu_s"} <= entry.stats.keys()
    actor.awake.set()
    await call


async def test_stream_items_arrive_in_order_to_the_end(join: Join) -> None:
    await join("a", Talker())
    items = (await join("b")).ref("a").stream(Talk.numbers, Number(200))
    assert [item.value async for item in items] == list(range(200))


async def test_producer_stays_within_its_credits(join: Join) -> None:
    actor = Talker()
    await join("a", actor)
    async with aclosing((await join("b")).ref("a").stream(Talk.numbers, Number(1000))) as items:
        assert await anext(items) == Number(0)
        await asyncio.sleep(0.1)
        assert actor.produced <= 1 + 2 * Talk.numbers.credits


@pytest.mark.parametrize("how", ["break", "aclose", "cancel"])
async def test_ended_consumer_closes_the_producer(join: Join, how: str) -> None:
    actor = Talker()
    await join("a", actor)
    items = (await join("b")).ref("a").stream(Talk.numbers, Number(10_000))

    async def consume() -> None:
        nonlocal items
        async for item in items:
            if item.value == 3 and how != "cancel":
                break
            if item.value == 3:
                await asyncio.sleep(30)

    task = asyncio.create_task(consume())
    await until(lambda: actor.produced >= 4)
    if how == "cancel":
        task.cancel()
    await asyncio.wait([task])
    if how == "aclose":
        await items.aclose()
    del items, task, consume
    await until(actor.closed.is_set)


async def test_stream_idle_beyond_idle_s_ends_both_sides(join: Join) -> None:
    actor = Talker()
    await join("a", actor)
    ref = (await join("b")).ref("a")
    await ref.call(Talk.echo, Text(""))  # the connection exists, so the producer starts
    with pytest.raises(DeadlineExceeded, match=r"Talk\.silent"):
        async for _ in ref.stream(Talk.silent, Number(1)):
            pass
    await until(actor.closed.is_set)


async def test_lost_producer_ends_the_stream_with_an_error(join: Join) -> None:
    producer = await join("a", Talker())
    values = []
    with pytest.raises(PeerLost, match="of a has exited"):
        async for item in (await join("b")).ref("a").stream(Talk.numbers, Number(100_000)):
            values.append(item.value)
            if item.value == 5:
                await producer.leave()
    assert values == list(range(len(values)))


async def test_lost_consumer_closes_the_producer(join: Join) -> None:
    actor = Talker()
    await join("a", actor)
    consumer = await join("b")
    items = consumer.ref("a").stream(Talk.numbers, Number(100_000))
    await anext(items)
    await consumer.leave()
    await until(actor.closed.is_set)
