"""What is repeated has a bound, and says for whom it waits until it succeeds."""

from __future__ import annotations

import pytest

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import MeshError, PeerLost, Refused, StateUnavailable, StorageFull
from meshrl.common.base.random import Random
from meshrl.common.mesh.runtime.calls.waits import WaitTable
from meshrl.common.mesh.runtime.patience import (
    HOPELESS_S,
    OUTAGE_S,
    PEER_S,
    WAITS,
    Patience,
    patiently,
    waited_for,
)
from meshrl.sim.loop import VirtualClock, run_virtual


async def gave_up(clock: Clock, *errors: MeshError, for_s: float = OUTAGE_S) -> float:
    """After how long an action is given up that fails by these errors in turn, for ever."""
    began, tries = clock.monotonic(), 0

    async def fails() -> None:
        nonlocal tries
        tries += 1
        raise errors[tries % len(errors)]

    with pytest.raises(MeshError):
        await patiently(clock, fails, every_s=5.0, for_s=for_s)
    return clock.monotonic() - began


def test_an_outage_is_waited_out_for_longer_than_a_peer() -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        assert await gave_up(clock, StateUnavailable("x")) == pytest.approx(OUTAGE_S, abs=6.0)
        assert await gave_up(clock, StorageFull("x")) == pytest.approx(OUTAGE_S, abs=6.0)
        assert await gave_up(clock, PeerLost("x")) == pytest.approx(PEER_S, abs=6.0)
        assert await gave_up(clock, PeerLost("x"), for_s=60.0) == pytest.approx(60.0, abs=6.0)
        assert await gave_up(clock, Refused("x")) == 0.0

    run_virtual(main)


def test_a_peer_has_its_time_anew_after_an_outage() -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        both = await gave_up(clock, PeerLost("x"), StateUnavailable("x"))
        assert both == pytest.approx(OUTAGE_S, abs=12.0)

    run_virtual(main)


def test_a_loop_that_goes_on_after_errors_ends_by_one_that_does_not_pass() -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        patience = Patience(clock)
        for _ in range(100):
            patience.failed(Refused("x"))
            await clock.sleep(HOPELESS_S - 1.0)
            patience.succeeded()
        patience.failed(Refused("x"))
        await clock.sleep(HOPELESS_S + 1.0)
        with pytest.raises(Refused):
            patience.failed(Refused("x"))

    run_virtual(main)


def test_whom_it_waits_for_is_on_record_until_it_succeeds() -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        waits = WaitTable(clock)
        WAITS.set(waits)
        tries = 0
        seen = []

        async def third() -> int:
            nonlocal tries
            tries += 1
            seen.append([(wait["on"], wait["what"]) for wait in waits.published([])])
            if tries < 3:
                raise StorageFull("no room for a chunk", where="/runs/a")
            return tries

        assert await patiently(clock, third, every_s=1.0) == 3
        full = ("disk", "room (at /runs/a): no room for a chunk")
        assert seen == [[], [full], [full]] and waits.published([]) == []
        assert waited_for(PeerLost("gone", where="weights"))[1] == "weights"
        assert waited_for(StateUnavailable("Redis refuses writes: MISCONF"))[1] == "redis"

    run_virtual(main)
