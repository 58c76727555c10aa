"""Role process of a job's frozen models: it loads them, then serves until one fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshrl.common.api.scoring import scoring_name
from meshrl.common.base.errors import ConfigError, CorruptData, NotFound
from meshrl.common.generation.builtin.engine_builder import (
    BUILD_TIMEOUT_S,
    BuiltinEngine,
    build_engine,
)
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import load_model_config
from meshrl.common.job.config import INITIAL, FrozenModelConfig
from meshrl.common.mesh.instances.time_slices import SliceClient
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.initial_parameters import load_model
from meshrl.common.model.files.model_directory import load_config
from meshrl.common.model.network.lora import merge_adapters
from meshrl.common.model.tokens.tokenizer import Tokenizer, with_tokenizer
from meshrl.common.records.slice_records import record_slices
from meshrl.common.state import jobs
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.receiver import WeightReceiver
from meshrl.common.weights.store.job_files import open_local_job
from meshrl.services.scoring.frozen_models import BuildModels, FrozenModel, FrozenModels

LOAD_TIMEOUT_S = 3600.0  # to load one model into memory
POLL_S = 0.5  # between two checks for version 0
FROZEN_VERSION = 0  # these weights never change
BROKEN_EXIT_STATUS = 70  # after a batch that left the models in an unknown state


async def run_scoring(placement: Placement) -> None:
    name, settings = scoring_name(placement.job), MeshSettings.from_env()
    mesh = await Mesh.open(name, "scoring", settings, placement.job)
    torch.set_num_threads(1)
    row = await retry(mesh.clock, lambda: jobs.read_job(mesh.state, placement.job))
    data = await open_local_job(mesh, row)
    turns = SliceClient(
        mesh,
        placement.slice_scheduler,
        placement.instance,
        placement.generation,
        enabled=placement.time_sliced,
    )

    async def read() -> BuildModels:
        return await read_frozen_models(mesh, data)

    served = FrozenModels(mesh, read, turns)

    def stats() -> dict[str, Any]:
        return {
            **placement.initial_stats(),
            **turns.stats(),
            "ready": not served.draining,
            **served.stats(),
        }

    await mesh.join(served, stats=stats)
    try:
        async with record_slices(mesh, data, placement, turns, served.kinds):
            await served.load()
            failure = await served.wait_for_failure()
    except ConfigError as error:
        why = f"the frozen models cannot be served: {error}"
        await retry(
            mesh.clock,
            lambda: jobs.set_phase(
                mesh.state, placement.job, jobs.Phase.FAILED, mesh.token, mesh.name, why
            ),
        )
        raise
    finally:
        await mesh.leave()
    mesh.host.exit(BROKEN_EXIT_STATUS, f"{mesh.name} restarts: {failure!r}", failure)


async def read_frozen_models(mesh: Mesh, data: JobData) -> BuildModels:
    """Read a job's frozen models; wait for version 0 if one starts from it.

    The returned function puts them on the accelerator, and returns them by role.
    """
    builders: dict[str, Callable[[], FrozenModel]] = {}
    for role, config in data.config.models.models_by_role.items():
        with mesh.loading():
            if config.path == INITIAL:
                builders[role] = await _read_initial_model(mesh, data, config)
            else:
                builders[role] = await mesh.host.run_blocking(
                    _read_bundled_model, data, role, deadline_s=LOAD_TIMEOUT_S
                )

    async def build() -> dict[str, FrozenModel]:
        found = {}
        for role in list(builders):
            with mesh.loading():
                found[role] = await mesh.host.run_blocking(
                    builders.pop(role), deadline_s=LOAD_TIMEOUT_S + BUILD_TIMEOUT_S
                )
            mesh.telemetry.log.info("frozen model", role=role, path=found[role].engine.backend)
        return found

    return build


async def _read_initial_model(
    mesh: Mesh, data: JobData, config: FrozenModelConfig
) -> Callable[[], FrozenModel]:
    """Read the weights of version 0, which retention keeps for frozen models."""
    manifest = ""
    with mesh.wait("version 0", on=f"trainer/{data.id}"):
        while not manifest:
            row = await retry(mesh.clock, lambda: jobs.read_job(mesh.state, data.id))
            manifest = row.initial_manifest
            if not manifest:
                await mesh.clock.sleep(POLL_S)
    try:
        image = await WeightReceiver(mesh, BulkClient(mesh)).receive(manifest)
    except (CorruptData, NotFound) as error:
        raise ConfigError(
            f"the weights of version 0, which are the reference, are corrupt: {error.message}",
            where=error.where,
            fix="Restore the file from a copy of the run and resume, or start a new run",
        ) from error
    model = load_model_config(data)

    def build() -> FrozenModel:
        engine = _build_engine(model, data, config)
        engine.wake(merge_adapters(model, image.tensors, data.config.lora.scale), FROZEN_VERSION)
        return FrozenModel(engine, size_bytes=_count_bytes(engine))

    return build


def _read_bundled_model(data: JobData, role: str) -> Callable[[], FrozenModel]:
    """Read a model from the job's bundle; raise ConfigError if it is unreadable."""
    config: FrozenModelConfig = getattr(data.config.models, role)
    place = data.get_frozen_model_dir(role)
    hf = load_config(place)
    if role == "reward":
        hf = with_tokenizer(hf, place / "tokenizer.json")
    else:
        hf = with_tokenizer(hf, data.tokenizer_file)
        if hf.vocab_size < (num_token_ids := load_model_config(data).token_id_end):
            raise ConfigError(
                f"models.{role} has rows for {hf.vocab_size} ids, and the job's tokenizer has "
                f"{num_token_ids}",
                where=str(place),
                fix="Choose a model with the same tokenizer",
            )
    _, model = load_model(place)
    tokenizer = Tokenizer.load(place) if role == "reward" else None

    def build() -> FrozenModel:
        engine = _build_engine(hf, data, config)
        engine.wake(model.state_dict(), FROZEN_VERSION)
        return FrozenModel(engine, tokenizer, _count_bytes(engine))

    return build


def _count_bytes(engine: BuiltinEngine) -> int:
    return engine.collect_weights().total_bytes + engine.cache_size_bytes


def _build_engine(model: ModelConfig, data: JobData, config: FrozenModelConfig) -> BuiltinEngine:
    most = config.max_tokens or data.config.rollout.max_tokens
    device = data.config.mesh.device
    return build_engine(model, 1, most, backend=config.backend, device=device, dtype=config.dtype)
