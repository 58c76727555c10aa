"""Weights of an engine and their replacement or removal between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshrl.common.api.node import SLICE_WAIT_TIMEOUT_S
from meshrl.common.api.stats import SERVER_OF_ENGINE
from meshrl.common.base.errors import DeadlineExceeded, Refused
from meshrl.common.generation.engine_contract import (
    NO_VERSION,
    Quarantined,
    TokenEngine,
    quarantine_on_error,
)
from meshrl.common.mesh.instances.kind_controller import KindController
from meshrl.common.mesh.instances.time_slices import SliceClient
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.model.files.tensor_storages import trim_heap
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.common.weights.layout.version_image import get_meta_tensors
from meshrl.common.weights.transports.version_fetcher import publish_transport
from meshrl.services.engine.kv.host_cache import HostCache
from meshrl.services.engine.measurement.load_deadlines import compute_load_deadline_s
from meshrl.services.engine.measurement.update_pauses import UpdatePauses
from meshrl.services.engine.stepping.commands import BETWEEN_STEPS_TIMEOUT_S, StepCommands
from meshrl.services.engine.stepping.shard_streams import ShardStreams

LOAD_TIMEOUT_S = 600.0  # to fetch and, beside its bytes, load the current version


@dataclass(frozen=True)
class AdapterVersion:
    """Version of a job's adapters, and the base weights that they are added to."""

    name: str  # name in requests
    version: int
    tensors: Mapping[str, Tensor]
    scale: float
    base_manifest: str  # manifest of the base weights
    base_version: int
    base_tensors: Mapping[str, Tensor] | None  # base weights; None: the engine has them


class EngineWeights:
    """Loaded weights of an engine, replaced as a whole between two steps.

    If an installation fails halfway, the engine has no version, and shards are notified.
    """

    def __init__(
        self,
        mesh: Mesh,
        engine: TokenEngine,
        commands: StepCommands,
        shard_streams: ShardStreams,
        pauses: UpdatePauses,
        time_slices: SliceClient | None,
    ) -> None:
        self._mesh, self._engine, self._commands = mesh, engine, commands
        self._shard_streams, self._pauses, self._time_slices = shard_streams, pauses, time_slices
        self.manifest = ""  # manifest of the loaded weights
        self.lineage = 0  # lineage of the loaded version
        self.base_manifest = ""  # manifest of the base of the job's adapters; empty: none
        self.loaded_bytes = 0  # size of the last loaded weights as received
        self.process_started_s = mesh.clock.monotonic()  # start of the process
        self.start_s = 0.0  # from the start to the first weights; 0: none so far
        self._model_bytes = 0  # loaded bytes without adapters
        self.is_waking = False  # the engine was woken and has no weights yet
        self.is_asleep = False  # by request; no new version is fetched until wake-up
        self.loaded_event = asyncio.Event()  # set once weights are loaded after a wake-up
        # set when the job may have a new version or the engine wakes
        self.change_event = asyncio.Event()
        # As the driver thread knows them:
        self.default_adapter = ""  # the job's adapter, for requests without a name
        self.computing_manifest = ""  # manifest that the engine computes with
        self.host_cache: HostCache | None = None  # it records which weights computed each chunk
        self._published_transport = ""  # transport to the SGLang server in the last event
        # called on the loop when an installation begins, before its time slice ends
        self.on_install: Callable[[], None] = lambda: None

    @property
    def version(self) -> int:
        """Version of the job that the engine computes with; NO_VERSION: no complete one."""
        if not self.default_adapter or self._engine.version < 0:
            return self._engine.version
        return self._engine.adapter_versions.get(self.default_adapter, NO_VERSION)

    @property
    def lineage_and_version(self) -> tuple[int, int]:
        """Lineage and version that the engine computes with."""
        return self.lineage, self.version

    @property
    def server_transport(self) -> dict[str, Any] | None:
        """Report of the last transfer to the engine's SGLang server; None: it has no server."""
        return getattr(self._engine, "server_transport", None)

    async def publish_server_transport(self, job: str) -> None:
        """Publish an event if the last transfer to the SGLang server used another transport."""
        report = self.server_transport
        if report is not None and report["way"] != self._published_transport:
            self._published_transport = report["way"]
            process = SERVER_OF_ENGINE.format(self._mesh.name)
            await publish_transport(self._mesh, job, process, report)

    def has_base(self, manifest: str) -> bool:
        """Return True if these base weights are loaded for adapters, so they need not be sent
        again.
        """
        return self.base_manifest == manifest and self._engine.version >= 0 and not self.is_waking

    async def update_weights(
        self, tensors: Mapping[str, Tensor], version: int, manifest: str, lineage: int = 0
    ) -> None:
        """Install a version's full weights between two steps; wake an engine that is waking without
        weights.

        Do nothing if the engine sleeps by then. An adapter is removed, and running requests on it
        are aborted and requested again.

        Raises:
            Quarantined: The installation failed halfway; the engine has no version now.
        """
        open_requests = self._shard_streams.open_requests if self.base_manifest else []

        def install() -> None:
            if not self.default_adapter:
                return self._put_model(tensors, version)
            self._engine.abort(open_requests)
            self._put_model(tensors, version)
            with quarantine_on_error(version, self._engine.quarantine):
                self._engine.unload_adapter(self.default_adapter)
            self.default_adapter = ""

        size_bytes = _count_bytes(tensors)
        if await self._apply_between_steps(install, manifest, size_bytes):
            self.base_manifest, self._model_bytes = "", size_bytes
            self._record_loaded(manifest, lineage, size_bytes)

    async def put_adapter(self, adapter: AdapterVersion, manifest: str, lineage: int) -> None:
        """Install a version of the job's adapters between two steps; first its base, if that is
        missing.

        With a new base, requests that run on full weights are aborted and requested again. Without
        `base_tensors`, the base must be loaded (`has_base`). Do nothing if the engine sleeps by
        then.

        Raises:
            Quarantined: The installation failed halfway; the engine has no version now.
        """
        open_requests = [] if self.base_manifest else self._shard_streams.open_requests

        def load() -> None:
            adapter_fields = adapter.tensors, adapter.scale, adapter.version
            self._engine.load_adapter(adapter.name, *adapter_fields)
            self.default_adapter = adapter.name

        def install() -> None:
            if adapter.base_tensors is None:
                return load()
            self._engine.abort(open_requests)
            self._put_model(adapter.base_tensors, adapter.base_version)
            # else the base without adapters serves
            with quarantine_on_error(adapter.version, self._engine.quarantine):
                load()

        base_bytes = 0 if adapter.base_tensors is None else _count_bytes(adapter.base_tensors)
        adapter_bytes = _count_bytes(adapter.tensors)
        if await self._apply_between_steps(install, manifest, base_bytes + adapter_bytes):
            if adapter.base_tensors is not None:
                self.base_manifest, self._model_bytes = adapter.base_manifest, base_bytes
            self._record_loaded(manifest, lineage, self._model_bytes + adapter_bytes)

    def enter_lineage(self, lineage: int) -> None:
        """Assign the loaded weights to a lineage, and send the change to the shards."""
        self.lineage = lineage
        self._shard_streams.publish_weights()

    def _put_model(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Load full weights: wake an engine that has none, or update the others."""
        if self._engine.version < 0 or self.is_waking:
            self._engine.wake(tensors, version)
            self.is_waking = False
        else:
            self._engine.update_weights(tensors, version)

    async def _apply_between_steps(
        self, apply: Callable[[], None], manifest: str, size_bytes: int
    ) -> bool:
        """Run `apply`, which loads `size_bytes` bytes, on the driver thread between two steps.

        Return False if the engine sleeps by then.
        If `apply` fails halfway, report the quarantine to the shards.
        """

        def install() -> bool:
            if self.is_asleep:
                return False
            self._commands.call_on_loop(self.on_install)
            try:
                with self._pauses.measure_update():
                    apply()
            except Quarantined:
                self._set_computing_manifest("")
                self._commands.call_on_loop(self._report_quarantine)
                raise
            self._set_computing_manifest(manifest)
            return True

        is_unsliced = self._time_slices is None or not self._time_slices.is_enabled
        floor_s = BETWEEN_STEPS_TIMEOUT_S if is_unsliced else SLICE_WAIT_TIMEOUT_S
        timeout_s = compute_load_deadline_s(size_bytes, floor_s)
        description = "the engine's update of its weights"
        return await self._commands.run_between_steps(
            install, description, timeout_s, needs_slice=True
        )

    def _set_computing_manifest(self, manifest: str) -> None:
        """Set the manifest that the engine computes with, for the host cache too."""
        self.computing_manifest = manifest
        if self.host_cache is not None:
            self.host_cache.set_weights(manifest, list(self._engine.adapter_versions))

    def _record_loaded(self, manifest: str, lineage: int, weight_bytes: int) -> None:
        """Record loaded weights, and notify the shards and `EngineSleeper.wake`."""
        self.manifest, self.loaded_bytes = manifest, weight_bytes
        self.start_s = self.start_s or self._mesh.clock.monotonic() - self.process_started_s
        self.loaded_event.set()
        self.enter_lineage(lineage)

    def forget_version(self) -> None:
        """Request the current version again, because the weights are gone."""
        self._set_computing_manifest("")
        self.manifest = ""
        self.change_event.set()

    def _report_quarantine(self) -> None:
        """Notify the shards that the engine has no version, as its weights are undefined.

        `follow_versions` then requests a complete version again.
        """
        self.manifest = ""
        self._mesh.telemetry.count("engine_quarantined")
        self._shard_streams.publish_weights()


class EngineSleeper:
    """Control of an engine's sleep, which frees weights and cache between two steps.

    Running requests wait and lose no token. Nothing is saved: the store has the weights, and caches
    of sessions are computed again.
    """

    def __init__(
        self,
        mesh: Mesh,
        engine: TokenEngine,
        commands: StepCommands,
        weights: EngineWeights,
        kinds: KindController,
    ) -> None:
        self._mesh, self._engine, self._commands = mesh, engine, commands
        self._weights, self._kinds = weights, kinds

    async def sleep(self, tier: Tier) -> None:
        """Put the engine to sleep until `wake`; until then it fetches no new version."""

        self._weights.is_asleep = True  # `follow_versions` loads nothing from now on
        try:
            async with self._kinds.use_kinds():
                await self._commands.run_between_steps(
                    self._put_to_sleep, "putting the engine to sleep"
                )
                self._kinds.forget_all()
                self._kinds.is_asleep = True
        except BaseException:
            self._weights.is_asleep = False
            raise
        await self._kinds.drop_copies()
        self._weights.manifest = ""
        await self._mesh.host.run_blocking(trim_heap, deadline_s=LOAD_TIMEOUT_S)

    def _put_to_sleep(self) -> None:
        self._engine.sleep()
        self._engine.pause()

    async def wake(self) -> None:
        """Resume the engine; if it had weights before, wait until the current version is loaded.

        Raises:
            Refused: No version was loaded within LOAD_TIMEOUT_S, and the time that the engine's
                server may take to restart; the engine sleeps again.
        """
        weights, engine = self._weights, self._engine
        had_weights = engine.version >= 0
        weights.loaded_event.clear()
        weights.is_waking, weights.is_asleep = had_weights, False
        await self._commands.run_between_steps(engine.resume, "waking the engine")
        weights.change_event.set()
        if not had_weights:
            return
        try:
            floor_s = LOAD_TIMEOUT_S + getattr(engine, "wake_limit_s", 0.0)
            limit_s = compute_load_deadline_s(weights.loaded_bytes, floor_s)
            async with self._mesh.clock.timeout(limit_s, "loading the weights"):
                await weights.loaded_event.wait()
        except DeadlineExceeded as error:
            weights.is_asleep = True
            await self._commands.run_between_steps(
                self._put_to_sleep, "putting the engine back to sleep"
            )
            raise Refused(str(error), where=self._mesh.name, fix="Retry") from error
        except asyncio.CancelledError:
            weights.is_asleep = True
            raise

    async def move(self, tier: Tier) -> None:
        """Do nothing, because no state is retained."""

    @property
    def is_removable(self) -> bool:
        """True: the store has all state at any time."""
        return True

    async def cancel_removal(self) -> None:
        """Do nothing, because the engine never stopped for a removal."""

    async def prepare_removal(self) -> None:
        """Do nothing, because the store has all state; a drain moves running requests elsewhere."""


def _count_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in get_meta_tensors(tensors).values())
