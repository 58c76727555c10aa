"""Workers and zygotes that end unasked are told, and count as what a run's processes did."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from meshrl.common.api.sandbox import OK
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.state import events
from meshrl.common.state.events import Event
from meshrl.services.sandbox.outcomes import TELL_S, Ends, ToldEnds
from meshrl.services.sandbox.workers.calls import PoolCall, PoolFunctions, PoolLimits
from meshrl.services.sandbox.workers.pool import WorkerPool
from meshrl.sim.loop import VirtualClock, run_virtual
from meshrl.view.history.belonging import Belonging
from meshrl.view.history.news import unforeseen
from tests.load import scaled
from tests.meshes import alone
from tests.simulated_host import SimulatedHost


def counted(found: list[Event]) -> list[tuple[str, int]]:
    """Name and number of the ends that a run counts."""
    return [(e.fields["name"], e.fields["count"]) for e in found if unforeseen(e)]


def test_many_ends_of_one_name_are_one_event_each_few_seconds() -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        mesh = alone("sandbox/calc/0", clock, random, SimulatedHost(clock, random))
        ends = ToldEnds(mesh.state, clock, "sandbox/calc/0", "calc")
        ends.saw("worker of calc", -11, "it ended by SIGSEGV", None, "calc")
        await clock.sleep(0.1)
        for _ in range(40):
            ends.saw("worker of calc", -11, "it ended by SIGSEGV", None, "calc")
        ends.saw("zygote", -9, "it was killed: somebody has stopped it (pid 7)", None)
        await clock.sleep(2 * TELL_S)
        told = await events.read_all(mesh.state)
        name = "worker of calc of sandbox/calc/0"
        assert counted(told) == [(name, 1), (name, 40), ("zygote of sandbox/calc/0", 1)]
        assert told[1].fields["times"] == 41 and told[1].fields["job"] == "calc"
        assert all(Belonging("calc").takes(event) for event in told)
        assert not any(Belonging("other").takes(event) for event in told)
        ends.stop()

    run_virtual(main)


async def test_a_worker_that_is_killed_is_told_and_one_that_has_served_its_time_is_not(
    tmp_path: Path,
) -> None:
    class Heard(Ends):
        def saw(self, name: str, code: int, why: str, log: Path | None, job: str = "") -> None:
            heard.append((name, code, why))

    heard: list[tuple[str, int, str]] = []
    (tmp_path / "tools.py").write_text("import os\ndef pid(x): return os.getpid()\n")
    pool = WorkerPool(
        SystemHost(),
        SystemClock(),
        PoolFunctions("calc", str(tmp_path), {"tool:pid": "tools:pid"}),
        PoolLimits(warm=1, most=1, recycle=2),
        ends=Heard(),
    )
    await pool.start()
    try:
        seen = [(await pool.run([PoolCall("tool:pid", [0], scaled(20.0))]))[0] for _ in range(3)]
        assert {answer.status for answer in seen} == {OK}
        assert seen[1].value != seen[2].value and heard == [], "it has served its time"
        os.kill(seen[2].value, signal.SIGKILL)
        (answer,) = await pool.run([PoolCall("tool:pid", [0], scaled(20.0))])
        assert answer.status == OK and answer.value != seen[2].value
        ((name, code, _),) = heard
        assert (name, code) == ("worker of calc", -signal.SIGKILL)
    finally:
        await pool.stop()
