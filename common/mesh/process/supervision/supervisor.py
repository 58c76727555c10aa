"""Supervisor in the manner of Erlang: it restarts processes within a budget, then escalates.

Source of the strategies and of the restart intensity: Erlang/OTP, `supervisor` behaviour.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import NotFound, Refused
from meshrl.common.mesh.process.child_handle import ChildProcess
from meshrl.common.mesh.process.diagnosis.failure import Failure
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.process.spawning import SpawnOptions
from meshrl.common.mesh.process.supervision.restart_budget import (
    FIRST_DELAY_S,
    LONGEST_DELAY_S,
    RestartBudget,
)

LEASE_CHECK_S = 0.5  # seconds between two checks of a running child's lease
START_FAILED_STATUS = 1  # exit status of a run that could not start


@dataclass(frozen=True)
class ChildSpec:
    """Command of a child and its restart policy. `name` is also the child's name in the
    registry.
    """

    name: str
    argv: list[str]
    env: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None
    restart: Literal["always", "on_failure", "never"] = "always"
    # Restarts, seconds: the supervisor gives up after more restarts within that time. It also gives
    # up after more exits in a row by one error, each after a shorter run.
    budget: tuple[int, float] = (5, 60.0)
    is_critical: bool = False  # its permanent loss escalates
    stage: int = 0  # started from the lowest, stopped from the highest
    own_session: bool = False
    die_with_parent: bool = True
    niceness: int = 0


@dataclass(frozen=True)
class ChildExit:
    """Exit of one run of a child: `why` in a few words, `failure` as the child's own report."""

    code: int
    why: str  # "signal 9", "exit status 1", "stopped"
    failure: Failure | None = None
    restart_count: int = 0  # restarts before this exit
    final: bool = False  # not restarted: it can only fail again
    is_requested: bool = False  # its supervisor stopped it
    run_time_s: float = 0.0  # from start to exit
    repeating_for_s: float = 0.0  # since its first exit by this cause, without another cause

    @property
    def cause(self) -> str:
        """Cause that distinguishes this exit from those by other causes, without numbers that
        vary.
        """
        return f"{self.failure.type} {self.failure.where}" if self.failure is not None else self.why

    @property
    def description(self) -> str:
        """Error of the run if there is one, else the reason of its exit."""
        return str(self.failure) if self.failure is not None else self.why


class SupervisorHooks:
    """Callbacks for the owner of a supervisor; override those that are needed.

    An error in a callback is printed and ignored: a child restarts even while Redis is unavailable.
    """

    async def on_start(self, child: ChildProcess) -> None:
        """Handle the start or restart of a child."""

    async def on_exit(self, child: ChildProcess, child_exit: ChildExit) -> None:
        """Handle the exit of a child before its restart: the moment to release its registry
        name.

        A child that the hook removes is not restarted.
        """

    def has_lease_expired(self, child: ChildProcess) -> bool:
        """Return True if the child still runs long after its lease expired: it is then killed."""
        return False

    async def should_reset_budget(self, spec: ChildSpec, child_exit: ChildExit) -> bool:
        """Return True if a child with an exhausted budget restarts with a fresh one.

        That is so when the cause of its exit has been removed.
        """
        return False

    async def on_give_up(self, spec: ChildSpec, why: str) -> None:
        """Handle a child that is not restarted again."""

    async def on_critical_loss(self, name: str) -> None:
        """Handle the permanent loss of a critical child."""


async def _run_hook(hook: Coroutine[None, None, None]) -> None:
    try:
        await hook
    except Exception:
        traceback.print_exc()


@dataclass
class _SupervisedChild:
    spec: ChildSpec
    restarts: RestartBudget
    child: ChildProcess | None = None
    started_at: float = 0.0  # monotonic seconds
    start_error: str = ""  # why there is no child: its last start failed
    is_stopping: bool = False
    watcher: asyncio.Task[None] | None = None


async def _cancel_watcher(running: _SupervisedChild) -> None:
    if running.watcher is not None and running.watcher is not asyncio.current_task():
        running.watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running.watcher


class Supervisor:
    """Supervisor of children that are passed at the start or added later.

    All methods run on the main thread's loop. With `one_for_all` the exit of one child restarts
    all, and only that child's budget is charged.
    """

    def __init__(
        self,
        host: Host,
        clock: Clock,
        specs: Iterable[ChildSpec] = (),
        *,
        hooks: SupervisorHooks | None = None,
        strategy: Literal["one_for_one", "one_for_all"] = "one_for_one",
    ) -> None:
        self._host, self._clock = host, clock
        self._hooks = hooks or SupervisorHooks()
        self._strategy = strategy
        self._children: dict[str, _SupervisedChild] = {}
        self._specs = sorted(specs, key=lambda spec: spec.stage)
        self._group_restart = asyncio.Lock()

    @property
    def children(self) -> dict[str, ChildProcess]:
        """Running children by name."""
        return {
            name: running.child
            for name, running in self._children.items()
            if running.child is not None and running.child.poll() is None
        }

    def count_restarts(self, name: str) -> int:
        """Return how often a child has been restarted; KeyError for a name that is not
        supervised.
        """
        return self._children[name].restarts.total_restarts

    async def start(self) -> None:
        """Start the initial children in the order of their stages."""
        for spec in self._specs:
            await self.add(spec)

    async def add(self, spec: ChildSpec, *, adopted: ChildProcess | None = None) -> ChildProcess:
        """Start and watch a child, or watch one that an earlier incarnation started.

        If its first start fails, the error reaches the caller and the child is not supervised.
        """
        if spec.name in self._children:
            raise Refused(f"{spec.name} is already supervised", fix="Remove it first")
        child = adopted or self._spawn(spec)
        began = self._clock.monotonic()
        running = self._children[spec.name] = _SupervisedChild(
            spec, RestartBudget(*spec.budget), child, began
        )
        running.watcher = asyncio.create_task(self._watch(running), name=f"watch {spec.name}")
        await _run_hook(self._hooks.on_start(child))
        return child

    async def remove(self, name: str, grace_s: float) -> None:
        """Stop the child (SIGTERM, after `grace_s` SIGKILL) and remove it."""
        running = self._children.get(name)
        if running is None:
            raise NotFound(f"no child {name!r}; the children are {sorted(self._children)}")
        await self._stop_one(running, grace_s)
        self._children.pop(name, None)

    async def stop(self, grace_s: float) -> None:
        """Stop all children, stage by stage from the highest, each stage within `grace_s`."""
        for running in self._children.values():
            running.is_stopping = True
        for stage in sorted({r.spec.stage for r in self._children.values()}, reverse=True):
            same = [r for r in self._children.values() if r.spec.stage == stage]
            await asyncio.gather(*(self._stop_one(running, grace_s) for running in same))
        self._children.clear()

    def release(self) -> None:
        """Stop watching and leave the children running, for the next incarnation to adopt."""
        for running in self._children.values():
            if running.watcher is not None:
                running.watcher.cancel()
        self._children.clear()

    def replace_spec(self, spec: ChildSpec) -> None:
        """Replace the command of a child from its next restart on."""
        self._children[spec.name].spec = spec

    def _spawn(self, spec: ChildSpec) -> ChildProcess:
        return self._host.spawn(
            spec.argv,
            name=spec.name,
            env=spec.env,
            log=spec.log,
            options=SpawnOptions(
                own_session=spec.own_session,
                die_with_parent=spec.die_with_parent,
                niceness=spec.niceness,
            ),
        )

    async def _restart(self, running: _SupervisedChild) -> None:
        """Restart a child. A failed start counts as a failed run, which the child's watcher
        handles.
        """
        try:
            running.child = self._spawn(running.spec)
        except Exception as error:
            traceback.print_exc()
            running.start_error = f"it cannot be started: {type(error).__name__}: {error}"
            running.started_at = self._clock.monotonic()
        else:
            running.started_at = self._clock.monotonic()
            await _run_hook(self._hooks.on_start(running.child))

    async def _stop_one(self, running: _SupervisedChild, grace_s: float) -> None:
        running.is_stopping = True
        await _cancel_watcher(running)
        child = running.child
        if child is not None:
            running.child = None
            await self._terminate(child, grace_s, "stopped")

    async def _terminate(self, child: ChildProcess, grace_s: float, why: str) -> None:
        child.terminate()
        code = await child.wait(grace_s)
        if code is None:
            child.kill()
            code = await child.wait(LONGEST_DELAY_S)
            why = f"{why}, after SIGKILL"
        await _run_hook(
            self._hooks.on_exit(
                child, ChildExit(-9 if code is None else code, why, is_requested=True)
            )
        )

    async def _watch(self, running: _SupervisedChild) -> None:
        while not running.is_stopping:
            if running.child is None:
                end = ChildExit(START_FAILED_STATUS, running.start_error)
            else:
                end = await self._wait_for_exit(running, running.child)
                if running.is_stopping:
                    return
                exited_child, running.child = running.child, None
                await _run_hook(self._hooks.on_exit(exited_child, end))
            if running.is_stopping or not await self._restart_or_give_up(running, end):
                return

    async def _wait_for_exit(self, running: _SupervisedChild, child: ChildProcess) -> ChildExit:
        killed = ""
        while (code := await child.wait(LEASE_CHECK_S)) is None:
            if not killed and self._hooks.has_lease_expired(child):
                killed = "its lease expired while it ran"
                child.kill()
        why = killed or (f"signal {-code}" if code < 0 else f"exit status {code}")
        failure = None
        if code and not killed:
            failure = self._host.find_failure(child.pid, running.spec.log, code)
        final = failure is not None and failure.is_fatal
        ran_s = self._clock.monotonic() - running.started_at
        return ChildExit(
            code, why, failure, running.restarts.total_restarts, final, run_time_s=ran_s
        )

    async def _restart_or_give_up(self, running: _SupervisedChild, end: ChildExit) -> bool:
        """Restart an exited child, or give up at once if it can only fail again.

        Returns True if its watcher continues.
        """
        spec, why = running.spec, end.description
        should_restart = spec.restart == "always" or (
            spec.restart == "on_failure" and end.code != 0
        )
        should_restart = should_restart and not end.final
        now = self._clock.monotonic()
        lasting_s = running.restarts.record_exit(end.cause, now - running.started_at, now)
        delay = running.restarts.next_delay(now) if should_restart else None
        if delay is None and should_restart:
            why = f"{why}; {running.restarts.exhaustion_reason}"
            try:
                absolved = await self._hooks.should_reset_budget(
                    spec, replace(end, repeating_for_s=lasting_s)
                )
            except Exception:
                traceback.print_exc()
                absolved = False
            if absolved:
                running.restarts.reset()
                delay = LONGEST_DELAY_S
        if delay is None:
            running.is_stopping = True
            await _run_hook(self._hooks.on_give_up(spec, why))
            if spec.is_critical:
                await _run_hook(self._hooks.on_critical_loss(spec.name))
            return False
        if self._strategy == "one_for_all":
            await self._restart_siblings(running)
        await self._clock.sleep(delay)
        await self._restart(running)
        return True

    async def _restart_siblings(self, ended: _SupervisedChild) -> None:
        """Restart the other children; their watchers observe the exits without charging budgets."""
        if self._group_restart.locked():
            return  # a sibling's exit ended this child
        async with self._group_restart:
            others = [r for r in self._children.values() if r is not ended and not r.is_stopping]
            await asyncio.gather(*(self._replace(other) for other in others))

    async def _replace(self, running: _SupervisedChild) -> None:
        await _cancel_watcher(running)
        if running.child is not None:
            child, running.child = running.child, None
            await self._terminate(child, FIRST_DELAY_S * 20, "a sibling ended")
        # The task runs at the next suspension, after the start has succeeded or failed. So a
        # cancelled hook leaves no child unwatched.
        running.watcher = asyncio.create_task(self._watch(running))
        await self._restart(running)
