"""Runs an engine process: a thread for its arithmetic, and weights that follow the job's
version.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

import torch

from common.errors import ConfigError, MeshError
from common.generation.contract import TokenEngine
from common.job.job_data import JobData
from common.job.model_shape import model_config
from common.model.lora import merged
from common.runtime.mesh import Mesh, MeshSettings
from common.runtime.patience import Patience, patiently
from common.state import jobs
from services.engine.build import opened
from services.engine.lacking import Versions
from services.engine.service import EngineService

IDLE_S = 0.05  # the driver sleeps this long when it has nothing to do and no hint comes
LOOK_S = 1.0  # how often the job's version is looked at without a hint, which rarely gets lost
MERGE_S = 300.0  # for adapters to become part of the model
SWITCH_S = 0.0005  # the compute thread leaves the interpreter to the loop this often


OpenEngine = Callable[[Mesh, JobData, str], Awaitable[TokenEngine]]


class EngineDriver(Protocol):
    """What takes an engine service's turns."""

    def deliver(self, action: Callable[[], None]) -> None:
        """Runs `action` on the loop."""

    def start(self, service: EngineService) -> None: ...
    def stop(self) -> None: ...


class Driver:
    """Runs an engine service's turns in a thread of its own."""

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
                wait_s = service.engine.due_s if service.turn() else IDLE_S
                if wait_s:
                    service.wake.wait(wait_s)
                    service.wake.clear()
        except BaseException as error:
            if self._stopped:  # what it waited for was cancelled with the loop
                return
            self.error = error
            service.mesh.host.exit(70, f"the engine failed: {error!r}", error)

    def stop(self) -> None:
        self._stopped = True


async def main(a: argparse.Namespace) -> None:
    mesh = await Mesh.open(f"engine/{a.gang}", "engine", MeshSettings.from_env())
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_S)
    driver = Driver(asyncio.get_running_loop())
    await serve(mesh, a.gang, a.job, a.epoch, opened, driver)


async def serve(
    mesh: Mesh, gang: str, job_id: str, epoch: int, open_engine: OpenEngine, driver: EngineDriver
) -> None:
    """The life of an engine process, until it is cancelled."""
    row = await patiently(mesh.clock, lambda: jobs.job(mesh.state, job_id))
    if row is None:
        raise ConfigError(f"no job is called {job_id}", where=mesh.name)
    data = JobData.of(job_id, row.document, row.run_dir)
    with mesh.loading():
        engine = await open_engine(mesh, data, gang)
    limits = data.config.rollout
    mesh.telemetry.log.info("engine", path=engine.path)
    service = EngineService(mesh, engine, limits.slots, driver.deliver)

    def stats() -> dict[str, Any]:
        return {
            "job": job_id,
            "epoch": epoch,
            "ready": not service.draining,
            "gang": gang,
            "version": engine.version,
            "tokens": engine.tokens_generated,
            "busy_s": engine.busy_s,
            "occupied_s": service.occupied_s,
            "running": engine.running,
            "waiting": engine.waiting,
            "requests": service.requests,
            "plateau": service.throughput.plateau,
            "path": engine.path,
            "tensor_parallel": engine.tensor_parallel,
            "preempted": engine.preempted,
            "prefill_tokens_per_s": engine.prefill_tokens_per_s,
            "cache_bytes_per_token": engine.cache_bytes_per_token,
        }

    driver.start(service)
    await mesh.join(service, stats=stats)
    try:
        await follow(mesh, service, job_id, plain=partial(_plain, data))
    finally:
        driver.stop()
        await mesh.leave()


Tensors = dict[str, torch.Tensor]


def _plain(data: JobData, tensors: Tensors) -> Tensors:
    """A version's tensors as an engine takes them: adapters become part of the model."""
    return merged(model_config(data), tensors, data.config.lora.scale)


async def follow(
    mesh: Mesh,
    service: EngineService,
    job: str,
    look_s: float = LOOK_S,
    plain: Callable[[Tensors], Tensors] = dict,
) -> None:
    """Keeps the engine at the job's committed version: looks at each hint, and each `look_s`.
    ConfigError when a version's weights are damaged, and nobody can write them again; what else
    keeps it from new ones for too long (`Patience`).
    """
    patience = Patience(mesh.clock)
    versions = Versions(mesh, job)
    while True:
        service.changed.clear()
        try:
            row = await jobs.job(mesh.state, job)
            stale = row is not None and row.version >= 0 and row.manifest != service.manifest
            if row is not None and stale and not service.asleep:
                tensors = await versions.fetched(row.manifest)
                if tensors is not None:
                    tensors = await mesh.host.run_blocking(plain, tensors, deadline_s=MERGE_S)
                    await service.swap(tensors, row.version, row.manifest, row.lineage)
            elif row is not None and not stale and row.lineage != service.lineage:
                service.enter(row.lineage)  # it begins with these weights
            patience.succeeded()
        except ConfigError:  # the weights cannot be had
            raise
        except MeshError as error:
            mesh.telemetry.log.warning("weights", error=str(error))
            patience.failed(error)
        try:
            async with mesh.clock.timeout(look_s, "a hint"):
                await service.changed.wait()
        except MeshError:
            continue
