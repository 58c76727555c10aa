"""Role process of an engine: a thread that computes, and weights that follow the job's version."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch

from meshrl.common.base.errors import ConfigError, MeshError
from meshrl.common.generation.engine_contract import SteppableEngine, TokenEngine
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import load_model_config
from meshrl.common.job.emulation import parse_engine_speed
from meshrl.common.mesh.instances.time_slices import SliceClient
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.mesh.runtime.retry_policy import RetryPolicy, retry
from meshrl.common.model.network.lora import is_adapter_tensor, merge_adapters
from meshrl.common.records.line_files import TraceWriter
from meshrl.common.records.slice_records import record_slices
from meshrl.common.state import jobs
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.weights.bulk.port import BulkServer
from meshrl.common.weights.bulk.port import serve_chunks as serve_chunks
from meshrl.common.weights.store.job_files import open_local_job
from meshrl.services.engine.engine_factory import create_engine
from meshrl.services.engine.kv.cache_factory import open_host_cache
from meshrl.services.engine.service import EngineService
from meshrl.services.engine.stepping.emulation import EmulatedSteps
from meshrl.services.engine.weights.engine_weights import AdapterVersion, EngineWeights
from meshrl.services.engine.weights.merge_policy import AdapterMode, MergePolicy
from meshrl.services.engine.weights.version_receiver import VersionReceiver

IDLE_S = 0.05  # longest sleep of an idle driver without a hint
# A slice is long relative to the millisecond of a switch, and short relative to a training step.
# Tokens so arrive in no coarser bursts than flushes to a remote shard.
SLICE_S = 0.2
POLL_S = 1.0  # interval of polls of the job's version; hints are rarely lost
MERGE_TIMEOUT_S = 300.0  # to merge adapters into the model
CLOSE_TIMEOUT_S = 10.0  # to close the KV tiers
SWITCH_INTERVAL_S = 0.0005  # how often the compute thread yields the interpreter to the loop


OpenEngine = Callable[[Mesh, JobData, Placement], Awaitable[TokenEngine]]


class EngineDriver(Protocol):
    """Driver that runs an engine service's steps."""

    def call_on_loop(self, action: Callable[[], None]) -> None:
        """Runs `action` on the loop."""

    def start(self, service: EngineService) -> None: ...
    def stop(self) -> None: ...


class ThreadDriver:
    """Driver that runs an engine service's steps in a thread of its own.

    It runs without a break or, if other instances of the gang compute too, in slices of
    `SLICE_S`, for each of which it acquires the gang's time slice. Where switches are dear the
    scheduler grants longer ones.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.service: EngineService | None = None
        self._stopped = False
        # start and end of the current steps without a time slice
        self._piece: tuple[float, float] | None = None
        self._thread = threading.Thread(target=self._drive, name="engine", daemon=True)
        self.error: BaseException | None = None

    def call_on_loop(self, action: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(action)

    def start(self, service: EngineService) -> None:
        self.service = service
        self._thread.start()

    def _drive(self) -> None:
        service = self.service
        assert service is not None
        try:
            while not self._stopped:
                if service.time_slices is not None and service.time_slices.is_enabled:
                    busy = self._run_slice(service, service.time_slices)
                    wait_s = 0.0 if busy else IDLE_S
                else:
                    wait_s = self._run_unsliced(service)
                if wait_s:
                    service.commands.wait(wait_s)
        except BaseException as error:
            if self._stopped:  # the loop cancelled the wait at its end
                return
            self.error = error
            service.mesh.host.exit(70, f"the engine failed: {error!r}", error)

    def _run_unsliced(self, service: EngineService) -> float:
        """Run a step without a time slice; return the seconds until the next.

        Steps of about `SLICE_S` count as one piece, like those of a time slice.
        """
        clock = service.mesh.clock
        began = clock.monotonic()
        did = service.run_once()
        if did:
            piece_began = began if self._piece is None else self._piece[0]
            self._piece = piece_began, clock.monotonic()
        if self._piece is not None and (not did or self._piece[1] - self._piece[0] >= SLICE_S):
            (piece_began, ended), self._piece = self._piece, None
            if service.time_slices is not None:
                piece = "generate", piece_began, ended - piece_began, ended
                self._loop.call_soon_threadsafe(service.time_slices.add_piece, *piece)
        return service.steps.next_step_delay_s if did else IDLE_S

    def _run_slice(self, service: EngineService, time_slices: SliceClient) -> bool:
        """Acquire one time slice if there is work for it; return False if there was none."""
        service.run_commands(in_slice=False)
        function = service.slice_function
        if not function:
            return False
        ticket = self._wait_for_slice(service, service.begin_slice(time_slices, function))
        if ticket is None:
            return False
        clock = service.mesh.clock
        began = clock.monotonic()
        try:
            if function == "sync":
                service.run_commands(in_slice=True)
                # The next eviction would drop weights that cannot be copied before any step.
                if not service.engine.cannot_copy_memory or service.slice_function != "generate":
                    return True
            if service.emulation is not None:
                service.emulation.reset_lateness()
            slice_s = max(SLICE_S, service.engine.min_slice_s, time_slices.quantum_s)
            return self._run_steps(service, began + slice_s)
        finally:
            service.engine.end_slice()
            lasted_s = clock.monotonic() - began
            end = partial(service.end_slice, time_slices, ticket, function, lasted_s)
            self._loop.call_soon_threadsafe(end)

    def _run_steps(self, service: EngineService, until_s: float) -> bool:
        """Run steps until `until_s` and to the end of the last step.

        Return True if there was work.
        """
        clock, steps, did = service.mesh.clock, service.steps, False
        while not self._stopped and service.run_once():
            did = True
            last = clock.monotonic() + steps.next_step_delay_s >= until_s
            while (due_s := steps.next_step_delay_s) > 0 and not self._stopped:
                service.commands.wait(due_s)
                if not last:
                    break  # a queued command takes effect at once
            if last and steps.next_step_delay_s <= 0:
                break
        service.flush()
        return did

    def _wait_for_slice(
        self, service: EngineService, request: Coroutine[Any, Any, int]
    ) -> int | None:
        """Wait for a time slice and return it; None if the driver stops.

        Commands that need no slice run during the wait.
        """
        future = asyncio.run_coroutine_threadsafe(request, self._loop)
        future.add_done_callback(lambda _: service.commands.wake_event.set())
        while not future.done():
            service.commands.wait(IDLE_S)
            service.run_commands(in_slice=False)
            if self._stopped:
                future.cancel()
                return None
        return future.result()

    def stop(self) -> None:
        self._stopped = True


async def main(placement: Placement) -> None:
    name, settings = f"engine/{placement.instance}", MeshSettings.from_env()
    mesh = await Mesh.open(name, "engine", settings, placement.job)
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    driver = ThreadDriver(asyncio.get_running_loop())
    await serve(mesh, placement, create_engine, driver)


async def serve(
    mesh: Mesh, placement: Placement, open_engine: OpenEngine, driver: EngineDriver
) -> None:
    began = mesh.clock.monotonic()
    row = await retry(mesh.clock, lambda: jobs.read_job(mesh.state, placement.job))
    data = await open_local_job(mesh, row)
    with mesh.loading():
        engine = await open_engine(mesh, data, placement)
    limits = data.config.rollout
    emulated = None
    if limits.emulate:
        emulated = EmulatedSteps(
            engine, parse_engine_speed(limits.emulate), mesh.clock, placement.ranks
        )
    steps: SteppableEngine = emulated or engine
    mesh.telemetry.log.info("engine", path=steps.backend)
    turns = SliceClient(
        mesh,
        placement.slice_scheduler,
        placement.instance,
        placement.generation,
        enabled=placement.time_sliced,
    )
    service = EngineService(
        mesh, engine, driver.call_on_loop, time_slices=turns, emulation=emulated
    )
    service.weights.process_started_s = began
    kv = await open_host_cache(mesh, placement.job, limits, engine, service.commands.wake_event.set)
    bulk: BulkServer | None = None
    if kv is not None:
        service.use_host_cache(kv)
        bulk = (
            serve_chunks(mesh, kv.chunk_store, accepts_uploads=False) if limits.kv.peers else None
        )
    versions = VersionReceiver(mesh, placement.job, limits.weights)
    traces = TraceWriter(mesh, data, f"engine-{placement.instance}")

    def stats() -> dict[str, Any]:
        own = service.stats()
        own.pulls, own.pull_s = versions.pulls, round(versions.pull_s, 3)
        if not limits.kv.peers:
            own.cache_bytes_per_token = 0
        own.weights_transport = versions.fetcher.last_report
        return placement.initial_stats() | turns.stats() | service.tiers.stats() | own.encode()

    driver.start(service)
    await mesh.join(service, stats=stats, bulk_address=bulk.address if bulk is not None else "")
    try:
        plain, merging = (
            partial(_merge_adapters, data),
            MergePolicy(_choose_adapter_mode(data), mesh.clock),
        )
        about = mesh, service, placement.job, versions
        async with record_slices(mesh, data, placement, turns, service.kinds):
            await follow_versions(*about, merge=plain, merge_policy=merging, traces=traces)
    finally:
        driver.stop()
        if bulk is not None:
            bulk.close()
        if kv is not None:
            with suppress(MeshError):  # a waiting thread ends with the process
                await mesh.host.run_blocking(kv.close, deadline_s=CLOSE_TIMEOUT_S)
        await traces.close()
        await mesh.leave()


Tensors = Mapping[str, torch.Tensor]


def _choose_adapter_mode(data: JobData) -> AdapterMode:
    """Return how the engine treats adapters.

    SGLang fixes this at the start of its server, before any measurement: it computes adapters
    beside the model only if the job requires that.
    """
    configured_mode = data.config.lora.engine_mode
    return (
        "merged"
        if data.config.rollout.engine == "sglang" and configured_mode == "auto"
        else configured_mode
    )


def _merge_adapters(data: JobData, tensors: Tensors) -> Tensors:
    """Return a version's tensors with its adapters merged into the model."""
    if not any(map(is_adapter_tensor, tensors)):
        return tensors
    return merge_adapters(load_model_config(data), tensors, data.config.lora.scale)


async def _update_weights(
    mesh: Mesh,
    service: EngineService,
    versions: VersionReceiver,
    row: jobs.JobRow,
    merge: Callable[[Tensors], Tensors],
    merge_policy: MergePolicy,
) -> None:
    if not merge_policy.observe_version(row.manifest) and await _put_adapters(
        service.weights, versions, row
    ):
        return
    image = await versions.receive(row.manifest)
    if image is not None:
        began = mesh.clock.monotonic()
        tensors = await mesh.host.run_blocking(merge, image.tensors, deadline_s=MERGE_TIMEOUT_S)
        merged_s = mesh.clock.monotonic() - began
        await service.weights.update_weights(tensors, row.version, row.manifest, row.lineage)
        merge_policy.record_merge_time(merged_s + service.pauses.last_pause_s)


async def _put_adapters(
    weights: EngineWeights, versions: VersionReceiver, row: jobs.JobRow
) -> bool:
    """Load a version's adapters beside their base; return False if it has more than adapters."""
    manifest = await versions.read_manifest(row.manifest)
    base = manifest.base
    if base is None:
        return False
    names = {piece.name for piece in manifest.tensors}
    adapters = {name for name in names if is_adapter_tensor(name)}
    model = None
    if not weights.has_base(base.manifest):
        model = await versions.receive(row.manifest, names - adapters)
        if model is None:
            return True
    image = await versions.receive(row.manifest, adapters)
    if image is not None:
        version = AdapterVersion(
            manifest.job,
            row.version,
            image.tensors,
            manifest.scale,
            base.manifest,
            base.version,
            model.tensors if model is not None else None,
        )
        await weights.put_adapter(version, row.manifest, row.lineage)
    return True


def _build_pull_trace(
    mesh: Mesh, version: int, duration_s: float, paused_s: float
) -> dict[str, Any]:
    """Build the trace of a version that was just installed.

    Its spans are the pull, the wait for the end of a step, and the pause without steps.
    """
    paused_ms = round(1000 * min(paused_s, duration_s), 3)
    parts = ["pull", round(1000 * duration_s - paused_ms, 3), "pause", paused_ms]
    at = round(mesh.clock.wall() - duration_s, 6)
    return {"kind": "weights", "at": at, "version": version, "parts": parts}


async def follow_versions(
    mesh: Mesh,
    service: EngineService,
    job: str,
    versions: VersionReceiver,
    poll_s: float = POLL_S,
    merge: Callable[[Tensors], Tensors] = lambda tensors: tensors,
    merge_policy: MergePolicy | None = None,
    traces: TraceWriter | None = None,
) -> None:
    """Update the engine to the job's committed version at each hint and every `poll_s` seconds.

    Raise ConfigError if a version's weights are corrupt and cannot be written again. Other errors
    that block new versions for too long raise too (`RetryPolicy`).
    """
    patience = RetryPolicy(mesh.job_clock)
    weights = service.weights
    merge_policy = merge_policy or MergePolicy("merged", mesh.clock)
    while True:
        weights.change_event.clear()
        if weights.is_asleep:
            patience.record_success()
            await weights.change_event.wait()
            continue
        try:
            row = await jobs.read_job(mesh.state, job)
            mesh.job_clock.set_paused(row.is_paused)
            stale = row is not None and row.version >= 0 and row.manifest != weights.manifest
            if row is not None and stale:
                began = mesh.clock.monotonic()
                await _update_weights(mesh, service, versions, row, merge, merge_policy)
                took_s = mesh.clock.monotonic() - began
                await weights.publish_server_transport(job)
                if traces is not None and weights.manifest == row.manifest:
                    traces.write(
                        _build_pull_trace(mesh, row.version, took_s, service.pauses.last_pause_s)
                    )
            elif row is not None and not stale and row.lineage != weights.lineage:
                weights.enter_lineage(row.lineage)  # the new lineage begins with the loaded weights
            patience.record_success()
        except ConfigError:  # the weights are unavailable
            raise
        except MeshError as error:
            mesh.telemetry.log.warning("weights", error=str(error))
            patience.record_failure(error)
        try:
            async with mesh.clock.timeout(poll_s, "waiting for a hint"):
                await weights.change_event.wait()
        except MeshError:
            continue
