"""Factory of the engine that a job asks for on this host, created without weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from meshrl.common.api.engine import Engine
from meshrl.common.base.errors import ConfigError, MeshError
from meshrl.common.generation.builtin.engine_builder import (
    BUILD_TIMEOUT_S,
    BuiltinEngine,
    build_engine,
)
from meshrl.common.generation.engine_contract import TokenEngine
from meshrl.common.generation.kv_directories import get_disk_root, make_private_directory
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import load_model_config
from meshrl.common.mesh.process.engine_environments import locate_environment, locate_python
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.model.architecture.projections import resolve_targets
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.services.engine.kv.cache_factory import log_unused_tier
from meshrl.services.engine.service import FLUSH_S, FLUSH_STEPS

DRIVER_TIMEOUT_S = 30.0  # to list the host's GPUs

if TYPE_CHECKING:
    from meshrl.services.engine.sglang.engine import SGLangEngine
    from meshrl.services.engine.sglang.launch_config import HierarchicalCache
    from meshrl.services.engine.sglang.server import OnProgress


async def create_engine(mesh: Mesh, data: JobData, placement: Placement) -> TokenEngine:
    """Create the job's engine, asleep; compile native code if this host has none yet.

    A placement of several ranks has an engine of as many tensor-parallel workers, whose
    accelerators this process sees. Steps are emulated if the job declares an emulated speed;
    otherwise SGLang computes them. Call this on the main thread: a server that an engine needs dies
    with the thread that starts it.
    """
    pace = data.config.rollout.emulate
    if data.config.rollout.engine == "sglang":
        degree = 1 if pace else placement.ranks
        report = await _announce_start(mesh, placement)
        try:
            return await _create_sglang_engine(mesh, data, placement, degree, report)
        except BaseException:
            with suppress(MeshError):
                await mesh.leave()  # else a successor waits until the announced name expires
            raise
    if placement.ranks > 1 and not pace:
        raise ConfigError(
            f"the built-in engine uses one worker, and {placement.instance} has {placement.ranks}",
            where="rollout.tensor_parallel",
            fix='Set it to [1], or set rollout.engine = "sglang"',
        )
    return await mesh.host.run_blocking(
        _create_builtin_engine, data, placement, deadline_s=BUILD_TIMEOUT_S
    )


async def _announce_start(mesh: Mesh, placement: Placement) -> OnProgress:
    """Publish the progress of a server's start from now on; return its function to report it.

    The worker waits for a process as long as its published progress changes.
    """
    progress: dict[str, Any] = {"ready": False, "starting": "SGLang starts"}

    def report(text: str, numbers: list[float]) -> None:
        progress.update(starting=f"SGLang starts: {text}", progress=numbers)

    await mesh.announce(Engine, lambda: placement.initial_stats() | progress)
    return report


async def _create_sglang_engine(
    mesh: Mesh,
    data: JobData,
    placement: Placement,
    tensor_parallel_size: int,
    report: OnProgress,
) -> SGLangEngine:
    import torch

    from meshrl.services.engine.sglang.devices import VisibleDevices, read_visible_devices
    from meshrl.services.engine.sglang.engine import attach_engine
    from meshrl.services.engine.sglang.launch_config import (
        AdapterLimits,
        LaunchConfig,
        prefers_weights_backup,
    )
    from meshrl.services.engine.sglang.server import SGLangServer

    limits, lora = data.config.rollout, data.config.lora
    model = load_model_config(data)
    adapters = None
    if lora.rank and lora.engine_mode == "beside":
        adapters = AdapterLimits(lora.rank, tuple(resolve_targets(model, lora.targets)))
    devices = VisibleDevices()
    if data.config.mesh.device == "cuda":
        devices = await mesh.host.run_blocking(
            read_visible_devices, os.environ, deadline_s=DRIVER_TIMEOUT_S
        )
    free_space = mesh.host.measure_free_space(data.local_run_dir)
    weight_bytes = model.num_parameters * getattr(torch, limits.dtype).itemsize
    how = LaunchConfig(
        limits.sglang_python or str(locate_python(locate_environment("sglang"))),
        data.local_run_dir / "sglang" / placement.instance,
        limits.slots,
        limits.max_tokens,
        kv_tokens=limits.kv_tokens,
        dtype=limits.dtype,
        device=data.config.mesh.device,
        seed=data.config.seed,
        adapter_limits=adapters,
        backs_up_weights=placement.time_sliced
        and prefers_weights_backup(weight_bytes, free_space.memory_bytes),
        read_back=limits.verify_weights,
        options=tuple(limits.sglang_options),
        tensor_parallel_size=tensor_parallel_size,
        hierarchical_cache=_choose_hierarchical_cache(mesh, data),
        devices=devices,
    )
    server = await SGLangServer.start(
        mesh.host, mesh.clock, how, model, limits.sglang_weights, on_progress=report
    )
    return attach_engine(
        server,
        model,
        limits.slots,
        limits.max_tokens,
        weights=limits.sglang_weights,
        kv_on_update=limits.kv_on_update,
        decode=_load_decoder(data),
    )


def _choose_hierarchical_cache(mesh: Mesh, data: JobData) -> HierarchicalCache | None:
    """Return where SGLang's own hierarchical cache is, or None if there is none."""
    from meshrl.services.engine.sglang.launch_config import HierarchicalCache

    limits = data.config.rollout
    if not limits.kv_tier_gib and not limits.kv.disk:
        return None
    root = get_disk_root(mesh.settings.run_root, limits.kv.path)
    directory = None
    if limits.kv.disk:
        try:
            directory = make_private_directory(root) / f"{data.config.name}-sglang"
        except ConfigError as error:  # another user owns the directory
            log_unused_tier(mesh, "rollout.kv.disk", error)
    if not limits.kv_tier_gib and directory is None:
        return None
    return HierarchicalCache(limits.kv_tier_gib, directory)


def _load_decoder(data: JobData) -> Callable[[Sequence[int]], str] | None:
    stop_text = data.config.rollout.stop_text
    return Tokenizer.load(str(data.tokenizer_file)).decode if stop_text else None


def _create_builtin_engine(data: JobData, placement: Placement) -> BuiltinEngine:
    limits = data.config.rollout
    return build_engine(
        load_model_config(data),
        limits.slots,
        limits.max_tokens,
        backend=limits.backend,
        device=data.config.mesh.device,
        dtype=limits.dtype,
        kv_cache_tokens=limits.kv_tokens,
        cache_memory=limits.cache_memory,
        is_time_sliced=placement.time_sliced,
        num_workers=data.config.mesh.workers,
        kv_on_update=limits.kv_on_update,
        max_steps=1 if limits.emulate else FLUSH_STEPS,
        step_budget_s=FLUSH_S,
        decode_tokens=_load_decoder(data),
        verify_weights=limits.verify_weights,
    )
