"""`meshrl.Client`: jobs of a running mesh, from Python."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from meshrl.client.event_types import make_typed_event
from meshrl.common.api.gateway import JobState
from meshrl.common.base.errors import (
    ConfigError,
    DeadlineExceeded,
    MeshError,
    PeerLost,
    StateUnavailable,
)
from meshrl.common.job.config import JobConfig
from meshrl.common.state.events import Event
from meshrl.job.job_file import JobFile
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot

if TYPE_CHECKING:
    from meshrl.client.local_transport import LocalTransport
    from meshrl.client.remote_transport import RemoteTransport

T = TypeVar("T")

TOKEN_ENV = "MESHRL_TOKEN"  # a token, or the file that holds one, where none is given
ANSWER_TIMEOUT_S = 20.0  # for what a mesh answers from its records
SUBMIT_TIMEOUT_S = 600.0  # the job's files are packed and, with a token, sent
WEIGHTS_TIMEOUT_S = 600.0
VERSIONS_TIMEOUT_S = 60.0  # a process starts for that
EVENT_WAIT_S = 5.0  # of one request for events; the next follows at once
POLL_S = 0.5
UNAVAILABLE_TIMEOUT_S = 120.0  # wait for a mesh that does not answer: some part restarts
RETRY_INTERVAL_S = 1.0  # between requests to a mesh that does not answer


class Client:
    """Jobs of one mesh: `async with Client() as client`.

    `mesh` is a run or mesh directory of this user (default: the mesh that was started last from
    here); `token` is what `meshrl token` printed, or the file that holds it, and reaches any mesh
    that gave it, as any user. Every method raises a MeshError of its kind, DeadlineExceeded past
    its deadline.
    """

    def __init__(self, mesh: Path | str | None = None, token: Path | str | None = None) -> None:
        self._mesh = Path(mesh) if mesh is not None else None
        self._token = token or (os.environ.get(TOKEN_ENV) if mesh is None else None)
        self._open_transport: LocalTransport | RemoteTransport | None = None

    async def __aenter__(self) -> Client:
        if self._mesh is not None and self._token:
            raise ConfigError("a mesh and a token were given", fix="Give only one of them")
        async with _deadline(ANSWER_TIMEOUT_S, "reaching the mesh"):
            if self._token:
                from meshrl.client.remote_transport import RemoteTransport

                self._open_transport = await RemoteTransport.open(self._token)
            else:
                from meshrl.client.local_transport import LocalTransport

                self._open_transport = await LocalTransport.open(self._mesh)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        opened, self._open_transport = self._open_transport, None
        if opened is not None:
            await opened.close()

    @property
    def _transport(self) -> LocalTransport | RemoteTransport:
        if self._open_transport is None:
            raise ConfigError("the client is not open", fix="Write: async with Client() as client")
        return self._open_transport

    async def submit(
        self,
        job: Path | str | JobConfig | JobFile,
        overrides: Sequence[str] = (),
        *,
        base: Path | None = None,
        job_file: Path | None = None,
        force: bool = False,
        deadline_s: float = SUBMIT_TIMEOUT_S,
    ) -> JobHandle:
        """Check a job, submit it to the mesh, and return its handle with its name there.

        `job` is a job file, or a JobConfig whose paths and modules count from `base` (default: the
        working directory), or a checked JobFile, read from `job_file`. `overrides` are KEY=VALUE,
        as of `--set`; `force` replaces a run that has ended. Raises ConfigError for a mistake in
        the job, Refused when it can never fit.
        """
        from meshrl.client import job_check

        # Downloads from the Hub take any time; a stalled one ends by a deadline of its own.
        found = await asyncio.to_thread(job_check.load_checked_job, job, list(overrides), base)
        file = Path(job) if isinstance(job, Path | str) else job_file
        async with _deadline(deadline_s, "submitting the job"):
            submitted = await self._transport.submit(found, force, file)
        return JobHandle(self, submitted.job, submitted.run_dir)

    async def jobs(self) -> list[JobState]:
        """Return all jobs of the mesh (with a token: its own) in the order of submission."""
        async with _deadline(ANSWER_TIMEOUT_S, "requesting the jobs"):
            return await self._transport.jobs()

    async def job(self, name: str) -> JobState:
        """Return the state of a job. Raises NotFound."""
        async with _deadline(ANSWER_TIMEOUT_S, f"requesting the state of {name}"):
            return await self._transport.job(name)

    async def events(self, name: str, since: str = "0") -> AsyncIterator[Event[Any]]:
        """Yield past and new events of a job, in order, until it is over.

        `event_types` has the classes of most kinds. `since`: id of the event after which to start.
        An event of kind `history_lost` reports events that the mesh no longer has. A mesh that does
        not answer, as while Redis restarts, is retried for `UNAVAILABLE_TIMEOUT_S`. Raises
        NotFound.
        """
        while True:
            # before the request: so the job's last event is included
            has_ended = (await _retry(partial(self.job, name))).over
            look = partial(self.read_events, name, since, 0.0 if has_ended else EVENT_WAIT_S)
            found, since = await _retry(look)
            for event in found:
                yield make_typed_event(event)
            if has_ended and not found:
                return

    async def read_events(
        self, name: str, since: str = "0", wait_s: float = 0.0
    ) -> tuple[list[Event], str]:
        """Return a page of a job's events after the event `since`, and the id to continue from.

        If there is none, wait up to `wait_s` for one. Raises NotFound.
        """
        async with _deadline(ANSWER_TIMEOUT_S + wait_s, f"requesting events of {name}"):
            return await self._transport.read_events(name, since, wait_s)

    async def wait(self, name: str, timeout_s: float | None = None) -> JobState:
        """Return the state of a job once it is over.

        A mesh that does not answer is retried for `UNAVAILABLE_TIMEOUT_S`. Raises DeadlineExceeded
        after `timeout_s`; NotFound.
        """
        async with _deadline(timeout_s, f"waiting for the end of {name}"):
            while True:
                found = await _retry(partial(self.job, name))
                if found.over:
                    return found
                await asyncio.sleep(POLL_S)

    async def stop(self, name: str) -> bool:
        """End a job cleanly; its results stay. Return False if it had ended already. Raises
        NotFound.
        """
        async with _deadline(ANSWER_TIMEOUT_S, f"stopping {name}"):
            return await self._transport.stop(name, uuid.uuid4().hex)

    async def delete(self, name: str) -> None:
        """Remove an ended job from the mesh's records, and weights that only the mesh's store has.

        Its run directory stays. Raises Refused while the job runs; NotFound.
        """
        async with _deadline(ANSWER_TIMEOUT_S, f"deleting {name}"):
            await self._transport.delete(name, uuid.uuid4().hex)

    async def workers(self) -> MeshSnapshot:
        """Return the mesh's workers and gangs, with their instances. Raises NotAllowed with a
        token.
        """
        async with _deadline(ANSWER_TIMEOUT_S, "requesting the workers"):
            return await self._transport.workers()

    async def move(self, worker: str, role: str, job: str = "") -> str:
        """Order the planner to give a worker another role and keep it there; return its decision.

        Raises Refused with the planner's reason, or for a client with only a token.
        """
        async with _deadline(ANSWER_TIMEOUT_S, f"moving {worker}"):
            return await self._transport.move(worker, role, job)

    async def place(self, job: str, partner: str = "") -> str:
        """Order the planner to place a job's core on the gang of another job's core.

        Both take time slices there. Without a partner the job is placed apart again. Return the
        planner's decision.

        Raises Refused with the planner's reason, NotAllowed for a client with only a token.
        """
        async with _deadline(ANSWER_TIMEOUT_S, f"placing {job}"):
            return await self._transport.place(job, partner)

    async def weights(
        self,
        name: str,
        step: int | None = None,
        *,
        best: bool = False,
        out: Path | None = None,
        deadline_s: float = WEIGHTS_TIMEOUT_S,
    ) -> Path:
        """Write a version of a job's model as a Hugging Face directory, also while it trains.

        The version is that of a step, the best one, or the last. Returns the directory: `out`, or
        NAME-model here. Raises NotFound when the mesh does not have it.
        """
        if best and step is not None:
            raise ConfigError(
                "a step and the best version were requested", fix="Give only one of them"
            )
        target = (out or Path(f"{name}-model")).absolute()
        async with _deadline(deadline_s, f"fetching the weights of {name}"):
            return await self._transport.weights(name, step, best, target)

    async def versions(self, name: str) -> list[dict[str, Any]]:
        """Return the versions of a job's weights that the store has, the oldest first.

        Each has `lineage`, `version`, `manifest`, `bytes`, `why` it stays, and more. Raises
        NotFound.
        """
        found: list[dict[str, Any]] = (await self.run_versions_command(name, "list"))["versions"]
        return found

    async def pin(self, name: str, version: int | str, note: str = "") -> None:
        """Retain a version until it is unpinned.

        `version`: a number, LINEAGE/NUMBER, `last`, `best`, or the first digits of its manifest.
        Raises NotFound when the store no longer has it.
        """
        await self.run_versions_command(name, "pin", str(version), note)

    async def unpin(self, name: str, version: int | str) -> None:
        """Remove a pin, if there is one. Raises NotFound."""
        await self.run_versions_command(name, "unpin", str(version))

    async def run_versions_command(
        self, name: str, action: str, version: str = "", note: str = ""
    ) -> dict[str, Any]:
        """Return what `meshrl weights --json` prints for `list`, `pin` and `unpin`."""
        async with _deadline(VERSIONS_TIMEOUT_S, f"reading the versions of {name}"):
            return await self._transport.run_versions_command(name, action, version, note)


@dataclass(frozen=True)
class JobHandle:
    """Submitted job. Its methods are those of the client, for this job."""

    client: Client
    name: str
    run_dir: str  # on the mesh's host

    async def state(self) -> JobState:
        """Return the job's state."""
        return await self.client.job(self.name)

    def events(self, since: str = "0") -> AsyncIterator[Event[Any]]:
        """Yield past and new events of the job, until it is over."""
        return self.client.events(self.name, since)

    async def wait(self, timeout_s: float | None = None) -> JobState:
        """Return the job's state once it is over."""
        return await self.client.wait(self.name, timeout_s)

    async def stop(self) -> bool:
        """End the job cleanly."""
        return await self.client.stop(self.name)

    async def delete(self) -> None:
        """Remove the job from the mesh's records once it has ended."""
        await self.client.delete(self.name)

    async def weights(
        self, step: int | None = None, *, best: bool = False, out: Path | None = None
    ) -> Path:
        """Write a version of the job's model as a Hugging Face directory."""
        return await self.client.weights(self.name, step, best=best, out=out)


async def _retry(request_once: Callable[[], Awaitable[T]]) -> T:
    """Return the answer; retry for `UNAVAILABLE_TIMEOUT_S` while there is none."""
    now = asyncio.get_running_loop().time
    until = now() + UNAVAILABLE_TIMEOUT_S
    while True:
        try:
            return await request_once()
        except (StateUnavailable, PeerLost, DeadlineExceeded):
            if now() > until:
                raise
        await asyncio.sleep(RETRY_INTERVAL_S)


@asynccontextmanager
async def _deadline(deadline_s: float | None, operation: str) -> AsyncIterator[None]:
    """Raise DeadlineExceeded when the block takes longer; our own errors pass unchanged."""
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError as error:
        if isinstance(error, MeshError):
            raise
        raise DeadlineExceeded(f"{operation} took more than {deadline_s:g} s") from error


def run_request(
    operation: Callable[[Client], Awaitable[T]], mesh: Path | None = None, token: str | None = None
) -> T:
    """Return what a mesh answers to a caller that waits: the named one, or that of the token."""

    async def answered() -> T:
        async with Client(mesh, None if mesh else token) as client:
            return await operation(client)

    return asyncio.run(answered())
