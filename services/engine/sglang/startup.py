"""Opens SGLang as an engine: a server in its own interpreter, driven over HTTP and never patched.

The parts are beside this: the process (`server`), the wire (`http`), what SGLang 0.5 calls
things (`v0_5`), weights on their way (`weights`), the engine itself (`engine`).
"""

from __future__ import annotations

from pathlib import Path

import torch

from common.clock import Clock
from common.errors import ConfigError
from common.generation.served_by_sglang import served_by_sglang
from common.model.config import ModelConfig
from common.process.host import Host
from services.engine.sglang.control import UPDATE_S, Control
from services.engine.sglang.engine import SGLangEngine
from services.engine.sglang.health import HealthWatch
from services.engine.sglang.requests import Decode
from services.engine.sglang.server import START_S, Adapting, Launch, SGLangServer, write_model
from services.engine.sglang.tiers import Tiers
from services.engine.sglang.weights import TRANSPORTS, transport

__all__ = [
    "TRANSPORTS",
    "Adapting",
    "Launch",
    "SGLangEngine",
    "SGLangServer",
    "attach",
    "launch",
    "start",
]


def launch(
    python: str,
    config: ModelConfig,
    directory: Path,
    slots: int,
    max_length: int,
    *,
    kv_tokens: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
    seed: int = 0,
    kv_on_update: str = "keep",
    adapters: Adapting | None = None,
    read_back: bool = False,
    options: tuple[str, ...] = (),
    degree: int = 1,
    tiers: Tiers | None = None,
) -> Launch:
    """How to serve a model; its config.json and the log go into `directory`. With a `degree` above
    1 the server computes on so many of the GPUs that this process sees.
    """
    if max_length > config.max_positions:
        raise ConfigError(
            f"slots of {max_length} tokens exceed the model's {config.max_positions} positions",
            where="rollout.max_tokens",
            fix="lower it, or raise max_position_embeddings",
        )
    model = directory / "model"
    write_model(model, served_by_sglang(config, max_length), max_length, dtype)
    return Launch(
        python,
        model,
        directory / "sglang.log",
        slots,
        max_length,
        kv_tokens,
        dtype,
        device,
        seed,
        exact_switch=kv_on_update == "keep",
        adapters=adapters,
        read_back=read_back,
        options=options,
        degree=degree,
        tiers=tiers,
    )


async def start(
    host: Host, clock: Clock, how: Launch, weights: str, deadline_s: float = START_S
) -> SGLangServer:
    """A server that is ready. From the main thread: it dies with the thread that starts it."""
    kind = "disk" if weights == "auto" else weights
    return await SGLangServer.start(host, clock, how, kind, deadline_s)


def attach(
    server: SGLangServer,
    config: ModelConfig,
    slots: int,
    max_length: int,
    *,
    weights: str = "auto",
    kv_on_update: str = "keep",
    decode: Decode | None = None,
    clock: Clock | None = None,
    update_s: float = UPDATE_S,
) -> SGLangEngine:
    """The engine of a server, asleep until it gets weights; they must arrive, and be read back
    where that is asked for, in `update_s`.
    """
    how = server.launch
    dtype, on_cpu = getattr(torch, how.dtype), how.device == "cpu"
    way = transport(weights, server.http, how.model.parent / "weights", server.ranks, how.device)
    watch = HealthWatch(server.http, server.lost)
    about = server.http, watch, way
    return SGLangEngine(
        server.http,
        Control(*about, on_cpu=on_cpu, dtype=dtype, clock=clock, update_s=update_s),
        config,
        slots,
        max_length,
        kv_on_update=kv_on_update,
        seeded=server.seeded,
        decode=decode,
        clock=clock,
        path=f"sglang {server.version}, {how.dtype}, {how.device}",
        tensor_parallel=server.ranks,
        adapters=how.adapters is not None,
        read_back=how.read_back,
    )
