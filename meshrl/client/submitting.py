"""A job of this user's own mesh: its run directory is made here, and the mesh is told of it."""

from __future__ import annotations

import uuid
from pathlib import Path

from common.api.gateway import SubmittedJob
from common.base.errors import StateUnavailable
from common.base.host.settings import MeshSettings
from common.job.isolation import containment
from common.job.run_names import free_name
from common.state import jobs
from common.state.pool.demand.needs import need_of
from common.state.pool.store.fitting import refuse_what_never_fits
from common.state.redis.client import State
from meshrl.directory.asking import ANSWER_S, ask
from meshrl.directory.claims import claimed, writing
from meshrl.directory.places import MeshPlace
from meshrl.job.bundle import pack_run
from meshrl.job.loaded import JobFile
from meshrl.job.model_files import size


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
