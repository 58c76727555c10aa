"""Records of an instance's pieces: the profile of its kind, and a trace for its run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from meshrl.common.base.digest import compute_digest
from meshrl.common.base.errors import MeshError
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import load_model_config
from meshrl.common.mesh.instances.kind_controller import KindController
from meshrl.common.mesh.instances.time_slices import SliceClient, UsedSlice
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.records.line_files import TraceWriter
from meshrl.common.state.pool.demand.measurements import parse_accelerator_kind
from meshrl.common.state.pool.demand.profiles import Profile, ProfileKey
from meshrl.common.state.pool.store import profile_rows
from meshrl.common.state.pool.store.profile_rows import ProfileRow
from meshrl.common.state.pool.workers.placement import Placement

WRITE_INTERVAL_S = 30.0  # between two writes of samples: their number does not depend on slices
READ_TIMEOUT_S = 120.0  # for the checked files of a bundle's model and tokenizer
CLOSE_TIMEOUT_S = 5.0  # for the last write when the process exits


def make_profile_key(mesh: Mesh, data: JobData, placement: Placement) -> ProfileKey:
    """Return the kind of an instance's process. Raises CorruptData if its bundle has changed."""
    config, shape = data.config, load_model_config(data)
    files = [name for name in config.dataset.trained_paths if name in data.files]
    rows = "".join(f"{name}:{data.files[name][1]};" for name in files)
    model = f"{shape.architecture} {shape.num_layers}x{shape.hidden_size}"
    emulated = config.rollout.emulate if mesh.kind == "engine" else config.training.emulate
    accelerator = parse_accelerator_kind(mesh.settings.accelerator or config.mesh.device)
    return ProfileKey(
        role=mesh.kind,
        model=f"{model} {shape.num_parameters}",
        algorithm=config.algorithm.name,
        dataset=compute_digest(rows.encode()) if rows else "",
        max_tokens=config.rollout.max_tokens,
        accelerator=f"{accelerator} {emulated}" if emulated else accelerator,
        ranks=placement.ranks,
    )


@asynccontextmanager
async def record_slices(
    mesh: Mesh,
    data: JobData,
    placement: Placement,
    time_slices: SliceClient,
    kinds: KindController | None = None,
) -> AsyncIterator[None]:
    """Record the pieces of the block's process, which begins with the stored profile of its kind.

    Samples are written periodically and at the end. While Redis is away they are retained. `kinds`
    has the sizes of the process's tensors.
    """
    key = await mesh.host.run_blocking(
        make_profile_key, mesh, data, placement, deadline_s=READ_TIMEOUT_S
    )
    traces = TraceWriter(mesh, data, f"slices-{placement.instance}")
    recorder = SliceRecorder(mesh, key, placement, time_slices, traces, kinds)
    await recorder.start()
    try:
        yield
    finally:
        await recorder.close()


class SliceRecorder:
    """Recorder of one process's pieces."""

    def __init__(
        self,
        mesh: Mesh,
        key: ProfileKey,
        placement: Placement,
        time_slices: SliceClient,
        traces: TraceWriter,
        kinds: KindController | None = None,
    ) -> None:
        self._mesh, self._placement, self._time_slices = mesh, placement, time_slices
        self._row, self._traces, self._kinds = ProfileRow(key, {}), traces, kinds
        self._writing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the stored profile, if Redis answers, and begin to record."""
        try:
            self._row = await profile_rows.read_profile(self._mesh.state, self._row.key)
        except MeshError as error:
            self._mesh.log.warning("the profile cannot be read", error=str(error))
        self._time_slices.profile.set_stored(self._row.profile)
        self._time_slices.on_release = self._trace_slice
        self._writing = asyncio.create_task(self._write_periodically(), name="write the profile")

    async def close(self) -> None:
        """Write what is left."""
        self._time_slices.on_release = lambda _: None
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])
        try:
            async with self._mesh.clock.timeout(CLOSE_TIMEOUT_S, "writing the profile"):
                await self.write()
        except MeshError as error:
            self._mesh.log.warning("the last samples are not in the profile", error=str(error))
        finally:
            await self._traces.close()

    async def write(self) -> None:
        """Add the samples since the last write to the stored profile.

        They are retained if Redis does not answer.
        """
        profile = self._time_slices.profile
        batch = profile.take_batch()
        if not batch:
            return
        self._add_bytes(batch)
        try:
            self._row = await profile_rows.add_to_profile(
                self._mesh.state, self._row, batch, self._mesh.random.hex_token
            )
        except BaseException:
            profile.restore_batch(batch)
            raise
        profile.set_stored(self._row.profile)

    def _add_bytes(self, batch: Profile) -> None:
        """Add the present sizes of the kinds that each function needs."""
        if self._kinds is None:
            return
        sizes = {state.kind: state.size_bytes for state in self._kinds.describe_kinds().kinds}
        for function, profile in batch.items():
            needed = self._time_slices.kinds_by_function.get(function) or sizes
            profile.bytes_by_kind = {kind: sizes[kind] for kind in needed if sizes.get(kind)}

    async def _write_periodically(self) -> None:
        while True:
            await self._mesh.clock.sleep(WRITE_INTERVAL_S)
            try:
                await self.write()
            except MeshError as error:
                self._mesh.log.warning("the profile cannot be written", error=str(error))

    def _trace_slice(self, used: UsedSlice) -> None:
        to_wall = self._mesh.clock.wall() - self._mesh.clock.monotonic()
        self._traces.write(
            {
                "kind": "slice",
                "at": round(used.requested_s + to_wall, 6),
                "gang": self._placement.gang,
                "instance": self._placement.instance,
                "role": self._mesh.kind,
                "function": used.function,
                "parts": [
                    *("wait", _to_ms(used.granted_s - used.switch_s - used.requested_s)),
                    *("switch", _to_ms(used.switch_s)),
                    *("slice", _to_ms(used.ended_s - used.granted_s)),
                ],
                "other_jobs_s": round(used.other_jobs_s, 6),
                "loaded_bytes": used.loaded_bytes,
                "hidden_bytes": used.hidden_bytes,
            }
        )


def _to_ms(seconds: float) -> float:
    return round(1000 * max(0.0, seconds), 3)
