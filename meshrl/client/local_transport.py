"""Transport to a mesh of this user, through its Redis."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

from meshrl.common.api.gateway import JobState, SubmittedJob
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import NotFound, Refused, StateUnavailable
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.job.isolation import isolation_probe
from meshrl.common.job.run_names import choose_free_name
from meshrl.common.state import events, jobs
from meshrl.common.state.events import Event
from meshrl.common.state.job_lifecycle import deletion
from meshrl.common.state.job_lifecycle.job_status import to_job_state, wait_for_events
from meshrl.common.state.pool.demand.requirements import derive_requirements
from meshrl.common.state.pool.scheduling.snapshot import PoolRequest
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.store.submission_check import check_job_is_feasible
from meshrl.common.state.pool.workers.rows import Role
from meshrl.common.state.redis.client import StateClient
from meshrl.directory import directory_paths, model_export, versions_process
from meshrl.directory.directory_paths import MeshPaths
from meshrl.directory.mesh_query import ANSWER_TIMEOUT_S, await_redis_answer, query_mesh
from meshrl.directory.run_claims import claim_run_directory, translate_write_errors
from meshrl.job.bundle import pack_run
from meshrl.job.job_file import JobFile
from meshrl.job.model_files import describe_models
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot, read_mesh_snapshot

CONNECT_TIMEOUT_S = 10.0
DECISION_TIMEOUT_S = 6.0
POLL_S = 0.2
# Events of a decision about a request.
DECISION_EVENTS = ("move_declined", "move_settled", "desired", "place_declined", "place_settled")
MOVE_ROLES = (Role.ROLLOUT, Role.TRAINING, Role.IDLE)


class LocalTransport:
    """Transport to the mesh at `place`, by its `state`, with the methods of `Client`."""

    def __init__(self, place: MeshPaths, state: StateClient) -> None:
        self._place, self._state, self._clock = place, state, SystemClock()

    @classmethod
    async def open(cls, mesh: Path | None) -> LocalTransport:
        """Connect to the mesh that is meant. Raises NotFound, StateUnavailable when it does not
        run.
        """
        place = directory_paths.find_mesh(mesh)
        opening = StateClient.open(place.redis_url, connect_timeout_s=CONNECT_TIMEOUT_S)
        return cls(place, await await_redis_answer(place, opening))

    async def close(self) -> None:
        await self._state.close()

    async def submit(self, job: JobFile, force: bool, job_file: Path | None) -> SubmittedJob:
        # On a thread, which goes on if who waits for it is cancelled: a run directory that is
        # being filled is either handed over or taken back.
        return await asyncio.to_thread(submit_local, job, force, self._place, job_file)

    async def jobs(self) -> list[JobState]:
        rows = await await_redis_answer(self._place, jobs.read_jobs(self._state))
        return [to_job_state(row) for row in rows]

    async def job(self, name: str) -> JobState:
        return to_job_state(await await_redis_answer(self._place, jobs.read_job(self._state, name)))

    async def read_events(self, name: str, since: str, wait_s: float) -> tuple[list[Event], str]:
        pending_events = wait_for_events(self._state, self._clock, name, since, wait_s)
        return await await_redis_answer(self._place, pending_events)

    async def stop(self, name: str, op_id: str) -> bool:
        return await await_redis_answer(self._place, jobs.cancel(self._state, name, op_id))

    async def delete(self, name: str, op_id: str) -> None:
        await await_redis_answer(self._place, deletion.delete_job(self._state, name, op_id))

    async def workers(self) -> MeshSnapshot:
        return await await_redis_answer(self._place, read_mesh_snapshot(self._state))

    async def move(self, worker: str, role: str, job: str) -> str:
        worker = worker.removeprefix("worker/")
        if role not in MOVE_ROLES:
            raise Refused(f"{role!r} is not a role", fix=f"Choose one of: {', '.join(MOVE_ROLES)}")
        known = [
            found.id
            for found in await await_redis_answer(self._place, pool.read_workers(self._state))
        ]
        if worker not in known:
            raise NotFound(f"there is no worker {worker}", fix=f"Choose one of: {', '.join(known)}")
        last = await events.read_last_id(self._state)
        op_id = uuid.uuid4().hex
        request = PoolRequest(op_id, "move", worker=worker, role=role, job=job)
        await pool.submit_request(self._state, request)
        decision = await self._wait_for_decision(op_id, last)
        if decision is None:
            return (
                f"the planner has not decided on {worker} yet; `meshrl workers` shows its decision"
            )
        if decision.kind == "move_settled":
            return f"{worker} already has that role"
        role = f"the role {decision.fields['role']}"
        return f"{worker} will take {role}; `meshrl workers` shows the change"

    async def place(self, job: str, partner: str) -> str:
        known = [
            row.id for row in await await_redis_answer(self._place, jobs.read_jobs(self._state))
        ]
        for name in (job, partner) if partner else (job,):
            if name not in known:
                fix = f"Choose one of: {', '.join(known)}" if known else ""
                raise NotFound(f"there is no job {name or repr(name)}", fix=fix)
        last = await events.read_last_id(self._state)
        op_id = uuid.uuid4().hex
        await pool.submit_request(
            self._state, PoolRequest(op_id, "place", job=job, partner=partner)
        )
        decision = await self._wait_for_decision(op_id, last)
        if decision is None:
            return f"the planner has not decided on {job} yet; `meshrl status --why {job}` shows it"
        where = (
            f"share the gang of {partner}"
            if partner
            else "get workers of its own when they suffice"
        )
        return f"{job} will {where}; `meshrl status` shows the change"

    async def _wait_for_decision(self, op_id: str, since: str) -> Event | None:
        """Return the event of the planner's decision about a request; None if there is none yet.

        Raises Refused with the planner's reason.
        """
        for _ in range(round(DECISION_TIMEOUT_S / POLL_S)):
            await asyncio.sleep(POLL_S)
            for event in await events.read_all(self._state, since):
                if event.kind not in DECISION_EVENTS or event.fields["op"] != op_id:
                    continue
                if event.kind.endswith("_declined"):
                    raise Refused(event.fields["reason"])
                return event
        return None

    async def weights(self, name: str, step: int | None, best: bool, out: Path) -> Path:
        run_dir = Path((await self.job(name)).run_dir)
        code, _, error_output = await versions_process.run_command(
            model_export.build_export_command(run_dir, out, step, best)
        )
        if code != 0:
            raise NotFound(model_export.extract_error(error_output))
        return out

    async def run_versions_command(
        self, name: str, action: str, version: str, note: str
    ) -> dict[str, Any]:
        run_dir = (await self.job(name)).run_dir
        words = versions_process.build_arguments(action, run_dir, version, note)
        _, output, error_output = await versions_process.run_command(
            versions_process.build_command(words)
        )
        return versions_process.parse_answer(output, error_output)


def submit_local(
    job_source: JobFile, force: bool, place: MeshPaths, job_file: Path | None
) -> SubmittedJob:
    """Pack the job into a new run directory and submit it; see `run_claims.claim_run_directory`."""
    config = job_source.config
    if not MeshSettings.from_file(place.settings).joinable:  # there is one host: this one
        isolation_probe.require_isolation(config)

    async def list_taken_names(state: StateClient) -> set[str]:
        document = config.to_document() | {"bundle": {"models": describe_models(config)}}
        await check_job_is_feasible(state, derive_requirements(document), document)
        return {row.id for row in await jobs.read_jobs(state)}

    job = choose_free_name(config.name, query_mesh(place, list_taken_names, ANSWER_TIMEOUT_S))
    with claim_run_directory(config, force) as claim:
        run_dir = claim.directory
        with translate_write_errors(run_dir):
            about = {"job": job, "mesh": str(place.root)}
            document = pack_run(config, job_source.base, run_dir, about, job_file)
            (run_dir / "store").symlink_to(place.root / "store")  # store of the mesh's weights

        async def hand_over(state: StateClient) -> None:
            await jobs.submit(state, job, document, str(run_dir), uuid.uuid4().hex)

        try:
            query_mesh(place, hand_over, ANSWER_TIMEOUT_S)
        except StateUnavailable:  # perhaps the mesh has the job all the same
            claim.commit()
            raise
        claim.commit()
        claim.delete_replaced_run()
    return SubmittedJob(job, str(run_dir))
