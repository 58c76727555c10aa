"""Puts the learner where a checkpoint left it: the job's last one, or where that is damaged the
newest before it that is whole.
"""

from __future__ import annotations

from pathlib import Path

from common.api.weights import Checkpoint, Load, Weights
from common.errors import ConfigError, Damaged, MeshError, NotFound
from common.job.job_data import JobData
from common.job.model_shape import model_config
from common.model.output import read_version
from common.model.transfer import fetch, stage_again
from common.records import damage
from common.records.checkpoints import STATE, check_files, older, set_aside
from common.runtime.mesh import Mesh
from common.runtime.patience import patiently
from common.state import events
from common.wire.bulk import BulkClient
from common.wire.weight_store import STORE
from services.trainer.core.step import Enter
from services.trainer.ranks.compute import SAVE_S, Compute


class Restoring:
    def __init__(
        self, mesh: Mesh, bulk: BulkClient, data: JobData, compute: Compute, enter: Enter
    ) -> None:
        self._mesh, self._bulk, self._data = mesh, bulk, data
        self._compute, self._enter = compute, enter
        self._directory = data.run_dir / "checkpoints"

    async def usable(self, last: str) -> tuple[str, Checkpoint]:
        """The checkpoint called `last`, or the newest before it that is whole, with the learner in
        its state. What is damaged is set aside. ConfigError when none is whole.
        """
        first: MeshError | None = None
        earlier = await self._mesh.host.run_blocking(
            older, self._data.run_dir, last, deadline_s=SAVE_S
        )
        for name, before in zip([last, *earlier], [*earlier, ""], strict=True):
            try:
                checkpoint = await self._loaded(name)
                await self.restore(name, checkpoint)
            except (Damaged, NotFound) as error:
                first = first or error
                await self._set_aside(name, error, before)
            else:
                return name, checkpoint
        raise ConfigError(
            f"no checkpoint of the run is whole: {first.message if first else ''}",
            where=str(_place(first, self._directory / f"{last}.json")),
            fix=f"Put {last}.json and the directory {last} back below {self._directory} from a "
            f"copy, and resume; or start over: meshrl run JOB. What is damaged lies in "
            f"{self._data.run_dir / damage.QUARANTINE}",
        )

    async def restore(self, name: str, checkpoint: Checkpoint) -> None:
        """Puts the learner where a checkpoint left it. Damaged or NotFound, and the learner is to
        be restored otherwise, when a file that it goes on from is not what was written.
        """
        self._enter("restoring", checkpoint.step)
        directory, run = self._directory / name, self._mesh.host.run_blocking
        await run(check_files, directory, checkpoint.files, deadline_s=SAVE_S)
        try:
            _, weights = await fetch(self._mesh, self._bulk, checkpoint.weights)
        except (Damaged, NotFound) as error:
            await self._make_again(directory, checkpoint, error)
            _, weights = await fetch(self._mesh, self._bulk, checkpoint.weights)
        await self._compute.restore(directory / STATE, weights)

    async def _loaded(self, name: str) -> Checkpoint:
        store, load = self._mesh.ref(STORE), Load(self._data.id, name)
        return await patiently(self._mesh.clock, lambda: store.call(Weights.load, load))

    async def _make_again(
        self, directory: Path, checkpoint: Checkpoint, error: Damaged | NotFound
    ) -> None:
        """Writes the version of a checkpoint to the store again, from the model that lies in its
        directory; `error` goes on when that is not the version any more.
        """
        run = self._mesh.host.run_blocking
        await run(check_files, directory, checkpoint.files, "", deadline_s=SAVE_S)
        like, config = await self._compute.weights(), model_config(self._data)
        weights = await run(read_version, config, like, directory, deadline_s=SAVE_S)
        lineage, step = checkpoint.lineage, checkpoint.step
        version = self._data.id, lineage, step, weights, checkpoint.weights
        if not await stage_again(self._mesh, self._bulk, *version):
            raise error
        path = _place(error, Path(checkpoint.weights))
        await self._tell("weights", path, error, f"written again from {directory}")

    async def _set_aside(self, name: str, error: MeshError, before: str) -> None:
        manifest = self._directory / f"{name}.json"
        aside = await self._mesh.host.run_blocking(set_aside, manifest, deadline_s=SAVE_S)
        then = f"training goes on from {before}" if before else "the job fails: there is no other"
        await self._tell("checkpoint", _place(error, manifest), error, then, aside)

    async def _tell(
        self, kind: str, path: Path, error: MeshError, then: str, aside: Path | None = None
    ) -> None:
        self._mesh.telemetry.log.error("damaged", path=str(path), why=error.message, then=then)
        told = damage.fields(kind, path, error.message, then, job=self._data.id, aside=aside)
        state = self._mesh.state
        await patiently(self._mesh.clock, lambda: events.append(state, damage.EVENT, told))


def _place(error: MeshError | None, otherwise: Path) -> Path:
    """The file that an error names, which has come from another process with that one's address."""
    named = error is not None and error.where.startswith("/")
    return Path(error.where) if error is not None and named else otherwise
