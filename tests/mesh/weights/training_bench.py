"""Job under network faults whose versions are trained, staged and committed by real processes.

Its trainer is a core, or a core of two ranks. Host 2 reaches the store through a proxy. Its groups
are made from a seed, and each step has some.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from loadtests.weights import contents, models
from loadtests.weights.scene import Member, Scene
from meshrl.common.api.transfer import bulk_permissions
from meshrl.common.base.encoding.blob import pack
from meshrl.common.base.files.run_host import RunHost
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.state import groups, jobs, registry
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.state.server_state import run_host
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.receiver import WeightReceiver
from meshrl.common.weights.store.weight_store_client import put_chunk
from meshrl.directory.directory_paths import MeshPaths
from meshrl.job import bundle, job_reader
from meshrl.launch.head import durable_restore
from meshrl.services.weights.retention.job_records import JOBS_FOLDER, read_record
from tests.load import scaled
from tests.mesh.elastic import GROUPS, JOB_FILE, MEMBERS, STEPS, WITHIN_S, group
from tests.mesh.weights.transfer_bench import (
    ENDLESS,
    MODEL,
    POLL_S,
    Answer,
    TransferBench,
    sample_answer,
    until,
)

JOB = "job"
CORE, RANK = f"trainer/{JOB}", f"rank/{JOB}/1"
OWNER = "rollout/job/0"  # of the groups
BEYOND = 2  # the host from which a proxy leads to the store
WHOLE_SHARE = 1.0  # of a version
SETTINGS = {
    "training.bin_tokens": 40,  # some bins a step
    "training.checkpoint_every": STEPS,  # recovery repeats steps from their records
    "training.deltas": "off",  # the proxy transfers staged data and the engines' pulls
    "budget.steps": STEPS,
    "algorithm.max_staleness": STEPS,
}


class TrainingBench(TransferBench):
    """Store on host 0, an engine on host 1, and a job in training."""

    ranks = 1
    within_s = WITHIN_S

    def __init__(self, scene: Scene, opened: AsyncExitStack) -> None:
        super().__init__(scene, opened)
        self._meshes: list[Mesh] = []  # this process's
        self._trained: dict[int, Answer] = {}  # tokens that are sampled with a version
        self._training: dict[str, Member] = {}
        self._admitted: list[groups.AdmittedGroup] = []
        self._base = self._released = 0

    async def begin_training(self, ranks: int = 1, url: str = "", **settings: Any) -> None:
        """Commit version 0 and wait until an engine has it.

        A single core reaches the store through the proxy; of a core of two ranks, only the second
        rank does. `url` is the address of the mesh's durable copy.
        """
        self.ranks = ranks
        if url:
            self.scene.settings(0)
            durable_restore.configure_durable_copy(url, self.place)
        await self._open()
        await self._submit(settings)
        await self._begin()
        await jobs.set_phase(self.scene.state, JOB, jobs.Phase.TRAINING, self._token, OWNER)

    async def resume_job(self, url: str) -> None:
        """Resume the job of a lost mesh from its durable copy; wait until an engine has that
        version.
        """
        self.scene.settings(0)
        durable_restore.fetch_runs(url, self.place)
        tell = durable_restore.make_pending_restore(self.place)
        assert tell is not None
        await tell(self.scene.state)
        self._base = (await self.row()).version
        await self._open()
        await self._begin()

    @property
    def place(self) -> MeshPaths:
        """Return the paths of the store's host."""
        return MeshPaths(self.scene.root(0))

    async def _open(self) -> None:
        state = self.scene.state
        elsewhere = self.scene.directory / "nowhere"  # as if each host had a disk of its own
        await run_host.write_run_host(state, RunHost("h0", str(elsewhere), ""))
        self.store, self.proxy = await self.start_behind_proxy(
            "weights", 0, "meshrl.services.weights"
        )
        self.proxy.stalls_both_directions = True
        settings = MeshSettings.from_file(self.scene.settings(0))
        self._here = await Mesh.open("test", "trainer", settings)
        self._meshes.append(self._here)
        self._bulk = BulkClient(self._here)
        entry = registry.RegistryEntry(OWNER, "rollout", incarnation=uuid.uuid4().hex)
        self._token = await registry.register(state, entry, 600_000)

    async def _begin(self) -> None:
        for name in (CORE, RANK)[: self.ranks]:
            self.start(name)
        self.shard = await self.scene.shard(1)
        await self.wait_for_row(lambda row: row.phase in jobs.ACTIVE_PHASES)
        self.engine = await self.new_engine()
        await self.wait_for_version(self.engine)

    async def leave(self) -> None:
        for mesh in self._meshes:
            await mesh.leave()

    async def _submit(self, settings: dict[str, Any]) -> None:
        hf = models.MODELS[MODEL].to_hf()
        words = {f"model.config.{key}": value for key, value in hf.items() if value is not None}
        more = {"training.ranks": self.ranks, "mesh.workers": self.ranks + 1}
        words |= SETTINGS | more | {key.replace("__", "."): v for key, v in settings.items()}
        config, base = job_reader.load_config(
            JOB_FILE, [f"{k}={json.dumps(v)}" for k, v in words.items()]
        )
        run_dir = self.scene.root(0) / "run"
        _, document = bundle.pack_bundle(config, base, run_dir)
        await jobs.submit(self.scene.state, JOB, document, str(run_dir), uuid.uuid4().hex)

    # -- processes -------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start the core or the rank."""
        seat = Placement("g0", "g0", JOB, 1, core=True, rank=int(name == RANK), ranks=self.ranks)
        host = BEYOND if self.ranks == 1 or name == RANK else 0
        self._training[name] = self.scene.start(
            name, host, "meshrl.services.trainer", *seat.to_args()
        )

    async def kill(self, name: str) -> None:
        """Kill the process by SIGKILL; its name is free then."""
        await self._training[name].kill()
        await self.evict_name(name)

    # -- steps -----------------------------------------------------------------------------------

    async def release_until_share(self, share: float) -> None:
        """Release the next step's groups, and wait until this share of its version was transferred.

        At a share of 1, the store has every chunk and the manifest, and the core has no answer yet.
        """
        if share < WHOLE_SHARE:
            self.stall_after(share)
            await self.release()
            await self.wait_until_stalled()
            return
        calls = self.calls["weights"]
        calls.stall_at_bytes = calls.carried_bytes
        await self.release()
        staged = "the version is in the store"
        await until(lambda: self.newest in self.list_stored_versions(), staged, self.within_s)

    def list_stored_versions(self) -> set[int]:
        """Return the versions that the store retains."""
        path = self.scene.root(0) / "store" / JOBS_FOLDER / f"{JOB}.json"
        return {number.version for number in read_record(path).versions.values()}

    def resume_transfer(self) -> None:
        super().resume_transfer()
        self.calls["weights"].stall_at_bytes = ENDLESS

    @property
    def newest(self) -> int:
        """Return the version of the last step with groups."""
        return self._base + self._released

    async def release(self) -> None:
        """Mark the groups of the next step ready."""
        state = self.scene.state
        if not self._admitted:
            whole = STEPS * GROUPS
            self._admitted = await groups.admit_groups(
                state, JOB, OWNER, self._token, whole, uuid.uuid4().hex
            )
        start, self._released = self._released * GROUPS, self._released + 1
        for admitted in self._admitted[start : start + GROUPS]:
            content = pack(group(admitted.group))
            digest = await put_chunk(
                self._here, self._bulk, content, "a group", space=bulk_permissions.GROUPS
            )
            ready = groups.FinishedGroup(admitted.group, digest, len(content), 0, MEMBERS)
            await groups.mark_group_ready(state, JOB, OWNER, self._token, ready, uuid.uuid4().hex)

    async def wait_for_row(self, holds: Callable[[jobs.JobRow], bool]) -> jobs.JobRow:
        """Return the job's row once `holds` is true for it."""
        end = time.monotonic() + scaled(self.within_s)
        while not holds(row := await self.row()):
            assert time.monotonic() < end, f"{row.phase}, version {row.version}\n{self._outputs}"
            await asyncio.sleep(POLL_S)
        return row

    @property
    def _outputs(self) -> str:
        """Return the output of the core and the rank."""
        return "\n".join(member.log_tail for member in self._training.values())

    async def row(self) -> jobs.JobRow:
        """Return the row of the job."""
        row = await jobs.read_job(self.scene.state, JOB)
        assert row is not None
        return row

    async def wait_for_version(self, engine: Member, version: int = -1) -> None:
        try:
            await super().wait_for_version(engine, version)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._outputs}") from None
        await self.expected(await self.read_served_version(engine))  # while the store still has it

    async def expected(self, version: int) -> Answer:
        """Return the expected answer, from weights with the identity that the core has
        committed.
        """
        if version not in self._trained:
            row = await self.row()
            assert row.version == version, "one step at a time"
            image = await WeightReceiver(self._here, self._bulk).receive(row.manifest)
            assert contents.identity_of(dict(image.tensors)) == row.image
            self._trained[version] = sample_answer(image.tensors)
        return self._trained[version]
