"""Runs the process of a job's frozen models: it loads them, then serves until one breaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meshrl.common.api.scoring import scoring_name
from meshrl.common.base.errors import ConfigError, Damaged, NotFound
from meshrl.common.generation.builtin.build import BUILD_S, TorchEngine, build
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import model_config
from meshrl.common.job.config import INITIAL, FrozenModelConfig
from meshrl.common.mesh.residents.turns import Turns
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.checkpoint import load_config
from meshrl.common.model.files.rows import load_model
from meshrl.common.model.network.lora import merged
from meshrl.common.model.tokens.tokenizer import Tokenizer, with_tokenizer
from meshrl.common.state import jobs
from meshrl.common.state.pool.workers.seat import Seat
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.receive import Receiver
from meshrl.common.weights.store.local_files import local_job
from meshrl.services.scoring.frozen import FrozenModel, FrozenModels

LOAD_S = 3600.0  # to load one model into memory
LOOK_S = 0.5  # how often version 0 is looked for
VERSION = 0  # these weights never change
BROKEN = 70  # exit status after a batch that left the models in an unknown state


async def main(seat: Seat) -> None:
    name, settings = scoring_name(seat.job), MeshSettings.from_env()
    mesh = await Mesh.open(name, "scoring", settings, seat.job)
    torch.set_num_threads(1)
    row = await patiently(mesh.clock, lambda: jobs.job(mesh.state, seat.job))
    data = await local_job(mesh, row)
    turns = Turns(mesh, seat.keeper, seat.resident, seat.generation, enabled=seat.turns)

    async def load() -> dict[str, FrozenModel]:
        return await loaded(mesh, data)

    served = FrozenModels(mesh, load, turns)

    def stats() -> dict[str, Any]:
        return {
            **seat.stats(),
            **turns.stats(),
            "ready": not served.draining,
            **served.stats(),
        }

    await mesh.join(served, stats=stats)
    try:
        served.serve(await load())
        failure = await served.broken()
    except ConfigError as error:
        why = f"the frozen models cannot be served: {error}"
        await patiently(
            mesh.clock,
            lambda: jobs.set_phase(
                mesh.state, seat.job, jobs.Phase.FAILED, mesh.token, mesh.name, why
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
        image = await Receiver(mesh, BulkClient(mesh)).receive(manifest)
    except (Damaged, NotFound) as error:
        raise ConfigError(
            f"the weights of version 0, which are the reference, are damaged: {error.message}",
            where=error.where,
            fix="Put the file back from a copy of the run, and resume; or start over",
        ) from error
    model = model_config(data)

    def started() -> FrozenModel:
        engine = _engine(model, data, config)
        engine.wake(merged(model, image.tensors, data.config.lora.scale), VERSION)
        return FrozenModel(engine, bytes=_bytes(image.outline))

    return await mesh.host.run_blocking(started, deadline_s=LOAD_S + BUILD_S)


def _load(data: JobData, role: str) -> FrozenModel:
    """One that lies in the job's bundle; ConfigError when it cannot be read."""
    config: FrozenModelConfig = getattr(data.config.models, role)
    place = data.frozen(role)
    hf = load_config(place)
    if role == "reward":
        hf = with_tokenizer(hf, place / "tokenizer.json")
    else:
        hf = with_tokenizer(hf, data.tokenizer)
        if hf.vocab_size < (wanted := model_config(data).ids_end):
            raise ConfigError(
                f"models.{role} has rows for {hf.vocab_size} ids, and the job's tokenizer {wanted}",
                where=str(place),
                fix="take one of the same tokenizer",
            )
    engine = _engine(hf, data, config)
    _, model = load_model(place)
    weights = model.state_dict()
    engine.wake(weights, VERSION)
    tokenizer = Tokenizer.load(place) if role == "reward" else None
    return FrozenModel(engine, tokenizer, _bytes(weights))


def _bytes(weights: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in weights.values())


def _engine(model: ModelConfig, data: JobData, config: FrozenModelConfig) -> TorchEngine:
    most = config.max_tokens or data.config.rollout.max_tokens
    device = data.config.mesh.device
    return build(model, 1, most, path=config.engine_path, device=device, dtype=config.dtype)
