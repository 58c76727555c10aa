"""A mesh of this user's, asked through its Redis."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

from meshrl.common.api.gateway import JobState, SubmittedJob
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import NotFound, Refused, StateUnavailable
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.job.isolation import containment
from meshrl.common.job.run_names import free_name
from meshrl.common.state import events, jobs
from meshrl.common.state.events import Event
from meshrl.common.state.lifecycle import deleting
from meshrl.common.state.lifecycle.following import happened, standing
from meshrl.common.state.pool.demand.needs import need_of
from meshrl.common.state.pool.placing.snapshot import PoolRequest
from meshrl.common.state.pool.store import store as pool
from meshrl.common.state.pool.store.fitting import refuse_what_never_fits
from meshrl.common.state.pool.workers.rows import Role
from meshrl.common.state.redis.client import State
from meshrl.directory import exporting, places, versions
from meshrl.directory.asking import ANSWER_S, answered, ask
from meshrl.directory.claims import claimed, writing
from meshrl.directory.places import MeshPlace
from meshrl.job.bundle import pack_run
from meshrl.job.loaded import JobFile
from meshrl.job.model_files import size
from meshrl.view.mesh.snapshot import MeshSnapshot, read_mesh

CONNECT_S = 10.0
VERDICT_S = 6.0
POLL_S = 0.2
ROLES = (Role.ROLLOUT, Role.TRAINING, Role.IDLE)


class LocalTransport:
    """The mesh at `place`, by its `state`, asked as `Client` describes."""

    def __init__(self, place: MeshPlace, state: State) -> None:
        self._place, self._state, self._clock = place, state, SystemClock()

    @classmethod
    async def open(cls, mesh: Path | None) -> LocalTransport:
        """The mesh that is meant; NotFound, StateUnavailable when it does not run."""
        place = places.find_mesh(mesh)
        opening = State.open(place.redis_url, connect_s=CONNECT_S)
        return cls(place, await answered(place, opening))

    async def close(self) -> None:
        await self._state.close()

    async def submit(self, found: JobFile, force: bool, job_file: Path | None) -> SubmittedJob:
        # On a thread, which goes on if who waits for it is cancelled: a run directory that is
        # being filled is either handed over or taken back.
        return await asyncio.to_thread(submit, found, force, self._place, job_file)

    async def jobs(self) -> list[JobState]:
        rows = await answered(self._place, jobs.jobs(self._state))
        return [standing(row) for row in rows]

    async def job(self, name: str) -> JobState:
        return standing(await answered(self._place, jobs.job(self._state, name)))

    async def happened(self, name: str, since: str, wait_s: float) -> tuple[list[Event], str]:
        asked = happened(self._state, self._clock, name, since, wait_s)
        return await answered(self._place, asked)

    async def stop(self, name: str, op: str) -> bool:
        return await answered(self._place, jobs.cancel(self._state, name, op))

    async def delete(self, name: str, op: str) -> None:
        await answered(self._place, deleting.delete(self._state, name, op))

    async def workers(self) -> MeshSnapshot:
        return await answered(self._place, read_mesh(self._state))

    async def move(self, worker: str, role: str, job: str) -> str:
        worker = worker.removeprefix("worker/")
        if role not in ROLES:
            raise Refused(f"{role!r} is no role", fix=f"Roles are {', '.join(ROLES)}")
        known = [found.id for found in await answered(self._place, pool.workers(self._state))]
        if worker not in known:
            raise NotFound(f"there is no worker {worker}", fix=f"There are: {', '.join(known)}")
        last = await events.last_id(self._state)
        op_id = uuid.uuid4().hex
        asked = PoolRequest(op_id, "move", worker=worker, role=role, job=job)
        await pool.request(self._state, asked)
        return await self._verdict(worker, op_id, last)

    async def _verdict(self, worker: str, op_id: str, since: str) -> str:
        """What the planner made of a move that was asked for; Refused with its reason."""
        for _ in range(round(VERDICT_S / POLL_S)):
            await asyncio.sleep(POLL_S)
            for event in await events.read_all(self._state, since):
                kind, told = event.kind, event.fields
                if kind not in ("move_declined", "move_settled", "desired") or told["op"] != op_id:
                    continue
                if kind == "move_declined":
                    raise Refused(told["reason"])
                if kind == "move_settled":
                    return f"{worker} has that role already"
                role = f"the role {told['role']}"
                return f"{worker} is to take {role}; `meshrl workers` shows when it has"
        return f"the planner has not decided on {worker} yet; `meshrl workers` shows it when it has"

    async def weights(self, name: str, step: int | None, best: bool, out: Path) -> Path:
        run_dir = Path((await self.job(name)).run_dir)
        code, _, said = await versions.ran(exporting.command(run_dir, out, step, best))
        if code != 0:
            raise NotFound(exporting.complaint(said))
        return out

    async def on_versions(self, name: str, act: str, version: str, note: str) -> dict[str, Any]:
        run_dir = (await self.job(name)).run_dir
        words = versions.words(act, run_dir, version, note)
        _, said, complained = await versions.ran(versions.command(words))
        return versions.answer(said, complained)


def submit(found: JobFile, force: bool, place: MeshPlace, job_file: Path | None) -> SubmittedJob:
    """Packs the job into a new run directory and submits it; see `claims.claimed`."""
    config = found.config
    if not MeshSettings.from_file(place.settings).joinable:  # there is one host: this one
        containment.require(config)

    async def taken(state: State) -> set[str]:
        await refuse_what_never_fits(state, need_of(config.document(), size(config)))
        return {row.id for row in await jobs.jobs(state)}

    job = free_name(config.name, ask(place, taken, ANSWER_S))
    with claimed(config, force) as claim:
        run_dir = claim.directory
        with writing(run_dir):
            about = {"job": job, "mesh": str(place.root)}
            document = pack_run(config, found.base, run_dir, about, job_file)
            (run_dir / "store").symlink_to(place.root / "store")  # where the mesh keeps its weights

        async def hand_over(state: State) -> None:
            await jobs.submit(state, job, document, str(run_dir), uuid.uuid4().hex)

        try:
            ask(place, hand_over, ANSWER_S)
        except StateUnavailable:  # perhaps the mesh has the job all the same
            claim.keep()
            raise
        claim.keep()
        claim.replace()
    return SubmittedJob(job, str(run_dir))
