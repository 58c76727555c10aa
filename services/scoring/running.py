"""Runs the process of a job's frozen models: it loads them, then serves until one breaks."""

from __future__ import annotations

from typing import Any

import torch

from common.api.scoring import scoring_name
from common.errors import ConfigError, Damaged, NotFound
from common.generation.builtin.build import BUILD_S, TorchEngine, build
from common.job.config import INITIAL, FrozenModelConfig
from common.job.job_data import JobData
from common.job.model_shape import model_config
from common.model.config import ModelConfig
from common.model.formats.checkpoint import load_config
from common.model.hf import load_model
from common.model.lora import merged
from common.model.tokenizer import Tokenizer
from common.model.transfer import fetch
from common.runtime.mesh import Mesh, MeshSettings
from common.runtime.patience import patiently
from common.state import jobs
from common.wire.bulk import BulkClient
from services.scoring.frozen import FrozenModel, FrozenModels

LOAD_S = 3600.0  # to load one model into memory
LOOK_S = 0.5  # how often version 0 is looked for
VERSION = 0  # these weights never change
BROKEN = 70  # exit status after a batch that left the models in an unknown state


async def main(gang: str, job_id: str, epoch: int) -> None:
    mesh = await Mesh.open(scoring_name(job_id), "scoring", MeshSettings.from_env())
    torch.set_num_threads(1)
    row = await patiently(mesh.clock, lambda: jobs.job(mesh.state, job_id))
    data = JobData.of(job_id, row.document, row.run_dir)
    served = FrozenModels(mesh)

    def stats() -> dict[str, Any]:
        return {
            "job": job_id,
            "gang": gang,
            "epoch": epoch,
            "ready": not served.draining,
            **served.stats(),
        }

    await mesh.join(served, stats=stats)
    try:
        served.serve(await loaded(mesh, data))
        failure = await served.broken()
    except ConfigError as error:
        why = f"the frozen models cannot be served: {error}"
        await patiently(
            mesh.clock,
            lambda: jobs.set_phase(
                mesh.state, job_id, jobs.Phase.FAILED, mesh.token, mesh.name, why
            ),
        )
        raise
    finally:
        await mesh.leave()
    mesh.host.exit(BROKEN, f"{mesh.name} starts again: {failure!r}", failure)


async def loaded(mesh: Mesh, data: JobData) -> dict[str, FrozenModel]:
    """The frozen models of a job, by role; one that begins as the job does is waited for."""
    found = {}
    for role, config in data.config.models.declared.items():
        with mesh.loading():
            if config.path == INITIAL:
                model = await _initial(mesh, data, config)
            else:
                model = await mesh.host.run_blocking(_load, data, role, deadline_s=LOAD_S)
        found[role] = model
        mesh.telemetry.log.info("frozen model", role=role, path=model.engine.path)
    return found


async def _initial(mesh: Mesh, data: JobData, config: FrozenModelConfig) -> FrozenModel:
    """The weights of version 0, which retention keeps for this."""
    manifest = ""
    with mesh.wait("version 0", on=f"trainer/{data.id}"):
        while not manifest:
            row = await patiently(mesh.clock, lambda: jobs.job(mesh.state, data.id))
            manifest = row.initial_manifest
            if not manifest:
                await mesh.clock.sleep(LOOK_S)
    try:
        _, tensors = await fetch(mesh, BulkClient(mesh), manifest)
    except (Damaged, NotFound) as error:
        raise ConfigError(
            f"the weights of version 0, which are the reference, are damaged: {error.message}",
            where=error.where,
            fix="Put the file back from a copy of the run, and resume; or start over",
        ) from error
    model = model_config(data)

    def started() -> FrozenModel:
        engine = _engine(model, data, config)
        engine.wake(merged(model, tensors, data.config.lora.scale), VERSION)
        return FrozenModel(engine)

    return await mesh.host.run_blocking(started, deadline_s=LOAD_S + BUILD_S)


def _load(data: JobData, role: str) -> FrozenModel:
    """One that lies in the job's bundle; ConfigError when it cannot be read."""
    config: FrozenModelConfig = getattr(data.config.models, role)
    place = data.frozen(role)
    hf = load_config(place)
    if role != "reward" and hf.vocab_size < model_config(data).vocab_size:
        raise ConfigError(
            f"models.{role} knows {hf.vocab_size} tokens, the model "
            f"{model_config(data).vocab_size}",
            where=str(place),
            fix="take one of the same tokenizer",
        )
    engine = _engine(hf, data, config)
    _, model = load_model(place)
    engine.wake(model.state_dict(), VERSION)
    return FrozenModel(engine, Tokenizer.load(place) if role == "reward" else None)


def _engine(model: ModelConfig, data: JobData, config: FrozenModelConfig) -> TorchEngine:
    """One slot, which scoring borrows."""
    most = config.max_tokens or data.config.rollout.max_tokens
    return build(model, 1, most, path=config.engine_path, dtype=config.dtype)
