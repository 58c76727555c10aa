"""Runs an engine process: a thread for its arithmetic, and weights that follow the job's
version.
"""

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
from meshrl.common.generation.contract import EngineSteps, TokenEngine
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import model_config
from meshrl.common.job.pace import profile
from meshrl.common.mesh.residents.turns import Turns
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.mesh.runtime.patience import Patience, patiently
from meshrl.common.model.network.lora import is_adapter, merged
from meshrl.common.records.run_lines import Traces
from meshrl.common.state import jobs
from meshrl.common.state.pool.workers.seat import Seat
from meshrl.common.weights.bulk.port import BulkServer
from meshrl.common.weights.bulk.port import serve as serve_chunks
from meshrl.common.weights.store.local_files import local_job
from meshrl.services.engine.build import opened
from meshrl.services.engine.kv.opening import host_cache
from meshrl.services.engine.service import EngineService
from meshrl.services.engine.stepping.emulation import EmulatedSteps
from meshrl.services.engine.weights.loaded import AdapterVersion, EngineWeights
from meshrl.services.engine.weights.merging import Merging, Wish
from meshrl.services.engine.weights.versions import Versions

IDLE_S = 0.05  # the driver sleeps this long when it has nothing to do and no hint comes
# A slice is long beside the millisecond that a turn takes to change hands, and short beside a step
# of training: tokens come in no coarser bursts than flushes to a far shard do.
QUANTUM_S = 0.2
LOOK_S = 1.0  # how often the job's version is looked at without a hint, which rarely gets lost
MERGE_S = 300.0  # for adapters to become part of the model
CLOSE_S = 10.0  # for what is kept of keys and values to be given up
SWITCH_S = 0.0005  # the compute thread leaves the interpreter to the loop this often


OpenEngine = Callable[[Mesh, JobData, Seat], Awaitable[TokenEngine]]


class EngineDriver(Protocol):
    """What takes an engine service's turns."""

    def deliver(self, action: Callable[[], None]) -> None:
        """Runs `action` on the loop."""

    def start(self, service: EngineService) -> None: ...
    def stop(self) -> None: ...


class ThreadDriver:
    """Runs an engine service's turns in a thread of its own: for ever, or, where the gang has
    others that compute, in slices of `QUANTUM_S`, for each of which it takes the gang's turn.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.service: EngineService | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._drive, name="engine", daemon=True)
        self.error: BaseException | None = None

    def deliver(self, action: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(action)

    def start(self, service: EngineService) -> None:
        self.service = service
        self._thread.start()

    def _drive(self) -> None:
        service = self.service
        assert service is not None
        try:
            while not self._stopped:
                if service.turns is not None and service.turns.enabled:
                    busy = self._slice(service, service.turns)
                    wait_s = 0.0 if busy else IDLE_S
                else:
                    wait_s = service.steps.due_s if service.turn() else IDLE_S
                if wait_s:
                    service.commands.wait(wait_s)
        except BaseException as error:
            if self._stopped:  # what it waited for was cancelled with the loop
                return
            self.error = error
            service.mesh.host.exit(70, f"the engine failed: {error!r}", error)

    def _slice(self, service: EngineService, turns: Turns) -> bool:
        """Takes one turn of the gang, if there is anything to do in it; False when there was
        nothing.
        """
        service.obey(in_turn=False)
        function = service.wants
        if not function:
            return False
        ticket = self._granted(service, turns.take(function))
        if ticket is None:
            return False
        clock = service.mesh.clock
        began = clock.monotonic()
        try:
            if function == "sync":
                service.obey(in_turn=True)
                return True
            if service.emulated is not None:
                service.emulated.begin()
            return self._steps(service, began + QUANTUM_S)
        finally:
            lasted_s = clock.monotonic() - began
            self._loop.call_soon_threadsafe(turns.give_back, ticket, function, lasted_s)

    def _steps(self, service: EngineService, until: float) -> bool:
        """Steps until then, and to the end of the last step; whether there was anything to do."""
        clock, steps, did = service.mesh.clock, service.steps, False
        while not self._stopped and service.turn():
            did = True
            last = clock.monotonic() + steps.due_s >= until
            while (due_s := steps.due_s) > 0 and not self._stopped:
                service.commands.wait(due_s)
                if not last:
                    break  # a command may have come, which holds at once
            if last and steps.due_s <= 0:
                break
        service.flush()
        return did

    def _granted(self, service: EngineService, asking: Coroutine[Any, Any, int]) -> int | None:
        """The ticket of a turn; what needs none is done while it is waited for. None: it stops."""
        future = asyncio.run_coroutine_threadsafe(asking, self._loop)
        future.add_done_callback(lambda _: service.commands.wake.set())
        while not future.done():
            service.commands.wait(IDLE_S)
            service.obey(in_turn=False)
            if self._stopped:
                future.cancel()
                return None
        return future.result()

    def stop(self) -> None:
        self._stopped = True


async def main(seat: Seat) -> None:
    name, settings = f"engine/{seat.resident}", MeshSettings.from_env()
    mesh = await Mesh.open(name, "engine", settings, seat.job)
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_S)
    driver = ThreadDriver(asyncio.get_running_loop())
    await serve(mesh, seat, opened, driver)


async def serve(mesh: Mesh, seat: Seat, open_engine: OpenEngine, driver: EngineDriver) -> None:
    began = mesh.clock.monotonic()
    row = await patiently(mesh.clock, lambda: jobs.job(mesh.state, seat.job))
    data = await local_job(mesh, row)
    with mesh.loading():
        engine = await open_engine(mesh, data, seat)
    limits = data.config.rollout
    emulated = None
    if limits.pace:
        emulated = EmulatedSteps(engine, profile(limits.pace), mesh.clock, seat.ranks)
    steps: EngineSteps = emulated or engine
    mesh.telemetry.log.info("engine", path=steps.path)
    room = limits.kv_tokens or limits.slots * limits.max_tokens
    turns = Turns(mesh, seat.keeper, seat.resident, seat.generation, enabled=seat.turns)
    service = EngineService(mesh, engine, driver.deliver, room, turns=turns, emulated=emulated)
    service.weights.began = began
    kv = await host_cache(mesh, seat.job, limits, engine, service.commands.wake.set)
    bulk: BulkServer | None = None
    if kv is not None:
        service.use(kv)
        bulk = serve_chunks(mesh, kv.shelved, takes=False) if limits.kv.peers else None
    versions = Versions(mesh, seat.job, limits.weights)
    traces = Traces(mesh, data, f"engine-{seat.resident}")

    def stats() -> dict[str, Any]:
        own = service.stats()
        own.pulls, own.pull_s = versions.pulls, round(versions.pull_s, 3)
        if not limits.kv.peers:
            own.cache_bytes_per_token = 0
        own.weights_way = versions.bringing.last
        return seat.stats() | turns.stats() | service.tiers.stats() | own.encoded()

    driver.start(service)
    await mesh.join(service, stats=stats, bulk_address=bulk.address if bulk is not None else "")
    try:
        plain, merging = partial(_plain, data), Merging(_wish(data), mesh.clock)
        about = mesh, service, seat.job, versions
        await follow(*about, plain=plain, merging=merging, traces=traces)
    finally:
        driver.stop()
        if bulk is not None:
            bulk.close()
        if kv is not None:
            with suppress(MeshError):  # a thread that waits for others ends with the process
                await mesh.host.run_blocking(kv.close, deadline_s=CLOSE_S)
        await traces.close()
        await mesh.leave()


Tensors = Mapping[str, torch.Tensor]


def _wish(data: JobData) -> Wish:
    """What SGLang does with adapters is decided when its server starts, so before anything was
    measured: it computes them beside the model where the job asks for that alone.
    """
    wish = data.config.lora.engines
    return "merged" if data.config.rollout.engine == "sglang" and wish == "auto" else wish


def _plain(data: JobData, tensors: Tensors) -> Tensors:
    """A version's tensors as an engine takes them: adapters become part of the model."""
    if not any(map(is_adapter, tensors)):
        return tensors
    return merged(model_config(data), tensors, data.config.lora.scale)


async def _update(
    mesh: Mesh,
    service: EngineService,
    versions: Versions,
    row: jobs.JobRow,
    plain: Callable[[Tensors], Tensors],
    merging: Merging,
) -> None:
    if not merging.came(row.manifest) and await _beside(service.weights, versions, row):
        return
    image = await versions.received(row.manifest)
    if image is not None:
        began = mesh.clock.monotonic()
        tensors = await mesh.host.run_blocking(plain, image.tensors, deadline_s=MERGE_S)
        merged_s = mesh.clock.monotonic() - began
        await service.weights.swap(tensors, row.version, row.manifest, row.lineage)
        merging.took(merged_s + service.pauses.last_s)


async def _beside(weights: EngineWeights, versions: Versions, row: jobs.JobRow) -> bool:
    """Puts a version's adapters beside their base; False: it is not one of adapters alone."""
    manifest = await versions.described(row.manifest)
    base = manifest.base
    if base is None:
        return False
    names = {piece.name for piece in manifest.tensors}
    adapters = {name for name in names if is_adapter(name)}
    model = None
    if not weights.has_base(base.digest):
        model = await versions.received(row.manifest, names - adapters)
        if model is None:
            return True
    image = await versions.received(row.manifest, adapters)
    if image is not None:
        version = AdapterVersion(
            manifest.job,
            row.version,
            image.tensors,
            manifest.scale,
            base.digest,
            base.version,
            model.tensors if model is not None else None,
        )
        await weights.put_adapter(version, row.manifest, row.lineage)
    return True


def _pulled(mesh: Mesh, version: int, took_s: float, paused_s: float) -> dict[str, Any]:
    """What a trace tells of a version that has just been put in place: it was pulled, and waited
    for the end of a step, and then no step ran.
    """
    paused_ms = round(1000 * min(paused_s, took_s), 3)
    parts = ["pull", round(1000 * took_s - paused_ms, 3), "pause", paused_ms]
    at = round(mesh.clock.wall() - took_s, 6)
    return {"kind": "weights", "at": at, "version": version, "parts": parts}


async def follow(
    mesh: Mesh,
    service: EngineService,
    job: str,
    versions: Versions,
    look_s: float = LOOK_S,
    plain: Callable[[Tensors], Tensors] = lambda tensors: tensors,
    merging: Merging | None = None,
    traces: Traces | None = None,
) -> None:
    """Keeps the engine at the job's committed version: looks at each hint, and each `look_s`.
    ConfigError when a version's weights are damaged, and nobody can write them again; what else
    keeps it from new ones for too long (`Patience`).
    """
    patience = Patience(mesh.job_clock)
    weights = service.weights
    merging = merging or Merging("merged", mesh.clock)
    while True:
        weights.changed.clear()
        if weights.asleep:
            patience.succeeded()
            await weights.changed.wait()
            continue
        try:
            row = await jobs.job(mesh.state, job)
            mesh.job_clock.hold(row.paused)
            stale = row is not None and row.version >= 0 and row.manifest != weights.manifest
            if row is not None and stale:
                began = mesh.clock.monotonic()
                await _update(mesh, service, versions, row, plain, merging)
                took_s = mesh.clock.monotonic() - began
                if traces is not None and weights.manifest == row.manifest:
                    traces.write(_pulled(mesh, row.version, took_s, service.pauses.last_s))
            elif row is not None and not stale and row.lineage != weights.lineage:
                weights.enter(row.lineage)  # it begins with these weights
            patience.succeeded()
        except ConfigError:  # the weights cannot be had
            raise
        except MeshError as error:
            mesh.telemetry.log.warning("weights", error=str(error))
            patience.failed(error)
        try:
            async with mesh.clock.timeout(look_s, "a hint"):
                await weights.changed.wait()
        except MeshError:
            continue
