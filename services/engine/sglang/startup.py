"""Opens SGLang as an engine: a server in its own interpreter, driven over HTTP and never patched.

The parts are beside this: the process (`server`), the wire (`http`), what SGLang 0.5 calls
things (`v0_5`), weights on their way (`weights`), the engine itself (`engine`).
"""

from __future__ import annotations

import torch

from common.model.architecture.config import ModelConfig
from services.engine.sglang.control import UPDATE_S, Control
from services.engine.sglang.engine import ServedEngine, SGLangEngine
from services.engine.sglang.health import HealthWatch
from services.engine.sglang.requests import Decode, Requests
from services.engine.sglang.server import SGLangServer
from services.engine.sglang.weights import transport


def attach(
    server: SGLangServer,
    config: ModelConfig,
    slots: int,
    max_length: int,
    *,
    weights: str = "auto",
    kv_on_update: str = "keep",
    decode: Decode | None = None,
    update_s: float = UPDATE_S,
) -> SGLangEngine:
    """The engine of a server, asleep until it gets weights; they must arrive, and be read back
    where that is asked for, in `update_s`.
    """
    how = server.launch
    way = transport(weights, server.http, how.directory / "weights", server.ranks, how.device)
    control = Control(
        server.http,
        HealthWatch(server.http, server.lost),
        way,
        on_cpu=how.device == "cpu",
        dtype=getattr(torch, how.dtype),
        clock=server.clock,
        update_s=update_s,
    )
    served = ServedEngine(
        path=f"sglang {server.version}, {how.dtype}, {how.device}",
        ranks=server.ranks,
        seeded=server.seeded,
        adapters=how.adapters is not None,
        read_back=how.read_back,
        recompute=kv_on_update == "recompute",
    )
    requests = Requests(server.http, config.ids_end, slots, max_length, decode, server.clock)
    return SGLangEngine(server.http, control, config, requests, served)
