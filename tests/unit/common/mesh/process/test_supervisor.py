"""Supervisors that restart exited processes, and lease watches that find stopped ones."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from meshrl.common.base.clock import Clock, SystemClock
from meshrl.common.base.errors import NotFound, Refused, StateUnavailable
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.child_handle import ChildProcess
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.supervision.lease_watch import GRACE_S, LeaseWatch
from meshrl.common.mesh.process.supervision.restart_budget import RestartBudget
from meshrl.common.mesh.process.supervision.supervisor import (
    ChildExit,
    ChildSpec,
    Supervisor,
    SupervisorHooks,
)
from meshrl.common.state import registry
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.registry import RegistryEntry
from meshrl.sim.redis.simulated_state import open_simulated_state
from meshrl.sim.virtual_loop import run_virtual
from tests.load import scaled
from tests.simulated_host import SimulatedChannel, SimulatedHost, staged
from tests.unit.common.mesh.runtime.talking import until

TTL_MS = 6000


class RecordingHooks(SupervisorHooks):
    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.stopped_pid = 0
        self.reasons: list[str] = []
        self.exits: list[ChildExit] = []

    async def on_start(self, child: ChildProcess) -> None:
        self.calls.append(("started", child.name))

    async def on_exit(self, child: ChildProcess, child_exit: ChildExit) -> None:
        self.calls.append(("ended", child.name))
        self.reasons.append(child_exit.description)
        self.exits.append(child_exit)

    def has_lease_expired(self, child: ChildProcess) -> bool:
        return child.pid == self.stopped_pid

    async def on_give_up(self, spec: ChildSpec, why: str) -> None:
        self.calls.append(("gave up", spec.name))
        self.reasons.append(why)

    async def on_critical_loss(self, name: str) -> None:
        self.calls.append(("escalated", name))


def sleeper(name: str, **options: object) -> ChildSpec:
    return ChildSpec(name, ["sleep", "60"], **options)  # type: ignore[arg-type]


Make = Callable[..., Supervisor]


@pytest.fixture
async def make_supervisor() -> AsyncIterator[Make]:
    supervisors: list[Supervisor] = []

    def build(*specs: ChildSpec, **options: object) -> Supervisor:
        supervisors.append(Supervisor(SystemHost(), SystemClock(), specs, **options))  # type: ignore[arg-type]
        return supervisors[-1]

    yield build
    for supervisor in supervisors:
        await supervisor.stop(0.0)


async def test_killed_child_is_restarted_after_its_exit_was_reported(make_supervisor: Make) -> None:
    hooks = RecordingHooks()
    supervisor = make_supervisor(sleeper("a"), hooks=hooks)
    await supervisor.start()
    first = supervisor.children["a"].pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: len(hooks.calls) == 3)
    assert hooks.calls == [("started", "a"), ("ended", "a"), ("started", "a")]
    assert hooks.reasons == ["signal 9"]
    assert supervisor.children["a"].pid != first and supervisor.count_restarts("a") == 1


async def test_exhausted_restart_budget_escalates_for_a_critical_child(
    make_supervisor: Make,
) -> None:
    hooks = RecordingHooks()
    failing_argv = ["/bin/sh", "-c", "exit 4"]
    supervisor = make_supervisor(
        ChildSpec("bad", failing_argv, budget=(2, 60.0), is_critical=True), hooks=hooks
    )
    await supervisor.start()
    await until(lambda: ("escalated", "bad") in hooks.calls)
    kinds = [kind for kind, _ in hooks.calls]
    assert kinds == ["started", "ended"] * 3 + ["gave up", "escalated"]
    assert hooks.reasons[-1] == "exit status 4; exited more than 2 times in 60 s"
    assert supervisor.children == {}


async def test_successful_exit_is_not_restarted_with_on_failure(make_supervisor: Make) -> None:
    hooks = RecordingHooks()
    done = ChildSpec("done", ["/bin/true"], restart="on_failure")
    once = ChildSpec("once", ["/bin/false"], restart="never")
    supervisor = make_supervisor(done, once, hooks=hooks)
    await supervisor.start()
    await until(lambda: len([k for k, _ in hooks.calls if k == "gave up"]) == 2)
    assert supervisor.children == {}
    assert len([k for k, _ in hooks.calls if k == "started"]) == 2


async def test_stopped_child_with_an_expired_lease_is_killed_and_restarted(
    make_supervisor: Make,
) -> None:
    hooks = RecordingHooks()
    supervisor = make_supervisor(sleeper("a"), hooks=hooks)
    await supervisor.start()
    first = supervisor.children["a"].pid
    os.kill(first, signal.SIGSTOP)
    hooks.stopped_pid = first
    await until(lambda: len(hooks.calls) == 3)
    assert hooks.reasons == ["its lease expired while it ran"]
    assert supervisor.children["a"].pid != first


async def test_one_for_all_restarts_the_siblings_too(make_supervisor: Make) -> None:
    supervisor = make_supervisor(sleeper("a"), sleeper("b"), sleeper("c"), strategy="one_for_all")
    await supervisor.start()
    before = {name: child.pid for name, child in supervisor.children.items()}
    os.kill(before["b"], signal.SIGKILL)

    def are_all_new() -> bool:
        now = {name: child.pid for name, child in supervisor.children.items()}
        return len(now) == 3 and not set(now.values()) & set(before.values())

    await until(are_all_new)
    assert supervisor.count_restarts("b") == 1 and supervisor.count_restarts("a") == 0


async def test_stages_stop_from_the_highest_and_unresponsive_children_are_killed(
    make_supervisor: Make, tmp_path: Path
) -> None:
    hooks = RecordingHooks()
    ready = tmp_path / "ready"
    stubborn = ["/bin/sh", "-c", f"trap '' TERM; touch {ready}; while :; do sleep 0.1; done"]
    supervisor = make_supervisor(
        ChildSpec("deaf", stubborn, stage=1, own_session=True), sleeper("base"), hooks=hooks
    )
    await supervisor.start()
    assert hooks.calls == [("started", "base"), ("started", "deaf")]
    await until(ready.exists)
    await supervisor.stop(scaled(0.5))
    assert hooks.calls[2:] == [("ended", "deaf"), ("ended", "base")]
    assert hooks.reasons == ["stopped, after SIGKILL", "stopped"]


async def test_failing_hook_does_not_end_the_supervision(
    make_supervisor: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    class FailingHooks(SupervisorHooks):
        async def on_exit(self, child: ChildProcess, child_exit: ChildExit) -> None:
            raise RuntimeError("redis was away")

    supervisor = make_supervisor(sleeper("a"), hooks=FailingHooks())
    await supervisor.start()
    first = supervisor.children["a"].pid
    supervisor.children["a"].kill()
    await until(lambda: "a" in supervisor.children and supervisor.children["a"].pid != first)
    assert "redis was away" in capsys.readouterr().err


async def test_children_are_added_and_removed_by_name(make_supervisor: Make) -> None:
    supervisor = make_supervisor()
    child = await supervisor.add(sleeper("a"))
    with pytest.raises(Refused):
        await supervisor.add(sleeper("a"))
    await supervisor.remove("a", scaled(2.0))
    assert child.poll() == -signal.SIGTERM
    with pytest.raises(NotFound):
        await supervisor.remove("a", 2.0)


async def test_released_children_keep_running_and_can_be_adopted(make_supervisor: Make) -> None:
    supervisor = make_supervisor()
    child = await supervisor.add(sleeper("a", own_session=True, die_with_parent=False))
    supervisor.release()
    adopted = SystemHost().adopt(child.pid, child.start_time, name="a")
    assert adopted is not None
    hooks = RecordingHooks()
    successor = make_supervisor(hooks=hooks)
    await successor.add(sleeper("a"), adopted=adopted)
    child.kill()
    await until(lambda: len(hooks.calls) == 3)
    assert hooks.calls == [("started", "a"), ("ended", "a"), ("started", "a")]


def block_starts(log: Path) -> None:
    """Replace the log's directory by a file, so that no child that writes to `log` can start."""
    log.unlink()
    log.parent.rmdir()
    log.parent.touch()


def unblock_starts(log: Path) -> None:
    log.parent.unlink()


async def test_failing_restart_is_retried_until_it_succeeds(
    make_supervisor: Make, tmp_path: Path
) -> None:
    hooks, log = RecordingHooks(), tmp_path / "logs" / "a.log"
    supervisor = make_supervisor(sleeper("a", log=log, budget=(20, 60.0)), hooks=hooks)
    await supervisor.start()
    block_starts(log)
    supervisor.children["a"].kill()
    await until(lambda: supervisor.count_restarts("a") >= 3)
    assert supervisor.children == {}
    unblock_starts(log)
    await until(lambda: "a" in supervisor.children)
    assert hooks.calls == [("started", "a"), ("ended", "a"), ("started", "a")]


@pytest.mark.parametrize("strategy", ["one_for_one", "one_for_all"])
async def test_repeatedly_failing_restarts_exhaust_the_budget_and_escalate(
    make_supervisor: Make, tmp_path: Path, strategy: str
) -> None:
    hooks, log = RecordingHooks(), tmp_path / "logs" / "a.log"
    supervisor = make_supervisor(
        sleeper("a", log=log, budget=(3, 60.0), is_critical=True),
        sleeper("b", budget=(0, 60.0)),
        hooks=hooks,
        strategy=strategy,
    )
    await supervisor.start()
    block_starts(log)
    supervisor.children["a"].kill()
    await until(lambda: ("escalated", "a") in hooks.calls)
    assert [kind for kind, name in hooks.calls if name == "a"] == [
        "started",
        "ended",
        "gave up",
        "escalated",
    ]
    assert "it cannot be started: FileExistsError" in hooks.reasons[-1]
    assert str(log.parent) in hooks.reasons[-1]
    assert "exited more than 3 times in 60 s" in hooks.reasons[-1]
    assert list(supervisor.children) == ["b"]


async def test_sibling_that_cannot_restart_exhausts_its_own_budget(
    make_supervisor: Make, tmp_path: Path
) -> None:
    hooks, log = RecordingHooks(), tmp_path / "logs" / "a.log"
    supervisor = make_supervisor(
        sleeper("a", log=log, budget=(2, 60.0), is_critical=True),
        sleeper("b", budget=(1, 60.0)),
        hooks=hooks,
        strategy="one_for_all",
    )
    await supervisor.start()
    block_starts(log)
    supervisor.children["b"].kill()
    await until(lambda: ("escalated", "a") in hooks.calls)
    await until(lambda: list(supervisor.children) == ["b"])
    assert supervisor.count_restarts("a") == 2 and supervisor.count_restarts("b") == 1


async def test_failing_first_start_raises_and_leaves_the_name_free(
    make_supervisor: Make, tmp_path: Path
) -> None:
    supervisor, log = make_supervisor(), tmp_path / "logs" / "a.log"
    log.parent.touch()
    with pytest.raises(FileExistsError):
        await supervisor.add(sleeper("a", log=log))
    unblock_starts(log)
    await supervisor.add(sleeper("a", log=log))
    assert list(supervisor.children) == ["a"]


def test_restart_delays_grow_and_old_restarts_expire() -> None:
    restarts = RestartBudget(3, 10.0)
    assert [restarts.next_delay(t) for t in (0.0, 1.0, 2.0)] == [0.05, 0.1, 0.2]
    assert restarts.next_delay(9.9) is None
    assert restarts.next_delay(10.5) is not None
    assert restarts.total_restarts == 4


def count_restarts(
    restarts: RestartBudget, cause: str, every_s: float, times: int, start_s: float = 0.0
) -> int:
    """Return how often a child that runs `every_s` and ends by `cause` is restarted."""
    for number in range(times):
        now = start_s + number * every_s
        restarts.record_exit(cause, every_s, now)
        if restarts.next_delay(now) is None:
            return number
    return times


def test_repeated_error_exhausts_the_budget_at_any_rate() -> None:
    assert count_restarts(RestartBudget(3, 10.0), "signal 11", 9.0, 50) == 3
    assert count_restarts(RestartBudget(3, 10.0), "signal 11", 11.0, 50) == 50, (
        "it ran for long in between"
    )


def test_different_error_starts_a_new_count() -> None:
    restarts = RestartBudget(3, 10.0)
    for index, cause in enumerate(("signal 9", "PeerLost a", "signal 9", "signal 9")):
        assert count_restarts(restarts, cause, 9.0, 2, index * 20.0) == 2 or index == 3
    assert restarts.record_exit("signal 9", 1.0, 100.0) == 60.0
    restarts.reset()
    assert restarts.next_delay(200.0) is not None
    assert restarts.record_exit("signal 9", 1.0, 201.0) == 161.0, "a fresh budget is no other error"


async def sleeps(arguments: list[str], channel: SimulatedChannel) -> None:
    await channel.recv()


class InterruptedState(StateClient):
    """State client whose simulated Redis can be is_unreachable."""

    is_unreachable = False

    async def run_script(self, script: str, keys: list[str], *args: object) -> object:
        if self.is_unreachable:
            raise StateUnavailable("away")
        return await super().run_script(script, keys, *args)


class WatchBench:
    def __init__(self, clock: Clock, random: Random) -> None:
        self.clock = clock
        simulated = open_simulated_state(clock)
        self.state = InterruptedState(
            simulated.url, simulated.client, simulated._sync_client, clock.monotonic
        )
        self.host = SimulatedHost(clock, random, {"services.x": sleeps})
        self.child: ChildProcess = self.host.spawn(["python", "-m", "services.x"], name="x/0")
        self.watch = LeaseWatch(self.state, clock, "h", lambda: [self.child])
        self.token = 0

    async def register(self, incarnation: str = "i1", pid: int = 0) -> None:
        entry = RegistryEntry(
            "x/0", "x", host="h", pid=pid or self.child.pid, incarnation=incarnation
        )
        self.token = await registry.register(self.state, entry, TTL_MS)

    async def run_watch(self, seconds: float, *, renewing: bool = False) -> None:
        for _ in range(int(seconds / 0.5)):
            if renewing:
                registry.renew_lease(self.state, "x/0", self.token, TTL_MS, {}, [])
            await self.clock.sleep(0.5)
            await self.watch.check_leases()


def run_with_bench(body: Callable[[WatchBench], Awaitable[None]]) -> None:
    async def main(clock: Clock, random: Random) -> None:
        bench = WatchBench(clock, random)
        await body(bench)
        bench.child.kill()

    run_virtual(main)


@staged(run_with_bench)
async def test_lease_watch_finds_processes_that_stop_renewing(bench: WatchBench) -> None:
    await bench.register()
    await bench.run_watch(20, renewing=True)
    assert not bench.watch.has_expired(bench.child)
    await bench.run_watch(7)
    assert not bench.watch.has_expired(bench.child)
    await bench.run_watch(3)
    assert bench.watch.has_expired(bench.child)


@staged(run_with_bench)
async def test_unregistered_process_is_not_reported_as_expired(bench: WatchBench) -> None:
    await bench.register(pid=bench.child.pid + 1)  # a predecessor's expired entry
    await bench.run_watch(30)
    assert not bench.watch.has_expired(bench.child)


@staged(run_with_bench)
async def test_redis_outage_grants_a_grace_period(bench: WatchBench) -> None:
    await bench.register()
    await bench.run_watch(3, renewing=True)
    bench.state.is_unreachable = True
    await bench.run_watch(20)
    bench.state.is_unreachable = False
    await bench.run_watch(GRACE_S - 1)
    assert not bench.watch.has_expired(bench.child)
    await bench.run_watch(4)
    assert bench.watch.has_expired(bench.child)


@staged(run_with_bench)
async def test_name_of_a_dead_process_is_freed_after_a_redis_outage(
    bench: WatchBench,
) -> None:
    await bench.register()
    bench.state.is_unreachable = True
    await bench.watch.evict(bench.child)
    bench.state.is_unreachable = False
    await bench.run_watch(1)
    entry = await registry.lookup(bench.state, "x/0")
    assert entry is not None and not entry.alive


@staged(run_with_bench)
async def test_late_eviction_spares_the_successor(bench: WatchBench) -> None:
    await bench.register()
    await registry.evict(bench.state, "x/0", "i1")
    await bench.register("i2", pid=99)
    await bench.watch.evict(bench.child)
    entry = await registry.lookup(bench.state, "x/0")
    assert entry is not None and entry.alive and entry.incarnation == "i2"
