"""Builds the engine that a job asks for on this host, without weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from meshrl.common.base.errors import ConfigError
from meshrl.common.generation.builtin.build import BUILD_S, TorchEngine, build
from meshrl.common.generation.contract import TokenEngine
from meshrl.common.generation.kv_directories import disk_root, own_directory
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import model_config
from meshrl.common.mesh.process.interpreters import home, interpreter
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.model.architecture.projections import targeted
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.common.state.pool.workers.seat import Seat
from meshrl.services.engine.kv.opening import not_kept
from meshrl.services.engine.service import FLUSH_S, FLUSH_STEPS

if TYPE_CHECKING:
    from meshrl.services.engine.sglang.engine import SGLangEngine
    from meshrl.services.engine.sglang.server import HierarchicalCache


async def opened(mesh: Mesh, data: JobData, seat: Seat) -> TokenEngine:
    """The job's engine, asleep; native code is compiled if this host has none yet. A seat of
    several ranks has one of so many workers, whose accelerators this process sees: at a pace they
    are emulated, else SGLang computes on them.

    From the main thread: a server that an engine needs dies with the thread that starts it.
    """
    pace = data.config.rollout.pace
    if data.config.rollout.engine == "sglang":
        degree = 1 if pace else seat.ranks
        return await _sglang(mesh, data, seat.resident, degree)
    if seat.ranks > 1 and not pace:
        raise ConfigError(
            f"the built-in engine computes on one worker, and {seat.resident} has {seat.ranks}",
            where="rollout.tensor_parallel",
            fix='set it to [1], or rollout.engine = "sglang"',
        )
    return await mesh.host.run_blocking(_torch, data, deadline_s=BUILD_S)


async def _sglang(mesh: Mesh, data: JobData, resident: str, degree: int) -> SGLangEngine:
    from meshrl.services.engine.sglang.engine import attach
    from meshrl.services.engine.sglang.server import Adapting, Launch, SGLangServer

    limits, lora = data.config.rollout, data.config.lora
    model = model_config(data)
    adapters = None
    if lora.rank and lora.engines == "beside":
        adapters = Adapting(lora.rank, tuple(targeted(model, lora.targets)))
    how = Launch(
        limits.sglang_python or str(interpreter(home("sglang"))),
        data.here / "sglang" / resident,
        limits.slots,
        limits.max_tokens,
        kv_tokens=limits.kv_tokens,
        dtype=limits.dtype,
        device=data.config.mesh.device,
        seed=data.config.seed,
        exact_switch=limits.kv_on_update == "keep",
        adapters=adapters,
        read_back=limits.read_back,
        options=tuple(limits.sglang_options),
        degree=degree,
        tiers=_tiers(mesh, data),
    )
    server = await SGLangServer.start(mesh.host, mesh.clock, how, model, limits.sglang_weights)
    return attach(
        server,
        model,
        limits.slots,
        limits.max_tokens,
        weights=limits.sglang_weights,
        kv_on_update=limits.kv_on_update,
        decode=_decode(data),
    )


def _tiers(mesh: Mesh, data: JobData) -> HierarchicalCache | None:
    """Where SGLang's own cache goes on; None: nowhere."""
    from meshrl.services.engine.sglang.server import HierarchicalCache

    limits = data.config.rollout
    if not limits.kv_memory and not limits.kv.disk:
        return None
    root = disk_root(mesh.settings.run_root, limits.kv.path)
    directory = None
    if limits.kv.disk:
        try:
            directory = own_directory(root) / f"{data.config.name}-sglang"
        except ConfigError as error:  # another user has taken the name
            not_kept(mesh, "rollout.kv.disk", error)
    if not limits.kv_memory and directory is None:
        return None
    return HierarchicalCache(limits.kv_memory, directory)


def _decode(data: JobData) -> Callable[[Sequence[int]], str] | None:
    stop_text = data.config.rollout.stop_text
    return Tokenizer.load(str(data.tokenizer)).decode if stop_text else None


def _torch(data: JobData) -> TorchEngine:
    limits = data.config.rollout
    return build(
        model_config(data),
        limits.slots,
        limits.max_tokens,
        path=limits.path,
        device=data.config.mesh.device,
        dtype=limits.dtype,
        kv_tokens=limits.kv_tokens,
        kv_on_update=limits.kv_on_update,
        steps=1 if limits.pace else FLUSH_STEPS,
        budget_s=FLUSH_S,
        decode=_decode(data),
        read_back=limits.read_back,
    )
