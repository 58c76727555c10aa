"""Supervisors restart processes that end; lease watches find those that are stopped."""

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


class Recorded(SupervisorHooks):
    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.stopped_pid = 0
        self.whys: list[str] = []
        self.ends: list[ChildExit] = []

    async def on_start(self, child: ChildProcess) -> None:
        self.seen.append(("started", child.name))

    async def on_exit(self, child: ChildProcess, child_exit: ChildExit) -> None:
        self.seen.append(("ended", child.name))
        self.whys.append(child_exit.description)
        self.ends.append(child_exit)

    def has_lease_expired(self, child: ChildProcess) -> bool:
        return child.pid == self.stopped_pid

    async def on_give_up(self, spec: ChildSpec, why: str) -> None:
        self.seen.append(("gave up", spec.name))
        self.whys.append(why)

    async def on_critical_loss(self, name: str) -> None:
        self.seen.append(("escalated", name))


def sleeper(name: str, **options: object) -> ChildSpec:
    return ChildSpec(name, ["sleep", "60"], **options)  # type: ignore[arg-type]


Make = Callable[..., Supervisor]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[Supervisor] = []

    def build(*specs: ChildSpec, **options: object) -> Supervisor:
        made.append(Supervisor(SystemHost(), SystemClock(), specs, **options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for supervisor in made:
        await supervisor.stop(0.0)


async def test_a_killed_child_comes_back_after_its_end_was_told(make: Make) -> None:
    hooks = Recorded()
    supervisor = make(sleeper("a"), hooks=hooks)
    await supervisor.start()
    first = supervisor.children["a"].pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: len(hooks.seen) == 3)
    assert hooks.seen == [("started", "a"), ("ended", "a"), ("started", "a")]
    assert hooks.whys == ["signal 9"]
    assert supervisor.children["a"].pid != first and supervisor.count_restarts("a") == 1


async def test_a_spent_budget_is_given_up_and_escalates_for_a_critical_child(make: Make) -> None:
    hooks = Recorded()
    fails = ["/bin/sh", "-c", "exit 4"]
    supervisor = make(ChildSpec("bad", fails, budget=(2, 60.0), is_critical=True), hooks=hooks)
    await supervisor.start()
    await until(lambda: ("escalated", "bad") in hooks.seen)
    kinds = [kind for kind, _ in hooks.seen]
    assert kinds == ["started", "ended"] * 3 + ["gave up", "escalated"]
    assert hooks.whys[-1] == "exit status 4; ended more than 2 times in 60 s"
    assert supervisor.children == {}


async def test_a_child_that_may_end_well_is_restarted_only_on_failure(make: Make) -> None:
    hooks = Recorded()
    done = ChildSpec("done", ["/bin/true"], restart="on_failure")
    once = ChildSpec("once", ["/bin/false"], restart="never")
    supervisor = make(done, once, hooks=hooks)
    await supervisor.start()
    await until(lambda: len([k for k, _ in hooks.seen if k == "gave up"]) == 2)
    assert supervisor.children == {}
    assert len([k for k, _ in hooks.seen if k == "started"]) == 2


async def test_a_stopped_child_whose_lease_expired_is_killed_and_restarted(make: Make) -> None:
    hooks = Recorded()
    supervisor = make(sleeper("a"), hooks=hooks)
    await supervisor.start()
    first = supervisor.children["a"].pid
    os.kill(first, signal.SIGSTOP)
    hooks.stopped_pid = first
    await until(lambda: len(hooks.seen) == 3)
    assert hooks.whys == ["its lease had expired while it ran"]
    assert supervisor.children["a"].pid != first


async def test_one_for_all_replaces_the_siblings_too(make: Make) -> None:
    supervisor = make(sleeper("a"), sleeper("b"), sleeper("c"), strategy="one_for_all")
    await supervisor.start()
    before = {name: child.pid for name, child in supervisor.children.items()}
    os.kill(before["b"], signal.SIGKILL)

    def all_new() -> bool:
        now = {name: child.pid for name, child in supervisor.children.items()}
        return len(now) == 3 and not set(now.values()) & set(before.values())

    await until(all_new)
    assert supervisor.count_restarts("b") == 1 and supervisor.count_restarts("a") == 0


async def test_stages_stop_from_the_highest_and_a_deaf_child_is_killed(
    make: Make, tmp_path: Path
) -> None:
    hooks = Recorded()
    ready = tmp_path / "ready"
    deaf = ["/bin/sh", "-c", f"trap '' TERM; touch {ready}; while :; do sleep 0.1; done"]
    supervisor = make(
        ChildSpec("deaf", deaf, stage=1, own_session=True), sleeper("base"), hooks=hooks
    )
    await supervisor.start()
    assert hooks.seen == [("started", "base"), ("started", "deaf")]
    await until(ready.exists)
    await supervisor.stop(scaled(0.5))
    assert hooks.seen[2:] == [("ended", "deaf"), ("ended", "base")]
    assert hooks.whys == ["stopped, after SIGKILL", "stopped"]


async def test_a_hook_that_raises_does_not_end_the_supervision(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(SupervisorHooks):
        async def on_exit(self, child: ChildProcess, child_exit: ChildExit) -> None:
            raise RuntimeError("redis was away")

    supervisor = make(sleeper("a"), hooks=Broken())
    await supervisor.start()
    first = supervisor.children["a"].pid
    supervisor.children["a"].kill()
    await until(lambda: "a" in supervisor.children and supervisor.children["a"].pid != first)
    assert "redis was away" in capsys.readouterr().err


async def test_children_come_and_go_by_name(make: Make) -> None:
    supervisor = make()
    child = await supervisor.add(sleeper("a"))
    with pytest.raises(Refused):
        await supervisor.add(sleeper("a"))
    await supervisor.remove("a", scaled(2.0))
    assert child.poll() == -signal.SIGTERM
    with pytest.raises(NotFound):
        await supervisor.remove("a", 2.0)


async def test_released_children_run_on_and_can_be_adopted(make: Make) -> None:
    supervisor = make()
    child = await supervisor.add(sleeper("a", own_session=True, die_with_parent=False))
    supervisor.release()
    adopted = SystemHost().adopt(child.pid, child.start_time, name="a")
    assert adopted is not None
    hooks = Recorded()
    successor = make(hooks=hooks)
    await successor.add(sleeper("a"), adopted=adopted)
    child.kill()
    await until(lambda: len(hooks.seen) == 3)
    assert hooks.seen == [("started", "a"), ("ended", "a"), ("started", "a")]


def break_starts(log: Path) -> None:
    """No child that writes to `log` can be started: where its directory was, there is a file."""
    log.unlink()
    log.parent.rmdir()
    log.parent.touch()


def mend_starts(log: Path) -> None:
    log.parent.unlink()


async def test_a_restart_that_fails_is_tried_again_until_it_succeeds(
    make: Make, tmp_path: Path
) -> None:
    hooks, log = Recorded(), tmp_path / "logs" / "a.log"
    supervisor = make(sleeper("a", log=log, budget=(20, 60.0)), hooks=hooks)
    await supervisor.start()
    break_starts(log)
    supervisor.children["a"].kill()
    await until(lambda: supervisor.count_restarts("a") >= 3)
    assert supervisor.children == {}
    mend_starts(log)
    await until(lambda: "a" in supervisor.children)
    assert hooks.seen == [("started", "a"), ("ended", "a"), ("started", "a")]


@pytest.mark.parametrize("strategy", ["one_for_one", "one_for_all"])
async def test_restarts_that_go_on_failing_spend_the_budget_and_escalate(
    make: Make, tmp_path: Path, strategy: str
) -> None:
    hooks, log = Recorded(), tmp_path / "logs" / "a.log"
    supervisor = make(
        sleeper("a", log=log, budget=(3, 60.0), is_critical=True),
        sleeper("b", budget=(0, 60.0)),
        hooks=hooks,
        strategy=strategy,
    )
    await supervisor.start()
    break_starts(log)
    supervisor.children["a"].kill()
    await until(lambda: ("escalated", "a") in hooks.seen)
    assert [kind for kind, name in hooks.seen if name == "a"] == [
        "started",
        "ended",
        "gave up",
        "escalated",
    ]
    assert "it cannot be started: FileExistsError" in hooks.whys[-1]
    assert str(log.parent) in hooks.whys[-1]
    assert "ended more than 3 times in 60 s" in hooks.whys[-1]
    assert list(supervisor.children) == ["b"]


async def test_a_sibling_that_cannot_be_started_again_spends_its_own_budget(
    make: Make, tmp_path: Path
) -> None:
    hooks, log = Recorded(), tmp_path / "logs" / "a.log"
    supervisor = make(
        sleeper("a", log=log, budget=(2, 60.0), is_critical=True),
        sleeper("b", budget=(1, 60.0)),
        hooks=hooks,
        strategy="one_for_all",
    )
    await supervisor.start()
    break_starts(log)
    supervisor.children["b"].kill()
    await until(lambda: ("escalated", "a") in hooks.seen)
    await until(lambda: list(supervisor.children) == ["b"])
    assert supervisor.count_restarts("a") == 2 and supervisor.count_restarts("b") == 1


async def test_a_first_start_that_fails_is_the_caller_s_and_leaves_the_name_free(
    make: Make, tmp_path: Path
) -> None:
    supervisor, log = make(), tmp_path / "logs" / "a.log"
    log.parent.touch()
    with pytest.raises(FileExistsError):
        await supervisor.add(sleeper("a", log=log))
    mend_starts(log)
    await supervisor.add(sleeper("a", log=log))
    assert list(supervisor.children) == ["a"]


def test_restarts_slow_down_and_are_forgotten_with_time() -> None:
    restarts = RestartBudget(3, 10.0)
    assert [restarts.next_delay(t) for t in (0.0, 1.0, 2.0)] == [0.05, 0.1, 0.2]
    assert restarts.next_delay(9.9) is None
    assert restarts.next_delay(10.5) is not None
    assert restarts.total_restarts == 4


def ends(
    restarts: RestartBudget, cause: str, every_s: float, times: int, begin: float = 0.0
) -> int:
    """How often a child that runs `every_s` and ends by `cause` is started again."""
    for number in range(times):
        now = begin + number * every_s
        restarts.record_exit(cause, every_s, now)
        if restarts.next_delay(now) is None:
            return number
    return times


def test_one_error_in_a_row_is_given_up_however_slowly_it_comes() -> None:
    assert ends(RestartBudget(3, 10.0), "signal 11", 9.0, 50) == 3
    assert ends(RestartBudget(3, 10.0), "signal 11", 11.0, 50) == 50, "it ran for long in between"


def test_another_error_begins_a_row_of_its_own() -> None:
    restarts = RestartBudget(3, 10.0)
    for begin, cause in enumerate(("signal 9", "PeerLost a", "signal 9", "signal 9")):
        assert ends(restarts, cause, 9.0, 2, begin * 20.0) == 2 or begin == 3
    assert restarts.record_exit("signal 9", 1.0, 100.0) == 60.0
    restarts.reset()
    assert restarts.next_delay(200.0) is not None
    assert restarts.record_exit("signal 9", 1.0, 201.0) == 161.0, "a fresh budget is no other error"


async def sleeps(arguments: list[str], channel: SimulatedChannel) -> None:
    await channel.recv()


class AwayAtTimes(StateClient):
    """A simulated Redis that can be away."""

    away = False

    async def run_script(self, script: str, keys: list[str], *args: object) -> object:
        if self.away:
            raise StateUnavailable("away")
        return await super().run_script(script, keys, *args)


class Scene:
    def __init__(self, clock: Clock, random: Random) -> None:
        self.clock = clock
        whole = open_simulated_state(clock)
        self.state = AwayAtTimes(whole.url, whole.client, whole._sync_client, clock.monotonic)
        self.host = SimulatedHost(clock, random, {"services.x": sleeps})
        self.child: ChildProcess = self.host.spawn(["python", "-m", "services.x"], name="x/0")
        self.watch = LeaseWatch(self.state, clock, "h", lambda: [self.child])
        self.token = 0

    async def register(self, incarnation: str = "i1", pid: int = 0) -> None:
        entry = RegistryEntry(
            "x/0", "x", host="h", pid=pid or self.child.pid, incarnation=incarnation
        )
        self.token = await registry.register(self.state, entry, TTL_MS)

    async def watching(self, seconds: float, *, renewing: bool = False) -> None:
        for _ in range(int(seconds / 0.5)):
            if renewing:
                registry.renew_lease(self.state, "x/0", self.token, TTL_MS, {}, [])
            await self.clock.sleep(0.5)
            await self.watch.check_leases()


def in_scene(play: Callable[[Scene], Awaitable[None]]) -> None:
    async def main(clock: Clock, random: Random) -> None:
        scene = Scene(clock, random)
        await play(scene)
        scene.child.kill()

    run_virtual(main)


@staged(in_scene)
async def test_a_process_that_renews_is_left_alone_and_a_stopped_one_is_found(scene: Scene) -> None:
    await scene.register()
    await scene.watching(20, renewing=True)
    assert not scene.watch.has_expired(scene.child)
    await scene.watching(7)
    assert not scene.watch.has_expired(scene.child)
    await scene.watching(3)
    assert scene.watch.has_expired(scene.child)


@staged(in_scene)
async def test_a_process_that_has_not_registered_yet_is_no_stopped_one(scene: Scene) -> None:
    await scene.register(pid=scene.child.pid + 1)  # a predecessor's entry, expired
    await scene.watching(30)
    assert not scene.watch.has_expired(scene.child)


@staged(in_scene)
async def test_after_an_outage_of_redis_everyone_has_a_grace(scene: Scene) -> None:
    await scene.register()
    await scene.watching(3, renewing=True)
    scene.state.away = True
    await scene.watching(20)
    scene.state.away = False
    await scene.watching(GRACE_S - 1)
    assert not scene.watch.has_expired(scene.child)
    await scene.watching(4)
    assert scene.watch.has_expired(scene.child)


@staged(in_scene)
async def test_the_name_of_a_dead_process_is_free_at_once_even_if_redis_was_away(
    scene: Scene,
) -> None:
    await scene.register()
    scene.state.away = True
    await scene.watch.evict(scene.child)
    scene.state.away = False
    await scene.watching(1)
    entry = await registry.lookup(scene.state, "x/0")
    assert entry is not None and not entry.alive


@staged(in_scene)
async def test_a_late_eviction_spares_the_successor(scene: Scene) -> None:
    await scene.register()
    await registry.evict(scene.state, "x/0", "i1")
    await scene.register("i2", pid=99)
    await scene.watch.evict(scene.child)
    entry = await registry.lookup(scene.state, "x/0")
    assert entry is not None and entry.alive and entry.incarnation == "i2"
