"""Fault injection: cancel at a chosen await, fail a chosen call or script."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from meshrl.common.base.errors import MeshError
from meshrl.common.mesh.runtime.actor_ref import ActorRef
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.redis.client import StateClient


class Interruption:
    """Cancellation of `task` at the `at`-th await of the watched coroutines."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.awaits = at, 0
        self.task: asyncio.Task[Any] | None = None

    @property
    def has_cancelled(self) -> bool:
        return 0 < self.at <= self.awaits

    async def watch(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await self._steps(work)

    @types.coroutine
    def _steps(self, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        answer: Any = None
        error: BaseException | None = None
        while True:
            try:
                waited = work.send(answer) if error is None else work.throw(error)
            except StopIteration as end:
                return end.value
            self.awaits += 1
            if self.awaits == self.at and self.task is not None:
                self.task.cancel()
            answer = error = None
            try:
                answer = yield waited
            except BaseException as thrown:
                error = thrown


class Faults:
    """Failure of the `at`-th call, or of the `at`-th call by one name, once; `calls` lists all
    calls.
    """

    def __init__(self) -> None:
        self.arm(0, None)

    def arm(self, at: int, make: Callable[[], MeshError] | None, name: str = "") -> None:
        self.at, self.make, self.name = at, make, name
        self.calls: list[str] = []

    def check(self, what: str) -> None:
        self.calls.append(what)
        count = self.calls.count(self.name) if self.name else len(self.calls)
        if self.make is not None and what == (self.name or what) and count == self.at:
            raise self.make()


class FaultyRef(ActorRef):
    def __init__(self, mesh: FaultyMesh, name: str) -> None:
        super().__init__(mesh._call_context, name)
        self._faults = mesh.faults

    async def call(self, method: Any, request: Any, *, deadline_s: float | None = None) -> Any:
        self._faults.check(f"{method.name} of {self.name}")
        return await super().call(method, request, deadline_s=deadline_s)


class FaultyMesh(Mesh):
    """Process whose calls may fail."""

    faults: Faults

    def ref(self, name: str) -> ActorRef:
        return FaultyRef(self, name)


class FaultyState(StateClient):
    """Redis client whose scripts may fail."""

    faults: Faults

    async def run_script(self, script: str, keys: list[str], *args: Any) -> Any:
        self.faults.check(script)
        return await super().run_script(script, keys, *args)
